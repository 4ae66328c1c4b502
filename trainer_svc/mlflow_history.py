"""Takes back what a run in MLflow was told of iterations that a resumed run goes back behind: every step is there once.

MLflow can add to a run, not take away. Where the tracker is a database that this process opens itself, the figures are
deleted from its tables; behind a tracking server they stay, beside the newer ones of the same steps. Tables of answers
are artifacts, and are written again without them.
"""

import json
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.store.tracking.dbmodels.models import SqlLatestMetric, SqlMetric
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from sqlalchemy import ColumnElement, and_, or_

from trainer_svc.run_log import Continued

logger = logging.getLogger(__name__)

_EVALUATION = "eval/"


def forget(client: MlflowClient, continued: Continued, answers: str) -> None:
    """Deletes what will come again.

    Args:
        answers: artifact folder of the tables of answers.
    """
    store = client._tracking_client.store
    if isinstance(store, SqlAlchemyStore):
        _forget_figures(store, continued)
    else:
        logger.info("a tracking server deletes no figures: those of steps after %d stay", continued.iteration)
    for artifact in client.list_artifacts(continued.run_id, answers):
        _forget_answers(client, continued, artifact.path)


def _forget_figures(store: SqlAlchemyStore, continued: Continued) -> None:
    with store.ManagedSessionMaker(read_only=False) as session:
        figures = session.query(SqlMetric).filter(SqlMetric.run_uuid == continued.run_id)
        num_forgotten = figures.filter(_comes_again(SqlMetric, continued)).delete(synchronize_session=False)
        newest = session.query(SqlLatestMetric).filter(SqlLatestMetric.run_uuid == continued.run_id)
        for latest in newest.filter(_comes_again(SqlLatestMetric, continued)).all():
            left = (
                figures.filter(SqlMetric.key == latest.key)
                .order_by(SqlMetric.step.desc(), SqlMetric.timestamp.desc())
                .first()
            )
            if left is None:
                session.delete(latest)
            else:
                latest.step, latest.timestamp = left.step, left.timestamp
                latest.value, latest.is_nan = left.value, left.is_nan
    if num_forgotten:
        logger.info("%d figures of steps after %d are deleted: they come again", num_forgotten, continued.iteration)


def _comes_again(table: Any, continued: Continued) -> ColumnElement[bool]:
    """`Continued.forgets`, as a condition on rows."""
    is_evaluation = table.key.startswith(_EVALUATION)
    return or_(table.step > continued.iteration, and_(is_evaluation, table.step.in_(list(continued.open_evaluations))))


def _forget_answers(client: MlflowClient, continued: Continued, path: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        table = json.loads(Path(client.download_artifacts(continued.run_id, path, folder)).read_text())
    column: Callable[[str], int] = table["columns"].index
    if not {"step", "purpose"} <= set(table["columns"]):
        return
    kept = [
        row
        for row in table["data"]
        if not continued.forgets(row[column("step")], is_evaluation=row[column("purpose")] == "evaluation")
    ]
    if len(kept) < len(table["data"]):
        client.log_dict(continued.run_id, {"columns": table["columns"], "data": kept}, path)
