"""A stand-in for any of the four services, for tests of what the command does with their processes.

It speaks the services' contract with the command (arguments, exit codes, error files, summary, status over gRPC) and
does no work. The environment variable STUB says, by instance, how it behaves:
    check_s         seconds that --check takes
    check_error     --check refuses with this message
    met_attempt     it is refused as long as it is of an earlier attempt than this
    exit_code       it ends with this code, with `error` in its error file
    check_thread    --check leaves a thread that never ends
    dies_completed  trainer: it ends with exit_code when it has written its summary
    after_s         seconds before it does so (0: before it registers)
    deaf            it never notices SIGTERM
    child           it leaves a child of its own running
    iteration_s     trainer: seconds of an iteration; each one leaves a checkpoint, which the next attempt goes on from
    note            trainer: a sentence for whoever started the run
    waits_after     trainer: after so many iterations it waits for ever
    holds_after     trainer: after so many iterations it goes on only when the run's folder has a file `go_on`
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import grpc

from streamrl import lifetime
from streamrl.rpc.channel import open_aio_channel
from streamrl.rpc.server import Server
from streamrl.service import end_process
from streamrl.v1 import scheduler_pb2, scheduler_pb2_grpc, trainer_pb2, trainer_pb2_grpc


def main(service: str) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("settings", type=Path)
    parser.add_argument("--instance", default=service)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    settings = json.loads(arguments.settings.read_text())
    behaviour: dict[str, Any] = json.loads(os.environ.get("STUB", "{}")).get(arguments.instance, {})
    if arguments.check:
        time.sleep(behaviour.get("check_s", 0))
        if behaviour.get("check_thread"):
            threading.Thread(target=threading.Event().wait).start()
            end_process(0)
        if "check_error" in behaviour:
            sys.stderr.write(json.dumps({"kind": "bad_input", "message": behaviour["check_error"]}) + "\n")
            sys.exit(2)
        return
    folder = Path(settings["run"]["dir"], settings["run"]["id"])
    (folder / "services").mkdir(exist_ok=True)
    sys.exit(asyncio.run(_serve(service, arguments.instance, settings, folder, behaviour)))


async def _serve(service: str, instance: str, settings: dict[str, Any], folder: Path, behaviour: dict[str, Any]) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    lifetime.on_termination(lambda: loop.call_soon_threadsafe(stop.set), grace_s=60.0)
    if behaviour.get("deaf"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    if behaviour.get("child"):
        child = await asyncio.create_subprocess_exec("sleep", "1000")
        (folder / "services" / f"{instance}.child").write_text(str(child.pid))
    if settings["run"]["attempt"] < behaviour.get("met_attempt", 0):
        report = {"kind": "StaleAttemptError", "message": "too old", "current_attempt": behaviour["met_attempt"]}
        (folder / "services" / f"{instance}.error.json").write_text(json.dumps(report))
        return 1
    if "exit_code" in behaviour and not behaviour.get("after_s") and not behaviour.get("dies_completed"):
        return _end(instance, folder, behaviour)
    if service == "trainer":
        return await _train(settings, folder, stop, behaviour)
    if service == "scheduler":
        await _Fleet().serve(settings, stop)
    elif service == "weights":
        await _serve_nothing("streamrl.v1.WeightsService", settings["rpc"]["weights_address"], stop)
    elif service == "generator":
        await _register(instance, settings)
    if "exit_code" in behaviour:
        await asyncio.sleep(behaviour["after_s"])
        return _end(instance, folder, behaviour)
    await stop.wait()
    return 0


def _end(instance: str, folder: Path, behaviour: dict[str, Any]) -> int:
    if "error" in behaviour:
        report = {"kind": "EngineDiedError", "message": behaviour["error"]}
        (folder / "services" / f"{instance}.error.json").write_text(json.dumps(report))
    return int(behaviour["exit_code"])


class _Fleet(scheduler_pb2_grpc.SchedulerServiceServicer):
    def __init__(self) -> None:
        self._instances: dict[str, scheduler_pb2.Instance] = {}

    async def serve(self, settings: dict[str, Any], stop: asyncio.Event) -> None:
        server = Server(
            "streamrl.v1.SchedulerService",
            lambda raw: scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self, raw),
        )
        await server.serve(settings["rpc"]["scheduler_address"])
        await stop.wait()
        await server.stop()

    async def Register(self, request: Any, context: Any) -> Any:
        self._instances[request.instance] = scheduler_pb2.Instance(
            instance=request.instance,
            address="127.0.0.1:1234",
            pid=request.pid,
            incarnation=1,
            state=scheduler_pb2.INSTANCE_STATE_LIVE,
            heartbeat=scheduler_pb2.HeartbeatRequest(running=3, waiting=2, weight_version=1),
        )
        return scheduler_pb2.RegisterResponse(incarnation=1)

    async def Drain(self, request: Any, context: Any) -> Any:
        if request.stopped and request.incarnation == 1:
            self._instances[request.instance].state = scheduler_pb2.INSTANCE_STATE_DEAD
            sys.stderr.write(f"{request.instance} has stopped: {request.reason}\n")
        return scheduler_pb2.DrainResponse()

    async def GetFleet(self, request: Any, context: Any) -> Any:
        return scheduler_pb2.GetFleetResponse(instances=self._instances.values(), waits=["batch 4 waits for version 3"])


async def _serve_nothing(name: str, address: str, stop: asyncio.Event) -> None:
    """A server that only says that it is there."""
    server = Server(name, lambda raw: None)
    await server.serve(address)
    await stop.wait()
    await server.stop()


async def _register(instance: str, settings: dict[str, Any]) -> None:
    async with open_aio_channel(settings["rpc"]["scheduler_address"]) as channel:
        stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        await stub.Register(
            scheduler_pb2.RegisterRequest(instance=instance, pid=os.getpid()), timeout=20, wait_for_ready=True
        )


class _Trainer(trainer_pb2_grpc.TrainerServiceServicer):
    def __init__(self, run_id: str, first_iteration: int, num_iterations: int, notes: list[str]) -> None:
        self.stop = asyncio.Event()
        self.status = trainer_pb2.TrainerServiceGetStatusResponse(
            run_id=run_id,
            pid=os.getpid(),
            state="training",
            iteration=first_iteration,
            num_iterations=num_iterations,
            notes=notes,
        )

    async def GetStatus(self, request: Any, context: Any) -> Any:
        return self.status

    async def Stop(self, request: Any, context: Any) -> Any:
        self.stop.set()
        return trainer_pb2.TrainerServiceStopResponse()


async def _train(settings: dict[str, Any], folder: Path, stop: asyncio.Event, behaviour: dict[str, Any]) -> int:
    run_id, num_iterations = settings["run"]["id"], settings["trainer"]["num_iterations"]
    checkpoint = folder / "checkpoints" / "iteration"
    checkpoint.parent.mkdir(exist_ok=True)
    first_iteration = int(checkpoint.read_text()) if checkpoint.exists() else 0
    notes = [behaviour["note"]] if "note" in behaviour else []
    trainer = _Trainer(run_id, first_iteration, num_iterations, notes)

    def register(raw: grpc.aio.Server) -> None:
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server(trainer, raw)

    server = Server("streamrl.v1.TrainerService", register)
    await server.serve(settings["rpc"]["trainer_address"])
    while trainer.status.iteration < num_iterations and not trainer.stop.is_set() and not stop.is_set():
        if trainer.status.iteration == behaviour.get("waits_after"):
            trainer.status.state, trainer.status.waits_for = "waiting", "rollouts of batch 2: 0 of 32"
            await trainer.stop.wait()
            break
        if trainer.status.iteration == behaviour.get("holds_after") and not (folder / "go_on").exists():
            await asyncio.sleep(0.05)
            continue
        await asyncio.sleep(behaviour.get("iteration_s", 0.1))
        trainer.status.iteration += 1
        checkpoint.write_text(str(trainer.status.iteration))
        trainer.status.metrics["reward/mean"] = 0.5
        if behaviour.get("dies_completed"):
            continue
        lived_s = (trainer.status.iteration - first_iteration) * behaviour.get("iteration_s", 0.1)
        if "exit_code" in behaviour and lived_s >= behaviour["after_s"]:
            checkpoint.write_text(str(first_iteration))
            return _end("trainer", folder, behaviour)
    done = trainer.status.iteration == num_iterations
    summary = summary_of(run_id, "completed" if done else "stopped", trainer.status.iteration)
    summary["attempts"] = settings["run"]["attempt"]
    (folder / "summary.json").write_text(json.dumps(summary))
    await server.stop()
    return int(behaviour["exit_code"]) if behaviour.get("dies_completed") else 0


def summary_of(run_id: str, status: str, iterations: int) -> dict[str, Any]:
    """A summary with every key."""
    dropped = dict.fromkeys(("stale", "abandoned", "truncated", "deadline", "infrastructure", "filtered"), 0)
    rollouts = {"expected": 8, "received": 8, "trained": 8, "duplicate": 0, "redispatched": 0, "dead_letters": 0}
    return {
        "status": status,
        "run_id": run_id,
        "iterations": iterations,
        "wall_s": 1.0,
        "samples_per_s": 8.0,
        "tokens_per_s": 80.0,
        "eval": {"first": 0.25, "last": 0.75, "num_prompts": 4},
        "reward": {"first": 0.25, "last": 0.5},
        "rollouts": rollouts | {"dropped": dropped},
        "staleness_max": 1,
        "idle": {"trainer": 0.5, "generator": 0.25},
        "weights": {"version": iterations, "bytes_full": 100, "bytes_sent": 100},
        "attempts": 1,
        "mlflow": {"tracking_uri": "sqlite:///mlflow.db", "run_id": "abc"},
        "report": None,
    }
