"""Where runs are logged, looked at before anything starts."""

from pathlib import Path

import pytest

from trainer_svc.settings import TrainerSettings
from trainer_svc.tracking_place import check_tracking


def _check(runs: Path, uri: str) -> None:
    check_tracking(TrainerSettings.model_validate({"run": {"dir": runs}, "mlflow": {"tracking_uri": uri}}))


def test_what_mlflow_can_use_is_taken(tmp_path: Path) -> None:
    for uri in (
        "",
        "off",
        "http://mlflow:5000",
        "https://user:password@host/path",
        "postgresql+psycopg2://u:p@h/db",
        "databricks",
        "file:///tmp/mlruns",
        str(tmp_path),
        "sqlite:///mlflow.db",
        "sqlite://",
        f"sqlite:///{tmp_path}/mlflow.db",
        f"sqlite:///{tmp_path}/runs/mlflow.db",
    ):
        _check(tmp_path / "runs", uri)


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("foo://bar", "expected http://"),
        ("http://", "name of a host"),
        ("http://[x", "name of a host"),
        ("sqlite:////nonexistent/deep/mlflow.db", "there is no folder /nonexistent/deep"),
        ("sqlite:////tmp", "which is a folder"),
    ],
)
def test_what_can_never_work_is_refused_by_name(tmp_path: Path, uri: str, expected: str) -> None:
    with pytest.raises(ValueError, match=r"^mlflow\.tracking_uri is ") as caught:
        _check(tmp_path / "runs", uri)
    assert uri in str(caught.value) and expected in str(caught.value)
