from pathlib import Path

import pytest

from streamrl.command.accelerators import gpu_shares, smallest_gpu_bytes, visible_gpus
from streamrl.command.settings import Settings


def settings_of(mode: str = "async", ranks: int = 1, instances: int = 1, width: int = 1) -> Settings:
    return Settings.model_validate(
        {
            "pipeline": {"mode": mode},
            "trainer": {"num_ranks": ranks},
            "generator": {"num_instances": instances, "tensor_parallel_size": width},
        }
    )


def test_trainer_and_instances_get_gpus_of_their_own() -> None:
    shares = gpu_shares(settings_of(ranks=4, instances=2, width=2), [str(index) for index in range(8)])

    assert {name: share["CUDA_VISIBLE_DEVICES"] for name, share in shares.items()} == {
        "trainer": "0,1,2,3",
        "generator-0": "4,5",
        "generator-1": "6,7",
        "scheduler": "",
        "weights": "",
    }


def on_a_fabric(settings: Settings) -> Settings:
    return settings.model_copy(update={"weights": settings.weights.model_copy(update={"fabric": "ib0"})})


def test_weights_svc_gets_one_of_the_trainers_to_send_from() -> None:
    shares = gpu_shares(on_a_fabric(settings_of(ranks=2, instances=2)), ["0", "1", "2", "3"])
    assert shares["weights"] == {"CUDA_VISIBLE_DEVICES": "0"}


@pytest.mark.parametrize(
    "mode, gpus, why",
    [("async", [], "no GPU is visible"), ("colocated", ["0", "1"], "in mode colocated an instance has each GPU")],
)
def test_a_fabric_without_a_gpu_to_send_from_is_refused(mode: str, gpus: list[str], why: str) -> None:
    with pytest.raises(ValueError, match=rf"weights.fabric is 'ib0': .*{why}"):
        gpu_shares(on_a_fabric(settings_of(mode)), gpus)


def test_colocated_stages_share_them() -> None:
    shares = gpu_shares(settings_of("colocated", ranks=2, instances=2), ["3", "5"])

    assert shares["trainer"] == {"CUDA_VISIBLE_DEVICES": "3,5"}
    assert shares["generator-1"] == {"CUDA_VISIBLE_DEVICES": "5"}


def test_without_gpus_nothing_is_assigned() -> None:
    assert gpu_shares(settings_of(ranks=2, instances=3), []) == {}


def test_too_few_are_refused_with_the_count() -> None:
    with pytest.raises(ValueError, match=r"needs 6 GPUs .* and 4 are visible"):
        gpu_shares(settings_of(ranks=2, instances=4), ["0", "1", "2", "3"])


def test_visible_gpus_are_those_of_the_environment_before_those_of_the_machine(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()

    assert visible_gpus({}, tmp_path) == ["0", "1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "7, 2"}, tmp_path) == ["7", "2"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []


def test_the_memory_of_the_smallest_gpu_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = tmp_path / "asked"
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\necho "$@" > {asked}\necho 81559\necho 40960\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert smallest_gpu_bytes(["0", "GPU-3"]) == 40960 * 1024**2
    assert "-i 0,GPU-3" in asked.read_text()
    program.write_text("#!/bin/sh\necho No devices were found\nexit 6\n")
    assert smallest_gpu_bytes(["0"]) is None
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert smallest_gpu_bytes(["0"]) is None
