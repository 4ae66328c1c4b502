"""Where prompts come from: JSONL and Parquet files, tasks of reasoning-gym, and the built-in counting task.

A source gives records, each checked for its form; what becomes of them (templates, tokens, length) is data.py's work.
`check_source` looks at a source without reading it all and without importing a large library.
"""

import bisect
import dataclasses
import importlib.util
import itertools
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from streamrl.digest import bytes_digest
from trainer_svc.counting_task import CountingPrompt, held_out_prompts, train_prompts
from trainer_svc.json_lines import JsonLines, parse_row
from trainer_svc.nearest_name import nearest

logger = logging.getLogger(__name__)

COUNTING = "counting"
REASONING_GYM = "reasoning_gym:"
_FILE_KINDS = {".jsonl": "json", ".ndjson": "json", ".parquet": "parquet"}
CHECKED_ROWS = 10_000
"""Of each file, before a run starts: enough to meet what is wrong with it at all, and done in a moment."""
_DEFAULT_TASK_SIZE = 10_000
# Seeds a task's held-out questions: the same in every run. Question i of seed s is question 0 of seed s + i, hence the
# large step between the seeds of training.
_HELD_OUT_TASK_SEED = 1_000_000_007
_TASK_SEED_STEP = 2_000_003

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Record:
    """One prompt with its key, as the source has it."""

    prompt: str | Messages
    """A text, or chat messages with `role` and `content`."""
    answer: str
    id: str
    """Stable across epochs and runs."""
    metadata: Mapping[str, Any]
    """All other fields."""

    @property
    def text(self) -> str:
        """What a reward function is told: the text, or that of the last message."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[-1]["content"]

    @property
    def identity(self) -> str:
        """Equal for equal prompts."""
        return self.prompt if isinstance(self.prompt, str) else json.dumps(self.prompt, sort_keys=True)


class Source(Protocol):
    """Records by index. A slice of many is cheaper than as many single ones."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> list[Record]: ...


@dataclass(frozen=True)
class Fields:
    """Names of the fields of a file's rows."""

    prompt: str = "prompt"
    answer: str = "answer"
    """Empty: there is no key, and reward functions get an empty one."""
    id: str = ""
    """Empty: the id is made from the prompt."""


def open_source(
    name: str,
    *,
    fields: Fields,
    task_options: Mapping[str, Any],
    seed: int,
    held_out: int | None,
) -> Source:
    """Opens a source by its name in the settings.

    Args:
        name: a file, a folder of files of one kind, `reasoning_gym:TASK`, or `counting`.
        task_options: of the reasoning-gym task; `size` is the number of its training prompts.
        seed: of training prompts that are made up; held-out ones are the same for every seed.
        held_out: None for training; for evaluation how many records are wanted at most.

    Raises:
        ValueError: see `check_source`; or a file that cannot be read to its end.
    """
    if name == COUNTING:
        prompts = train_prompts(seed) if held_out is None else held_out_prompts()[:held_out]
        return _CountingSource(prompts)
    if name.startswith(REASONING_GYM):
        return _TaskSource(name.removeprefix(REASONING_GYM), task_options, seed=seed, held_out=held_out)
    files = _files(name)
    _check_first_rows(files, fields, 1)
    kind = _ParquetSource if files[0].suffix == ".parquet" else _JsonLinesSource
    return kind(files, fields, held_out)


def check_source(name: str, *, fields: Fields, task_options: Mapping[str, Any]) -> None:
    """Looks whether a source is there and has the right form, by the first `CHECKED_ROWS` rows of each file.

    Raises:
        ValueError: no such file or task, an empty file, a field that is not there or of the wrong type, options that
            the task does not take.
    """
    if name == COUNTING:
        return
    if name.startswith(REASONING_GYM):
        _TaskSource(name.removeprefix(REASONING_GYM), task_options, seed=0, held_out=1).read(0, 1)
        return
    _check_first_rows(_files(name), fields, CHECKED_ROWS)


def open_levels(name: str, *, task_options: Mapping[str, Any], seed: int) -> list[Source]:
    """The training prompts of each level of a reasoning-gym task's curriculum, the easiest first.

    Args:
        name: `reasoning_gym:TASK`.
        task_options: for what the levels leave open; `size` is the number of prompts of each level.

    Raises:
        ValueError: as `check_source`, or the task has no curriculum.
    """
    task = name.removeprefix(REASONING_GYM)
    # Says what is wrong with task and options, if anything is.
    _TaskSource(task, task_options, seed=seed, held_out=None)
    from reasoning_gym.factory import create_curriculum, has_curriculum

    if not has_curriculum(task):
        raise ValueError(f"data.curriculum: reasoning-gym has none for task {task}")
    curriculum = create_curriculum(task)
    attributes = curriculum.attributes.values()
    fields = [
        getattr(attribute, field)
        for attribute in attributes
        for field in ("field_name", "lower_field_name", "upper_field_name")
        if hasattr(attribute, field)
    ]
    given = {option: value for option, value in task_options.items() if option != "size"}
    levels: list[dict[str, Any]] = []
    sources: list[Source] = []
    for level in range(max(len(attribute.levels) for attribute in attributes)):
        curriculum.set_global_level(level)
        configuration = curriculum.generate_configuration(given)
        options = {**task_options, **{field: getattr(configuration, field) for field in fields}}
        if options in levels:
            continue
        try:
            sources.append(_TaskSource(task, options, seed=seed, held_out=None))
        except ValueError as error:  # some curricula offer more than their task takes
            logger.warning("level %d of the curriculum of %s is left out: %s", level, task, error)
        else:
            levels.append(options)
    if not sources:
        raise ValueError(f"data.curriculum: task {task} refuses each level of its curriculum")
    return sources


class Joined:
    """Sources one after the other."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self.ends = list(itertools.accumulate(len(source) for source in sources))
        """For each source the number of records in it and all before it."""

    def __len__(self) -> int:
        return self.ends[-1]

    def read(self, start: int, stop: int) -> list[Record]:
        records = []
        for source, end in zip(self._sources, self.ends, strict=True):
            first = end - len(source)
            if start < end and first < stop:
                records += source.read(max(start, first) - first, min(stop, end) - first)
        return records


class _CountingSource:
    def __init__(self, prompts: Sequence[CountingPrompt]) -> None:
        self._prompts = prompts

    def __len__(self) -> int:
        return len(self._prompts)

    def read(self, start: int, stop: int) -> list[Record]:
        return [Record(prompt.text, prompt.answer, prompt.id, {}) for prompt in self._prompts[start:stop]]


class _TaskSource:
    """A task of reasoning-gym. Its questions are made when they are read, each from its own seed."""

    def __init__(self, task: str, options: Mapping[str, Any], *, seed: int, held_out: int | None) -> None:
        if importlib.util.find_spec("reasoning_gym") is None:
            raise ValueError(f"data: {REASONING_GYM}{task} needs the package reasoning-gym: install it first")
        from reasoning_gym.factory import DATASETS, create_dataset

        if task not in DATASETS:
            raise ValueError(f"data: reasoning-gym has no task {task!r}{nearest(task, DATASETS)}")
        self._options = {name: value for name, value in options.items() if name != "size"}
        known = {field.name for field in dataclasses.fields(DATASETS[task][1])} - {"seed"}
        for name in self._options:
            if name not in known:
                raise ValueError(
                    f"data.reasoning_gym.{name}: task {task} has no such option{nearest(name, known)}; "
                    f"it has {', '.join(sorted(known))}"
                )
        self._size = options.get("size", _DEFAULT_TASK_SIZE) if held_out is None else held_out
        if not isinstance(self._size, int) or self._size < 1:
            raise ValueError(f"data.reasoning_gym.size is {self._size!r}, expected a number of prompts")
        task_seed = _HELD_OUT_TASK_SEED if held_out is not None else (seed * _TASK_SEED_STEP) % 2**31
        # The task's checker and the question are found again by these (reward `reasoning_gym`).
        self._origin = {"task": task, "task_options": self._options, "task_seed": task_seed, "task_size": self._size}
        try:
            self._questions = create_dataset(task, size=self._size, seed=task_seed, **self._options)
        except (AssertionError, TypeError, ValueError) as error:
            raise ValueError(f"data.reasoning_gym: task {task} refuses {self._options}: {error}") from error

    def __len__(self) -> int:
        return self._size

    def read(self, start: int, stop: int) -> list[Record]:
        return [self._record(index) for index in range(start, min(stop, self._size))]

    def _record(self, index: int) -> Record:
        entry = self._questions[index]
        metadata = {**entry["metadata"], **self._origin, "task_index": index}
        question = entry["question"]
        return Record(question, str(entry["answer"]), _id_of(question), metadata)


class _JsonLinesSource:
    """Rows of JSON Lines files, parsed when they are read.

    The JSON loader of `datasets` is not used: it turns texts that look like dates into timestamps.
    """

    def __init__(self, files: Sequence[Path], fields: Fields, held_out: int | None) -> None:
        self._fields = fields
        try:
            self._files = [JsonLines(file, held_out) for file in files]
        except OSError as error:
            raise ValueError(f"data: {error.filename or files[0].parent} cannot be read: {error}") from error
        self._ends = list(itertools.accumulate(len(file) for file in self._files))
        self._num_rows = self._ends[-1] if held_out is None else min(held_out, self._ends[-1])

    def __len__(self) -> int:
        return self._num_rows

    def read(self, start: int, stop: int) -> list[Record]:
        return [self._read_one(row) for row in range(start, min(stop, self._num_rows))]

    def _read_one(self, row: int) -> Record:
        file, index = _file_and_row(self._ends, row)
        lines = self._files[file]
        return _record(lines.place(index), lines.row(index), self._fields)


class _ParquetSource:
    """Rows of Parquet files, mapped into memory by `datasets` and not held there."""

    def __init__(self, files: Sequence[Path], fields: Fields, held_out: int | None) -> None:
        import datasets
        import pyarrow.parquet

        datasets.disable_progress_bars()
        self._files = files
        self._fields = fields
        self._ends = list(itertools.accumulate(pyarrow.parquet.read_metadata(file).num_rows for file in files))
        try:
            self._rows = datasets.load_dataset("parquet", data_files=[str(file) for file in files], split="train")
        except (datasets.exceptions.DatasetGenerationError, OSError, ValueError) as error:
            name = str(files[0]) if len(files) == 1 else f"{files[0].parent} ({len(files)} files)"
            raise ValueError(f"data: {name} cannot be read: {error.__cause__ or error}") from error
        if held_out is not None:
            self._rows = self._rows.select(range(min(held_out, len(self._rows))))

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, start: int, stop: int) -> list[Record]:
        columns: dict[str, list[Any]] = self._rows[start:stop]
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return [_record(self._place(start + i), row, self._fields) for i, row in enumerate(rows)]

    def _place(self, row: int) -> str:
        file, index = _file_and_row(self._ends, row)
        return f"{self._files[file]}, row {index + 1}"


def _file_and_row(ends: Sequence[int], row: int) -> tuple[int, int]:
    """Which file a row of several files is in, and which row of that file it is.

    Args:
        ends: for each file the number of rows in it and all before it.
    """
    file = bisect.bisect_right(ends, row)
    return file, row - (ends[file - 1] if file else 0)


def _files(name: str) -> list[Path]:
    """The files that a path in the settings stands for."""
    kinds = ", ".join(_FILE_KINDS)
    path = Path(name).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in _FILE_KINDS)
        if len({_FILE_KINDS[file.suffix] for file in files}) != 1:
            raise ValueError(f"data: expected files of one kind ({kinds}) in folder {path}, found {len(files)}")
        return files
    if not path.exists():
        built_in = nearest(name, [COUNTING]) if "/" not in name else ""
        raise ValueError(
            f"data: there is no file {path}{built_in} (looked in {Path.cwd()}); expected a {kinds} file, a folder of "
            f"them, {REASONING_GYM}TASK, or {COUNTING}"
        )
    if path.suffix not in _FILE_KINDS:
        raise ValueError(f"data: {path} is not a {kinds} file: convert it, one JSON object a line is enough")
    return [path]


def _check_first_rows(files: Sequence[Path], fields: Fields, limit: int) -> None:
    for file in files:
        rows = _parquet_rows(file, limit) if file.suffix == ".parquet" else _json_rows(file)
        number = 0
        for number, (place, row) in enumerate(itertools.islice(rows, limit), 1):
            if number == 1:
                _check_fields(str(file), row, fields)
            _record(place, row, fields)
        if number == 0:
            raise ValueError(f"data: {file} holds no rows")


def _json_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.isspace():
                place = f"{file}, line {number}"
                yield place, parse_row(line, place)


def _parquet_rows(file: Path, limit: int) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow.parquet
    from pyarrow import ArrowException

    number = 0
    try:
        parquet = pyarrow.parquet.ParquetFile(file)
        for rows in parquet.iter_batches(batch_size=min(limit, 1000)):
            for row in rows.to_pylist():
                number += 1
                yield f"{file}, row {number}", row
    except (ArrowException, OSError) as error:
        raise ValueError(f"data: {file} is not a Parquet file, or is damaged: {error}") from error


def _check_fields(name: str, row: Mapping[str, Any], fields: Fields) -> None:
    for setting in ("prompt", "answer", "id"):
        field = getattr(fields, setting)
        if (field or setting == "prompt") and field not in row:
            raise ValueError(
                f"data.{setting}_field is {field!r}, and {name} has no such field{nearest(field, row)}; "
                f"it has {', '.join(sorted(row))}"
            )


def _record(place: str, row: Mapping[str, Any], fields: Fields) -> Record:
    """A row in its form.

    Raises:
        ValueError: naming the row and what is wrong with it.
    """
    prompt = _prompt_of(place, row.get(fields.prompt), fields)
    answer = _answer_of(place, row.get(fields.answer), fields) if fields.answer else ""
    metadata = {name: value for name, value in row.items() if name not in (fields.prompt, fields.answer)}
    record = Record(prompt, answer, "", metadata)
    if not fields.id:
        return dataclasses.replace(record, id=_id_of(record.identity))
    given = row.get(fields.id)
    if isinstance(given, bool) or not isinstance(given, str | int) or given == "":
        raise ValueError(f"data: {place}: expected text or a whole number in field {fields.id!r}, got {given!r}")
    return dataclasses.replace(record, id=str(given))


def _prompt_of(place: str, value: Any, fields: Fields) -> str | Messages:
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value and all(_is_message(message) for message in value):
        return [{"role": message["role"], "content": message["content"]} for message in value]
    raise ValueError(
        f"data: {place}: expected text, or a list of messages with texts `role` and `content`, in field "
        f"{fields.prompt!r}; got {_shown(value)}"
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _answer_of(place: str, value: Any, fields: Fields) -> str:
    """The key as text. Files may hold whole numbers as floats beside others that are none: 42.0 is 42."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"data: {place}: expected text or a finite number in field {fields.answer!r}, got {value}")
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise ValueError(
        f"data: {place}: expected text or a number in field {fields.answer!r}, got {_shown(value)} "
        '(data.answer_field = "" if there is no key)'
    )


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"[:120]


def _id_of(identity: str) -> str:
    """BLAKE3 of the prompt, 128 bits in hex."""
    return bytes_digest(identity.encode())[:32]
