"""Whether runs can be logged where `mlflow.tracking_uri` says, as far as that can be told without MLflow and network.

A tracker that is lost later does not stop a run (run_log.py): what can never work is refused before it starts.
"""

from importlib.metadata import entry_points
from pathlib import Path
from urllib.parse import unquote, urlsplit

from trainer_svc.settings import TrainerSettings

_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_SCHEMES = ("http", "https", "file", "databricks", "databricks-uc", "uc", *_DATABASES)


def check_tracking(settings: TrainerSettings) -> None:
    """
    Raises:
        ValueError: the scheme is none of MLflow's or of its plugins', or the SQLite file's folder does not exist.
    """
    uri = settings.mlflow.tracking_uri
    if not uri or uri == "off" or "://" not in uri:
        return
    scheme = uri.partition("://")[0].partition("+")[0].lower()
    if scheme not in _SCHEMES and scheme not in entry_points(group="mlflow.tracking_store").names:
        raise ValueError(
            f"mlflow.tracking_uri is {uri}: expected http://, https://, a database (sqlite:///FILE, postgresql://…, "
            "mysql://…, mssql://…), a folder, off, or nothing for a SQLite file in run.dir"
        )
    if scheme in ("http", "https") and not _host(uri):
        raise ValueError(f"mlflow.tracking_uri is {uri}: expected the name of a host, such as {scheme}://mlflow:5000")
    if scheme == "sqlite":
        _check_sqlite(uri, settings.run.dir)


def _host(uri: str) -> str | None:
    try:
        return urlsplit(uri).hostname
    except ValueError:
        return None


def _check_sqlite(uri: str, run_dir: Path) -> None:
    file = unquote(uri.partition("://")[2].partition("?")[0]).removeprefix("/")
    if file in ("", ":memory:"):
        return
    folder = Path(file).absolute().parent
    # The folder of the runs is made when the run starts.
    if not folder.is_dir() and folder != run_dir.absolute():
        raise ValueError(
            f"mlflow.tracking_uri is {uri}, and there is no folder {folder}: make it, or choose another file "
            "(three slashes before a relative path, four before an absolute one)"
        )
    if Path(file).is_dir():
        raise ValueError(f"mlflow.tracking_uri is {uri}, which is a folder: expected a file, such as {uri}/mlflow.db")
