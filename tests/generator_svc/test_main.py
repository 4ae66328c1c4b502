"""A whole instance: from the first version to the drain."""

import asyncio
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from generator_svc.main import main
from streamrl.errors import BrokerUnavailableError, EngineDiedError, RefusedError, UnavailableError, WeightTransferError
from streamrl.rpc.channel import open_aio_channel
from streamrl.v1.generator_pb2 import (
    GeneratorServiceDrainRequest,
    GeneratorServiceGetStatusRequest,
    GeneratorServicePauseRequest,
    GeneratorServiceResumeRequest,
)
from streamrl.v1.generator_pb2_grpc import GeneratorServiceStub
from streamrl.v1.records_pb2 import ROLLOUT_STATUS_FAILED, ROLLOUT_STATUS_OK, SampleDraw
from streamrl.v1.sample_pb2 import (
    FINISH_REASON_STOP,
    LOGPROB_MODE_PROCESSED,
    PURPOSE_EVALUATION,
    PURPOSE_TRAIN,
    SampleId,
)
from streamrl.v1.scheduler_pb2 import FLEET_PHASE_GENERATE, FLEET_PHASE_TRAIN

Play = Callable[[Any], None]
Site = Any


def train(batch: int, sample: int) -> SampleId:
    return SampleId(purpose=PURPOSE_TRAIN, batch=batch, group=0, sample=sample)


async def until(site: Site, condition: Callable[[], Any]) -> None:
    """Waits heartbeat by heartbeat."""
    async with asyncio.timeout(20):
        while not condition():
            await site.heard_from()


def test_an_assignment_becomes_rollouts(play: Play) -> None:
    async def scenario(site: Site) -> None:
        async with site.instance():
            await site.registered()
            who = site.scheduler.registered[0]
            assert (who.instance, who.site, who.max_running, who.kv_cache_tokens) == ("generator-0", "west", 8, 1024)
            assert who.tokenizer_digest
            site.assign(0, [0, 1])
            await site.running("0/0/0", "0/0/1")
            request = site.engine.requests["0/0/1"]
            assert (request.prompt_token_ids, request.stop_token_ids, request.seed) == ([4, 5], [1], 2)
            site.engine.end("0/0/1")
            site.engine.end("0/0/0", finish_reason="length")
            rollout, other = await site.rollouts(2)
            assert (rollout.id.sample, other.id.sample) == (1, 0)
            assert rollout.id == train(0, 1)
            assert (rollout.attempt, rollout.instance, rollout.incarnation) == (1, "generator-0", 101)
            assert list(rollout.token_ids) == [7, 8, 1]
            assert list(rollout.logprobs) == [-0.5, -0.25, -0.125]
            assert rollout.logprob_mode == LOGPROB_MODE_PROCESSED
            assert [(span.weight_version, span.num_tokens) for span in rollout.version_spans] == [(0, 3)]
            assert (rollout.status, rollout.finish_reason) == (ROLLOUT_STATUS_OK, FINISH_REASON_STOP)
            assert rollout.timings.received_s > 0 and rollout.timings.started_s == 5.0
            await until(site, lambda: site.scheduler.heartbeats[-1].finished_samples == 2)
            beat = site.scheduler.heartbeats[-1]
            assert (beat.generated_tokens, beat.running, beat.waiting, beat.weight_version) == (6, 0, 0, 0)
            assert beat.busy_s > 0
            assert (beat.step_latencies[0].batch_size, beat.step_latencies[0].held_tokens) == (4, 100.0)
            assert who.profile.prefill_token_s == 0.5

    play(scenario)


def test_the_first_version_is_acknowledged_with_its_canaries(play: Play) -> None:
    async def scenario(site: Site) -> None:
        site.engine.canary_error = 0.5
        async with site.instance():
            await site.registered()
            await until(site, lambda: site.weights.acknowledged)
            outcome = site.weights.acknowledged[0]
            assert (outcome.receiver, outcome.weight_version, outcome.digest) == ("generator-0", 0, "digest-0")
            assert (outcome.canary_abs_diff_mean, outcome.canary_abs_diff_max) == (0.5, 0.5)
            assert (outcome.canary_num_tokens, outcome.fetch_s, outcome.switch_s) == (2, 0.1, 0.2)

    play(scenario)


def test_records_of_other_lives_are_skipped_and_impossible_ones_answered(play: Play) -> None:
    async def scenario(site: Site) -> None:
        async with site.instance():
            await site.registered()
            site.assign(0, [0], incarnation=7)
            site.assign(0, [1], attempt=0)
            site.write(b"\xff\xff\xff no assignment")
            site.assign(0, [2], token_ids=[])
            site.assign(0, [3], token_ids=[1] * 60)
            site.assign(0, [4])
            await site.running("0/0/4")
            assert site.engine.requests.keys() == {"0/0/4"}
            letters = await site.dead_letters(3)
            assert ["not an Assignment" in letters[0].reason, "no tokens" in letters[1].reason] == [True, True]
            assert "longer than the 64" in letters[2].reason
            failed = await site.rollouts(2)
            assert {rollout.id.sample for rollout in failed} == {2, 3}
            assert all(rollout.status == ROLLOUT_STATUS_FAILED and rollout.error for rollout in failed)
            assert [rollout.dispatch for rollout in failed] == [1, 1]
            await until(site, lambda: site.scheduler.heartbeats[-1].dead_letters == 3)

    play(scenario)


def test_answers_that_must_not_be_trained_on_fail(play: Play) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"logprobs": [-1.0, float("nan"), -1.0]}, "finite"),
        ({"logprobs": [-1.0]}, "log-probs"),
        ({"version_spans": [(0, 2)]}, "spans"),
        ({"token_ids": [], "logprobs": [], "version_spans": []}, "no tokens"),
    ]

    async def scenario(site: Site) -> None:
        async with site.instance():
            await site.registered()
            site.assign(0, list(range(len(bad))))
            await site.running(*(f"0/0/{sample}" for sample in range(len(bad))))
            for sample, (changes, _) in enumerate(bad):
                site.engine.end(f"0/0/{sample}", **changes)
            for rollout in await site.rollouts(len(bad)):
                assert rollout.status == ROLLOUT_STATUS_FAILED
                assert bad[rollout.id.sample][1] in rollout.error
                assert not rollout.token_ids

    play(scenario)


def test_revokes_are_answered_whatever_they_meet(play: Play) -> None:
    async def scenario(site: Site) -> None:
        async with site.instance():
            await site.registered()
            site.scheduler.say(revoke=[train(0, 3)])
            site.assign(0, [0, 1])
            site.assign(5, [2], min_version=5)
            await site.running("0/0/0", "0/0/1")
            site.engine.end("0/0/1")
            await site.rollouts(1)
            await until(site, lambda: site.scheduler.heartbeats[-1].waiting == 1)
            site.scheduler.say(revoke=[train(0, 0), train(0, 1), train(5, 2)])
            await until(site, lambda: site.scheduler.revoked() == {"0/0/0", "5/0/2"})
            await until(site, lambda: site.scheduler.not_revoked() == {"0/0/1"})
            assert site.engine.aborted == ["0/0/0"]
            site.assign(0, [3])
            await until(site, lambda: "0/0/3" in site.scheduler.revoked())
            assert "0/0/3" not in site.engine.requests

    play(scenario)


def test_a_sample_that_has_begun_is_not_given_back_to_be_moved(play: Play) -> None:
    async def scenario(site: Site) -> None:
        site.engine.max_running = 2
        async with site.instance():
            await site.registered()
            site.assign(0, [0, 1], priority=0)
            site.assign(0, [2], priority=1)
            site.assign(9, [3], min_version=9)
            await site.running("0/0/0", "0/0/1", "0/0/2")
            site.scheduler.say(revoke_unstarted=[train(0, 0), train(0, 2), train(9, 3)])
            await until(site, lambda: site.scheduler.revoked() == {"0/0/2", "9/0/3"})
            await until(site, lambda: site.scheduler.not_revoked() == {"0/0/0"})
            assert "0/0/2" not in site.engine.answers
            site.engine.end("0/0/0")
            site.engine.end("0/0/1")
            assert {rollout.id.sample for rollout in await site.rollouts(2)} == {0, 1}

    play(scenario)


def test_heartbeats_come_when_work_begins_and_as_often_as_the_scheduler_wants(play: Play) -> None:
    async def scenario(site: Site) -> None:
        site.scheduler.interval_s = 1000.0
        beats = site.scheduler.heartbeats
        async with site.instance():
            await site.eventually(lambda: beats)
            site.assign(0, [0, 1])
            await site.eventually(lambda: any(beat.waiting + beat.running for beat in beats))
            number = len(beats)
            site.scheduler.say(heartbeat_interval_s=0.01)
            await site.eventually(lambda: len(beats) > number + 5)

    play(scenario)


def test_an_answer_that_has_begun_is_handed_over_and_goes_on_from_there(play: Play) -> None:
    async def scenario(site: Site) -> None:
        async with site.instance():
            await site.registered()
            site.assign(0, [0, 1])
            await site.running("0/0/0", "0/0/1")
            await until(site, lambda: site.scheduler.heartbeats[-1].progress)
            (progress,) = site.scheduler.heartbeats[-1].progress
            assert (progress.purpose, progress.batch) == (PURPOSE_TRAIN, 0)
            assert (list(progress.groups), list(progress.num_tokens)) == ([0, 0], [1, 1])
            assert sorted(progress.samples) == [0, 1]
            site.scheduler.say(hand_over=[train(0, 0), train(0, 2)])
            await until(site, lambda: "0/0/0" in site.scheduler.handed_over())
            given_back = site.scheduler.handed_over()["0/0/0"]
            assert given_back.dispatch == 1
            assert (list(given_back.prefix.token_ids), list(given_back.prefix.logprobs)) == ([7], [-0.5])
            assert site.engine.aborted == []
            site.assign(0, [], draws=[SampleDraw(sample=0, seed=9, dispatch=2, prefix=given_back.prefix)])
            await site.running("0/0/0")
            request = site.engine.requests["0/0/0"]
            assert (request.prompt_token_ids, request.prefix_token_ids) == ([4, 5], [7])
            await until(site, lambda: 2 in site.scheduler.heartbeats[-1].progress[0].num_tokens)
            # One that had not come yet is given back when it does.
            site.assign(0, [2])
            await until(site, lambda: "0/0/2" in site.scheduler.revoked())
            site.engine.end("0/0/0", version_spans=[(0, 3)])
            (rollout,) = await site.rollouts(1)
            assert (rollout.id.sample, rollout.dispatch) == (0, 2)
            assert list(rollout.token_ids) == [7, 7, 8, 1]
            assert list(rollout.logprobs) == [-0.5, -0.5, -0.25, -0.125]
            assert [(span.weight_version, span.num_tokens) for span in rollout.version_spans] == [(0, 4)]
            site.scheduler.say(hand_over=[train(0, 0)])
            await until(site, lambda: site.scheduler.not_revoked() == {"0/0/0"})

    play(scenario)


def test_weights_change_at_the_boundary_after_they_were_fetched_ahead(play: Play) -> None:
    async def scenario(site: Site) -> None:
        async with site.instance():
            await site.registered()
            site.assign(0, [0])
            await site.running("0/0/0")
            site.weights.publish(1)
            site.scheduler.announce(1)
            site.assign(1, [0], min_version=0)
            await until(site, lambda: site.engine.prefetched)
            assert site.engine.prefetched == [1] and site.engine.switches == []
            site.engine.end("0/0/0")
            await site.running("1/0/0")
            assert site.engine.switches == [1]
            site.engine.end("1/0/0")
            rollouts = await site.rollouts(2)
            assert {rollout.id.batch: rollout.version_spans[0].weight_version for rollout in rollouts} == {0: 0, 1: 1}
            await until(site, lambda: len(site.weights.acknowledged) == 2)
            await until(site, lambda: site.scheduler.heartbeats[-1].weight_version == 1)

    play(scenario)


def test_weights_change_in_flight_under_what_runs(play: Play) -> None:
    async def scenario(site: Site) -> None:
        async with site.instance(weights={"swap": "in_flight"}):
            await site.registered()
            site.assign(0, [0])
            await site.running("0/0/0")
            site.weights.publish(1)
            site.scheduler.announce(1)
            await until(site, lambda: site.engine.switches == [1])
            site.engine.end("0/0/0", version_spans=[(0, 1), (1, 2)])
            (rollout,) = await site.rollouts(1)
            assert [(span.weight_version, span.num_tokens) for span in rollout.version_spans] == [(0, 1), (1, 2)]

    play(scenario)


def test_an_evaluation_of_a_version_that_is_gone_fails_and_the_rest_goes_on(play: Play) -> None:
    async def scenario(site: Site) -> None:
        site.weights.publish(3)
        async with site.instance():
            await site.registered()
            site.assign(2, [0], exact=2, priority=0)
            site.assign(3, [1], min_version=3)
            await site.running("3/0/1")
            (rollout,) = await site.rollouts(1)
            assert rollout.status == ROLLOUT_STATUS_FAILED and "not held" in rollout.error
            assert rollout.id.purpose == PURPOSE_EVALUATION

    play(scenario)


def test_a_failed_transfer_is_tried_again(play: Play) -> None:
    async def scenario(site: Site) -> None:
        async with site.instance():
            await site.registered()
            site.engine.failing_switches = 2
            site.weights.publish(1)
            site.scheduler.announce(1)
            await until(site, lambda: site.engine.switches == [1])

    play(scenario)


def test_a_transfer_that_fails_for_too_long_ends_the_instance(play: Play) -> None:
    async def scenario(site: Site) -> None:
        async with site.instance(rpc={"patience_s": 0.5}) as life:
            await site.registered()
            site.engine.failing_switches = 1000
            site.weights.publish(1)
            site.scheduler.announce(1)
            with pytest.raises(WeightTransferError, match="digest"):
                await life
            assert site.scheduler.drained[0].stopped

    play(scenario)


def test_a_lost_lease_aborts_everything_and_begins_another_life(play: Play) -> None:
    async def scenario(site: Site) -> None:
        async with site.instance():
            await site.registered()
            site.assign(0, [0, 1])
            await site.running("0/0/0", "0/0/1")
            site.engine.end("0/0/1")
            await site.rollouts(1)
            site.scheduler.granted = False
            await site.registered(times=2)
            assert site.engine.aborted == ["0/0/0"]
            assert site.scheduler.revoked() == set()
            beat = await site.heard_from()
            assert (beat.incarnation, beat.running, beat.finished_samples, beat.generated_tokens) == (102, 0, 0, 0)
            site.assign(0, [0], dispatch=2)
            await site.running("0/0/0")
            site.engine.end("0/0/0")
            rollout = next(rollout for rollout in await site.rollouts(2) if rollout.id.sample == 0)
            assert (rollout.id.sample, rollout.incarnation, rollout.dispatch) == (0, 102, 2)

    play(scenario)


def test_silence_for_a_lease_is_a_lost_lease(play: Play) -> None:
    async def scenario(site: Site) -> None:
        site.scheduler.lease_s = 0.6
        async with site.instance():
            await site.registered()
            site.assign(0, [0])
            await site.running("0/0/0")
            site.scheduler.silent = True
            await site.eventually(lambda: site.engine.aborted)
            site.scheduler.silent = False
            await site.registered(times=2)

    play(scenario)


def test_a_scheduler_that_comes_back_within_the_lease_finds_the_work_going_on(play: Play) -> None:
    async def scenario(site: Site) -> None:
        async with site.instance():
            await site.registered()
            site.assign(0, [0])
            await site.running("0/0/0")
            address = site.scheduler_address
            await site.scheduler_server.stop(0)
            await site.serve_scheduler(address)
            await site.heard_from()
            site.engine.end("0/0/0")
            (rollout,) = await site.rollouts(1)
            assert rollout.incarnation == 101
            assert len(site.scheduler.registered) == 1

    play(scenario)


def test_the_engine_sleeps_in_the_trainers_turn(play: Play) -> None:
    async def scenario(site: Site) -> None:
        async with site.instance(pipeline={"mode": "colocated", "max_staleness": 0}):
            await site.registered()
            site.assign(0, [0])
            await site.running("0/0/0")
            site.scheduler.phase = FLEET_PHASE_TRAIN
            site.scheduler.say()
            site.assign(0, [1])
            await site.heard_from()
            assert site.engine.history == []
            site.engine.end("0/0/0")
            await until(site, lambda: site.scheduler.heartbeats[-1].phase == FLEET_PHASE_TRAIN)
            assert site.engine.history == ["sleep"]
            assert "0/0/1" not in site.engine.requests
            site.scheduler.phase = FLEET_PHASE_GENERATE
            site.scheduler.say()
            await site.running("0/0/1")
            assert site.engine.history == ["sleep", "wake"]
            await until(site, lambda: site.scheduler.heartbeats[-1].phase == FLEET_PHASE_GENERATE)

    play(scenario)


def test_a_pause_holds_until_it_is_ended_or_its_lease_is(play: Play) -> None:
    async def scenario(site: Site) -> None:
        async with site.instance():
            await site.registered()
            async with open_aio_channel(site.scheduler.registered[0].address) as channel:
                control = GeneratorServiceStub(channel)
                await control.Pause(GeneratorServicePauseRequest(lease_s=60))
                assert site.engine.history == ["pause"]
                site.assign(0, [0])
                await until(site, lambda: site.scheduler.heartbeats[-1].waiting == 1)
                status = await control.GetStatus(GeneratorServiceGetStatusRequest())
                assert (status.state, status.instance, status.weight_version) == ("paused", "generator-0", 0)
                await control.Resume(GeneratorServiceResumeRequest())
                await site.running("0/0/0")
                assert site.engine.history == ["pause", "resume"]
                await control.Pause(GeneratorServicePauseRequest(lease_s=0.1))
                site.assign(0, [1])
                await site.running("0/0/1")
                assert (await control.GetStatus(GeneratorServiceGetStatusRequest())).state == "generating"

    play(scenario)


def test_a_drain_gives_back_what_has_not_begun_and_finishes_the_rest(play: Play) -> None:
    async def scenario(site: Site) -> None:
        site.engine.max_running = 2
        async with site.instance(generator={"drain_timeout_s": 20}) as life:
            await site.registered()
            site.assign(0, [0, 1], priority=0)
            site.assign(0, [2], priority=1)
            site.assign(9, [3], min_version=9)
            await site.running("0/0/0", "0/0/1", "0/0/2")
            async with open_aio_channel(site.scheduler.registered[0].address) as channel:
                await GeneratorServiceStub(channel).Drain(GeneratorServiceDrainRequest())
            await until(site, lambda: site.scheduler.revoked() == {"0/0/2", "9/0/3"})
            assert site.scheduler.heartbeats[-1].draining
            site.assign(0, [4])
            await until(site, lambda: "0/0/4" in site.scheduler.revoked())
            assert not site.scheduler.drained
            site.engine.end("0/0/0")
            site.engine.end("0/0/1")
            await life
            assert {rollout.id.sample for rollout in await site.rollouts(2)} == {0, 1}
            (goodbye,) = site.scheduler.drained
            assert goodbye.stopped and goodbye.incarnation == 101
            assert site.engine.stopped

    play(scenario)


def test_a_drain_does_not_wait_for_ever(play: Play) -> None:
    async def scenario(site: Site) -> None:
        async with site.instance(generator={"drain_timeout_s": 0.2}) as life:
            await site.registered()
            site.assign(0, [0])
            await site.running("0/0/0")
            site.stop.set()
            await life
            assert site.scheduler.handed_over().keys() == {"0/0/0"}
            assert site.scheduler.drained[0].stopped

    play(scenario)


def test_an_engine_that_dies_ends_the_instance_with_a_word_to_the_scheduler(play: Play) -> None:
    async def scenario(site: Site) -> None:
        async with site.instance() as life:
            await site.registered()
            site.assign(0, [0, 1])
            await site.running("0/0/0", "0/0/1")
            site.engine.end("0/0/0")
            await site.rollouts(1)
            site.engine.die()
            with pytest.raises(EngineDiedError):
                await life
            (goodbye,) = site.scheduler.drained
            assert goodbye.stopped and goodbye.reason
            assert len(await site.rollouts(1)) == 1
            assert site.engine.stopped

    play(scenario)


def test_an_engine_that_dies_while_idle_is_noticed(play: Play) -> None:
    async def scenario(site: Site) -> None:
        async with site.instance() as life:
            await site.registered()
            site.engine.die()
            with pytest.raises(EngineDiedError):
                await life
            assert site.scheduler.drained[0].stopped

    play(scenario)


def test_it_can_be_stopped_before_there_is_a_version(play: Play) -> None:
    async def scenario(site: Site) -> None:
        site.weights.held.add(-1)
        async with site.instance() as life:
            await asyncio.sleep(0.3)
            site.stop.set()
            await life
            assert not site.scheduler.registered

    play(scenario)


def test_a_broker_that_does_not_answer_is_named(play: Play) -> None:
    async def scenario(site: Site) -> None:
        kafka = {"bootstrap_servers": "127.0.0.1:9", "patience_s": 1}
        async with site.instance(kafka=kafka) as life:
            with pytest.raises(BrokerUnavailableError, match=r"127\.0\.0\.1:9"):
                await life

    play(scenario)


def test_bad_input_is_told_from_failure(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "settings.json"), "--instance", "generator-0"]) == 2
    assert json.loads(capfd.readouterr().err.splitlines()[-1])["kind"] == "bad_input"


def test_a_refusal_ends_the_instance(play: Play) -> None:
    async def scenario(site: Site) -> None:
        async def refuse(request: object, context: object) -> None:
            raise RefusedError("another tokenizer")

        site.scheduler.Register = refuse
        async with site.instance() as life:
            with pytest.raises(RefusedError, match="another tokenizer"):
                await life

    play(scenario)


def test_a_scheduler_that_never_answers_ends_the_instance(play: Play) -> None:
    async def scenario(site: Site) -> None:
        async with site.instance(rpc={"patience_s": 0.5, "scheduler_address": "127.0.0.1:9"}) as life:
            with pytest.raises(UnavailableError, match="scheduler_svc at 127"):
                await life

    play(scenario)


def test_spans_follow_each_other_without_gaps(play: Play) -> None:
    async def scenario(site: Site) -> None:
        async with site.instance() as life:
            await site.registered()
            site.assign(4, [0])
            await site.running("4/0/0")
            site.engine.end("4/0/0")
            await site.rollouts(1)
            site.weights.publish(1)
            site.scheduler.announce(1)
            await until(site, lambda: site.engine.switches == [1])
            site.stop.set()
            await life
            spans = await site.spans(5)
            assert [span.activity for span in spans] == ["wait", "generate", "wait", "switch", "wait"]
            assert spans[1].batch == 4 and spans[0].detail == "assignments"
            for earlier, later in itertools.pairwise(spans):
                assert earlier.finished_s == later.started_s

    play(scenario)
