"""The simulated engine keeps to its profile, its places, its priorities and its versions."""

import asyncio
import json
import math
import statistics
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from generator_svc.engine import GenerationRequest, GenerationResult
from generator_svc.fake_engine import FakeEngine, log_normal_length
from generator_svc.weight_fetcher import WeightSource
from streamrl.errors import EngineDiedError, WeightTransferError
from streamrl.planning.profile import InstanceProfile, TokenLatency
from streamrl.planning.simulated_instance import SimulatedInstance, SimulatedSequence

WEIGHTS = {"w": torch.zeros(4)}
STOP = 1


def request(name: str, *, num_tokens: int = 10, max_tokens: int = 100, priority: int = 0) -> GenerationRequest:
    """The seed says how long the answer is: see `seed_length`."""
    return GenerationRequest(name, [4, 5], 1.0, max_tokens, [STOP], num_tokens, priority)


def seed_length(request: GenerationRequest) -> int:
    return request.seed


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 50}))
    return tmp_path


@pytest.fixture
def play(published: Any, model_folder: Path) -> Callable[..., None]:
    """Runs a scenario with an engine that has version 0, a thousand times as fast as it says."""

    def run(scenario: Callable[[FakeEngine], Awaitable[None]], **changes: Any) -> None:
        async def main() -> None:
            source = WeightSource(published.address, "run", attempt=1, receiver="g", site="a", patience_s=5.0)
            settings: dict[str, Any] = {
                "max_running": 4,
                "step_ms": {1: 10.0},
                "answer_length": seed_length,
                "speed": 1e3,
            }
            engine = FakeEngine(source, **{**settings, **changes})
            report = await engine.start(model_folder, published.publish(0, WEIGHTS))
            assert report.weight_version == 0
            async with asyncio.timeout(20.0):
                await scenario(engine)
            await engine.stop()

        asyncio.run(main())

    return run


async def all_at_once(engine: FakeEngine, *requests: GenerationRequest) -> list[GenerationResult]:
    """Submitted while the engine stands still, so that all are there when it chooses."""
    await engine.pause()
    tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
    await asyncio.sleep(0)
    await engine.resume()
    return await asyncio.gather(*tasks)


def test_answers_have_their_length_and_end_with_a_stop_token(play: Callable[..., None]) -> None:
    async def scenario(engine: FakeEngine) -> None:
        result = await engine.generate(request("a", num_tokens=30))
        assert len(result.token_ids) == len(result.logprobs) == 30
        assert result.finish_reason == "stop"
        assert [index for index, token in enumerate(result.token_ids) if token == STOP] == [29]
        assert result.version_spans == [(0, 30)]

    play(scenario)


def test_max_tokens_cut_an_answer(play: Callable[..., None]) -> None:
    async def scenario(engine: FakeEngine) -> None:
        result = await engine.generate(request("a", num_tokens=30, max_tokens=29))
        assert (len(result.token_ids), result.finish_reason) == (29, "length")
        assert STOP not in result.token_ids

    play(scenario)


def test_the_same_seed_gives_the_same_answer(play: Callable[..., None]) -> None:
    async def scenario(engine: FakeEngine) -> None:
        one, other = await all_at_once(engine, request("a"), request("b"))
        assert one.token_ids == other.token_ids

    play(scenario, answer_length=log_normal_length)


def test_answers_end_in_the_order_of_their_lengths(play: Callable[..., None]) -> None:
    async def scenario(engine: FakeEngine) -> None:
        ended: list[str] = []

        async def draw(name: str, num_tokens: int) -> None:
            await engine.generate(request(name, num_tokens=num_tokens))
            ended.append(name)

        await engine.pause()
        async with asyncio.TaskGroup() as group:
            for name, num_tokens in (("long", 40), ("short", 5), ("middle", 20)):
                group.create_task(draw(name, num_tokens))
            await asyncio.sleep(0)
            await engine.resume()
        assert ended == ["short", "middle", "long"]

    play(scenario)


def test_a_free_place_goes_to_the_lowest_priority_number(play: Callable[..., None]) -> None:
    async def scenario(engine: FakeEngine) -> None:
        late, soon = await all_at_once(engine, request("late", priority=2), request("soon", priority=1))
        assert soon.started_s <= late.started_s
        assert [steps[:3] for steps in engine.step_latencies()] == [(1, pytest.approx(1e-5), 20)]

    play(scenario, max_running=1)


def test_steps_take_what_the_profile_says_for_the_sequences_in_them(play: Callable[..., None]) -> None:
    async def scenario(engine: FakeEngine) -> None:
        await all_at_once(engine, request("a", num_tokens=10), request("b", num_tokens=4))
        # Four steps together, then six alone.
        alone, together = engine.step_latencies()
        assert alone[:3] == (1, pytest.approx(0.01), 6)
        # Two prompts of two tokens, and on average two more of each.
        assert together == (2, pytest.approx(0.03), 4, pytest.approx(8.0))

    # Told by the clock, on which it goes a thousand times as fast.
    play(scenario, step_ms={1: 10e3, 2: 30e3})


def test_an_interrupted_answer_goes_on_elsewhere_from_where_it_stands(play: Callable[..., None]) -> None:
    async def scenario(engine: FakeEngine) -> None:
        drawing = [
            asyncio.create_task(engine.generate(request(name, num_tokens=100_000, max_tokens=100_000))) for name in "ab"
        ]
        while not engine.progress().get("a"):  # noqa: ASYNC110  (it says nothing by itself)
            await asyncio.sleep(0.001)
        assert engine.running() == 1
        assert engine.progress().keys() == {"a"}
        for name in ("a", "b", "nobody"):
            await engine.interrupt(name)
        begun, waiting = await asyncio.gather(*drawing)
        assert (begun.finish_reason, waiting.finish_reason) == ("interrupted", "interrupted")
        assert waiting.token_ids == waiting.logprobs == waiting.version_spans == []
        there = len(begun.token_ids)
        assert 0 < there < 100_000
        assert begun.version_spans == [(0, there)]
        whole = request("a", num_tokens=there + 7, max_tokens=100_000)
        rest = await engine.generate(replace(whole, prefix_token_ids=begun.token_ids))
        assert (len(rest.token_ids), rest.finish_reason) == (7, "stop")
        assert rest.version_spans == [(0, 7)]

    play(scenario, speed=20.0, max_running=1)


def test_a_made_up_answer_that_goes_on_is_as_long_as_those_that_have_come_so_far() -> None:
    def length(seed: int, there: int) -> int:
        asked = GenerationRequest("a", [4], 1.0, 10_000, [STOP], seed, 0, prefix_token_ids=[5] * there)
        return log_normal_length(asked)

    whole = [length(seed, 0) for seed in range(4000)]
    longer = [tokens for tokens in whole if tokens > 40]
    going_on = [length(seed, 40) for seed in range(4000)]
    assert min(going_on) > 40
    assert statistics.median(going_on) == pytest.approx(statistics.median(longer), rel=0.05)


def test_a_switch_in_flight_splits_the_running_answers_between_versions(
    play: Callable[..., None], published: Any
) -> None:
    async def scenario(engine: FakeEngine) -> None:
        drawing = asyncio.create_task(engine.generate(request("a", num_tokens=1000, max_tokens=1000)))
        await asyncio.sleep(0.02)
        report = await engine.switch(published.publish(1, WEIGHTS))
        assert report.weight_version == 1
        (old, before), (new, after) = (await drawing).version_spans
        assert (old, new, before + after) == (0, 1, 1000)
        assert (await engine.generate(request("b"))).version_spans == [(1, 10)]

    play(scenario, speed=20.0)


def test_a_version_that_cannot_be_fetched_leaves_the_old_one(play: Callable[..., None], published: Any) -> None:
    async def scenario(engine: FakeEngine) -> None:
        manifest = published.publish(1, WEIGHTS)
        published.corrupt_tensor = 0
        with pytest.raises(WeightTransferError):
            await engine.switch(manifest)
        assert (await engine.generate(request("a"))).version_spans == [(0, 10)]

    play(scenario)


def test_a_switch_during_a_pause_does_not_end_it(play: Callable[..., None], published: Any) -> None:
    async def scenario(engine: FakeEngine) -> None:
        await engine.pause()
        drawing = asyncio.create_task(engine.generate(request("a", num_tokens=1)))
        await engine.switch(published.publish(1, WEIGHTS))
        await asyncio.sleep(0.01)
        assert not drawing.done()
        await engine.resume()
        assert (await drawing).version_spans == [(1, 1)]

    play(scenario)


def test_an_aborted_sequence_frees_its_place(play: Callable[..., None]) -> None:
    async def scenario(engine: FakeEngine) -> None:
        stuck = asyncio.create_task(engine.generate(request("stuck", num_tokens=10**9, max_tokens=10**9)))
        next_one = asyncio.create_task(engine.generate(request("next")))
        await asyncio.sleep(0.01)
        assert engine.running() == 1
        assert not next_one.done()
        stuck.cancel()
        await next_one
        assert engine.running() == 0

    play(scenario, max_running=1)


def test_a_cache_that_is_computed_again_takes_time(play: Callable[..., None], published: Any) -> None:
    async def scenario(engine: FakeEngine) -> None:
        clock = asyncio.get_running_loop().time
        started_s = clock()
        drawing = asyncio.create_task(engine.generate(request("a")))
        await asyncio.sleep(0)
        await engine.switch(published.publish(1, WEIGHTS))
        await drawing
        # Two tokens of the prompt, 100 simulated seconds each: when it began, and after the switch.
        assert (clock() - started_s) * 1e3 >= 400

    play(scenario, prefill_token_ms=1e5, recomputes_cache=True)


def test_a_sequence_aborted_before_its_turn_never_runs(play: Callable[..., None]) -> None:
    async def scenario(engine: FakeEngine) -> None:
        await engine.pause()
        aborted, kept = (asyncio.create_task(engine.generate(request(name))) for name in ("aborted", "kept"))
        await asyncio.sleep(0)
        aborted.cancel()
        await engine.resume()
        await kept
        assert [steps[:3] for steps in engine.step_latencies()] == [(1, pytest.approx(1e-5), 10)]

    play(scenario)


def test_a_stopped_engine_fails_what_is_inside_and_takes_nothing(play: Callable[..., None]) -> None:
    async def scenario(engine: FakeEngine) -> None:
        drawing = asyncio.create_task(engine.generate(request("a", num_tokens=10**9, max_tokens=10**9)))
        await asyncio.sleep(0)
        await engine.stop()
        with pytest.raises(EngineDiedError):
            await drawing
        with pytest.raises(EngineDiedError):
            await engine.generate(request("b"))

    play(scenario)


def test_scores_are_those_of_a_model_that_knows_nothing(play: Callable[..., None]) -> None:
    async def scenario(engine: FakeEngine) -> None:
        drawn = await engine.generate(request("a", num_tokens=3))
        assert await engine.score([4, 5, 6]) == drawn.logprobs[:2]

    play(scenario)


@pytest.mark.parametrize("kv_cache_tokens", [2**20, 150])
def test_it_takes_as_long_as_the_fleet_simulation_says(play: Callable[..., None], kv_cache_tokens: int) -> None:
    lengths = [40, 5, 20, 60, 3, 33, 12, 50, 7, 28]
    step_ms = {1: 10.0, 2: 12.0, 4: 20.0}
    profile = InstanceProfile(
        TokenLatency({size: latency_ms / 1000 for size, latency_ms in step_ms.items()}),
        4,
        held_token_s=1e-5,
        prefill_token_s=1e-3,
        kv_cache_tokens=kv_cache_tokens,
    )
    simulated = SimulatedInstance(profile)
    for index, length in enumerate(lengths):
        simulated.submit(SimulatedSequence(index, length, -length, prompt_tokens=2))
    ended = simulated.advance(math.inf)
    busy_s = ended[-1][1] - simulated.computed_tokens * profile.prefill_token_s

    async def scenario(engine: FakeEngine) -> None:
        requests = [request(str(length), num_tokens=length, priority=-length) for length in lengths]
        results = await all_at_once(engine, *requests)
        assert [len(result.token_ids) for result in results] == lengths
        # Sums of simulated time, a thousand times as fast: how late timers are does not matter.
        found_s = 1e3 * sum(steps.latency_s * steps.num_steps for steps in engine.step_latencies())
        assert found_s == pytest.approx(busy_s, rel=0.02)

    play(scenario, step_ms=step_ms, held_token_ms=0.01, prefill_token_ms=1.0, kv_cache_tokens=kv_cache_tokens)
