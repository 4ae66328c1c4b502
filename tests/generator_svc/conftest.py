"""An instance in this process between a real broker and scripted peers: everything it hears is ours to say."""

import asyncio
import json
import threading
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from generator_svc.engine import GenerationRequest, GenerationResult, SwitchReport
from generator_svc.main import serve
from generator_svc.settings import GeneratorSettings
from generator_svc.step_latencies import StepSpeed
from streamrl.digest import bytes_digest, version_digest
from streamrl.errors import EngineDiedError, WeightTransferError
from streamrl.kafka.connection import Connection
from streamrl.kafka.producer import RecordProducer
from streamrl.kafka.reader import RecordReader
from streamrl.kafka.topics import Topics, create_topics
from streamrl.rpc.server import Server
from streamrl.settings import KafkaSection
from streamrl.v1.records_pb2 import Assignment, DeadLetter, Rollout, SampleDraw, Span
from streamrl.v1.sample_pb2 import PURPOSE_EVALUATION, PURPOSE_TRAIN, SamplingSettings
from streamrl.v1.scheduler_pb2 import (
    FLEET_PHASE_GENERATE,
    DrainRequest,
    DrainResponse,
    EngineProfile,
    FleetPhase,
    GivenBack,
    HeartbeatRequest,
    HeartbeatResponse,
    RegisterRequest,
    RegisterResponse,
    StepLatency,
)
from streamrl.v1.scheduler_pb2_grpc import SchedulerServiceServicer, add_SchedulerServiceServicer_to_server
from streamrl.v1.weights_pb2 import (
    CHUNK_ENCODING_DENSE_DELTA,
    TRANSFER_FORMAT_FULL,
    AcknowledgeRequest,
    AcknowledgeResponse,
    Adapter,
    Canary,
    FetchRequest,
    FetchResponse,
    ModelFile,
    NegotiateRequest,
    NegotiateResponse,
    TensorChunk,
    TensorInfo,
    VersionManifest,
    WatchRequest,
    WatchResponse,
)
from streamrl.v1.weights_pb2_grpc import WeightsServiceServicer, add_WeightsServiceServicer_to_server

if TYPE_CHECKING:
    import torch

DEADLINE_S = 20.0
"""Whatever a test waits for has long come by then."""


class ScriptedEngine:
    """Answers end when the test says so; a switch waits while `hold_switch` is set."""

    max_running = 8
    kv_cache_tokens = 1024

    def __init__(self) -> None:
        self.version = -1
        self.answers: dict[str, asyncio.Future[GenerationResult]] = {}
        """By "batch/group/sample", with an "e" before for evaluation."""
        self.requests: dict[str, GenerationRequest] = {}
        self.aborted: list[str] = []
        self.switches: list[int] = []
        self.prefetched: list[int] = []
        self.failing_switches = 0
        self.hold_switch: asyncio.Event | None = None
        self.history: list[str] = []
        self.stopped = False
        self.death = asyncio.Event()
        self.canary_error = 0.0

    async def start(self, model_folder: Path, manifest: VersionManifest) -> SwitchReport:
        assert json.loads((model_folder / "config.json").read_text())["vocab_size"] == 100
        self.version = manifest.weight_version
        return SwitchReport(manifest.weight_version, manifest.digest, 0.1, 0.2)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        key = request.request_id.split("/", 1)[1].rpartition("/")[0]
        self.requests[key] = request
        answer = self.answers[key] = asyncio.get_running_loop().create_future()
        try:
            return await answer
        except asyncio.CancelledError:
            self.aborted.append(key)
            raise
        finally:
            del self.answers[key]

    def end(self, key: str, **changes: Any) -> None:
        """One answer of three tokens ends."""
        fields: dict[str, Any] = {
            "token_ids": [7, 8, 1],
            "logprobs": [-0.5, -0.25, -0.125],
            "version_spans": [(self.version, 3)],
            "finish_reason": "stop",
            "started_s": 5.0,
        }
        self.answers[key].set_result(GenerationResult(**{**fields, **changes}))

    async def interrupt(self, request_id: str) -> None:
        key = request_id.split("/", 1)[1].rpartition("/")[0]
        if key in self.answers:
            self.end(
                key, token_ids=[7], logprobs=[-0.5], version_spans=[(self.version, 1)], finish_reason="interrupted"
            )

    def progress(self) -> dict[str, int]:
        return {self.requests[key].request_id: 1 for key in self.answers}

    async def died(self) -> None:
        await self.death.wait()

    def die(self) -> None:
        self.death.set()
        for answer in self.answers.values():
            answer.set_exception(EngineDiedError("the engine was killed"))

    def prefetch(self, manifest: VersionManifest) -> None:
        self.prefetched.append(manifest.weight_version)

    def forget_fetched(self) -> None:
        pass

    async def switch(self, manifest: VersionManifest) -> SwitchReport:
        if self.failing_switches:
            self.failing_switches -= 1
            raise WeightTransferError("a digest disagrees")
        if self.hold_switch is not None:
            await self.hold_switch.wait()
        self.switches.append(manifest.weight_version)
        self.version = manifest.weight_version
        return SwitchReport(manifest.weight_version, manifest.digest, 0.1, 0.2)

    async def score(self, token_ids: list[int]) -> list[float]:
        return [-1.0 + self.canary_error] * (len(token_ids) - 1)

    def running(self) -> int:
        return min(len(self.answers), self.max_running)

    def step_latencies(self) -> list[StepSpeed]:
        return [StepSpeed(4, 0.002, 10, 100.0)]

    def known_profile(self) -> EngineProfile | None:
        return EngineProfile(steps=[StepLatency(batch_size=1, latency_s=0.001, num_steps=1)], prefill_token_s=0.5)

    async def pause(self) -> None:
        self.history.append("pause")

    async def resume(self) -> None:
        self.history.append("resume")

    async def sleep(self) -> None:
        self.history.append("sleep")

    async def wake(self) -> None:
        self.history.append("wake")

    async def stop(self) -> None:
        self.stopped = True


class ScriptedWeights(WeightsServiceServicer):
    """Holds whatever versions the test says."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.acknowledged: list[AcknowledgeRequest] = []
        self.news = asyncio.Event()

    def publish(self, weight_version: int) -> None:
        self.held.add(weight_version)
        self.news.set()

    async def Watch(self, request: WatchRequest, context: Any) -> AsyncIterator[WatchResponse]:
        await self.news.wait()
        yield WatchResponse(weight_version=max(self.held), attempt=1)
        await asyncio.Event().wait()

    async def Negotiate(self, request: NegotiateRequest, context: Any) -> NegotiateResponse:
        wanted = request.exact_weight_version if request.HasField("exact_weight_version") else max(self.held)
        if wanted not in self.held or wanted < request.min_weight_version:
            raise LookupError(f"version {wanted} is not held")
        manifest = VersionManifest(
            weight_version=wanted,
            attempt=1,
            digest=f"digest-{wanted}",
            canaries=[Canary(token_ids=[1, 2, 3], logprobs=[-1.0, -1.0])],
        )
        config = json.dumps({"vocab_size": 100, "max_position_embeddings": 64}).encode()
        files = [ModelFile(name="config.json", content=config), ModelFile(name="tokenizer.json", content=b"{}")]
        return NegotiateResponse(manifest=manifest, files=files if request.with_files else [])

    async def Acknowledge(self, request: AcknowledgeRequest, context: Any) -> AcknowledgeResponse:
        self.acknowledged.append(request)
        return AcknowledgeResponse()


class ScriptedScheduler(SchedulerServiceServicer):
    """Grants leases to the newest incarnation, unless told otherwise, and says what the test says."""

    def __init__(self) -> None:
        self.registered: list[RegisterRequest] = []
        self.heartbeats: list[HeartbeatRequest] = []
        self.drained: list[DrainRequest] = []
        self.incarnation = 100
        self.granted = True
        self.silent = False
        self.lease_s = 30.0
        self.interval_s = 0.2
        self.newest: int | None = None
        self.phase: FleetPhase.ValueType = FLEET_PHASE_GENERATE
        self._streams: list[asyncio.Queue[HeartbeatResponse]] = []

    def say(self, **fields: Any) -> None:
        """Speaks unasked, on every open stream."""
        for stream in self._streams:
            stream.put_nowait(self._response(**fields))

    def announce(self, weight_version: int) -> None:
        self.newest = weight_version
        self.say()

    def revoked(self) -> set[str]:
        return {key_of(given_back.id) for heartbeat in self.heartbeats for given_back in heartbeat.revoked}

    def handed_over(self) -> dict[str, GivenBack]:
        """What came back with a beginning."""
        given_back = [one for heartbeat in self.heartbeats for one in heartbeat.revoked]
        return {key_of(one.id): one for one in given_back if one.HasField("prefix")}

    def not_revoked(self) -> set[str]:
        return {key_of(sample_id) for heartbeat in self.heartbeats for sample_id in heartbeat.not_revoked}

    async def Register(self, request: RegisterRequest, context: Any) -> RegisterResponse:
        self.registered.append(request)
        self.incarnation += 1
        self.granted = True
        return RegisterResponse(
            incarnation=self.incarnation,
            partition=0,
            lease_s=self.lease_s,
            heartbeat_interval_s=self.interval_s,
        )

    async def Heartbeat(
        self, requests: AsyncIterator[HeartbeatRequest], context: Any
    ) -> AsyncIterator[HeartbeatResponse]:
        stream: asyncio.Queue[HeartbeatResponse] = asyncio.Queue()
        self._streams.append(stream)

        async def listen() -> None:
            async for request in requests:
                self.heartbeats.append(request)
                if not self.silent:
                    stream.put_nowait(self._response())

        listening = asyncio.create_task(listen())
        try:
            while True:
                yield await stream.get()
        finally:
            listening.cancel()
            self._streams.remove(stream)

    async def Drain(self, request: DrainRequest, context: Any) -> DrainResponse:
        self.drained.append(request)
        return DrainResponse()

    def _response(self, **fields: Any) -> HeartbeatResponse:
        return HeartbeatResponse(
            lease_granted=self.granted,
            lease_s=self.lease_s,
            newest_weight_version=self.newest,
            phase=self.phase,
            **fields,
        )


def key_of(sample_id: Any) -> str:
    evaluation = "e" if sample_id.purpose == PURPOSE_EVALUATION else ""
    return f"{evaluation}{sample_id.batch}/{sample_id.group}/{sample_id.sample}"


class Site:
    """The instance and everything around it."""

    def __init__(self, kafka: KafkaSection, folder: Path) -> None:
        self.kafka = kafka
        self.folder = folder
        self.run_id = f"test-{uuid.uuid4().hex[:12]}"
        self.topics = Topics(self.run_id)
        self.scheduler = ScriptedScheduler()
        self.weights = ScriptedWeights()
        self.engine = ScriptedEngine()
        self.stop = asyncio.Event()
        self.scheduler_server: Server
        self.scheduler_address = ""
        self.life: asyncio.Task[None]
        self._connection = Connection(kafka, "test")
        self._readers: dict[str, tuple[RecordReader, list[bytes]]] = {}

    @asynccontextmanager
    async def instance(self, **sections: dict[str, Any]) -> AsyncIterator[asyncio.Task[None]]:
        """Runs the service; version 0 is published already."""
        if not self.weights.held:
            self.weights.publish(0)
        await self.serve_scheduler("127.0.0.1:0")
        weights_server = Server(
            "streamrl.v1.WeightsService", lambda server: add_WeightsServiceServicer_to_server(self.weights, server)
        )
        weights_address = await weights_server.serve("127.0.0.1:0")
        settings = GeneratorSettings.model_validate(
            {
                "run": {"id": self.run_id, "dir": self.folder, "site": "west"},
                "kafka": self.kafka.model_dump(),
                "scheduler": {"max_instances": 2},
                **sections,
                "generator": {"engine": "fake", "drain_timeout_s": 0.1, **sections.get("generator", {})},
                "rpc": {
                    "scheduler_address": self.scheduler_address,
                    "weights_address": weights_address,
                    **sections.get("rpc", {}),
                },
            }
        )
        await asyncio.to_thread(create_topics, self._connection, self.topics, 2)
        self._producer = RecordProducer(self._connection)
        self.life = asyncio.create_task(serve(settings, "generator-0", self.stop, make_engine=lambda *_: self.engine))
        try:
            yield self.life
        finally:
            self.stop.set()
            self.scheduler.silent = False
            await asyncio.wait({self.life}, timeout=DEADLINE_S)
            await self.scheduler_server.stop(0)
            await weights_server.stop(0)
            await asyncio.to_thread(self._producer.close)
            for reader, _ in self._readers.values():
                await asyncio.to_thread(reader.close)

    async def serve_scheduler(self, address: str) -> None:
        self.scheduler_server = Server(
            "streamrl.v1.SchedulerService",
            lambda server: add_SchedulerServiceServicer_to_server(self.scheduler, server),
        )
        self.scheduler_address = await self.scheduler_server.serve(address)

    async def eventually(self, condition: Callable[[], Any]) -> None:
        """Waits until the condition holds."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():  # noqa: ASYNC110  (what it looks at has no events)
                await asyncio.sleep(0.01)

    async def registered(self, times: int = 1) -> None:
        await self.eventually(lambda: len(self.scheduler.registered) >= times)
        await self.heard_from()

    async def heard_from(self) -> HeartbeatRequest:
        """The next heartbeat of the newest incarnation."""
        seen = len(self.scheduler.heartbeats)
        scheduler = self.scheduler
        await self.eventually(
            lambda: any(beat.incarnation == scheduler.incarnation for beat in scheduler.heartbeats[seen:])
        )
        return scheduler.heartbeats[-1]

    async def running(self, *keys: str) -> None:
        await self.eventually(lambda: set(keys) <= self.engine.answers.keys())

    def assign(
        self,
        batch: int,
        samples: list[int],
        *,
        exact: int | None = None,
        min_version: int = 0,
        dispatch: int = 1,
        incarnation: int | None = None,
        **changes: Any,
    ) -> None:
        """One assignment for the newest incarnation."""
        fields: dict[str, Any] = {
            "attempt": 1,
            "incarnation": self.scheduler.incarnation if incarnation is None else incarnation,
            "purpose": PURPOSE_TRAIN if exact is None else PURPOSE_EVALUATION,
            "batch": batch,
            "group": 0,
            "token_ids": [4, 5],
            "sampling": SamplingSettings(temperature=1.0, max_tokens=8, stop_token_ids=[1]),
            "draws": [SampleDraw(sample=sample, seed=sample + 1, dispatch=dispatch) for sample in samples],
            "min_weight_version": min_version if exact is None else exact,
            "exact_weight_version": exact,
            "priority": batch,
        }
        self.write(Assignment(**{**fields, **changes}).SerializeToString())

    def write(self, value: bytes) -> None:
        """One record into the instance's partition."""
        self._producer.send(self.topics.assignments, value, partition=0)

    async def rollouts(self, count: int) -> list[Rollout]:
        """The first rollouts, once so many are there."""
        return [Rollout.FromString(value) for value in await self._read(self.topics.rollouts, count)]

    async def dead_letters(self, count: int) -> list[DeadLetter]:
        return [DeadLetter.FromString(value) for value in await self._read(self.topics.dead_letters, count)]

    async def spans(self, count: int) -> list[Span]:
        return [Span.FromString(value) for value in await self._read(self.topics.spans, count)]

    async def _read(self, topic: str, count: int) -> list[bytes]:
        if topic not in self._readers:
            partitions = self.kafka.rollout_partitions if topic == self.topics.rollouts else 1
            self._readers[topic] = (RecordReader(self._connection, topic, dict.fromkeys(range(partitions), 0)), [])
        reader, values = self._readers[topic]
        async with asyncio.timeout(DEADLINE_S):
            while len(values) < count:
                values += [record.value for record in await asyncio.to_thread(reader.read, 0.2)]
        return values


Scenario = Callable[[Site], Awaitable[None]]


@pytest.fixture
def play(kafka_settings: KafkaSection, tmp_path: Path) -> Iterator[Callable[[Scenario], None]]:
    """Plays a scenario on a site of its own."""

    def run(scenario: Scenario) -> None:
        async def main() -> None:
            async with asyncio.timeout(3 * DEADLINE_S):
                await scenario(Site(kafka_settings, tmp_path))

        asyncio.run(main())

    yield run


class PublishedVersions(WeightsServiceServicer):
    """Hands out versions as weights_svc does, and breaks where the test says."""

    def __init__(self) -> None:
        self.chunk_bytes = 64
        self.break_after_chunks: list[int] = []
        """Of each fetch to come, the chunks that are sent before the stream breaks; later fetches go through."""
        self.corrupt_tensor: int | None = None
        self.garble_after_chunks: list[int] = []
        """Of each fetch to come, chunks that are sent before one that cannot be decoded; later fetches are whole."""
        self.heals_when_verified = False
        self.gate = threading.Event()
        """Streams wait while it is not set."""
        self.gate.set()
        self.waiting = threading.Event()
        """A stream has come to the gate."""
        self.positions: list[tuple[int, int]] = []
        """Where each fetch asked to start."""
        self.fetched: list[int] = []
        self.source_address = ""
        self.address = ""
        self._versions: dict[int, tuple[VersionManifest, list[bytes]]] = {}

    def publish(
        self,
        weight_version: int,
        tensors: "Mapping[str, torch.Tensor]",
        *,
        adapter: Adapter | None = None,
        is_base: bool = False,
    ) -> VersionManifest:
        """A version of these tensors, all of them float32 or bfloat16."""
        import torch

        data = [
            tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors.values()
        ]
        infos = [
            TensorInfo(
                name=name,
                dtype="F32" if tensor.dtype == torch.float32 else "BF16",
                shape=tensor.shape,
                num_bytes=len(content),
                digest=bytes_digest(content),
            )
            for (name, tensor), content in zip(tensors.items(), data, strict=True)
        ]
        manifest = VersionManifest(
            weight_version=weight_version,
            attempt=1,
            tensors=infos,
            digest=version_digest(infos, adapter),
            adapter=adapter,
            is_base=is_base,
            num_bytes=sum(map(len, data)),
        )
        self._versions[weight_version] = manifest, data
        return manifest

    def num_fetches(self) -> Counter[int]:
        """By version."""
        return Counter(self.fetched)

    def forget(self, weight_version: int) -> None:
        del self._versions[weight_version]

    def Negotiate(self, request: NegotiateRequest, context: Any) -> NegotiateResponse:
        if request.exact_weight_version not in self._versions:
            context.abort(grpc.StatusCode.NOT_FOUND, f"version {request.exact_weight_version} is not held")
        manifest, _ = self._versions[request.exact_weight_version]
        return NegotiateResponse(
            manifest=manifest,
            format=TRANSFER_FORMAT_FULL,
            transfer_bytes=manifest.num_bytes,
            source_address="" if self.source_address in request.unreachable_addresses else self.source_address,
        )

    def Fetch(self, request: FetchRequest, context: Any) -> Iterator[FetchResponse]:
        self.positions.append((request.first_tensor_index, request.first_offset))
        self.fetched.append(request.weight_version)
        if request.verify_first and self.heals_when_verified:
            self.corrupt_tensor = None
        chunks_left = self.break_after_chunks.pop(0) if self.break_after_chunks else -1
        readable_left = self.garble_after_chunks.pop(0) if self.garble_after_chunks else -1
        _, data = self._versions[request.weight_version]
        for index in range(request.first_tensor_index, len(data)):
            first = request.first_offset if index == request.first_tensor_index else 0
            for offset in range(first, len(data[index]), self.chunk_bytes):
                if not self.gate.is_set():
                    self.waiting.set()
                    self.gate.wait(DEADLINE_S)
                if chunks_left == 0:
                    context.abort(grpc.StatusCode.UNAVAILABLE, "the stream broke")
                chunks_left -= 1
                content = data[index][offset : offset + self.chunk_bytes]
                if index == self.corrupt_tensor:
                    content = bytes([content[0] ^ 1]) + content[1:]
                chunk = TensorChunk(tensor_index=index, offset=offset, data=content)
                if readable_left == 0:
                    chunk.encoding, chunk.num_bytes = CHUNK_ENCODING_DENSE_DELTA, len(content)
                readable_left -= 1
                yield FetchResponse(chunk=chunk)


@pytest.fixture(scope="module")
def weights_server() -> Iterator[PublishedVersions]:
    """One server a module; `published` gives it to each test as new."""
    versions = PublishedVersions()
    server = grpc.server(ThreadPoolExecutor(max_workers=8))
    add_WeightsServiceServicer_to_server(versions, server)
    versions.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield versions
    versions.gate.set()
    server.stop(None)


@pytest.fixture
def published(weights_server: PublishedVersions) -> PublishedVersions:
    """A weights_svc that holds nothing yet and works."""
    address = weights_server.address
    weights_server.gate.set()
    weights_server.__init__()  # type: ignore[misc]
    weights_server.address = address
    return weights_server
