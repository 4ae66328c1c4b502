import threading

import pytest

from trainer_svc.control import TrainerControl


def test_a_stop_is_remembered_and_ends_a_pause() -> None:
    control = TrainerControl()
    control.pause(lease_s=600)
    waiting = threading.Thread(target=control.wait_while_paused, args=(600,))
    waiting.start()
    control.ask_stop()
    waiting.join(20)
    assert not waiting.is_alive()
    assert control.stop_asked()
    assert not control.gives_up_iteration()


def test_a_stop_at_once_overtakes_one_that_waits_for_the_iteration() -> None:
    control = TrainerControl()
    assert not control.gives_up_iteration()
    control.ask_stop()
    control.ask_stop(patience_s=0)
    assert control.gives_up_iteration()


def test_a_pause_ends_by_itself_when_its_lease_does() -> None:
    control = TrainerControl()
    control.pause(lease_s=0.05)
    assert control.paused()
    assert not control.wait_while_paused(20)
    assert not control.paused()


def test_a_pause_without_a_lease_is_refused() -> None:
    with pytest.raises(ValueError, match="lease_s"):
        TrainerControl().pause(0)


def test_resume_ends_a_pause_at_once() -> None:
    control = TrainerControl()
    control.pause(lease_s=600)
    assert control.wait_while_paused(0)
    control.resume()
    assert not control.wait_while_paused(20)


def test_a_checkpoint_request_is_taken_once() -> None:
    control = TrainerControl()
    control.ask_checkpoint()
    assert control.take_checkpoint_request()
    assert not control.take_checkpoint_request()


def test_newer_figures_join_earlier_ones() -> None:
    control = TrainerControl()
    control.show_iteration(3, {"reward/mean": 0.5})
    control.show_figures({"eval/accuracy": 0.7})
    control.show("waiting", "rollouts of batch 3: 0 of 8", waiting_rollouts=2)
    status = control.status()
    assert status.metrics == {"reward/mean": 0.5, "eval/accuracy": 0.7}
    assert (status.iteration, status.state, status.waiting_rollouts) == (3, "waiting", 2)
