"""A real vLLM engine with a tiny model: its log-probs are the model's, whatever version is loaded and however."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from generator_svc.answer_prefix import Prefix
from generator_svc.engine import GenerationRequest, GenerationResult
from generator_svc.profiler import Profiler
from generator_svc.sample import ModelLimits
from generator_svc.vllm_engine import VllmEngine
from generator_svc.vllm_settings import VllmSettings
from generator_svc.weight_fetcher import WeightSource
from streamrl.errors import EngineDiedError, WeightTransferError
from streamrl.v1.weights_pb2 import Adapter, VersionManifest

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    # vLLM's own, in this process.
    pytest.mark.filterwarnings("ignore"),
]

END_S = 10.0
"""An engine's processes are gone so soon after whatever kills them."""
STOP = 2
MAX_MODEL_LEN = 256


def descendants(pid: int) -> set[psutil.Process]:
    return set(psutil.Process(pid).children(recursive=True))


def still_alive(processes: set[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended within `END_S`."""
    _, alive = psutil.wait_procs(processes, timeout=END_S)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def tiny_model(seed: int, *, tied: bool = False) -> Any:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=133,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            intermediate_size=128,
            max_position_embeddings=512,
            tie_word_embeddings=tied,
            initializer_range=0.1,
        )
    ).eval()


class Lab:
    """An engine, the models whose weights it gets, and one event loop for all tests that share it."""

    def __init__(self, published: Any, folder: Path, versions: tuple[int, int], *, tied: bool, **changes: Any) -> None:
        self.published = published
        self.models = {version: tiny_model(version, tied=tied) for version in versions}
        first = versions[0]
        self.models[first].config.save_pretrained(folder)
        self.manifests = {version: self.publish(version) for version in self.models}
        self.runner = asyncio.Runner()
        usual = {"max_running": 16, "max_model_len": MAX_MODEL_LEN, "dtype": "float32", "kv_cache_gib": 0.05}
        usual["step_tokens"] = MAX_MODEL_LEN
        usual["in_one_process"] = "tensor_parallel_size" not in changes
        source = WeightSource(published.address, "run", attempt=1, receiver="g", site="a", patience_s=5.0)
        self.engine = self.run(self._make(VllmSettings(**{**usual, **changes}), source))
        before = descendants(os.getpid())
        report = self.run(self.engine.start(folder, self.manifests[first]))
        self.processes = descendants(os.getpid()) - before
        names = [process.name() for process in self.processes]
        assert "VLLM::EngineCore" in names
        num_workers = sum(name.startswith("VLLM::Worker") for name in names)
        assert num_workers == changes.get("tensor_parallel_size", 0)
        assert (report.weight_version, report.digest) == (first, self.manifests[first].digest)

    async def _make(self, settings: VllmSettings, source: WeightSource) -> VllmEngine:
        return VllmEngine(settings, source)

    def publish(self, version: int) -> VersionManifest:
        weights = dict(self.models[version].state_dict())
        if self.models[version].config.tie_word_embeddings:
            del weights["lm_head.weight"]
        self.published.chunk_bytes = 1 << 16
        manifest: VersionManifest = self.published.publish(version, weights)
        return manifest

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(asyncio.wait_for(work, 600.0))

    def load(self, version: int) -> None:
        """Makes sure that a test begins with this version."""
        self.run(self.engine.switch(self.manifests[version]))

    def logprobs(self, version: int, token_ids: list[int]) -> list[float]:
        """Of token_ids[1:], as the model itself computes them."""
        import torch

        with torch.no_grad():
            logits = self.models[version](torch.tensor([token_ids])).logits[0]
        logprobs = logits.log_softmax(dim=-1)
        return [logprobs[position, token].item() for position, token in enumerate(token_ids[1:])]

    def assert_agrees(self, request: GenerationRequest, result: GenerationResult) -> None:
        """Every token's log-prob is that of the version it names."""
        assert sum(length for _, length in result.version_spans) == len(result.token_ids) == len(result.logprobs)
        prompt = request.prompt_token_ids
        first = 0
        for version, length in result.version_spans:
            expected = self.logprobs(version, prompt + result.token_ids)[len(prompt) - 1 :]
            for position in range(first, first + length):
                assert result.logprobs[position] == pytest.approx(expected[position], abs=1e-4)
            first += length

    def close(self) -> None:
        self.run(self.engine.stop())
        self.runner.close()


def request(number: int, *, max_tokens: int = 64, stop: bool = True, **changes: Any) -> GenerationRequest:
    fields: dict[str, Any] = {
        "request_id": f"r{number}",
        "prompt_token_ids": [1, 3 + number % 100, 5, 9],
        "temperature": 1.0,
        "max_tokens": max_tokens,
        "stop_token_ids": [STOP] if stop else [],
        "seed": number,
        "priority": 0,
    }
    return GenerationRequest(**{**fields, **changes})


async def generate_all(engine: VllmEngine, requests: list[GenerationRequest]) -> list[GenerationResult]:
    return await asyncio.gather(*(engine.generate(request) for request in requests))


async def begun(engine: VllmEngine, count: int = 1) -> None:
    """Waits until so many sequences run."""
    while engine.running() < count:  # noqa: ASYNC110  (vLLM says it with each step)
        await asyncio.sleep(0.005)


@pytest.fixture(scope="module")
def lab(weights_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Recomputes caches at a switch."""
    lab = Lab(weights_server, tmp_path_factory.mktemp("model"), (0, 1), tied=False)
    yield lab
    lab.close()


@pytest.fixture(scope="module")
def keeping_lab(weights_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Keeps caches at a switch; the model's head is its embedding."""
    folder = tmp_path_factory.mktemp("model")
    lab = Lab(weights_server, folder, (10, 11), tied=True, max_running=4, kv_on_swap="keep")
    yield lab
    lab.close()


def test_log_probs_are_those_of_the_loaded_version(lab: Lab) -> None:
    for version in (1, 0):
        lab.load(version)
        requests = [request(number) for number in range(20)]
        for asked, result in zip(requests, lab.run(generate_all(lab.engine, requests)), strict=True):
            assert [span[0] for span in result.version_spans] == [version]
            lab.assert_agrees(asked, result)
            if result.finish_reason == "stop":
                assert result.token_ids.index(STOP) == len(result.token_ids) - 1
            else:
                assert len(result.token_ids) == 64


def test_adapters_are_added_to_the_version_that_they_are_for(lab: Lab) -> None:
    """Also when another version was loaded in between, and when a part of a layer that vLLM fuses has none."""
    import torch

    base = lab.published.publish(30, dict(lab.models[0].state_dict()), is_base=True)
    for version in (31, 32):
        model, parts = tiny_model(0), {}
        for name, weight in model.named_parameters():
            if name.endswith(("q_proj.weight", "down_proj.weight")):
                parts[name + ".lora_up"] = 0.2 * torch.randn(weight.shape[0], 4)
                parts[name + ".lora_down"] = 0.2 * torch.randn(4, weight.shape[1])
                weight.data += 1.5 * parts[name + ".lora_up"] @ parts[name + ".lora_down"]
        lab.models[version] = model
        adapter = Adapter(base_weight_version=30, base_digest=base.digest, scaling=1.5)
        lab.manifests[version] = lab.published.publish(version, parts, adapter=adapter)
    for version in (31, 32, 1, 31):
        lab.load(version)
        requests = [request(number) for number in range(4)]
        for asked, result in zip(requests, lab.run(generate_all(lab.engine, requests)), strict=True):
            lab.assert_agrees(asked, result)
    tokens = request(1).prompt_token_ids
    assert abs(lab.logprobs(31, tokens)[0] - lab.logprobs(0, tokens)[0]) > 1e-3


def test_log_probs_are_of_the_distribution_after_temperature(lab: Lab) -> None:
    import torch

    lab.load(0)
    asked = request(1, temperature=0.5)
    result = lab.run(lab.engine.generate(asked))
    with torch.no_grad():
        logits = lab.models[0](torch.tensor([asked.prompt_token_ids + result.token_ids])).logits[0] / 0.5
    logprobs = logits.log_softmax(dim=-1)[len(asked.prompt_token_ids) - 1 :]
    expected = [logprobs[position, token].item() for position, token in enumerate(result.token_ids)]
    assert result.logprobs == pytest.approx(expected, abs=1e-4)


def test_running_sequences_go_on_under_the_new_version_as_if_it_had_computed_them_all(lab: Lab) -> None:
    lab.load(0)
    requests = [request(number, max_tokens=200, stop=False) for number in range(20)]

    async def scenario() -> list[GenerationResult]:
        lab.engine.prefetch(lab.manifests[1])
        tasks = [asyncio.create_task(lab.engine.generate(request)) for request in requests]
        await begun(lab.engine, 16)
        await lab.engine.switch(lab.manifests[1])
        return await asyncio.gather(*tasks)

    results = lab.run(scenario())
    assert any([version for version, _ in result.version_spans] == [0, 1] for result in results)
    for asked, result in zip(requests, results, strict=True):
        assert len(result.token_ids) == 200
        lab.assert_agrees(asked, result)


def test_an_interrupted_answer_goes_on_from_its_tokens_as_if_nothing_had_been(lab: Lab) -> None:
    lab.load(0)
    # More than have a place: some are interrupted before they begin.
    requests = [request(number, max_tokens=120, stop=False) for number in range(20)]

    async def scenario() -> list[GenerationResult]:
        tasks = [asyncio.create_task(lab.engine.generate(request)) for request in requests]
        await begun(lab.engine, 16)
        while max(lab.engine.progress().values(), default=0) < 10:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await asyncio.gather(*(lab.engine.interrupt(request.request_id) for request in requests))
        return await asyncio.gather(*tasks)

    firsts = lab.run(scenario())
    assert {result.finish_reason for result in firsts} == {"interrupted"}
    assert lab.engine.progress() == {}
    assert sum(bool(result.token_ids) for result in firsts) == 16
    assert any(not result.token_ids for result in firsts)
    for asked, first in zip(requests, firsts, strict=True):
        lab.assert_agrees(asked, first)
    rest = [
        replace(asked, request_id=f"again{number}", prefix_token_ids=first.token_ids, seed=1000 + number)
        for number, (asked, first) in enumerate(zip(requests, firsts, strict=True))
    ]
    for asked, first, second in zip(requests, firsts, lab.run(generate_all(lab.engine, rest)), strict=True):
        assert (len(first.token_ids) + len(second.token_ids), second.finish_reason) == (120, "length")
        whole = Prefix().followed_by(first).followed_by(second)
        assert whole.version_spans == ((0, 120),)
        result = replace(
            second, token_ids=list(whole.token_ids), logprobs=list(whole.logprobs), version_spans=[(0, 120)]
        )
        lab.assert_agrees(asked, result)
    lab.run(lab.engine.interrupt("nobody"))


def test_scores_are_the_models_and_read_no_cache(lab: Lab) -> None:
    tokens = [1, 7, 5, 9, 11, 80]
    for version in (0, 1):
        lab.load(version)
        for _ in range(2):
            assert lab.run(lab.engine.score(tokens)) == pytest.approx(lab.logprobs(version, tokens), abs=1e-4)


def test_the_same_seed_draws_the_same_answer(lab: Lab) -> None:
    lab.load(0)
    once, again = (lab.run(lab.engine.generate(request(3))) for _ in range(2))
    assert once.token_ids == again.token_ids


def test_prompts_that_do_not_fit_into_one_step_are_computed_whole(lab: Lab) -> None:
    """Cut in two, a prompt of a request with a seed would kill an engine on CPUs."""
    lab.load(0)
    length = MAX_MODEL_LEN * 2 // 3
    asked = [request(number, prompt_token_ids=[3 + number] * length, max_tokens=8) for number in range(8)]
    for asked_for, result in zip(asked, lab.run(generate_all(lab.engine, asked)), strict=True):
        lab.assert_agrees(asked_for, result)


def test_a_version_that_cannot_be_fetched_leaves_the_old_one(lab: Lab) -> None:
    lab.load(0)
    lab.published.corrupt_tensor = 3
    with pytest.raises(WeightTransferError):
        lab.run(lab.engine.switch(lab.manifests[1]))
    lab.published.corrupt_tensor = None
    result = lab.run(lab.engine.generate(request(1)))
    assert result.version_spans == [(0, len(result.token_ids))]
    lab.assert_agrees(request(1), result)


def test_a_cancelled_request_leaves_the_engine(lab: Lab) -> None:
    async def scenario() -> None:
        drawing = asyncio.create_task(lab.engine.generate(request(1, max_tokens=250, stop=False)))
        await begun(lab.engine)
        drawing.cancel()
        await asyncio.wait([drawing])
        assert drawing.cancelled()
        await lab.engine.generate(request(2, max_tokens=1))
        assert lab.engine.running() == 0

    lab.run(scenario())


def test_a_free_place_goes_to_the_lowest_priority_number(lab: Lab) -> None:
    async def scenario() -> list[GenerationResult]:
        await lab.engine.pause()
        drawing = asyncio.create_task(
            generate_all(lab.engine, [request(n, max_tokens=20, stop=False, priority=-n) for n in range(32)])
        )
        await asyncio.sleep(0.2)
        await lab.engine.resume()
        return await drawing

    started = [result.started_s for result in lab.run(scenario())]
    assert max(started[16:]) < min(started[:16])


def test_a_pause_lasts_until_the_resume_also_over_a_switch(lab: Lab) -> None:
    lab.load(0)

    async def scenario() -> GenerationResult:
        await lab.engine.pause()
        drawing = asyncio.create_task(lab.engine.generate(request(1)))
        await lab.engine.switch(lab.manifests[1])
        await asyncio.sleep(0.2)
        assert not drawing.done()
        await lab.engine.resume()
        return await drawing

    assert lab.run(scenario()).version_spans[0][0] == 1


def test_a_request_longer_than_the_model_takes_is_refused_alone(lab: Lab) -> None:
    with pytest.raises(ValueError, match="r1"):
        lab.run(lab.engine.generate(request(1, prompt_token_ids=[5] * (MAX_MODEL_LEN + 1))))
    lab.run(lab.engine.generate(request(1)))


def test_steps_are_measured_by_batch_size(lab: Lab) -> None:
    lab.engine.step_latencies()
    lab.run(generate_all(lab.engine, [request(number, max_tokens=40, stop=False) for number in range(16)]))
    measured = lab.engine.step_latencies()
    assert max(steps.batch_size for steps in measured) == 16
    assert sum(steps.num_steps for steps in measured) >= 39
    assert all(steps.latency_s > 0 and steps.held_tokens > 0 for steps in measured)
    assert lab.engine.step_latencies() == []


def test_an_engine_is_measured_by_made_up_requests(lab: Lab) -> None:
    lab.load(0)
    assert lab.engine.sampling(request(0, to_the_end=True)).ignore_eos
    assert not lab.engine.sampling(request(0)).ignore_eos
    profile = lab.run(Profiler(lab.engine, ModelLimits(MAX_MODEL_LEN, 133), 2.0).measure())
    assert {1, 16} <= {step.batch_size for step in profile.steps}
    assert all(step.latency_s > 0 for step in profile.steps)
    assert profile.prefill_token_s > 0
    assert profile.held_token_s >= 0
    # It leaves nothing behind.
    result = lab.run(lab.engine.generate(request(1)))
    lab.assert_agrees(request(1), result)
    assert lab.engine.running() == 0


# An engine that keeps caches at a switch is one more to start.
@pytest.mark.slow
def test_kept_caches_stay_with_the_answers_that_have_begun(keeping_lab: Lab) -> None:
    lab = keeping_lab
    prompt = [1, 3, 5, 9] * 40
    requests = [request(n, prompt_token_ids=prompt, max_tokens=60, stop=False, priority=n) for n in range(12)]

    async def scenario() -> list[GenerationResult]:
        tasks = [asyncio.create_task(lab.engine.generate(request)) for request in requests]
        await begun(lab.engine, 4)
        await lab.engine.switch(lab.manifests[11])
        return await asyncio.gather(*tasks)

    results = lab.run(scenario())
    begun_before = [result for result in results if result.version_spans[0][0] == 10]
    assert begun_before
    assert len(begun_before) < len(results)
    for asked, result in zip(requests, results, strict=True):
        if result.version_spans[0][0] == 11:
            # Same prompt, other version: a shared cache would show in the log-probs.
            lab.assert_agrees(asked, result)


@pytest.mark.slow
def test_a_tied_head_changes_with_its_embedding(keeping_lab: Lab) -> None:
    for version in (11, 10):
        keeping_lab.load(version)
        keeping_lab.assert_agrees(request(1), keeping_lab.run(keeping_lab.engine.generate(request(1))))


@pytest.mark.slow
def test_a_version_that_does_not_fit_the_model_costs_the_engine(keeping_lab: Lab) -> None:
    weights = dict(keeping_lab.models[10].state_dict())
    del weights["lm_head.weight"], weights["model.norm.weight"]
    manifest = keeping_lab.published.publish(12, weights)

    async def scenario() -> None:
        drawing = asyncio.create_task(keeping_lab.engine.generate(request(1, max_tokens=80, stop=False)))
        with pytest.raises(EngineDiedError, match=r"model\.norm\.weight"):
            await keeping_lab.engine.switch(manifest)
        with pytest.raises(EngineDiedError):
            await drawing
        with pytest.raises(EngineDiedError):
            await keeping_lab.engine.generate(request(2))

    keeping_lab.run(scenario())
    assert not still_alive({process for process in keeping_lab.processes if "VLLM" in process.name()})


def test_when_its_process_is_killed_everything_that_waits_fails(lab: Lab) -> None:
    async def scenario() -> None:
        (core,) = (process for process in lab.processes if process.name() == "VLLM::EngineCore")
        tasks = [asyncio.create_task(lab.engine.generate(request(n, max_tokens=250, stop=False))) for n in range(40)]
        await begun(lab.engine)
        core.kill()
        async with asyncio.timeout(END_S):
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(outcome, EngineDiedError) for outcome in outcomes)
        with pytest.raises(EngineDiedError):
            await lab.engine.switch(lab.manifests[0])

    lab.run(scenario())


OWNER = """
import asyncio, sys
from pathlib import Path
from generator_svc.vllm_engine import VllmEngine
from generator_svc.vllm_settings import VllmSettings
from generator_svc.weight_fetcher import WeightSource
from streamrl.v1.weights_pb2 import VersionManifest

async def main():
    settings = VllmSettings(max_running=4, max_model_len=64, dtype="bfloat16", kv_cache_gib=0.05)
    source = WeightSource(sys.argv[2], "run", attempt=1, receiver="g", site="a")
    engine = VllmEngine(settings, source)
    await engine.start(Path(sys.argv[1]), VersionManifest.FromString(sys.stdin.buffer.read()))
    print("ready", flush=True)
    await asyncio.Event().wait()

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.slow
def test_an_engine_ends_with_the_process_that_owns_it(published: Any, tmp_path: Path) -> None:
    model = tiny_model(0)
    model.config.save_pretrained(tmp_path)
    manifest = published.publish(0, dict(model.state_dict()))
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    owner = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path), published.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert owner.stdin is not None
    assert owner.stdout is not None
    owner.stdin.write(manifest.SerializeToString())
    owner.stdin.close()
    assert owner.stdout.readline() == b"ready\n"
    engine = descendants(owner.pid)
    assert {"VLLM::EngineCore", "VLLM::Worker"} <= {process.name() for process in engine}
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    assert not still_alive(engine)


@pytest.mark.slow
def test_each_of_two_workers_loads_its_share_of_a_version_bit_for_bit(
    weights_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # of the function that the workers are asked with

    def parameters(worker: Any) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in worker.get_model().named_parameters()}

    lab = Lab(weights_server, tmp_path, (20, 21), tied=False, tensor_parallel_size=2)
    try:
        for version in (21, 20):
            lab.load(version)
            asked = [request(number) for number in range(4)]
            for one, result in zip(asked, lab.run(generate_all(lab.engine, asked)), strict=True):
                lab.assert_agrees(one, result)
        shares = lab.run(lab.engine._llm.collective_rpc(parameters))  # type: ignore[arg-type]
    finally:
        lab.close()
    whole = lab.models[20].state_dict()
    # Layers that multiply are repacked for the processor: the log-probs above speak for them.
    assert torch.equal(
        torch.cat([share["model.embed_tokens.weight"] for share in shares])[:133], whole["model.embed_tokens.weight"]
    )
    for layer in range(2):
        attention, norm = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.input_layernorm.weight"
        for rank, share in enumerate(shares):
            biases = [whole[f"{attention}.{part}_proj.bias"].chunk(2)[rank] for part in "qkv"]
            assert torch.equal(share[f"{attention}.qkv_proj.bias"], torch.cat(biases))
            assert torch.equal(share[norm], whole[norm])
