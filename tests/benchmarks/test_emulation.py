"""What is decided and computed around emulated devices."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from benchmarks import paper_workload
from benchmarks.emulation.devices import NUM_DEVICES, SPLITS, best_split, relative_time, scaled_s, streamed_end_s
from benchmarks.emulation.fleet import WARM_UP_ITERATIONS, Look, steady_state
from benchmarks.emulation.lengths import PROMPT_CORRELATION, PaperLengths
from benchmarks.emulation.plan import TrainedStep
from benchmarks.emulation.stages import BATCH_SIZE, LENGTH_SETS, LONGEST_ANSWER, Stages


def test_stages_take_on_other_devices_what_the_paper_says() -> None:
    assert relative_time("generation", 32) == 0.69
    assert relative_time("training", 16) == 0.54
    assert relative_time("training", 20) == pytest.approx((0.54 + 0.30) / 2)
    assert scaled_s("training", 19.0, measured_on=32, devices=8) == pytest.approx(100)
    with pytest.raises(ValueError, match="8 to 32"):
        relative_time("training", 4)


def test_the_best_split_is_that_of_the_shortest_iteration_and_uses_all_devices() -> None:
    assert all(generating + training == NUM_DEVICES for generating, training in SPLITS)
    assert best_split(lambda generating, training: max(20 / generating, 12 / training)) == (20, 12)
    assert best_split(lambda _generating, _training: 1.0) == SPLITS[0]


def test_work_that_streams_ends_after_the_last_piece_or_when_all_of_it_is_done() -> None:
    assert streamed_end_s([(10.0, 1.0), (0.0, 2.0)]) == 11.0
    assert streamed_end_s([(0.0, 8.0), (10.0, 1.0), (5.0, 4.0)]) == 13.0


def test_replayed_lengths_have_the_papers_distribution() -> None:
    replayed = PaperLengths(20_000)
    lengths = [replayed.of([prompt], prompt) for prompt in range(4000)]
    # Four thousand prompts: quantiles within a few percent.
    assert np.quantile(lengths, 0.5) == pytest.approx(3241, rel=0.1)
    assert np.mean(lengths) == pytest.approx(paper_workload.MEAN_LENGTH, rel=0.1)
    assert max(lengths) <= 20_000


def test_prompts_tell_the_longest_fifth_of_answers_as_well_as_the_papers_ranker() -> None:
    draws = np.random.default_rng(0).normal(size=(2, 200_000))
    answers = PROMPT_CORRELATION * draws[0] + math.sqrt(1 - PROMPT_CORRELATION**2) * draws[1]
    fifth = NormalDist().inv_cdf(0.8)
    assert np.mean(draws[0][answers > fifth] > fifth) == pytest.approx(0.87, abs=0.005)


@pytest.mark.parametrize("lengths", LENGTH_SETS, ids=lambda lengths: lengths.name)
def test_both_stages_on_all_devices_take_what_the_papers_colocated_iteration_does(lengths: object) -> None:
    stages = Stages(lengths)  # type: ignore[arg-type]
    together_s = stages.generation_s(NUM_DEVICES) + stages.training_s(NUM_DEVICES)
    assert together_s == pytest.approx(BATCH_SIZE / stages.lengths.colocated_samples_per_s)
    assert 0 < stages.training_s(NUM_DEVICES) < stages.training_s(8)
    generating, training = stages.sync_split()
    assert stages.sync_s(generating, training) >= stages.generation_s(generating)
    assert stages.mean_tokens * lengths_of(stages) == pytest.approx(
        paper_workload.MEAN_LENGTH * stages.lengths.longest / 20_000
    )


def lengths_of(stages: Stages) -> float:
    return stages.lengths.longest / LONGEST_ANSWER


def test_the_steady_state_begins_after_the_warm_up() -> None:
    times = [10.0 * number for number in range(WARM_UP_ITERATIONS)] + [100.0, 110.0]
    first = times[WARM_UP_ITERATIONS - 1]
    steps = [TrainedStep(time_s=time_s, busy_s=2 * time_s, num_tokens=1) for time_s in times]
    looks = [Look(time_s, cpu_s=time_s / 2, instance_mib=60.0) for time_s in (0.0, first, 110.0, 120.0)]
    state = steady_state(steps, looks, {"idle": {"generator": 0.25}, "staleness_max": 1}, speed=20.0)
    assert state.iteration_s == pytest.approx((110 - first) * 20 / 2)
    assert state.trainer_idle == pytest.approx(1 - 2 / 20)
    assert state.busy_cores == pytest.approx(0.5)
    assert state.samples_per_s == pytest.approx(BATCH_SIZE / state.iteration_s)
