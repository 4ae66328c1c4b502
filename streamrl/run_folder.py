"""The folder of a run: what lies where in `runs/<id>/`, who runs it, and how `runs/latest` finds it.

    settings.json           resolved settings, every address final (readable by its owner only: it may hold passwords)
    run.json                who runs it: process ids, addresses, how it ended
    attempt.json            the number of the last attempt, written before anything of that attempt starts
    lock                    held by the command that runs it
    logs/NAME.log           output of each process
    services/NAME.error.json   why a service ended
    weights/ checkpoints/ model/ summary.json   written by the services

Contents of the services' own folders are described where they are written.
"""

import contextlib
import fcntl
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from streamrl.json_object import read_object
from streamrl.lifetime import ProcessIdentity
from streamrl.whole_file import create_file, replace_file

LATEST = "latest"
"""Link, beside the runs' folders, to the newest."""

_CHECKPOINT = re.compile(r"attempt-(\d+)-iteration-(\d+)")

RunStatus = Literal["running", "completed", "stopped", "failed"]
RunState = Literal["running", "completed", "stopped", "failed", "dead"]


_RESTORE_RECORD = (
    "Restore it from a copy; without it the run can be neither shown nor resumed: start a new one under another run.id"
)


_RESTORE_SETTINGS = (
    "Restore it from a copy (the run's tracker has one of each attempt, without passwords), or start a new run"
)


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class ServiceRecord(_Record):
    """One process of a run."""

    service: str
    """trainer, generator, scheduler, weights or broker."""
    instance: str
    process: ProcessIdentity
    address: str
    """host:port where it listens; empty: not known, it takes a free port when it starts."""
    restarts: int = 0
    """How often it was started again."""


class RunRecord(_Record):
    """What run.json says. It is replaced whole whenever a process starts or ends."""

    run_id: str
    config: str
    """The settings file that the run was started with."""
    process: ProcessIdentity
    """The command that runs it."""
    started_at: str
    """ISO 8601, UTC."""
    status: RunStatus = "running"
    finished_at: str | None = None
    error: dict[str, str] | None = None
    """kind and message, when it failed."""
    services: tuple[ServiceRecord, ...] = ()
    chosen: tuple[str, ...] = ()
    """Names of settings that the command filled in itself (free ports, its broker's address): the next attempt may
    have others."""

    @field_validator("started_at", "finished_at")
    @classmethod
    def _a_time(cls, value: str | None) -> str | None:
        if value:
            datetime.fromisoformat(value)
        return value

    @property
    def state(self) -> RunState:
        """The status, or dead: it says that it is running, but its process is gone."""
        return "dead" if self.status == "running" and not self.process.is_alive() else self.status

    def ended(self, status: RunStatus, finished_at: str, error: dict[str, str] | None) -> "RunRecord":
        """The record of the run when nothing of it runs any more."""
        return self.model_copy(update={"status": status, "finished_at": finished_at, "error": error, "services": ()})


class Checkpoint(NamedTuple):
    """Where a run can be taken up; ordered as the trainer orders them."""

    attempt: int
    iteration: int
    path: Path


class RunFolder:
    """Paths and files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings = path / "settings.json"
        self.record = path / "run.json"
        self.attempt = path / "attempt.json"
        self.summary = path / "summary.json"
        self.logs = path / "logs"

    def log(self, name: str) -> Path:
        """Where the output of a process goes."""
        return self.logs / f"{name}.log"

    def error_file(self, instance: str) -> Path:
        """Where a service says why it ended."""
        return self.path / "services" / f"{instance}.error.json"

    def check_usable(self) -> None:
        """Looks whether `create` can succeed, and leaves nothing behind.

        Raises:
            ValueError: it holds a run already, or the place is not one where a run can be.
        """
        with unusable_as_bad_input(self.path):
            if _is_there(self.record):
                raise self._taken()
            if self.last_attempt() > 0:
                raise ValueError(
                    f"run.dir: {self.path} holds what is left of a run, but no {self.record.name}: restore that file "
                    "and resume the run, choose another run.id, or remove that folder"
                )
            latest = self.path.parent / LATEST
            if _is_there(latest) and not latest.is_symlink():
                raise FileExistsError(None, f"{latest} is in the place of the link to the newest run")
            place = self.path
            while not _is_there(place):
                place = place.parent
            # Only the try tells: permissions do not say that a file system is read-only, or full, or not a real one.
            tempfile.TemporaryDirectory(prefix=".streamrl-", dir=place).cleanup()

    def create(self, record: RunRecord, settings: str) -> None:
        """Makes the folder, with the resolved settings (JSON), and points `latest` at it.

        Raises:
            ValueError: it holds a run already, or the place is not one where a run can be.
        """
        with unusable_as_bad_input(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                # The one step that two commands cannot both take.
                create_file(self.record, record.model_dump_json(indent=2))
            except FileExistsError:
                raise self._taken() from None
            try:
                self.logs.mkdir(exist_ok=True)
                self.begin_attempt()
                write_private(self.settings, settings)
                _point_latest_at(self.path)
            except OSError:
                # A run that never was: its id can be used once the disk has space again.
                for written in (self.settings, self.attempt, self.record):
                    written.unlink(missing_ok=True)
                raise

    def _taken(self) -> ValueError:
        return ValueError(
            f"run {self.path.name} exists already in {self.path}: take it up again (streamrl resume {self.path.name}), "
            "choose another run.id, or remove that folder"
        )

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keeps other commands from running this run meanwhile. The kernel lets go of it whatever ends the process.

        Raises:
            ValueError: another process has it, or the folder cannot be written.
        """
        with unusable_as_bad_input(self.path):
            file = (self.path / "lock").open("a")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"run {self.path.name} is run by another command: see streamrl status") from None
            yield

    def last_attempt(self) -> int:
        """The number of the run's last attempt; 0 before the first.

        It is the highest that anything in the folder names: where attempt.json was lost, or restored from an old copy,
        a number that checkpoints have already must not be given again.

        Raises:
            ValueError: attempt.json is damaged.
        """
        return max(
            self._attempt_on_record(),
            _number(_peek(self.settings, "run", "attempt")),
            *(_number(attempt) for attempt in _peek(self.path / "lineage.json") or {}),
            *(checkpoint.attempt for checkpoint in self.checkpoints()),
        )

    def has_checkpoint(self) -> bool:
        """Whether there is one, good or damaged, to take the run up from."""
        return bool(self.checkpoints())

    def checkpoints(self) -> list[Checkpoint]:
        """Good or damaged, oldest first: the next attempt takes the last."""
        folder = self.path / "checkpoints"
        paths = list(folder.iterdir()) if folder.is_dir() else []
        return sorted(
            Checkpoint(int(match[1]), int(match[2]), path)
            for path in paths
            if (match := _CHECKPOINT.fullmatch(path.name))
        )

    def _attempt_on_record(self) -> int:
        try:
            record = read_object(self.attempt)
            attempt = record.get("attempt")
            if not isinstance(attempt, int) or isinstance(attempt, bool) or attempt < 0:
                raise ValueError(f'expected a whole number as "attempt", got {attempt!r}')
        except FileNotFoundError:
            return 0
        except ValueError as error:
            raise damaged(
                self.attempt,
                error,
                "Delete it: the last attempt is then known from settings.json, lineage.json and the checkpoints",
            ) from error
        return attempt

    def begin_attempt(self) -> int:
        """Raises the number of attempts and returns the new one. It is on the disk before this returns: an attempt
        whose processes may have written anything is never forgotten.

        Raises:
            ValueError: the file is damaged.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        attempt = self.last_attempt() + 1
        replace_file(self.attempt, json.dumps({"attempt": attempt}), flush=True)
        return attempt

    def write_record(self, record: RunRecord) -> None:
        """Replaces run.json: a reader sees the old one or the new one."""
        replace_file(self.record, record.model_dump_json(indent=2))

    def write_end(self, record: RunRecord) -> None:
        """Replaces run.json for good, even on a full disk: there it is written over, in the place that the old one has.

        Raises:
            OSError: that place is too small, or cannot be written either.
        """
        try:
            self.write_record(record)
        except OSError as error:
            text = record.model_dump_json(indent=2).encode()
            file = os.open(self.record, os.O_WRONLY)
            try:
                place = os.fstat(file)
                if len(text) > max(place.st_size, place.st_blocks * 512):
                    raise error
                # One write over all of the old one: no reader sees the end of that behind the new one.
                os.pwrite(file, text.ljust(place.st_size), 0)
            finally:
                os.close(file)

    def read_record(self) -> RunRecord:
        """What run.json says; of a command that was killed when its trainer was done, that the run is completed.

        Raises:
            ValueError: there is none, or it is damaged.
        """
        try:
            return self._with_late_end(RunRecord.model_validate(read_object(self.record)))
        except FileNotFoundError:
            raise ValueError(f"{self.path} holds no run: {self.record.name} is missing. {_RESTORE_RECORD}") from None
        except ValidationError as error:
            raise damaged(self.record, first_problem(error), _RESTORE_RECORD) from error
        except ValueError as error:
            raise damaged(self.record, error, _RESTORE_RECORD) from error

    def _with_late_end(self, record: RunRecord) -> RunRecord:
        if record.state != "dead":
            return record
        try:
            # Each attempt begins without one: it is of the last.
            summary = self.read_summary()
            finished_s = self.summary.stat().st_mtime
        except (ValueError, OSError):
            return record
        if summary is None or summary.get("status") != "completed":
            return record
        finished_at = datetime.fromtimestamp(finished_s, UTC).isoformat(timespec="seconds")
        return record.model_copy(update={"status": "completed", "finished_at": finished_at})

    def read_settings(self) -> dict[str, dict[str, Any]]:
        """What settings.json says, by section; whether it fits together is for its readers.

        Raises:
            ValueError: there is none, or it is damaged.
        """
        try:
            sections = read_object(self.settings)
            for name, section in sections.items():
                if not isinstance(section, dict):
                    raise ValueError(f"expected a JSON object as section {name}, got {section!r}")
        except FileNotFoundError:
            raise ValueError(f"{self.path} has no {self.settings.name}. {_RESTORE_SETTINGS}") from None
        except ValueError as error:
            raise self.damaged_settings(error) from error
        return sections

    def damaged_settings(self, reason: object) -> ValueError:
        """Says so of settings.json."""
        return damaged(self.settings, reason, _RESTORE_SETTINGS)

    def is_completed(self) -> bool:
        """Whether the last attempt's trainer says that the run is completed: what comes later cannot change that."""
        try:
            return (self.read_summary() or {}).get("status") == "completed"
        except ValueError:
            return False

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replaces summary.json: a reader sees the old one or the new one."""
        replace_file(self.summary, json.dumps(summary))

    def read_summary(self) -> dict[str, Any] | None:
        """The run's last line; None before it has one.

        Raises:
            ValueError: it is damaged.
        """
        try:
            return read_object(self.summary)
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise self.damaged_summary(error) from error

    def damaged_summary(self, reason: object) -> ValueError:
        """Says so of summary.json."""
        return damaged(self.summary, reason, "Delete it: only the run's final figures are lost, and it can be resumed")

    def read_error(self, instance: str) -> dict[str, str] | None:
        """kind and message that a service left when it failed; None when it left none."""
        try:
            error = json.loads(self.error_file(instance).read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            # Not there, or cut off: its process was killed while it wrote.
            return None
        return {"kind": str(error["kind"]), "message": str(error["message"])}

    def read_newer_attempt(self, instance: str) -> int:
        """The attempt of the run that a service met when it was refused as one of an earlier; 0: that was not why it
        ended, or it is not known."""
        try:
            return int(json.loads(self.error_file(instance).read_text()).get("current_attempt", 0))
        except (FileNotFoundError, json.JSONDecodeError):
            return 0


def find_run(run: str | None, runs: Path) -> RunFolder:
    """The folder of a run.

    Args:
        run: an id in `runs`, or a folder; None: the newest in `runs`.

    Raises:
        ValueError: there is no such run.
    """
    candidates = [runs / LATEST] if run is None else [runs / run, Path(run)]
    for candidate in candidates:
        if (candidate / "run.json").is_file():
            return RunFolder(candidate.resolve())
    for candidate in candidates:
        if candidate.is_dir():
            # Says what is missing there.
            RunFolder(candidate.resolve()).read_record()
    if run is None:
        raise ValueError(
            f"no run in {runs.resolve()}: give a run's folder, such as runs/my-run, or set STREAMRL_RUN__DIR to the "
            "folder that the runs are in"
        )
    known = sorted(folder.parent.name for folder in runs.glob("*/run.json") if folder.parent.name != LATEST)
    hint = f"the newest are {', '.join(known[-5:])}" if known else "it holds none"
    raise ValueError(f"no run {run!r} in {runs.resolve()} ({hint}), and no such folder")


@contextlib.contextmanager
def unusable_as_bad_input(folder: Path) -> Iterator[None]:
    """What the system refuses within, as a ValueError that names the setting: a run's folder cannot be made or used."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"run.dir is {folder.parent}, where no run can be: {_reason(error)}") from error


def _reason(error: OSError) -> str:
    place = f": {error.filename}" if error.filename is not None else ""
    return f"{error.strerror}{place}"


def _is_there(path: Path) -> bool:
    """Whether there is something, be it a link to nothing. Raises OSError when that cannot be found out."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True


def damaged(file: Path, reason: object, remedy: str) -> ValueError:
    """The error that a file of a run cannot be used.

    Args:
        reason: what was expected, and what came.
        remedy: a sentence on what to do, without its full stop.
    """
    return ValueError(f"{file} is damaged: {reason}. {remedy}")


def first_problem(error: ValidationError) -> str:
    """Place, expectation and value of what pydantic found first."""
    problem = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in problem["loc"])
    came = "" if problem["type"] == "missing" else f", got {problem['input']!r}"
    return f"{place}: {problem['msg'].removeprefix('Value error, ')}{came}"


def _peek(file: Path, *keys: str) -> Any:
    """A value in a file, as far as that can be read; None: it is not there. Whoever needs the file says what is wrong
    with it."""
    try:
        value: Any = read_object(file)
    except (FileNotFoundError, ValueError):
        return None
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _number(value: object) -> int:
    """A whole number, also as text; else 0."""
    return int(str(value)) if re.fullmatch(r"[0-9]{1,9}", str(value)) else 0


def write_private(path: Path, text: str) -> None:
    """Writes a file that only its owner can read, whole or not at all."""
    replace_file(path, text, mode=0o600)


def _point_latest_at(path: Path) -> None:
    link = path.parent / LATEST
    new = path.parent / f".{LATEST}.{os.getpid()}"
    new.unlink(missing_ok=True)
    new.symlink_to(path.name)
    new.replace(link)
