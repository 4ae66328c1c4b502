import json

from trainer_svc.lineage import EvaluationResult, Lineage, TrainerState
from trainer_svc.rollout_counts import RolloutCounts
from trainer_svc.run_log import StepFigures


def test_first_and_last_are_by_iteration_and_version_whatever_ends_first() -> None:
    lineage = Lineage()
    lineage.add_iteration(None, 0)
    lineage.add_iteration(0.25, 1)
    lineage.add_iteration(0.5, 0)
    for version, accuracy in ((10, 0.8), (0, 0.4), (5, 0.6)):
        lineage.add_evaluation(EvaluationResult(version, accuracy, 8))
    assert (lineage.iteration, lineage.first_reward, lineage.last_reward, lineage.staleness_max) == (3, 0.25, 0.5, 1)
    assert lineage.first_evaluation == EvaluationResult(0, 0.4, 8)
    assert lineage.last_evaluation == EvaluationResult(10, 0.8, 8)


def test_a_state_comes_back_from_json_as_it_was() -> None:
    lineage = Lineage()
    lineage.add_iteration(0.25, 1)
    lineage.add_evaluation(EvaluationResult(0, 0.4, 8))
    state = TrainerState(
        attempt=2,
        lineage=lineage,
        cursor={"epoch": 1},
        counts=RolloutCounts(expected=8, received=9, trained=7).drop("stale"),
        redispatched=3,
        dead_letters=1,
        wall_s=2.5,
        wait_s=0.5,
        rollout_positions={0: 5, 3: 7},
        rollout_topic_id="n/LG2AdoTK6iBJS2Brd4Wg",
        open_evaluations=(4,),
        data_digest="d",
        generator_busy_s=1.5,
        generator_available_s=2.0,
        tracker_run_id="abc",
        unlogged=(StepFigures(3, 1.5, {"reward/mean": 0.25}),),
    )
    assert TrainerState.from_json(json.loads(json.dumps(state.to_json()))) == state
