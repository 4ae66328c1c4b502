"""A scripted fleet for whole-trainer tests: real Kafka, gRPC and a small model; no scheduler, weights_svc or engine."""

import asyncio
import json
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from streamrl.identity import PURPOSE_EVALUATION, BatchKey, SampleKey, group_key
from streamrl.kafka.connection import Connection
from streamrl.kafka.producer import RecordProducer
from streamrl.kafka.reader import ReaderThread, Record, RecordReader
from streamrl.kafka.topics import Topics, create_topics
from streamrl.rpc.server import Server
from streamrl.settings import FleetView, KafkaSection
from streamrl.staleness import required_version
from streamrl.v1.records_pb2 import ROLLOUT_STATUS_FAILED, ROLLOUT_STATUS_OK, Prompt, PromptRecord, Rollout
from streamrl.v1.sample_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    LOGPROB_MODE_PROCESSED,
    VersionSpan,
)
from streamrl.v1.scheduler_pb2 import (
    INSTANCE_STATE_LIVE,
    OUTCOME_REJECTED,
    AbandonedSample,
    GetFleetRequest,
    GetFleetResponse,
    HeartbeatRequest,
    Instance,
    ReportBatchRequest,
    ReportBatchResponse,
    SetPhaseRequest,
    SetPhaseResponse,
)
from streamrl.v1.scheduler_pb2_grpc import SchedulerServiceServicer, add_SchedulerServiceServicer_to_server
from streamrl.v1.weights_pb2 import (
    AcknowledgeRequest,
    ListVersionsRequest,
    ListVersionsResponse,
    PublishHeader,
    PublishRequest,
    PublishResponse,
    Receiver,
)
from streamrl.v1.weights_pb2_grpc import WeightsServiceServicer, add_WeightsServiceServicer_to_server

if TYPE_CHECKING:
    from trainer_svc.ranks import Ranks

WAIT_S = 30.0
MAX_DISPATCHES = 2
Fault = Callable[[SampleKey, int], str]
"""What goes wrong with a sample at its n-th dispatch: "", "fail", "copy", "stale", "garbage" or "lose"."""


class ScriptedFleet(SchedulerServiceServicer, WeightsServiceServicer):
    """One instance that answers with the published weights, and the two services that the trainer speaks to."""

    def __init__(self, kafka: KafkaSection, run_id: str, *, max_staleness: int, fault: Fault) -> None:
        self.kafka = kafka
        self.topics = Topics(run_id)
        self.max_staleness = max_staleness
        self.fault = fault
        self.headers: dict[int, PublishHeader] = {}
        self.weights: dict[int, dict[str, Any]] = {}
        self.reports: list[ReportBatchRequest] = []
        self.phases: list[int] = []
        self.run_ended = threading.Event()
        self.errors: list[BaseException] = []
        self._changed = threading.Condition()
        self._prompts: dict[BatchKey, list[Prompt]] = defaultdict(list)
        self.batch_ends: list[BatchKey] = []
        """As they stand in the topic."""
        self._whole: list[BatchKey] = []
        self._again: list[tuple[SampleKey, int]] = []
        self._dispatches: dict[SampleKey, int] = {}
        self._abandoned: dict[SampleKey, str] = {}
        self._redispatched = 0
        self._busy_s = 0.0
        self._ended = False

    # SchedulerService

    async def ReportBatch(self, request: ReportBatchRequest, context: Any) -> ReportBatchResponse:
        with self._changed:
            self.reports.append(request)
            for outcome in request.outcomes:
                key = SampleKey.from_proto(outcome.id)
                if outcome.outcome != OUTCOME_REJECTED or key in self._abandoned:
                    continue
                if self._dispatches[key] >= MAX_DISPATCHES:
                    self._abandoned[key] = f"dispatched {MAX_DISPATCHES} times"
                else:
                    self._redispatched += 1
                    self._dispatches[key] += 1
                    self._again.append((key, self._dispatches[key]))
                    self._changed.notify_all()
            return ReportBatchResponse(
                scheduler_incarnation=1,
                abandoned=[AbandonedSample(id=key.to_proto(), reason=why) for key, why in self._abandoned.items()],
                redispatched=self._redispatched,
            )

    async def SetPhase(self, request: SetPhaseRequest, context: Any) -> SetPhaseResponse:
        self.phases.append(request.phase)
        return SetPhaseResponse()

    async def GetFleet(self, request: GetFleetRequest, context: Any) -> GetFleetResponse:
        self._busy_s += 0.5
        heartbeat = HeartbeatRequest(busy_s=self._busy_s)
        instance = Instance(instance="generator-0", incarnation=1, state=INSTANCE_STATE_LIVE, heartbeat=heartbeat)
        return GetFleetResponse(instances=[instance], waits=["batch 0 waits for an instance"])

    # WeightsService

    async def Publish(self, requests: AsyncIterator[PublishRequest], context: Any) -> PublishResponse:
        header, data = PublishHeader(), defaultdict(bytearray)
        async for request in requests:
            match request.WhichOneof("part"):
                case "header":
                    header = request.header
                case "chunk":
                    data[request.chunk.tensor_index] += request.chunk.data
        with self._changed:
            self.headers[header.weight_version] = header
            self.weights[header.weight_version] = {
                info.name: (info.dtype, tuple(info.shape), bytes(data[index]))
                for index, info in enumerate(header.tensors)
            }
            self._changed.notify_all()
        return PublishResponse(digest="d")

    async def ListVersions(self, request: ListVersionsRequest, context: Any) -> ListVersionsResponse:
        acknowledged = AcknowledgeRequest(receiver="generator-0", fetch_s=0.1, switch_s=0.2)
        return ListVersionsResponse(
            receivers=[Receiver(receiver="generator-0", acknowledged=acknowledged)], bytes_full=100, bytes_sent=100
        )

    def wait_for_version(self, weight_version: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: weight_version in self.weights, 3 * WAIT_S)

    # The instance.

    def on_records(self, records: list[Record]) -> None:
        with self._changed:
            for record in records:
                prompt_record = PromptRecord.FromString(record.value)
                match prompt_record.WhichOneof("kind"):
                    case "prompt":
                        prompt = prompt_record.prompt
                        self._prompts[BatchKey(prompt.purpose, prompt.batch)].append(prompt)
                    case "batch_end":
                        end = prompt_record.batch_end
                        key = BatchKey(end.purpose, end.batch)
                        assert len(self._prompts[key]) == end.num_groups
                        self._whole.append(key)
                        self.batch_ends.append(key)
                    case "run_end":
                        self.run_ended.set()
            self._changed.notify_all()

    def generate_until_end(self) -> None:
        try:
            with RecordProducer(Connection(self.kafka, "fleet")) as producer:
                while (work := self._next_work()) is not None:
                    for key, dispatch in work:
                        self._answer(producer, key, dispatch)
        except BaseException as error:
            self.errors.append(error)
            raise

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _next_work(self) -> list[tuple[SampleKey, int]] | None:
        with self._changed:
            while not self._ended:
                if self._again:
                    work, self._again = self._again, []
                    return work
                for key in sorted(self._whole, key=lambda key: (self._version_for(key), not key.is_evaluation)):
                    if self._version_for(key) in self.weights:
                        self._whole.remove(key)
                        keys = [
                            sample_key
                            for prompt in self._prompts[key]
                            for sample in range(prompt.num_samples)
                            # Of a batch that was refilled, most are on their way.
                            if (sample_key := SampleKey(*key, prompt.group, sample)) not in self._dispatches
                        ]
                        self._dispatches |= dict.fromkeys(keys, 1)
                        return [(sample_key, 1) for sample_key in keys]
                self._changed.wait(WAIT_S)
            return None

    def _version_for(self, key: BatchKey) -> int:
        return key.batch if key.is_evaluation else required_version(key.batch, self.max_staleness)

    def _answer(self, producer: RecordProducer, key: SampleKey, dispatch: int) -> None:
        fault = self.fault(key, dispatch)
        if fault == "lose":
            return
        rollout = Rollout(attempt=1, id=key.to_proto(), instance="generator-0", incarnation=1, dispatch=dispatch)
        if fault == "fail":
            rollout.status, rollout.error = ROLLOUT_STATUS_FAILED, "scripted"
        else:
            prompt = self._prompts[key.batch_key][key.group]
            version = key.batch if key.purpose == PURPOSE_EVALUATION else self._version_for(key.batch_key)
            token_ids, logprobs = self._sample(version, prompt, seed=hash(key) + dispatch)
            rollout.status = ROLLOUT_STATUS_OK
            rollout.token_ids.extend(token_ids)
            rollout.logprobs.extend(logprobs)
            rollout.logprob_mode = LOGPROB_MODE_PROCESSED
            stopped = token_ids[-1] in prompt.sampling.stop_token_ids
            rollout.finish_reason = FINISH_REASON_STOP if stopped else FINISH_REASON_LENGTH
            span_version = version + 1000 if fault == "stale" else version
            rollout.version_spans.append(VersionSpan(weight_version=span_version, num_tokens=len(token_ids)))
        if fault == "garbage":
            producer.send(self.topics.rollouts, b"\xff not a rollout", key=group_key(key))
        for _ in range(2 if fault == "copy" else 1):
            producer.send(self.topics.rollouts, rollout.SerializeToString(), key=group_key(key))

    def _sample(self, version: int, prompt: Prompt, seed: int) -> tuple[list[int], list[float]]:
        import torch

        model = self._model(version)
        temperature = prompt.sampling.temperature
        random = torch.Generator().manual_seed(abs(seed))
        token_ids, logprobs = list(prompt.token_ids), []
        with torch.no_grad():
            for _ in range(prompt.sampling.max_tokens):
                logits = model(input_ids=torch.tensor([token_ids])).logits[0, -1]
                row = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
                drawn = int(torch.multinomial(row.exp(), 1, generator=random)) if temperature else int(row.argmax())
                token_ids.append(drawn)
                logprobs.append(float(row[drawn]))
                if drawn in prompt.sampling.stop_token_ids:
                    break
        return token_ids[len(prompt.token_ids) :], logprobs

    def _model(self, version: int) -> Any:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        if getattr(self, "_loaded_version", None) != version:
            if not hasattr(self, "_loaded"):
                config = next(file for file in self.headers[0].files if file.name == "config.json")
                settings = json.loads(config.content)
                self._loaded = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings)).float().eval()
            dtypes = {"F32": torch.float32, "BF16": torch.bfloat16}
            state = {
                name: torch.frombuffer(bytearray(data), dtype=dtypes[dtype]).reshape(shape)
                for name, (dtype, shape, data) in self.weights[version].items()
            }
            self._loaded.load_state_dict(state)
            self._loaded_version = version
        return self._loaded


class RunningFleet:
    """A scripted fleet with its threads, and where its services listen."""

    def __init__(self, fleet: ScriptedFleet) -> None:
        self.fleet = fleet
        self._loop = asyncio.new_event_loop()
        self._threads = [
            threading.Thread(target=self._loop.run_forever, daemon=True),
            threading.Thread(target=fleet.generate_until_end, daemon=True),
        ]
        connection = Connection(fleet.kafka, "fleet")
        create_topics(connection, fleet.topics, max_instances=FleetView().max_instances)
        reader = RecordReader(connection, fleet.topics.prompts, {0: None})
        self._reader = ReaderThread(reader, fleet.on_records, fleet.errors.append).start()
        for thread in self._threads:
            thread.start()
        self._servers: list[Server] = []
        self.scheduler_address = self._on_loop(
            self._serve("streamrl.v1.SchedulerService", add_SchedulerServiceServicer_to_server)
        )
        self.weights_address = self._on_loop(
            self._serve("streamrl.v1.WeightsService", add_WeightsServiceServicer_to_server)
        )

    async def _serve(self, name: str, add: Callable[..., None]) -> str:
        # Made on the loop that it will serve on.
        self._servers.append(Server(name, lambda server: add(self.fleet, server)))
        return await self._servers[-1].serve("127.0.0.1:0")

    def close(self) -> None:
        self.fleet.end()
        self._reader.close()
        for server in self._servers:
            self._on_loop(server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        for thread in self._threads:
            thread.join(WAIT_S)
        self._loop.close()

    def _on_loop(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(WAIT_S)


def no_fault(key: SampleKey, dispatch: int) -> str:
    return ""


@pytest.fixture
def start_fleet(kafka_settings: KafkaSection) -> Iterator[Callable[..., RunningFleet]]:
    """Starts scripted fleets, which end with the test."""
    running: list[RunningFleet] = []

    def start(run_id: str, *, max_staleness: int = 0, fault: Fault = no_fault) -> RunningFleet:
        fleet = ScriptedFleet(kafka_settings, run_id, max_staleness=max_staleness, fault=fault)
        running.append(RunningFleet(fleet))
        return running[-1]

    yield start
    for one in running:
        one.close()


@pytest.fixture(scope="session")
def ranks() -> Iterator["Ranks"]:
    """This process as the only rank. DeepSpeed keeps process groups for good: once a process is all it takes."""
    from trainer_svc.ranks import join_ranks

    with join_ranks(1, [], {}) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 with random weights and the tokenizer of the tiny model, as a folder."""
    import torch
    from transformers import Qwen2ForCausalLM

    from trainer_svc.tiny_model import save_tiny_model, tiny_config

    folder = tmp_path_factory.mktemp("model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        save_tiny_model(Qwen2ForCausalLM(tiny_config()).float(), folder)
    return folder


@pytest.fixture(scope="session")
def counting_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts of the counting task, as JSONL."""
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    rows = [{"prompt": f"to {start + 2} from {start}", "answer": f"{start + 1} {start + 2}"} for start in range(40)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path
