"""A run as a user starts it, watched."""

from pathlib import Path

import pytest

from benchmarks.real_run import real_run


@pytest.mark.slow
def test_a_run_is_watched_from_its_first_iteration_to_its_last() -> None:
    settings = {"generator.engine": "fake", "trainer.num_iterations": 3, "eval.every": 0, "eval.num_prompts": 4}
    run = real_run(Path("examples/laptop.toml"), {**settings, "mlflow.tracking_uri": "off"})
    assert run.samples_per_s > 0
    assert len(run.rewards) == 3
    assert 0 <= run.accuracy[1] <= 1
    assert 0 <= run.trainer_idle <= 1
