"""Which of this machine's GPUs each service of a run gets: the trainer the first ones, then each instance its own.

In mode colocated both stages share them. A machine without GPUs trains on its CPUs.
"""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from streamrl.command.settings import Settings

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
_NVIDIA_SMI_TIMEOUT_S = 20.0


def visible_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """The GPUs that this process may use, as CUDA names them.

    Args:
        environment: CUDA_VISIBLE_DEVICES in it, a list of names, comes before what the machine has.
        devices: the folder of device files; a container sees only those that it was given.
    """
    if VISIBLE_GPUS in environment:
        return [name for part in environment[VISIBLE_GPUS].split(",") if (name := part.strip())]
    count = sum(1 for file in devices.glob("nvidia*") if file.name.removeprefix("nvidia").isdigit())
    return [str(index) for index in range(count)]


def smallest_gpu_bytes(gpus: Sequence[str]) -> int | None:
    """The memory of the smallest of these GPUs, by nvidia-smi; None: it does not say."""
    query = ["nvidia-smi", "-i", ",".join(gpus), "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=True).stdout
        return min(int(line) for line in told.split()) * 1024**2
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def gpu_shares(settings: Settings, gpus: Sequence[str]) -> dict[str, dict[str, str]]:
    """For each process of a run by its instance name, the environment that shows it its GPUs.

    Args:
        gpus: all that the run may use; none: nothing is assigned.

    Raises:
        ValueError: they are too few, or none that versions could be sent from by NCCL.
    """
    shared = settings.pipeline.mode == "colocated"
    if settings.weights.fabric and (shared or not gpus):
        why = "in mode colocated an instance has each GPU of the run" if shared else "no GPU is visible"
        raise ValueError(
            f"weights.fabric is {settings.weights.fabric!r}: weights_svc needs a GPU for it that is no instance's, and "
            f"{why}. Leave weights.fabric out: instances then fetch each version"
        )
    if not gpus:
        return {}
    num_ranks, width = settings.trainer.num_ranks, settings.generator.tensor_parallel_size
    first = 0 if shared else num_ranks
    needed = max(num_ranks, first + settings.generator.num_instances * width)
    if needed > len(gpus):
        raise ValueError(
            f"the run needs {needed} GPUs (trainer.num_ranks {num_ranks}, and generator.num_instances "
            f"{settings.generator.num_instances} of generator.tensor_parallel_size {width}"
            f"{', which share them' if shared else ''}), and {len(gpus)} are visible: lower these, or change "
            f"{VISIBLE_GPUS}"
        )
    # What sends versions by NCCL may share a GPU with the trainer, not with an instance.
    shares = {"trainer": gpus[:num_ranks], "scheduler": [], "weights": gpus[:1] if settings.weights.fabric else []}
    for index in range(settings.generator.num_instances):
        begin = first + index * width
        shares[f"generator-{index}"] = gpus[begin : begin + width]
    return {instance: {VISIBLE_GPUS: ",".join(share)} for instance, share in shares.items()}
