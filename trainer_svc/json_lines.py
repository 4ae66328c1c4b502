"""JSON Lines files, row by row: values are just what the lines say, and no schema is guessed.

Only each line's place and checksum are held in memory, 24 bytes a row. Which fields a row should have is
trainer_svc/data_sources.py's work.
"""

import codecs
import json
import os
import zlib
from array import array
from pathlib import Path
from typing import Any


class JsonLines:
    """The rows of one file. Blank lines are no rows."""

    def __init__(self, path: Path, limit: int | None = None) -> None:
        """Goes over the file once, without parsing it.

        Args:
            limit: how many rows are wanted at most; None: all.

        Raises:
            OSError: the file cannot be read.
        """
        self._path = path
        # Open for as long as the rows are in use: another file put in its place changes nothing.
        self._file = path.open("rb")
        self._starts = array("q")
        self._lengths = array("q")
        self._numbers = array("I")
        self._checksums = array("I")
        start = 0
        for number, line in enumerate(self._file, 1):
            if limit is not None and len(self._starts) >= limit:
                break
            if not line.isspace():
                self._starts.append(start)
                self._lengths.append(len(line))
                self._numbers.append(number)
                self._checksums.append(zlib.crc32(line))
            start += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def place(self, index: int) -> str:
        """File and line of a row, for messages."""
        return f"{self._path}, line {self._numbers[index]}"

    def row(self, index: int) -> dict[str, Any]:
        """A row, parsed. Safe in any number of threads.

        Raises:
            ValueError: the line is not a JSON object in UTF-8, or was changed since the file was opened.
        """
        line = os.pread(self._file.fileno(), self._lengths[index], self._starts[index])
        if zlib.crc32(line) != self._checksums[index]:
            raise ValueError(f"data: {self.place(index)} was changed while in use: leave a run's files as they are")
        return parse_row(line, self.place(index))


def parse_row(line: bytes, place: str) -> dict[str, Any]:
    """One line as a row.

    Raises:
        ValueError: naming the place and what is wrong with it.
    """
    try:
        row = json.loads(line.removeprefix(codecs.BOM_UTF8).decode())
        if rb"\ud" in line or rb"\uD" in line:
            # Half of a surrogate pair is no text, and would be refused far from here.
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise ValueError(f"data: {place}: not UTF-8 ({error}): convert the file to UTF-8") from error
    except UnicodeEncodeError as error:
        raise ValueError(f"data: {place}: holds half of a surrogate pair, which is no text: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"data: {place}: not JSON, one object a line: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"data: {place}: expected a JSON object in every line, got {type(row).__name__}")
    return row
