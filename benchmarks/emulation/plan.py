"""What the emulated services of a run are told, beside their settings: `emulation.json` in the run's folder."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from streamrl.settings import RunSection

_FILE = "emulation.json"
STEPS_FILE = "steps.jsonl"
"""Written by the emulated trainer: a line a step."""


class Emulation(BaseModel):
    """Times are those of the emulated devices."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    speed: float
    """Emulated seconds in a real one."""
    longest_answer: int
    """Tokens."""
    max_running: int
    """Sequences that an instance runs at once."""
    step_ms: dict[int, float]
    """Of an instance, by number of running sequences."""
    prefill_token_ms: float
    """What a token takes that is computed again after a switch in mid-sequence."""
    load_s: float
    """For which an instance stands still when it switches its weights."""
    train_token_s: float
    """What training takes for a token of a prompt or an answer: forward passes of the reference, forward and backward
    of the policy."""
    answer_tokens: dict[str, int] = {}
    """Tokens of an answer by prompt, as `prompt_key` has it. Empty: as the paper's, up to `longest_answer`."""
    global_barrier: bool = False
    """A version is published only when all samples of the batches that may be under way have come: then all instances
    stand still, and change their weights together."""

    @classmethod
    def of(cls, run: RunSection) -> "Emulation":
        """What a run's folder holds."""
        return cls.model_validate_json((run.folder / _FILE).read_text())

    def write(self, folder: Path) -> None:
        """Puts it into a run's folder."""
        (folder / _FILE).write_text(self.model_dump_json(indent=2))


def prompt_key(token_ids: Sequence[int]) -> str:
    """A prompt as the name of a JSON field."""
    return " ".join(map(str, token_ids))


class TrainedStep(BaseModel):
    """A line of `steps.jsonl`."""

    time_s: float
    """Unix time, real, at which the step was done."""
    busy_s: float
    """Emulated seconds of training since the run began."""
    num_tokens: int
    """Of this step, prompts included."""
