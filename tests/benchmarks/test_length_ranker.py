"""The benchmark of the length ranker, but for what it measures."""

from itertools import islice
from pathlib import Path

from benchmarks.length_ranker import NUM_FOLDS, Prompted, fold_of, recall_over_folds
from benchmarks.lengths.kept import KeptLengths
from benchmarks.lengths.prompts import TASKS, prompts, task_of
from scheduler_svc.ranker.examples import Example


def test_each_prompt_is_held_out_once_and_each_fold_has_every_task() -> None:
    folds = [fold_of(200, fold) for fold in range(NUM_FOLDS)]
    assert sorted(index for fold in folds for index in fold) == list(range(200))
    for fold in folds:
        assert {task_of(index) for index in fold} == set(TASKS)


def test_recall_is_the_mean_over_folds() -> None:
    prompted = [Prompted(Example(str(n), 0, (1,), (n + 1, n + 3), (False, False)), "task") for n in range(80)]
    assert prompted[5].length == 7
    assert recall_over_folds(prompted, float, 0.2) == 1.0
    assert recall_over_folds(prompted, lambda index: -float(index), 0.2) == 0.0


def test_kept_lengths_come_back_and_cut_answers_are_counted(tmp_path: Path) -> None:
    kept = KeptLengths(64, [[3, 0, 5, 7], [1, 1, 1, 1]])
    kept.save(tmp_path / "data" / "lengths.json")
    assert KeptLengths.load(tmp_path / "data" / "lengths.json") == kept
    assert kept.cut_share == 1 / 8


def test_prompts_are_the_same_each_time() -> None:
    first, second = (list(islice(prompts(), 30)) for _ in range(2))
    assert first == second
    assert len(set(first)) == 30
    assert all(text.count("Question: ") == 4 and text.endswith("\nAnswer:") for text in first)
