"""Which runs there are, and what each is compared with. Nothing is run here."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from trainer_svc.algorithms import ALGORITHMS

LAPTOP = "examples/laptop.toml"
SMOLLM2 = "examples/smollm2.toml"

STALE_RATE = 3e-4
"""Three times the example's: there, answers that are four versions old undo what was learnt when nothing corrects for
their age; at 1e-3 they do so whatever is done."""


@dataclass(frozen=True)
class Arm:
    """One way to learn, run once a seed."""

    name: str
    """What plots and tables call it."""
    runs_as: str
    """Its runs are kept under this and the seed. Arms of several studies that are the same share it."""
    settings: Mapping[str, str]
    """What differs from the study's settings file, as for `--set`."""


@dataclass(frozen=True)
class PlannedRun:
    """One run to be done."""

    name: str
    config: str
    assignments: tuple[str, ...]
    """As for `--set`."""


@dataclass(frozen=True)
class Study:
    """A question, the arms that answer it, and how often each is run."""

    name: str
    title: str
    question: str
    config: str
    seeds: tuple[int, ...]
    arms: tuple[Arm, ...]
    compared: tuple[tuple[str, str], ...] = field(default=())
    """Pairs of arms whose curves are compared."""

    def runs_of(self, arm: Arm) -> list[PlannedRun]:
        """Of all seeds."""
        return [
            PlannedRun(
                name=f"{arm.runs_as}-{seed}",
                config=self.config,
                assignments=(f"run.seed={seed}", *(f"{name}={value}" for name, value in arm.settings.items())),
            )
            for seed in self.seeds
        ]

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)


# The examples evaluate every 10 iterations: too seldom for a curve that rises within ten.
_LAPTOP = {"eval.every": "5"}
_SYNC = {"pipeline.mode": "sync"}
_ASYNC = {"pipeline.mode": "async", "pipeline.max_staleness": "1"}
_FOUR_OLD = {"pipeline.mode": "async", "pipeline.max_staleness": "4"}
# Room for the samples of five batches on two instances: what is ahead of training is drawn at once, as old as may be.
_FAST = {**_LAPTOP, "trainer.learning_rate": str(STALE_RATE), "generator.max_running": "640"}

STUDIES = (
    Study(
        name="laptop",
        title="Sync and async on the counting task",
        question="Does learning from answers that are one version old cost anything?",
        config=LAPTOP,
        seeds=(0, 1, 2, 3, 4),
        arms=(
            Arm("sync", "laptop-sync", _LAPTOP | _SYNC),
            Arm("async, one version old", "laptop-async", _LAPTOP | _ASYNC),
        ),
        compared=(("sync", "async, one version old"),),
    ),
    Study(
        name="algorithms",
        title="Every algorithm on the counting task",
        question="Does each algorithm learn with what its paper sets and the example's other settings?",
        config=LAPTOP,
        seeds=(0,),
        arms=tuple(
            Arm(
                algorithm,
                "laptop-async" if algorithm == "grpo" else f"laptop-{algorithm}",
                _LAPTOP | _ASYNC | ({} if algorithm == "grpo" else {"trainer.algorithm": algorithm}),
            )
            for algorithm in ("grpo", "gspo", "cispo", "dapo", "dr_grpo", "rloo", "reinforce_pp", "ppo")
        ),
    ),
    Study(
        name="staleness",
        title="Four versions old, at a rate where it hurts",
        question="What does the off-policy correction do when answers are up to four versions old?",
        config=LAPTOP,
        seeds=(0, 1, 2),
        arms=(
            Arm("up to 4 old, not corrected", "stale-none", _FAST | _FOUR_OLD | {"trainer.off_policy": "none"}),
            Arm("up to 4 old, truncated", "stale-truncated", _FAST | _FOUR_OLD | {"trainer.off_policy": "truncated"}),
            Arm("sync", "stale-sync", _FAST | _SYNC),
        ),
        compared=(
            ("sync", "up to 4 old, not corrected"),
            ("sync", "up to 4 old, truncated"),
            ("up to 4 old, not corrected", "up to 4 old, truncated"),
        ),
    ),
    Study(
        name="smollm2",
        title="Sync and async on sums, with SmolLM2-135M",
        question="The same question as the first, asked of a real language model.",
        config=SMOLLM2,
        seeds=(0, 1, 2),
        arms=(Arm("sync", "smollm2-sync", _SYNC), Arm("async, one version old", "smollm2-async", _ASYNC)),
        compared=(("sync", "async, one version old"),),
    ),
)
"""In the order in which their runs are done."""

assert set(ALGORITHMS) == {arm.name for study in STUDIES if study.name == "algorithms" for arm in study.arms}


def planned_runs(studies: tuple[Study, ...] = STUDIES) -> Iterator[PlannedRun]:
    """All runs, each once: seed by seed, so that what is done first can be compared."""
    seen: set[str] = set()
    for study in studies:
        for runs in zip(*(study.runs_of(arm) for arm in study.arms), strict=True):
            for run in runs:
                if run.name not in seen:
                    seen.add(run.name)
                    yield run
