import pytest

from generator_svc.interruptions import InterruptionMeter


def test_the_longest_wait_and_its_parts_are_told_when_the_last_sequence_has_gone_on():
    meter = InterruptionMeter()
    meter.stopped(10.0, num_running=3)
    meter.resumed(10.25)
    assert meter.step([0.375], 10.3) is None  # one went on
    assert meter.step([0.05, 0.45], 10.35) is None  # the first again, and another
    told = meter.step([0.05, 0.05, 0.5], 10.45)
    assert told is not None
    assert (told.num_sequences, told.longest_wait_s) == (3, 0.5)
    assert (told.pause_s, told.recompute_s) == (pytest.approx(0.25), pytest.approx(0.2))
    assert "3 running sequences waited 0.500 s" in str(told)
    assert meter.step([9.0], 10.5) is None


def test_a_pause_under_nothing_interrupts_nobody():
    meter = InterruptionMeter()
    meter.stopped(1.0, num_running=0)
    meter.resumed(2.0)
    assert meter.step([5.0], 2.1) is None


def test_a_sequence_that_never_goes_on_does_not_spoil_the_next_pause():
    meter = InterruptionMeter()
    meter.stopped(1.0, num_running=2)
    meter.resumed(1.1)
    assert meter.step([0.2], 1.15) is None
    meter.stopped(3.0, num_running=1)
    assert meter.step([0.01], 3.0) is None
    meter.resumed(3.1)
    told = meter.step([0.25], 3.2)
    assert told is not None and (told.num_sequences, told.longest_wait_s) == (1, 0.25)
