"""How ours and TRL's run are set beside each other; TRL itself is not started."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers.comparison import comparison_cells, counting_rows, tasks
from benchmarks.real_run import RealRun
from streamrl.command.resolve import resolve


def test_rates_and_last_rewards_are_compared() -> None:
    ours = RealRun(30.0, 900.0, 0.1, 0.2, 1.9, rewards=(0.1, 0.2, 0.4, 0.5, 0.6), accuracy=(0.1, 0.7))
    # The first step warms up.
    theirs = {"step_s": [9.0, 4.0, 6.0], "rewards": [0.1, 0.5, 0.6, 0.7], "accuracy": [0.1, 0.8]}
    cells = {cell.name: cell for cell in comparison_cells("task", ours, theirs, batch_size=64)}
    assert cells["task/trl/samples"].value == pytest.approx(64 / 5)
    assert cells["task/samples"].ratio == pytest.approx(30 / (64 / 5))
    assert cells["task/samples"].met is True
    assert cells["task/last_reward"].ratio == pytest.approx(0.5 / 0.6)
    assert cells["task/last_reward"].met is False


def test_prompts_ask_for_as_many_numbers_as_their_answers_have() -> None:
    rows = counting_rows(200, np.random.default_rng(0))
    assert len({row["prompt"] for row in rows}) == 200
    lengths = []
    for row in rows:
        first, last = (int(word) for word in row["prompt"].removeprefix("Count from ").split(" to "))
        numbers = [int(word) for word in row["answer"].split(", ")]
        assert numbers == list(range(first, last + 1))
        assert 10 <= first <= last < 100
        lengths.append(len(numbers))
    # A long tail.
    assert max(lengths) > 3 * np.median(lengths)


def test_both_tasks_settings_are_taken(tmp_path: Path) -> None:
    for task in tasks(tmp_path):
        settings = resolve(task.config, [f"{name}={value}" for name, value in task.assignments.items()])
        assert settings.trainer.num_iterations == task.num_iterations
        batch = settings.data.prompts_per_batch * settings.data.samples_per_prompt
        assert batch % task.rows_at_once == 0
