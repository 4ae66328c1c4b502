import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainer_svc.run_log import Continued, RunLog

mlflow = pytest.importorskip("mlflow")


@pytest.mark.filterwarnings("ignore")
def test_a_run_is_logged_whole_and_continued_under_the_same_id(tmp_path: Path) -> None:
    from trainer_svc.mlflow_tracker import MlflowTracker

    settings = {"run": {"id": "r"}, "kafka": {"client": {"sasl.password": "hush"}}, "note": "x" * 9000}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    created: list[str] = []

    def tracker(continued: Continued | None = None) -> MlflowTracker:
        return MlflowTracker(
            tracking_uri=uri,
            experiment="test",
            run_name="r",
            continued=continued,
            on_created=created.append,
            settings=settings,
            artifacts=tmp_path / "artifacts",
        )

    log = RunLog(tracker).start()
    for step in (1, 2):
        log.figures(step, {"reward/mean": step / 10, "loss/policy": float("nan")})
        log.rows(step, [{"step": step, "purpose": "train", "answer": "48 49"}])
    # Of an iteration after the checkpoint that the run is taken up from, and of an evaluation that was not over then.
    log.figures(3, {"reward/mean": 0.9, "loss/policy": 0.9, "time/other": 1.0})
    log.figures(2, {"eval/accuracy": 0.9})
    log.rows(3, [{"step": 3, "purpose": "train", "answer": "50"}])
    log.folder(tmp_path / "model", "model")
    log.close("KILLED", timeout_s=60)
    assert log.dropped == 0
    run_id = log.tracker_run_id

    again = RunLog(lambda: tracker(Continued(run_id, 2, [2], attempt=2))).start()
    again.figures(3, {"reward/mean": 0.3})
    again.close("FINISHED", timeout_s=60)
    assert again.dropped == 0
    assert again.tracker_run_id == run_id

    client = mlflow.MlflowClient(uri)
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["kafka.client.sasl.password"] == "(secret)"
    assert run.data.params["note"].startswith("xxx")
    assert [(one.step, one.value) for one in client.get_metric_history(run_id, "reward/mean")] == [
        (1, 0.1),
        (2, 0.2),
        (3, 0.3),
    ]
    assert client.get_metric_history(run_id, "eval/accuracy") == client.get_metric_history(run_id, "time/other") == []
    assert set(run.data.metrics) == {"reward/mean", "loss/policy"}
    assert {file.path for file in client.list_artifacts(run_id)} == {
        "answers",
        "model",
        "settings.json",
        "settings-attempt-2.json",
    }
    table = json.loads(Path(client.download_artifacts(run_id, "answers/from-000000.json", str(tmp_path))).read_text())
    assert table == {
        "columns": ["step", "purpose", "answer"],
        "data": [[1, "train", "48 49"], [2, "train", "48 49"]],
    }

    lost = RunLog(lambda: tracker(Continued("0" * 32, 2, [], attempt=2))).start()
    lost.close("FINISHED", timeout_s=60)
    assert lost.dropped == 0
    assert created == [run_id, lost.tracker_run_id]

    # Killed between making the run and describing it.
    bare = client.create_run(run.info.experiment_id).info.run_id
    described = RunLog(lambda: tracker(Continued(bare, 0, [0], attempt=2))).start()
    described.close("FINISHED", timeout_s=60)
    assert client.get_run(bare).data.params["run.id"] == "r"


@pytest.mark.filterwarnings("ignore")
def test_what_a_killed_process_left_of_a_new_database_is_made_anew(tmp_path: Path) -> None:
    from trainer_svc.mlflow_tracker import MlflowTracker

    (tmp_path / "mlflow.db.unfinished").write_bytes(b"half of a database")
    tracker = MlflowTracker(
        tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}",
        experiment="test",
        run_name="r",
        continued=None,
        on_created=len,
        settings={},
        artifacts=tmp_path / "artifacts",
    )
    assert tracker.start()
    assert {path.name for path in tmp_path.glob("mlflow.db*")} == {"mlflow.db", "mlflow.db.lock"}


def test_runs_that_start_at_once_on_a_fresh_file_lose_nothing(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    # Forked from a process without threads: MLflow takes long to load, and so is loaded once.
    code = (
        "import multiprocessing, sys\n"
        "from pathlib import Path\n"
        "from trainer_svc.mlflow_tracker import MlflowTracker\n"
        "from trainer_svc.run_log import RunLog\n"
        "def one_run():\n"
        f"    make = lambda: MlflowTracker(tracking_uri={uri!r}, experiment='test', run_name='r', continued=None,"
        f" on_created=len, settings={{}}, artifacts=Path({str(tmp_path / 'artifacts')!r}))\n"
        "    log = RunLog(make).start()\n"
        "    log.figures(1, {'loss': 0.5})\n"
        "    log.close('FINISHED', timeout_s=120)\n"
        "    sys.exit(log.dropped)\n"
        "runs = [multiprocessing.get_context('fork').Process(target=one_run) for _ in range(3)]\n"
        "for run in runs: run.start()\n"
        "for run in runs: run.join()\n"
        "sys.exit(sum(run.exitcode != 0 for run in runs))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("test")
    assert [run.data.metrics for run in client.search_runs([experiment.experiment_id])] == [{"loss": 0.5}] * 3
