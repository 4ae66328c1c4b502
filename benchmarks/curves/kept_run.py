"""A finished run as a file that is kept: its settings, its figures by iteration, its summary. No path of a machine."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from streamrl.whole_file import replace_file

SECTIONS = ("pipeline", "model", "data", "reward", "generator", "trainer", "weights", "eval")
"""Those of the settings that decide what is learnt."""

FIGURES = (
    "reward/mean",
    "reward/std",
    "reward/equal_groups_share",
    "eval/accuracy",
    "eval/answers",
    "length/mean",
    "length/truncated_share",
    "staleness/mean",
    "staleness/max",
    "loss/policy",
    "policy/entropy",
    "policy/clip_fraction",
    "policy/effective_sample_share",
    "policy/importance_limited_share",
    "kl/behaviour_k3",
    "mismatch/logprob_abs_diff_mean",
    "critic/explained_variance",
    "critic/loss",
    "grad/norm",
    "train/applied",
    "rollouts/trained",
)
"""Names of trainer_svc/figures.py: those of learning."""


_TABLES = ("settings", "figures")


@dataclass(frozen=True)
class Series:
    """A figure over the run."""

    steps: Sequence[int]
    """Weight versions: version i is what iteration i makes, and an evaluation's is the one that answered."""
    values: Sequence[float]


@dataclass(frozen=True)
class KeptRun:
    """What is known of one run."""

    name: str
    config: str
    assignments: Sequence[str]
    ended_at: str
    """ISO 8601, UTC."""
    versions: Mapping[str, str]
    """Of Python and of the packages that compute."""
    settings: Mapping[str, Mapping[str, Any]]
    """Resolved, of `SECTIONS`."""
    summary: Mapping[str, Any]
    """As the command told it, without addresses."""
    figures: Mapping[str, Series]

    @property
    def seed(self) -> int:
        return int(next(text.partition("=")[2] for text in self.assignments if text.startswith("run.seed=")))

    def is_asked(self, config: str, assignments: Sequence[str]) -> bool:
        """Whether it was asked for by these words."""
        return self.config == config and list(self.assignments) == list(assignments)

    def learns_by(self, settings: Mapping[str, Mapping[str, Any]]) -> bool:
        """Whether a run with these settings would learn the same: every setting that both know has the same value. A
        setting that came later is one whose default changes nothing."""
        return all(
            settings[section][name] == value
            for section, values in self.settings.items()
            for name, value in values.items()
            if name in settings[section]
        )


def learning_settings(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Of whole settings as plain values, what decides what is learnt."""
    return {section: dict(values[section]) for section in SECTIONS}


def path_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def load(path: Path) -> KeptRun | None:
    """A kept run; None: there is none."""
    if not path.is_file():
        return None
    values = json.loads(path.read_text())
    figures = {name: Series(**series) for name, series in values.pop("figures").items()}
    return KeptRun(**values, figures=figures)


def save(path: Path, run: KeptRun) -> None:
    """Writes it whole or not at all, one line a part: what differs between two runs shows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = asdict(run)
    parts = [
        *(
            f"  {json.dumps(name)}: {json.dumps(values[name])}"
            for name in values
            if name not in ("settings", "figures")
        ),
        *(_table(name, values[name]) for name in ("settings", "figures")),
    ]
    replace_file(path, "{\n" + ",\n".join(parts) + "\n}\n", flush=True)


def _table(name: str, values: Mapping[str, Any]) -> str:
    rows = [f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items()]
    return f"  {json.dumps(name)}: {{\n" + ",\n".join(rows) + "\n  }"
