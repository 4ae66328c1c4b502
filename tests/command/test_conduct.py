"""What is said of a trainer that was asked to stop."""

import pytest

from streamrl.command.conduct import how_it_stops
from streamrl.v1.trainer_pb2 import TrainerServiceGetStatusResponse as Status


@pytest.mark.parametrize(
    "status", [None, Status(state="starting"), Status(state="evaluating")], ids=["silent", "starting", "evaluating"]
)
def test_before_the_first_iteration_no_checkpoint_is_promised(status: Status | None) -> None:
    assert how_it_stops(status) == "ends as soon as it can: its first iteration has not begun"


@pytest.mark.parametrize("status", [Status(state="training"), Status(state="evaluating", iteration=3)])
def test_an_iteration_is_ended_with_a_checkpoint(status: Status) -> None:
    assert how_it_stops(status) == "ends at the end of its iteration, with a checkpoint"
