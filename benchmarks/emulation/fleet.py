"""One run of the real services on emulated devices, from its start to what was measured in its steady state."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.emulation.plan import STEPS_FILE, Emulation, TrainedStep
from benchmarks.emulation.stages import BATCH_SIZE, NUM_INSTANCES, PROMPTS_PER_BATCH, SAMPLES_PER_PROMPT
from streamrl.command.broker import EmbeddedBroker
from streamrl.command.resolve import resolve, with_addresses
from streamrl.command.settings import Settings
from streamrl.errors import ServiceDiedError
from streamrl.run_folder import RunFolder
from streamrl.settings import KafkaSection

_CONFIG = Path("examples/laptop.toml")
_NUM_PROMPTS = 2 * PROMPTS_PER_BATCH
"""Two batches: from the third on the scheduler knows how long the answers to a prompt were, as it would with the
paper's ranker."""
WARM_UP_ITERATIONS = 3
_LOOK_S = 0.5
_END_S = 15.0


@dataclass(frozen=True)
class SteadyState:
    """Of the iterations after the warm-up. Times are emulated."""

    iteration_s: float
    train_s: float
    """That an iteration trained for."""
    generator_idle: float
    """Share of the time in which an instance had nothing to do; of the whole run."""
    busy_cores: float
    """Cores of this machine that were kept busy."""
    staleness_max: int
    instance_mib: float
    """Memory of one generator's process, pages that several share divided among them."""

    @property
    def samples_per_s(self) -> float:
        return BATCH_SIZE / self.iteration_s

    @property
    def trainer_idle(self) -> float:
        return max(0.0, 1 - self.train_s / self.iteration_s)


def run_emulated(
    nursery: "Nursery", emulation: Emulation, num_iterations: int, assignments: Mapping[str, Any]
) -> SteadyState:
    """The paper's workload. Several may run beside each other, each from a thread of its own.

    Args:
        num_iterations: those of the warm-up included.
        assignments: of settings, over those that all runs have.

    Raises:
        ServiceDiedError: as `run_services`.
    """
    with tempfile.TemporaryDirectory() as name:
        run = run_services(nursery, emulation, _settings(Path(name), emulation, num_iterations, assignments))
    return steady_state(run.steps, run.looks, run.summary, emulation.speed)


@dataclass(frozen=True)
class Look:
    """At the processes of a run."""

    time_s: float
    cpu_s: float
    instance_mib: float


@dataclass(frozen=True)
class EmulatedRun:
    """A run that is over."""

    steps: Sequence[TrainedStep]
    looks: Sequence[Look]
    summary: Mapping[str, Any]


def run_services(nursery: "Nursery", emulation: Emulation, settings: Settings) -> EmulatedRun:
    """Runs any workload, with a broker of its own. Several may run beside each other, as `run_emulated`.

    Raises:
        ServiceDiedError: a service ended too early; the message has the end of its log.
    """
    settings = with_addresses(settings)
    run_folder = settings.run.folder
    with ExitStack() as stack:
        run_folder.mkdir(parents=True)
        broker = stack.enter_context(
            EmbeddedBroker.start(settings.kafka, data=run_folder / "kafka", log=_log(run_folder, "broker"))
        )
        settings = _with_broker(settings, broker)
        (run_folder / "settings.json").write_text(settings.model_dump_json(indent=2))
        emulation.write(run_folder)
        broker.wait_ready()
        services = _Services(settings, nursery, broker.process.pid)
        stack.callback(services.end)
        looks = services.watch()
        steps = [TrainedStep.model_validate_json(line) for line in (run_folder / STEPS_FILE).read_text().splitlines()]
        summary = json.loads((run_folder / "summary.json").read_text())
    return EmulatedRun(steps, looks, summary)


def steady_state(
    steps: Sequence[TrainedStep], looks: Sequence[Look], summary: Mapping[str, Any], speed: float
) -> SteadyState:
    """What was measured, from what was noted."""
    first, last = steps[WARM_UP_ITERATIONS - 1], steps[-1]
    num_iterations = len(steps) - WARM_UP_ITERATIONS
    during = [look for look in looks if first.time_s <= look.time_s <= last.time_s]
    return SteadyState(
        iteration_s=(last.time_s - first.time_s) * speed / num_iterations,
        train_s=(last.busy_s - first.busy_s) / num_iterations,
        generator_idle=summary["idle"]["generator"],
        busy_cores=(during[-1].cpu_s - during[0].cpu_s) / (during[-1].time_s - during[0].time_s),
        staleness_max=summary["staleness_max"],
        instance_mib=during[-1].instance_mib,
    )


def _settings(folder: Path, emulation: Emulation, num_iterations: int, assignments: Mapping[str, Any]) -> Settings:
    train, held_out = folder / "train.jsonl", folder / "held_out.jsonl"
    prompts = [{"prompt": f"to {64 + number // 16} from {number % 16}", "answer": ""} for number in range(_NUM_PROMPTS)]
    train.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    held_out.write_text(json.dumps({"prompt": "to 99 from 99", "answer": ""}) + "\n")
    values = {
        "run.dir": folder,
        "run.id": "emulated",
        "data.train": train,
        "data.eval": held_out,
        "data.prompts_per_batch": PROMPTS_PER_BATCH,
        "data.samples_per_prompt": SAMPLES_PER_PROMPT,
        "generator.engine": "fake",
        "generator.num_instances": NUM_INSTANCES,
        "generator.max_running": emulation.max_running,
        "generator.max_tokens": emulation.longest_answer,
        "generator.max_model_len": 512,
        "trainer.num_iterations": num_iterations,
        "trainer.checkpoint_every": 0,
        # Otherwise answers of equal rewards need no pass.
        "trainer.kl": "loss",
        "eval.num_prompts": 1,
        "eval.every": 0,
        "mlflow.tracking_uri": "off",
        **assignments,
    }
    return resolve(_CONFIG, [f"{name}={value}" for name, value in values.items()])


def _with_broker(settings: Settings, broker: EmbeddedBroker) -> Settings:
    kafka: KafkaSection = broker.settings(settings.kafka)
    return settings.model_copy(update={"kafka": kafka})


def _log(run_folder: Path, name: str) -> Path:
    return run_folder / "logs" / f"{name}.log"


class Nursery:
    """Starts processes by benchmarks/emulation/nursery.py. Thread-safe. They end when it does."""

    def __init__(self) -> None:
        # One thread for whatever a library would start a thread a core for.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.emulation.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._lock = threading.Lock()

    def start(self, settings_file: Path, instance: str) -> psutil.Process:
        """Starts a service by its instance's name."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps([str(settings_file), instance]) + "\n")
            self._process.stdin.flush()
            pid = self._process.stdout.readline()
        if not pid:
            raise ServiceDiedError("the process that starts emulated services has ended")
        return psutil.Process(int(pid))

    def close(self) -> None:
        """Ends it."""
        self._process.communicate()


class _Services:
    """The processes of a run; those of devices are emulated."""

    def __init__(self, settings: Settings, nursery: Nursery, broker_pid: int) -> None:
        self._run_folder = settings.run.folder
        self._broker = psutil.Process(broker_pid)
        instances = (f"generator-{index}" for index in range(settings.generator.num_instances))
        names = ["weights", "scheduler", "trainer", *instances]
        self._processes = {name: nursery.start(self._run_folder / "settings.json", name) for name in names}

    def watch(self) -> list[Look]:
        """Waits for the end of the trainer, looking at all now and then.

        Raises:
            ServiceDiedError: another one ended before, or the trainer failed.
        """
        looks = []
        while self._processes["trainer"].is_running():
            time.sleep(_LOOK_S)
            for name, process in self._processes.items():
                if name != "trainer" and not process.is_running():
                    raise ServiceDiedError(f"{name} ended: {self._tail(name)}")
            looks.append(self._look())
        # As `streamrl run` has it: a run that the trainer called completed is, however its process ended.
        if not RunFolder(self._run_folder).is_completed():
            raise ServiceDiedError(f"the trainer failed: {self._tail('trainer')}")
        return looks

    def end(self) -> None:
        """Those that are served first, those that serve last."""
        for names in (set(self._processes) - {"weights", "scheduler"}, {"weights", "scheduler"}):
            processes = [self._processes[name] for name in names]
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.terminate()
            _, left = psutil.wait_procs(processes, timeout=_END_S)
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def _look(self) -> Look:
        cpu_s = instance_mib = 0.0
        for process in (self._broker, *self._processes.values()):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                cpu_s += times.user + times.system
        with contextlib.suppress(psutil.NoSuchProcess):
            instance_mib = self._processes["generator-0"].memory_full_info().pss / 2**20
        return Look(time.time(), cpu_s, instance_mib)

    def _tail(self, name: str) -> str:
        return _log(self._run_folder, name).read_text(errors="replace")[-2000:]
