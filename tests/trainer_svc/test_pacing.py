import pytest

from streamrl.v1.scheduler_pb2 import FLEET_PHASE_GENERATE, FLEET_PHASE_TRAIN
from trainer_svc.pacing import Pacing, pacing_of
from trainer_svc.settings import TrainerSettings


def pacing(mode: str, phases: list[int], deterministic: bool = False) -> Pacing:
    settings = TrainerSettings.model_validate(
        {"pipeline": {"mode": mode}, "trainer": {"saturation_tokens": 100, "deterministic": deterministic}}
    )
    return pacing_of(settings, phases.append)


@pytest.mark.parametrize(("mode", "blocks"), [("sync", True), ("async", False)])
def test_streamed_modes_begin_when_enough_tokens_wait_and_leave_the_fleet_alone(mode: str, blocks: bool) -> None:
    phases: list[int] = []
    streamed = pacing(mode, phases)
    streamed.before_training()
    streamed.before_generation()
    assert (streamed.min_tokens, streamed.evaluations_block, streamed.waits_for_publication) == (100, blocks, False)
    assert phases == []


def test_deterministic_runs_begin_with_a_whole_batch() -> None:
    assert pacing("async", [], deterministic=True).min_tokens is None


def test_colocated_stages_take_turns() -> None:
    phases: list[int] = []
    in_turn = pacing("colocated", phases)
    in_turn.before_training()
    in_turn.before_generation()
    assert phases == [FLEET_PHASE_TRAIN, FLEET_PHASE_GENERATE]
    assert (in_turn.min_tokens, in_turn.evaluations_block, in_turn.waits_for_publication) == (None, True, True)
