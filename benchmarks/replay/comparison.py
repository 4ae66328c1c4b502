"""Two real vLLM instances on replayed lengths: our dispatch, with the ranker, against random dispatch.

The tiny model in mode sync, four waves a batch, prompts that were never seen before. Ours is what `streamrl run` does
by default (`makespan`, moves, and a ranker that has learned from other prompts), on the same cores as the engines. Both
have the same lengths, sample by sample, and run in turns; what counts is the time from the first answer of a batch that
is asked for to the last that is over.

On emulated devices, a step of an engine does not end before a device of its own would have ended it. On the cores that
there are, each engine has what the other leaves. Half an hour.
"""

import contextlib
import json
import logging
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.emulation.plan import Emulation
from benchmarks.replay.process import ANSWERS, ON_DEVICES, NotedAnswer
from benchmarks.replay.workload import SLOWDOWN, ReplayedLengths, ReplayedPrompt, device_step_s, replayed_prompts
from benchmarks.result import Cell, Result
from streamrl import lifetime
from streamrl.command.broker import EmbeddedBroker
from streamrl.command.resolve import resolve, with_addresses
from streamrl.command.settings import Settings
from streamrl.errors import ServiceDiedError
from streamrl.run_folder import RunFolder

logger = logging.getLogger(__name__)

GOAL = 0.85
NUM_ROUNDS = 2
WARM_UP_BATCHES, MEASURED_BATCHES = 1, 8
PROMPTS_PER_BATCH, SAMPLES_PER_PROMPT = 64, 4
NUM_INSTANCES, MAX_RUNNING = 2, 32
LONGEST_ANSWER = 480
LEARNED_PROMPTS, PASSES = 1024, 40
"""Of the ranker, before the runs: as one has that knows a few batches."""
POLICIES: dict[str, dict[str, Any]] = {
    "random_fifo": {"scheduler.dispatch": "random", "scheduler.moves": "none", "scheduler.length_model": "history"},
    "makespan": {},
}
SETUPS = {"devices": True, "cores": False}
"""Whether each engine has an emulated device."""
_CONFIG = Path("examples/laptop.toml")
_MEASURED = range(WARM_UP_BATCHES, WARM_UP_BATCHES + MEASURED_BATCHES)
_LOOK_S, _END_S = 0.5, 30.0


def measure() -> Result:
    """All rounds; every other one in the opposite order.

    Raises:
        ValueError: this machine has a GPU.
    """
    import torch

    if torch.cuda.is_available():
        raise ValueError("expected engines on cores, which can be slowed down to emulated devices: run without a GPU")
    result = Result(
        "replay",
        {
            "config": str(_CONFIG),
            "rounds": NUM_ROUNDS,
            "batches": [WARM_UP_BATCHES, MEASURED_BATCHES],
            "prompts_per_batch": PROMPTS_PER_BATCH,
            "samples_per_prompt": SAMPLES_PER_PROMPT,
            "max_running": MAX_RUNNING,
            "longest_answer": LONGEST_ANSWER,
            "device_slowdown": SLOWDOWN,
            "policies": POLICIES,
        },
    )
    answers: dict[str, dict[str, list[Sequence[NotedAnswer]]]] = {
        setup: {policy: [] for policy in POLICIES} for setup in SETUPS
    }
    with tempfile.TemporaryDirectory() as name:
        for number in range(NUM_ROUNDS):
            prompts = _prompts(number)
            ranker = _learn(Path(name) / f"ranker-{number}", prompts[:LEARNED_PROMPTS])
            for setup, on_devices in SETUPS.items():
                for policy in list(POLICIES)[:: -1 if number % 2 else 1]:
                    folder = Path(name) / f"{setup}-{policy}-{number}"
                    found = run(
                        folder, number, prompts[LEARNED_PROMPTS:], POLICIES[policy], ranker, on_devices=on_devices
                    )
                    logger.info("%s: %s s a batch", folder.name, np.round(makespans_s(found), 2).tolist())
                    answers[setup][policy].append(found)
    for setup, of_policies in answers.items():
        result.cells += cells(setup, of_policies)
    return result


def cells(setup: str, answers: Mapping[str, Sequence[Sequence[NotedAnswer]]]) -> list[Cell]:
    """From the answers of each policy's rounds to what is reported; batches are paired."""
    seconds = {policy: np.concatenate([makespans_s(found) for found in runs]) for policy, runs in answers.items()}
    theirs, ours = seconds["random_fifo"], seconds["makespan"]
    ratio = float(ours.mean() / theirs.mean())
    # Of a ratio of means, by its linear approximation.
    error = float((ours - ratio * theirs).std(ddof=1) / math.sqrt(len(ours)) / theirs.mean())
    told = f"s a batch, mean of {len(ours)}, standard error of the ratio {error:.3f}"
    moved = sum(answer.handed_over for found in answers["makespan"] for answer in found if answer.batch in _MEASURED)
    return [
        Cell(f"{setup}/random_fifo", float(theirs.mean()), f"s a batch, mean of {len(theirs)}"),
        Cell(f"{setup}/makespan", float(ours.mean()), told, "random_fifo", ratio, GOAL, ratio <= GOAL),
        Cell(f"{setup}/makespan/moved", moved, "answers that went on on the other instance"),
    ]


def makespans_s(answers: Sequence[NotedAnswer]) -> np.ndarray:
    """Of each batch after the warm-up: from its first request to its last token."""
    of_batch = [[answer for answer in answers if answer.batch == batch] for batch in _MEASURED]
    return np.array([max(one.ended_s for one in of) - min(one.asked_s for one in of) for of in of_batch])


def check_pace(answers: Iterable[NotedAnswer]) -> None:
    """
    Raises:
        ValueError: an answer was drawn faster than a device can.
    """
    for answer in answers:
        took_s, least_s = answer.ended_s - answer.asked_s, answer.num_tokens * device_step_s(1, 1)
        if took_s < least_s:
            raise ValueError(
                f"{answer.num_tokens} tokens in {took_s:.3f} s, {least_s:.3f} s of a device: no step waited"
            )


def run(
    folder: Path,
    seed: int,
    prompts: Sequence[ReplayedPrompt],
    policy: Mapping[str, Any],
    ranker: Path,
    *,
    on_devices: bool,
) -> list[NotedAnswer]:
    """One run of all services.

    Args:
        folder: made for it.
        ranker: folder of one that has learned.
        on_devices: each engine has an emulated one.

    Raises:
        ServiceDiedError: a service ended too early; the message has the end of its log.
        ValueError: as `check_pace`.
    """
    folder.mkdir()
    train, held_out = folder / "train.jsonl", folder / "held_out.jsonl"
    train.write_text("".join(json.dumps({"prompt": prompt.text, "answer": ""}) + "\n" for prompt in prompts))
    held_out.write_text(json.dumps({"prompt": "to 99 from 99", "answer": ""}) + "\n")
    values = {
        "run.dir": folder,
        "run.id": "replay",
        "run.seed": seed,
        "pipeline.mode": "sync",
        "data.train": train,
        "data.eval": held_out,
        "data.prompts_per_batch": PROMPTS_PER_BATCH,
        "data.samples_per_prompt": SAMPLES_PER_PROMPT,
        "generator.num_instances": NUM_INSTANCES,
        "generator.max_running": MAX_RUNNING,
        "generator.max_tokens": LONGEST_ANSWER,
        "generator.max_model_len": LONGEST_ANSWER + 32,
        # The trainer computes no log-probs that could be compared.
        "generator.canary_alarm_nats": 1000,
        "scheduler.lease_s": 5,
        "trainer.num_iterations": WARM_UP_BATCHES + MEASURED_BATCHES,
        "trainer.checkpoint_every": 0,
        "trainer.kl": "loss",
        "eval.num_prompts": 1,
        "eval.every": 0,
        "mlflow.tracking_uri": "off",
        **policy,
    }
    settings = with_addresses(resolve(_CONFIG, [f"{name}={value}" for name, value in values.items()]))
    run_folder = settings.run.folder
    shutil.copytree(ranker, run_folder / "ranker")
    ReplayedLengths.of(prompts, _token_ids(prompts)).write(run_folder)
    _no_training_time().write(run_folder)
    if on_devices:
        (run_folder / ON_DEVICES).touch()
    with ExitStack() as stack:
        broker = stack.enter_context(
            EmbeddedBroker.start(settings.kafka, data=folder / "kafka", log=run_folder / "logs" / "broker.log")
        )
        settings = settings.model_copy(update={"kafka": broker.settings(settings.kafka)})
        (run_folder / "settings.json").write_text(settings.model_dump_json(indent=2))
        broker.wait_ready()
        _watch(run_folder, stack.enter_context(_services(settings)))
    files = (run_folder / ANSWERS).glob("*.jsonl")
    answers = [NotedAnswer.model_validate_json(line) for file in files for line in file.read_text().splitlines()]
    if on_devices:
        check_pace(answers)
    return answers


@contextmanager
def _services(settings: Settings) -> "Iterator[dict[str, subprocess.Popen[bytes]]]":
    """The processes of a run, by instance; they are ended."""
    folder = settings.run.folder
    modules = {"weights": "weights_svc", "scheduler": "scheduler_svc", "trainer": "benchmarks.replay.process"}
    modules |= {f"generator-{index}": "benchmarks.replay.process" for index in range(NUM_INSTANCES)}
    processes = {
        instance: lifetime.spawn(
            [sys.executable, "-m", module, str(folder / "settings.json"), "--instance", instance],
            log=folder / "logs" / f"{instance}.log",
        )
        for instance, module in modules.items()
    }
    try:
        yield processes
    finally:
        # Those that are served first, those that serve last.
        for instance in reversed(processes):
            processes[instance].terminate()
        deadline = time.monotonic() + _END_S
        for process in processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()


def _watch(run_folder: Path, processes: "Mapping[str, subprocess.Popen[bytes]]") -> None:
    """Waits for the end of the trainer."""
    while processes["trainer"].poll() is None:
        time.sleep(_LOOK_S)
        for instance, process in processes.items():
            if instance != "trainer" and process.poll() is not None:
                raise ServiceDiedError(f"{instance} ended: {_tail(run_folder, instance)}")
    if not RunFolder(run_folder).is_completed():
        raise ServiceDiedError(f"the trainer failed: {_tail(run_folder, 'trainer')}")


def _tail(run_folder: Path, instance: str) -> str:
    return (run_folder / "logs" / f"{instance}.log").read_text(errors="replace")[-2000:]


def _prompts(seed: int) -> list[ReplayedPrompt]:
    count = LEARNED_PROMPTS + PROMPTS_PER_BATCH * (WARM_UP_BATCHES + MEASURED_BATCHES)
    return replayed_prompts(count, SAMPLES_PER_PROMPT, LONGEST_ANSWER, seed)


def _token_ids(prompts: Sequence[ReplayedPrompt]) -> list[list[int]]:
    from trainer_svc.tiny_model import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    return [tokenizer.encode(prompt.text).ids for prompt in prompts]


def _learn(folder: Path, prompts: Sequence[ReplayedPrompt]) -> Path:
    """A ranker that knows the answers to some prompts."""
    import torch

    from scheduler_svc.ranker.examples import Example
    from scheduler_svc.ranker.kept import save_ranker
    from scheduler_svc.ranker.learner import BATCH_PROMPTS, LengthLearner

    torch.set_num_threads(1)
    examples = [
        Example(f"learned-{index}", 0, tuple(token_ids), prompt.lengths, (False,) * len(prompt.lengths))
        for index, (prompt, token_ids) in enumerate(zip(prompts, _token_ids(prompts), strict=True))
    ]
    learner = LengthLearner("", 0)
    learner.learn(examples, PASSES * len(examples) // BATCH_PROMPTS)
    save_ranker(folder, "", learner, examples)
    return folder


def _no_training_time() -> Emulation:
    return Emulation(
        speed=1.0,
        longest_answer=LONGEST_ANSWER,
        max_running=MAX_RUNNING,
        step_ms={1: 1.0},
        prefill_token_ms=0.0,
        load_s=0.0,
        train_token_s=0.0,
    )
