"""The file of lengths: one list a prompt, in the order of the prompts. 0 stands for an answer that was cut."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from streamrl.whole_file import replace_file


@dataclass
class KeptLengths:
    """What was produced so far."""

    FILE: ClassVar[Path] = Path(__file__).parent.parent / "data" / "smollm2_lengths.json"

    max_tokens: int
    """Where answers were cut."""
    lengths: list[list[int]]

    @classmethod
    def load(cls, file: Path) -> "KeptLengths":
        """
        Raises:
            FileNotFoundError: nothing was produced.
        """
        content = json.loads(file.read_text())
        return cls(content["max_tokens"], content["lengths"])

    def save(self, file: Path) -> None:
        file.parent.mkdir(exist_ok=True)
        rows = ",\n".join(json.dumps(lengths, separators=(",", ":")) for lengths in self.lengths)
        replace_file(file, f'{{"max_tokens": {self.max_tokens}, "lengths": [\n{rows}\n]}}\n')

    @property
    def cut_share(self) -> float:
        """0 to 1, of all answers."""
        answers = [length for lengths in self.lengths for length in lengths]
        return sum(length == 0 for length in answers) / max(len(answers), 1)
