"""A run in MLflow. Imported only in the run log's thread: MLflow takes seconds to load."""

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_VARIABLES = {
    # MLflow takes these from its environment only, the first when it is imported.
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
for _name, _value in _VARIABLES.items():
    os.environ.setdefault(_name, _value)

from mlflow import MlflowClient  # noqa: E402
from mlflow.entities import Metric, Param  # noqa: E402
from mlflow.exceptions import MlflowException  # noqa: E402
from mlflow.store.tracking import DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH  # noqa: E402
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore  # noqa: E402
from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH, MAX_PARAMS_TAGS_PER_BATCH  # noqa: E402
from sqlalchemy import make_url  # noqa: E402

from trainer_svc.mlflow_history import forget  # noqa: E402
from trainer_svc.run_log import Continued, TrackedStatus  # noqa: E402

_ITERATIONS_A_TABLE = 100
_ANSWERS = "answers"
_NOT_THERE = "RESOURCE_DOES_NOT_EXIST"
_SECRET_WORDS = ("password", "secret", "sasl.username", "sasl.oauthbearer", "ssl.key")


class MlflowTracker:
    """One run: settings as parameters and artifact, figures, tables of answers, the final model."""

    def __init__(
        self,
        *,
        tracking_uri: str,
        experiment: str,
        run_name: str,
        continued: Continued | None,
        on_created: Callable[[str], None],
        settings: Mapping[str, Any],
        artifacts: Path,
    ) -> None:
        """
        Args:
            continued: None: a new run is made.
            on_created: gets the id of a new run before anything is logged in it.
            settings: resolved, of all services.
            artifacts: where artifacts go when the tracker is a local file; a server has its own place.
        """
        self._tracking_uri = tracking_uri
        with _alone_at(tracking_uri):
            self._client = MlflowClient(tracking_uri)
        self._experiment = experiment
        self._run_name = run_name
        self._run_id = ""
        self._continued = continued
        self._on_created = on_created
        self._settings = without_secrets(settings)
        self._artifact_location = artifacts if _is_local(tracking_uri) else None

    def start(self) -> str:
        """Begins the run, or continues the given one, from its checkpoint."""
        with _alone_at(self._tracking_uri):
            return self._start()

    def _start(self) -> str:
        if self._continued is not None and self._is_there(self._continued.run_id):
            self._continue(self._continued)
            return self._continued.run_id
        if not self._run_id:
            self._run_id = self._client.create_run(self._experiment_id(), run_name=self._run_name).info.run_id
            self._on_created(self._run_id)
        self._log_settings(self._run_id)
        return self._run_id

    def _log_settings(self, run_id: str) -> None:
        params = [Param(name, value[:MAX_PARAM_VAL_LENGTH]) for name, value in flat(self._settings)]
        for start in range(0, len(params), MAX_PARAMS_TAGS_PER_BATCH):
            self._client.log_batch(run_id, params=params[start : start + MAX_PARAMS_TAGS_PER_BATCH])
        self._client.log_dict(run_id, self._settings, "settings.json")

    def _is_there(self, run_id: str) -> bool:
        try:
            return bool(self._client.get_run(run_id).info.lifecycle_stage == "active")
        except MlflowException as error:
            if error.error_code != _NOT_THERE:
                raise
            return False

    def _continue(self, continued: Continued) -> None:
        self._client.update_run(continued.run_id, status="RUNNING")
        forget(self._client, continued, _ANSWERS)
        if self._client.get_run(continued.run_id).data.params:
            # Parameters never change: they are what the run began with.
            self._client.log_dict(continued.run_id, self._settings, f"settings-attempt-{continued.attempt}.json")
        else:
            # Its process died between making the run and describing it.
            self._log_settings(continued.run_id)
        self._run_id = continued.run_id

    def log_figures(self, step: int, figures: Mapping[str, float], time_s: float) -> None:
        """Figures at a step; what is not a number goes as it is (MLflow knows nan)."""
        timestamp_ms = int(time_s * 1000)
        self._client.log_batch(
            self._run_id, metrics=[Metric(name, value, timestamp_ms, step) for name, value in figures.items()]
        )

    def log_rows(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows of the table of answers; a hundred iterations share a file."""
        first = step // _ITERATIONS_A_TABLE * _ITERATIONS_A_TABLE
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        self._client.log_table(self._run_id, columns, f"{_ANSWERS}/from-{first:06d}.json")

    def log_folder(self, folder: Path, name: str) -> None:
        """A folder as an artifact."""
        self._client.log_artifacts(self._run_id, str(folder), name)

    def end(self, status: TrackedStatus) -> None:
        """Closes the run."""
        self._client.set_terminated(self._run_id, status)

    def _experiment_id(self) -> str:
        experiment = self._client.get_experiment_by_name(self._experiment)
        if experiment is not None:
            return str(experiment.experiment_id)
        location = self._artifact_location
        try:
            return str(
                self._client.create_experiment(self._experiment, location.resolve().as_uri() if location else None)
            )
        except MlflowException:
            # Another run made it in the meantime.
            experiment = self._client.get_experiment_by_name(self._experiment)
            if experiment is None:
                raise
            return str(experiment.experiment_id)


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Names with dots, and values as text."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value)


def without_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings, with what must not be shown to everyone who may read the tracker left out."""
    return {
        name: without_secrets(value)
        if isinstance(value, Mapping)
        else "(secret)"
        if any(word in name.lower() for word in _SECRET_WORDS)
        else value
        for name, value in settings.items()
    }


@contextmanager
def _alone_at(tracking_uri: str) -> Iterator[None]:
    """Keeps other runs from an SQLite file meanwhile: MLflow makes its tables at first use, and two cannot at once.

    A lock beside the file; a server has its own order.
    """
    path = (make_url(tracking_uri).database or "") if tracking_uri.startswith("sqlite:") else ""
    if path in ("", ":memory:"):
        yield
        return
    with Path(f"{path}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _make_whole(Path(path))
        yield


def _make_whole(database: Path) -> None:
    """Makes a new SQLite file with all its tables, or none: a process that is killed halfway would leave one that
    MLflow neither uses nor mends."""
    if database.exists():
        return
    unfinished = database.with_name(f"{database.name}.unfinished")
    for leftover in database.parent.glob(f"{unfinished.name}*"):
        leftover.unlink()
    SqlAlchemyStore(f"sqlite:///{unfinished}", DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH).engine.dispose()
    unfinished.replace(database)


def _is_local(tracking_uri: str) -> bool:
    return "://" not in tracking_uri or tracking_uri.startswith(("sqlite:", "file:"))
