"""The scheduler as a process, and its peers as the tests want them: real Kafka, real gRPC, scripted minds."""

import json
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any, TypeVar

import grpc

from streamrl import lifetime
from streamrl.errors import BrokerUnavailableError
from streamrl.identity import PURPOSE_TRAIN, SampleKey
from streamrl.kafka.connection import Connection
from streamrl.kafka.producer import RecordProducer
from streamrl.kafka.reader import Record, RecordReader
from streamrl.kafka.topics import Topics, create_topics
from streamrl.rpc.channel import open_channel
from streamrl.settings import KafkaSection
from streamrl.v1.records_pb2 import Assignment, BatchEnd, Prompt, PromptRecord
from streamrl.v1.sample_pb2 import SamplingSettings
from streamrl.v1.scheduler_pb2 import (
    FLEET_PHASE_GENERATE,
    OUTCOME_ACCEPTED,
    DrainRequest,
    FleetPhase,
    GetFleetRequest,
    GetFleetResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    RegisterRequest,
    RegisterResponse,
    ReportBatchRequest,
    ReportBatchResponse,
    SampleOutcome,
    SetPhaseRequest,
)
from streamrl.v1.scheduler_pb2_grpc import SchedulerServiceStub
from streamrl.v1.weights_pb2 import WatchRequest, WatchResponse
from streamrl.v1.weights_pb2_grpc import WeightsServiceServicer, add_WeightsServiceServicer_to_server

DEADLINE_S = 30.0
LEASE_S = 2.0
MAX_INSTANCES = 4

Found = TypeVar("Found")


def wait_until(look: Callable[[], Found], seconds: float = DEADLINE_S) -> Found:
    """What `look` finds as soon as it finds something."""
    until = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)
    return found


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


class ScriptedWeights(WeightsServiceServicer):
    """Announces what it is told to."""

    def __init__(self) -> None:
        self.address = free_address()
        self._changed = threading.Condition()
        self._announced: list[WatchResponse] = []
        self.start()

    def start(self) -> None:
        self._up = True
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        add_WeightsServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.address)
        self._server.start()

    def stop(self) -> None:
        with self._changed:
            self._up = False
            self._changed.notify_all()
        self._server.stop(0).wait()

    def announce(self, weight_version: int, attempt: int = 1) -> None:
        with self._changed:
            self._announced.append(WatchResponse(weight_version=weight_version, attempt=attempt))
            self._changed.notify_all()

    def Watch(self, request: WatchRequest, context: grpc.ServicerContext) -> Iterator[WatchResponse]:
        told = max(len(self._announced) - 1, 0)
        while self._up and context.is_active():
            with self._changed:
                if len(self._announced) == told:
                    self._changed.wait(1.0)
                news, told = self._announced[told:], len(self._announced)
            yield from news


class SchedulerProcess:
    """`python -m scheduler_svc`, with a weights_svc and the trainer's end of topic and calls."""

    def __init__(self, folder: Path, kafka: KafkaSection, run_id: str, **settings: dict[str, Any]) -> None:
        self.run_id = run_id
        self.weights = ScriptedWeights()
        self.address = free_address()
        scheduler = {
            "lease_s": LEASE_S,
            "max_instances": MAX_INSTANCES,
            "fleet_wait_s": 30,
            **settings.pop("scheduler", {}),
        }
        self._settings = {
            "run": {"id": run_id, "dir": str(folder)},
            "rpc": {
                "scheduler_address": self.address,
                "weights_address": self.weights.address,
                "patience_s": 10,
                **settings.pop("rpc", {}),
            },
            "kafka": kafka.model_dump(),
            "scheduler": scheduler,
            **settings,
        }
        self._folder = folder
        self.topics = Topics(run_id)
        self.connection = Connection(kafka, "test")
        create_topics(self.connection, self.topics, MAX_INSTANCES)
        self._producer = RecordProducer(self.connection)
        self.instances: list[ScriptedInstance] = []
        self._spawn()
        self.connect()

    def _spawn(self) -> None:
        self._folder.mkdir(exist_ok=True)
        file = self._folder / "settings.json"
        file.write_text(json.dumps(self._settings))
        self.process = lifetime.spawn([sys.executable, "-m", "scheduler_svc", str(file)])

    def connect(self) -> None:
        self._channel = open_channel(self.address)
        grpc.channel_ready_future(self._channel).result(DEADLINE_S)
        self.stub = SchedulerServiceStub(self._channel)

    def kill_and_restart(self) -> None:
        self.process.kill()
        self.process.wait()
        self._channel.close()
        self._spawn()
        self.connect()

    def ended(self) -> tuple[int, dict[str, str]]:
        """Exit code, and the report in the run folder."""
        code = self.process.wait(DEADLINE_S)
        file = self._folder / self.run_id / "services" / "scheduler_svc.error.json"
        return code, json.loads(file.read_text()) if file.exists() else {}

    def close(self) -> int:
        """Ends everything; the exit code of the scheduler."""
        for instance in self.instances:
            instance.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(DEADLINE_S)
        self._channel.close()
        self._producer.close()
        self.weights.stop()
        return code

    # The trainer.

    def write(self, record: PromptRecord | bytes) -> None:
        value = record if isinstance(record, bytes) else record.SerializeToString()
        self._producer.send(self.topics.prompts, value)

    def write_batch(
        self,
        batch: int,
        num_groups: int,
        num_samples: int = 1,
        purpose: int = PURPOSE_TRAIN,
        *,
        max_tokens: int = 64,
    ) -> None:
        for group in range(num_groups):
            prompt = Prompt(
                purpose=purpose,  # type: ignore[arg-type]
                batch=batch,
                group=group,
                prompt_id=f"p{group}",
                token_ids=[group],
                sampling=SamplingSettings(temperature=1.0, max_tokens=max_tokens),
                num_samples=num_samples,
            )
            self.write(PromptRecord(attempt=1, prompt=prompt))
        end = BatchEnd(purpose=purpose, batch=batch, num_groups=num_groups)  # type: ignore[arg-type]
        self.write(PromptRecord(attempt=1, batch_end=end))

    def report(self, accepted: list[SampleKey] | None = None, **fields: Any) -> ReportBatchResponse:
        outcomes = [SampleOutcome(id=key.to_proto(), outcome=OUTCOME_ACCEPTED, num_tokens=10) for key in accepted or []]
        request = ReportBatchRequest(**{"run_id": self.run_id, "attempt": 1, "outcomes": outcomes, **fields})
        return self.stub.ReportBatch(request, timeout=DEADLINE_S)

    def set_phase(self, phase: FleetPhase.ValueType, timeout_s: float = DEADLINE_S) -> None:
        request = SetPhaseRequest(run_id=self.run_id, attempt=1, phase=phase)
        self.stub.SetPhase(request, timeout=timeout_s)

    def fleet(self) -> GetFleetResponse:
        return self.stub.GetFleet(GetFleetRequest(run_id=self.run_id), timeout=DEADLINE_S)

    def wait_for(self, sentence: str) -> None:
        """Until GetFleet says that somebody waits for this."""
        wait_until(lambda: sentence in self.fleet().waits)

    def read(self, topic: str, partition: int, num_records: int) -> list[Record]:
        """The first records of a partition, when there are so many."""
        reader = RecordReader(self.connection, topic, {partition: None})
        records: list[Record] = []
        until = time.monotonic() + DEADLINE_S
        try:
            while len(records) < num_records:
                assert time.monotonic() < until, f"{len(records)} of {num_records} records came"
                records += reader.read(0.2)
        finally:
            reader.close()
        return records

    # The fleet.

    def instance(self, name: str) -> "ScriptedInstance":
        instance = ScriptedInstance(self, name)
        self.instances.append(instance)
        return instance


class ScriptedInstance:
    """Registers, keeps its lease and reads its partition; everything else is the test's."""

    def __init__(self, scheduler: SchedulerProcess, name: str) -> None:
        self._scheduler = scheduler
        self.name = name
        self.phase: FleetPhase.ValueType = FLEET_PHASE_GENERATE
        self.state: dict[str, Any] = {}
        """What every heartbeat says."""
        self.heard: list[HeartbeatResponse] = []
        self._silent = threading.Event()
        self._requests: queue.SimpleQueue[HeartbeatRequest | None] = queue.SimpleQueue()
        self.join()

    def join(self) -> None:
        """Registers, as a new incarnation, and keeps the lease."""
        self.place = self.register()
        self.heard = []
        self._silent = threading.Event()
        self._requests = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._beat, args=(self._silent,), daemon=True).start()

    def register(self, **fields: Any) -> RegisterResponse:
        request = {"run_id": self._scheduler.run_id, "attempt": 1, "instance": self.name, "max_running": 8, **fields}
        return self._scheduler.stub.Register(RegisterRequest(**request), timeout=DEADLINE_S)

    def say(self, **fields: Any) -> None:
        """One heartbeat."""
        self._requests.put(
            HeartbeatRequest(
                run_id=self._scheduler.run_id,
                attempt=1,
                instance=self.name,
                incarnation=self.place.incarnation,
                phase=self.phase,
                **self.state,
                **fields,
            )
        )

    def drain(self, *, stopped: bool) -> None:
        self._scheduler.stub.Drain(
            DrainRequest(
                run_id=self._scheduler.run_id,
                attempt=1,
                instance=self.name,
                incarnation=self.place.incarnation,
                stopped=stopped,
            ),
            timeout=DEADLINE_S,
        )

    def fall_silent(self) -> None:
        """No further heartbeats: what a killed process does."""
        self._silent.set()

    def close(self) -> None:
        self.fall_silent()
        self._requests.put(None)

    def _listen(self) -> None:
        heard = self.heard
        try:
            for response in self._scheduler.stub.Heartbeat(iter(self._requests.get, None)):
                heard.append(response)
        except grpc.RpcError:
            self.fall_silent()

    def _beat(self, silent: threading.Event) -> None:
        self.say()
        while not silent.wait(self.place.heartbeat_interval_s):
            self.say()

    def lease_is_granted(self) -> bool:
        """As of its last answer."""
        return self.heard[-1].lease_granted

    def try_heartbeat(self) -> HeartbeatResponse:
        """One heartbeat on a stream of its own."""
        request = HeartbeatRequest(
            run_id=self._scheduler.run_id, attempt=1, instance=self.name, incarnation=self.place.incarnation
        )
        return next(self._scheduler.stub.Heartbeat(iter([request]), timeout=DEADLINE_S))

    def assignments(self) -> list[Assignment]:
        """What its partition has for this incarnation, once there is something."""
        reader = RecordReader(
            self._scheduler.connection, self._scheduler.topics.assignments, {self.place.partition: None}
        )
        until = time.monotonic() + DEADLINE_S
        try:
            found: list[Assignment] = []
            quiet = False
            while not (found and quiet):
                assert time.monotonic() < until, f"nothing was assigned to {self.name}: {self._scheduler.fleet().waits}"
                records = reader.read(0.3)
                quiet = not records
                found += [
                    assignment
                    for assignment in (Assignment.FromString(record.value) for record in records)
                    if assignment.incarnation == self.place.incarnation
                ]
            return found
        except BrokerUnavailableError as error:
            raise AssertionError(str(error)) from error
        finally:
            reader.close()

    def samples(self) -> list[SampleKey]:
        """The samples of `assignments`."""
        return sorted(
            SampleKey(assignment.purpose, assignment.batch, assignment.group, draw.sample)
            for assignment in self.assignments()
            for draw in assignment.draws
        )
