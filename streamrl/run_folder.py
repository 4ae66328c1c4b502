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
import tempfile
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from streamrl.lifetime import ProcessIdentity
from streamrl.whole_file import replace_file

LATEST = "latest"
"""Link, beside the runs' folders, to the newest."""

RunStatus = Literal["running", "completed", "stopped", "failed"]
RunState = Literal["running", "completed", "stopped", "failed", "dead"]


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
                with self.record.open("x") as file:
                    file.write(record.model_dump_json(indent=2))
            except FileExistsError:
                raise self._taken() from None
            self.logs.mkdir(exist_ok=True)
            self.begin_attempt()
            write_private(self.settings, settings)
            _point_latest_at(self.path)

    def _taken(self) -> ValueError:
        return ValueError(
            f"run {self.path.name} exists already in {self.path}: take it up again (streamrl resume {self.path.name}), "
            "choose another run.id, or remove that folder"
        )

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keeps other commands from running this run meanwhile. The kernel lets go of it whatever ends the process.

        Raises:
            ValueError: another process has it.
        """
        with (self.path / "lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"run {self.path.name} is run by another command: see streamrl status") from None
            yield

    def last_attempt(self) -> int:
        """The number of the run's last attempt; 0 before the first.

        Raises:
            ValueError: the file is damaged.
        """
        try:
            return int(json.loads(self.attempt.read_text())["attempt"])
        except FileNotFoundError:
            return 0
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.attempt} is damaged: {error}") from error

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

    def read_record(self) -> RunRecord:
        """What run.json says; of a command that was killed when its trainer was done, that the run is completed.

        Raises:
            ValueError: there is none, or it is damaged.
        """
        try:
            return self._with_late_end(RunRecord.model_validate_json(self.record.read_text()))
        except FileNotFoundError:
            raise ValueError(f"{self.path} holds no run: {self.record.name} is missing") from None
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            place = "".join(f"{part}: " for part in problem["loc"])
            raise ValueError(f"{self.record} is damaged: {place}{problem['msg']}") from error
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{self.record} cannot be read: {error}") from error

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

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replaces summary.json: a reader sees the old one or the new one."""
        replace_file(self.summary, json.dumps(summary))

    def read_summary(self) -> dict[str, Any] | None:
        """The run's last line; None before it has one.

        Raises:
            ValueError: it is damaged.
        """
        try:
            summary = json.loads(self.summary.read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.summary} is damaged: {error}") from error
        if not isinstance(summary, dict):
            raise ValueError(f"{self.summary} is damaged: expected an object")
        return summary

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
    if run is None:
        raise ValueError(
            f"no run in {runs.resolve()}: give a run's folder, or an id together with the folder of the runs"
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


def write_private(path: Path, text: str) -> None:
    """Writes a file that only its owner can read, whole or not at all."""
    replace_file(path, text, mode=0o600)


def _point_latest_at(path: Path) -> None:
    link = path.parent / LATEST
    new = path.parent / f".{LATEST}.{os.getpid()}"
    new.unlink(missing_ok=True)
    new.symlink_to(path.name)
    new.replace(link)
