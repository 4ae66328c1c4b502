import pytest

from trainer_svc.run_clock import RunClock


class Time:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_time_counts_to_the_last_step_and_evaluations_are_left_out() -> None:
    time = Time()
    clock = RunClock(now=time)
    time.now_s += 50  # the first evaluation
    clock.count(True)
    with clock.waiting():
        time.now_s += 6
    time.now_s += 4
    clock.end_iteration()
    time.now_s += 1  # belongs to the next iteration
    clock.count(False)
    with clock.waiting():
        time.now_s += 30  # an evaluation between two iterations
    clock.count(True)
    time.now_s += 4
    clock.end_iteration()
    assert clock.iteration_figures(num_samples=10, num_tokens=100) == {
        "time/iteration_s": 5,
        "time/wait_s": 0,
        "throughput/samples_per_s": 2,
        "throughput/tokens_per_s": 20,
        "idle/trainer": pytest.approx(0.4),
    }
    time.now_s += 70
    assert (clock.wall_s, clock.wait_s) == (15, 6)


def test_a_continued_run_counts_on_from_its_checkpoint() -> None:
    time = Time()
    clock = RunClock(wall_s=20, wait_s=5, now=time)
    assert clock.idle_share == 0.25
    clock.count(True)
    time.now_s += 5
    clock.end_iteration()
    assert (clock.wall_s, clock.wait_s) == (25, 5)
    assert clock.iteration_figures(5, 5)["time/iteration_s"] == 5


def test_before_anything_counted_nobody_was_idle() -> None:
    assert RunClock().idle_share == 0
