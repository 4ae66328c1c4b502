import json
from pathlib import Path

from trainer_svc.lineage import EvaluationResult, Lineage
from trainer_svc.rollout_counts import RolloutCounts
from trainer_svc.summary import RunTotals, summarise, write_summary


def totals(lineage: Lineage, counts: RolloutCounts, wall_s: float) -> RunTotals:
    return RunTotals(
        run_id="r",
        attempt=1,
        lineage=lineage,
        wall_s=wall_s,
        counts=counts,
        redispatched=1,
        dead_letters=2,
        idle_trainer=1.0000001,
        idle_generator=0.25,
        bytes_full=10,
        bytes_sent=10,
        mlflow_tracking_uri="sqlite:///x",
        mlflow_run_id="abc",
    )


def test_a_summary_says_what_became_of_every_sample() -> None:
    lineage = Lineage()
    lineage.add_iteration(0.25, 1)
    lineage.add_iteration(0.5, 0)
    lineage.add_evaluation(EvaluationResult(0, 0.4, 512))
    lineage.add_evaluation(EvaluationResult(2, 1.5, 511))
    counts = RolloutCounts(expected=16, received=16, trained=14, duplicate=3, generated_tokens=400).drop("stale", 2)
    summary = summarise("completed", totals(lineage, counts, wall_s=4.0))
    assert summary["rollouts"]["expected"] == summary["rollouts"]["trained"] + sum(
        summary["rollouts"]["dropped"].values()
    )
    assert (summary["samples_per_s"], summary["tokens_per_s"]) == (3.5, 100.0)
    assert summary["eval"] == {"first": 0.4, "last": 1.0, "num_prompts": 511}
    assert summary["reward"] == {"first": 0.25, "last": 0.5}
    assert summary["iterations"] == summary["weights"]["version"] == 2
    assert summary["idle"] == {"trainer": 1.0, "generator": 0.25}
    assert summary["staleness_max"] == 1


def test_a_run_that_never_got_far_has_a_summary_too(tmp_path: Path) -> None:
    summary = summarise("failed", totals(Lineage(), RolloutCounts(), wall_s=0.0))
    assert summary["eval"] == {"first": 0.0, "last": 0.0, "num_prompts": 0}
    assert summary["samples_per_s"] == 0.0
    write_summary(tmp_path, summary)
    text = (tmp_path / "summary.json").read_text()
    assert text.count("\n") == 1
    assert json.loads(text) == summary
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
