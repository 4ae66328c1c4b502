"""Lengths that are replayed on real engines, and what is reported of them."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks import paper_workload
from benchmarks.replay.comparison import MEASURED_BATCHES, WARM_UP_BATCHES, cells, check_pace
from benchmarks.replay.process import NotedAnswer
from benchmarks.replay.workload import SLOWDOWN, ReplayedLengths, device_step_s, replayed_prompts

LONGEST = 480


def test_lengths_are_the_papers_and_the_stretch_of_a_prompt_tells_them() -> None:
    prompts = replayed_prompts(4000, 4, LONGEST, seed=0)
    assert len({prompt.text for prompt in prompts}) == 4000
    lengths = np.array([prompt.lengths for prompt in prompts])
    expected = paper_workload.MEAN_LENGTH * LONGEST / paper_workload.LONGEST
    assert lengths.mean() == pytest.approx(expected, rel=0.05)
    assert (lengths >= 1).all()
    assert (lengths <= LONGEST).all()
    stretches = [int(words[1]) - int(words[3]) for words in (prompt.text.split() for prompt in prompts)]
    assert np.corrcoef(np.argsort(np.argsort(stretches)), np.argsort(np.argsort(lengths[:, 0])))[0, 1] > 0.9


def test_generators_find_the_lengths_that_were_written(tmp_path: Path) -> None:
    prompts = replayed_prompts(2, 3, LONGEST, seed=1)
    ReplayedLengths.of(prompts, [[1, 2], [1, 3]]).write(tmp_path)
    found = ReplayedLengths.read(tmp_path)
    assert [found.tokens([1, 3], sample) for sample in range(3)] == list(prompts[1].lengths)
    assert found.tokens([9], 0) is None


def _answers(seconds: float) -> list[NotedAnswer]:
    return [
        NotedAnswer(batch=batch, asked_s=100.0 * batch, ended_s=100.0 * batch + end, num_tokens=1, handed_over=end == 1)
        for batch in range(WARM_UP_BATCHES + MEASURED_BATCHES)
        for end in (1, seconds)
    ]


def test_the_ratio_is_that_of_the_mean_times_of_whole_batches() -> None:
    answers = {"random_fifo": [_answers(10.0)] * 2, "makespan": [_answers(8.0)] * 2}
    random_fifo, ours, moved = cells("devices", answers)
    assert (random_fifo.value, ours.value) == (10.0, 8.0)
    assert (ours.ratio, ours.met) == (0.8, True)
    assert moved.value == 2 * MEASURED_BATCHES


def test_a_step_of_a_device_takes_what_the_paper_says_and_prompts_take_longer() -> None:
    assert device_step_s(0, 0) == 0.0
    assert device_step_s(32, 32) == pytest.approx(SLOWDOWN * 10.25e-3)
    assert device_step_s(2, 102) - device_step_s(2, 2) == pytest.approx(SLOWDOWN * 100 * paper_workload.PREFILL_TOKEN_S)


def test_answers_that_no_device_draws_so_fast_are_noticed() -> None:
    fast = NotedAnswer(batch=1, asked_s=0.0, ended_s=100 * device_step_s(1, 1), num_tokens=101, handed_over=False)
    check_pace([fast.model_copy(update={"num_tokens": 100})])
    with pytest.raises(ValueError, match="no step waited"):
        check_pace([fast])


def test_a_goal_that_is_missed_is_told() -> None:
    answers = {"random_fifo": [_answers(10.0)], "makespan": [_answers(9.0)]}
    assert cells("cores", answers)[1].met is False
