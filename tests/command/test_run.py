"""`streamrl run` as a process tree: real command, real broker, stand-ins for the services."""

import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.run_status import status_of

pytestmark = pytest.mark.timeout(120)

SLOW_RUN: dict[str, Any] = {"trainer": {"iteration_s": 0.2}}
HELD_RUN: dict[str, Any] = {"trainer": {"holds_after": 2}}
"""It does its other iterations when the test has done what it does to a run that trains."""


def _training(place: Any) -> bool:
    """Whether both generators have registered and the trainer trains, as `streamrl status` sees it."""
    status = status_of(place.run_folder)
    versions = [one["weight_version"] for one in status.get("services", []) if one["service"] == "generator"]
    return (status.get("iteration") or 0) > 0 and versions == [1, 1]


def _wait_until_training(place: Any) -> None:
    place.eventually(lambda: _training(place), timeout_s=60)


def test_a_run_ends_with_one_line_and_leaves_no_process(place: Any) -> None:
    done = place.ended(place.start_run())
    assert done.exit_code == 0, done.stderr
    assert done.result["status"] == "completed"
    assert done.result["iterations"] == 5
    assert place.processes() == []
    record = json.loads((place.run_folder / "run.json").read_text())
    assert (record["status"], record["services"]) == ("completed", [])
    assert (place.folder / "runs" / "latest").resolve() == place.run_folder
    assert "broker ready" in done.stderr and "iterations" in done.stderr


def test_the_resolved_settings_are_final_and_private(place: Any) -> None:
    place.ended(place.start_run("--set", "kafka.client.sasl.password=secret"))
    file = place.run_folder / "settings.json"
    settings = json.loads(file.read_text())
    assert file.stat().st_mode & 0o077 == 0
    assert Path(settings["run"]["dir"]).is_absolute()
    assert settings["kafka"]["bootstrap_servers"].startswith("127.0.0.1:")
    for name in ("trainer_address", "scheduler_address", "weights_address"):
        assert not settings["rpc"][name].endswith(":0")


def test_a_killed_generator_is_started_again_and_the_run_completes(place: Any) -> None:
    run = place.start_run(stub=HELD_RUN)
    _wait_until_training(place)
    first = place.pid_of("generator-1")
    os.kill(first, signal.SIGKILL)
    place.eventually(lambda: "generator-1" in _instances(place) and place.pid_of("generator-1") != first)
    place.let_go_on()
    done = place.ended(run)
    assert done.exit_code == 0, done.stderr
    assert "generator-1 died (killed by signal SIGKILL): starting it again" in done.stderr
    scheduler_log = (place.run_folder / "logs" / "scheduler.log").read_text()
    assert "generator-1 has stopped: its process has ended" in scheduler_log


def _instances(place: Any) -> set[str]:
    return {service["instance"] for service in json.loads((place.run_folder / "run.json").read_text())["services"]}


def test_a_generator_that_keeps_dying_fails_the_run(place: Any) -> None:
    stub = {"trainer": {"iteration_s": 0.5}, "generator-0": {"exit_code": 1, "after_s": 0.5, "error": "out of memory"}}
    done = place.ended(
        place.start_run("--set", "run.max_restarts=1", "--set", "trainer.num_iterations=1000", stub=stub)
    )
    assert done.exit_code == 1
    assert done.result["error"]["kind"] == "ServiceDiedError"
    assert "generator-0 died 2 times" in done.result["error"]["message"]
    assert "out of memory" in done.result["error"]["message"]
    assert place.processes() == []


def test_a_generator_that_cannot_start_fails_the_run_with_its_own_error(place: Any) -> None:
    stub = {"trainer": {"iteration_s": 0.5}, "generator-0": {"exit_code": 1, "error": "no such architecture: Qwen9"}}
    done = place.ended(place.start_run("--set", "trainer.num_iterations=1000", stub=stub))
    assert done.exit_code == 1
    assert "generator-0 could not start: no such architecture: Qwen9" in done.result["error"]["message"]
    assert place.processes() == []
    assert json.loads((place.run_folder / "run.json").read_text())["status"] == "failed"


def test_a_service_that_refuses_its_settings_fails_the_run_as_bad_input(place: Any) -> None:
    stub = {"trainer": {"exit_code": 2, "error": "field 'question' is missing from data.jsonl"}}
    done = place.ended(place.start_run(stub=stub))
    assert done.exit_code == 2
    assert done.result["error"] == {"kind": "bad_input", "message": "field 'question' is missing from data.jsonl"}


def test_whatever_serves_others_is_started_again_alone(place: Any) -> None:
    run = place.start_run(stub=HELD_RUN)
    _wait_until_training(place)
    trainer = place.pid_of("trainer")
    # One is killed, and one ended in order by somebody who should not.
    for service, number in (("scheduler", signal.SIGKILL), ("weights", signal.SIGTERM)):
        first = place.pid_of(service)
        os.kill(first, number)
        place.eventually(lambda s=service, f=first: s in _instances(place) and place.pid_of(s) != f)  # type: ignore[misc]
    assert place.pid_of("trainer") == trainer
    place.let_go_on()
    done = place.ended(run)
    assert done.exit_code == 0, done.stderr
    assert "scheduler died (killed by signal SIGKILL): starting it again in 1 s" in done.stderr
    assert "weights died (exit code 0): starting it again in 1 s" in done.stderr
    assert done.result["attempts"] == 1
    assert place.processes() == []


def test_a_service_whose_budget_is_spent_ends_the_run(place: Any) -> None:
    run = place.start_run("--set", "trainer.num_iterations=1000", "--set", "run.max_restarts=0", stub=SLOW_RUN)
    _wait_until_training(place)
    os.kill(place.pid_of("scheduler"), signal.SIGKILL)
    done = place.ended(run)
    assert done.exit_code == 1
    assert "scheduler ended: killed by signal SIGKILL" in done.result["error"]["message"]
    assert place.processes() == []
    # The trainer, ended in order, has written that it was stopped.
    assert json.loads((place.run_folder / "summary.json").read_text())["status"] == "failed"
    shown = place.call("status", "r")
    assert "failed" in shown.stdout + shown.stderr and "stopped" not in shown.stdout + shown.stderr


@pytest.mark.parametrize(
    ("instance", "why"),
    [
        ("trainer", "trainer died (killed by signal SIGKILL)"),
        ("broker", "the embedded broker ended (killed by signal SIGKILL), and what it held is lost"),
    ],
)
def test_what_a_run_cannot_go_on_without_is_answered_by_its_next_attempt(place: Any, instance: str, why: str) -> None:
    run = place.start_run(stub=HELD_RUN)
    _wait_until_training(place)
    before = {name: place.pid_of(name) for name in _instances(place)}
    os.kill(before[instance], signal.SIGKILL)
    place.eventually(lambda: _attempt(place) == 2)
    place.let_go_on()
    done = place.ended(run)
    assert done.exit_code == 0, done.stderr
    assert f"{why}: the run is taken up again from its beginning in 1 s" in done.stderr
    assert (done.result["attempts"], done.result["iterations"]) == (2, 5)
    assert place.processes() == []


def _attempt(place: Any) -> int:
    return int(json.loads((place.run_folder / "settings.json").read_text())["run"]["attempt"])


@pytest.mark.kafka
def test_a_broker_that_kept_its_topics_is_started_again_alone(place: Any, kafka_download: object) -> None:
    run = place.start_run("--set", "kafka.embedded=apache", stub=HELD_RUN)
    _wait_until_training(place)
    first = place.pid_of("broker")
    os.kill(first, signal.SIGKILL)
    place.eventually(lambda: "broker" in _instances(place) and place.pid_of("broker") != first)
    place.let_go_on()
    done = place.ended(run)
    assert done.exit_code == 0, done.stderr
    assert "the embedded broker ended (killed by signal SIGKILL): starting it again in 1 s" in done.stderr
    assert done.result["attempts"] == 1
    assert place.processes() == []


def test_a_trainer_that_dies_when_the_run_is_completed_begins_no_attempt(place: Any) -> None:
    stub = {"trainer": {"exit_code": 1, "dies_completed": True, "error": "x"}}
    done = place.ended(place.start_run("--set", "run.max_restarts=0", stub=stub))
    assert done.exit_code == 0, done.stderr
    assert (done.result["status"], done.result["attempts"]) == ("completed", 1)
    assert json.loads((place.run_folder / "run.json").read_text())["status"] == "completed"
    assert (place.run_folder / "summary.json").exists()


def test_a_trainer_that_fails_again_at_the_same_place_fails_the_run(place: Any) -> None:
    stub = {"trainer": {"iteration_s": 1.0, "exit_code": 1, "after_s": 3.0, "error": "CUDA error: device-side assert"}}
    done = place.ended(place.start_run("--set", "trainer.num_iterations=1000", stub=stub))
    assert done.exit_code == 1
    message = done.result["error"]["message"]
    assert "trainer failed twice after the same iteration: CUDA error: device-side assert" in message
    assert json.loads((place.run_folder / "attempt.json").read_text())["attempt"] == 2
    assert place.processes() == []


def test_a_stop_that_is_asked_for_between_two_attempts_is_heard(place: Any) -> None:
    run = place.start_run("--set", "trainer.num_iterations=1000", stub=SLOW_RUN)
    _wait_until_training(place)
    os.kill(place.pid_of("trainer"), signal.SIGKILL)
    assert run.stderr is not None
    while "taken up again" not in run.stderr.readline():
        pass
    run.send_signal(signal.SIGTERM)
    done = place.ended(run)
    assert (done.exit_code, done.result["status"]) == (130, "stopped")
    assert place.processes() == []


def test_a_run_in_which_nothing_moves_ends_with_who_waits_for_whom(place: Any) -> None:
    stub = {"trainer": {"iteration_s": 0.2, "waits_after": 2}}
    run = place.start_run("--set", "trainer.num_iterations=1000", "--set", "run.no_progress_s=6", stub=stub)
    place.eventually(lambda: (place.run_folder / "run.json").exists() and "generator-1" in _instances(place))
    os.kill(place.pid_of("generator-1"), signal.SIGSTOP)
    done = place.ended(run)
    assert done.exit_code == 1
    assert done.result["error"]["kind"] == "NoProgressError"
    message = done.result["error"]["message"]
    assert message.startswith("nothing has moved for ") and "(run.no_progress_s): " in message
    assert "trainer waits for rollouts of batch 2: 0 of 32; scheduler: batch 4 waits for version 3" in message
    assert "is stopped by a signal" in message
    assert place.processes() == []


def test_what_the_trainer_wants_read_is_told_once(place: Any) -> None:
    note = "7 of 100 training prompts are longer than data.max_prompt_tokens and left out"
    done = place.ended(place.start_run(stub={"trainer": {"note": note, "iteration_s": 0.5}}))
    assert done.exit_code == 0
    assert done.stderr.count(note) == 1


def test_a_run_whose_command_was_killed_after_training_is_completed(place: Any) -> None:
    assert place.ended(place.start_run()).exit_code == 0
    record = json.loads((place.run_folder / "run.json").read_text())
    # As it was before the command could write how the run had ended.
    record |= {"status": "running", "finished_at": None, "process": {"pid": 1 << 22, "start_ticks": 1}}
    (place.run_folder / "run.json").write_text(json.dumps(record))
    assert place.call("status", "r", "--json").result["state"] == "completed"
    shown = place.call("status", "r")
    assert "completed" in shown.stdout + shown.stderr and "dead" not in shown.stdout + shown.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_at_the_end_of_the_iteration(place: Any, number: signal.Signals) -> None:
    run = place.start_run("--set", "trainer.num_iterations=1000", stub=SLOW_RUN)
    _wait_until_training(place)
    run.send_signal(number)
    done = place.ended(run)
    assert done.exit_code == 130
    assert done.result["status"] == "stopped"
    assert 0 < done.result["iterations"] < 1000
    assert place.processes() == []


def test_a_second_ctrl_c_stops_at_once(place: Any) -> None:
    stub = {"trainer": {"iteration_s": 1000}}
    run = place.start_run(stub=stub)
    place.eventually(lambda: (place.run_folder / "run.json").exists() and "generator-1" in _instances(place))
    run.send_signal(signal.SIGINT)
    assert run.stderr is not None
    while "asked to stop" not in run.stderr.readline():
        pass
    run.send_signal(signal.SIGINT)
    done = place.ended(run)
    assert done.exit_code == 130
    assert done.result["status"] == "stopped"
    assert place.processes() == []


def test_an_end_at_once_says_how_far_the_run_had_come(place: Any) -> None:
    run = place.start_run("--set", "trainer.num_iterations=1000", stub={"trainer": {"iteration_s": 3}})
    assert run.stderr is not None
    while "iteration 1/1000" not in run.stderr.readline():
        pass
    run.send_signal(signal.SIGINT)
    while "asked to stop" not in run.stderr.readline():
        pass
    run.send_signal(signal.SIGINT)
    done = place.ended(run)
    assert done.exit_code == 130
    assert done.result["error"]["message"] == "ended at once, without a checkpoint, after 1 iteration"


def test_a_signal_after_the_last_line_changes_nothing(place: Any) -> None:
    run = place.start_run(stub={"trainer": {"exit_code": 1, "error": "x"}})
    assert run.stdout is not None
    assert json.loads(run.stdout.readline())["status"] == "failed"
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        run.send_signal(number)
    assert run.wait() == 1


@pytest.mark.parametrize("arguments", [(), ("--dry-run",)])
def test_an_unusable_run_dir_is_told_before_anything_starts(place: Any, arguments: tuple[str, ...]) -> None:
    done = place.ended(place.start_run("--set", f"run.dir={place.config}", *arguments))
    assert done.exit_code == 2
    assert done.result["error"]["message"].startswith(f"run.dir is {place.config}, where no run can be: ")
    assert done.stderr.count("\n") == 1


def test_a_damaged_file_is_named(place: Any) -> None:
    assert place.ended(place.start_run()).exit_code == 0
    whole = {name: (place.run_folder / name).read_text() for name in ("settings.json", "run.json")}
    (place.run_folder / "summary.json").write_text('{"status": "completed"}')
    done = place.call("status", "r")
    assert done.exit_code == 2
    assert f"error: {place.run_folder / 'summary.json'} is damaged: expected " in done.stderr
    assert "'rollouts' is missing. Delete it" in done.stderr
    for name in ("settings.json", "run.json"):
        (place.run_folder / name).write_text("{")
        for command in ("status", "stop") if name == "run.json" else ("status",):
            done = place.call(command, "r")
            assert done.exit_code == 2
            assert done.stderr.startswith(f"error: {place.run_folder / name} is damaged: ")
            assert done.stderr.count("\n") == 1
        (place.run_folder / name).write_text(whole[name])


def test_whatever_a_service_leaves_behind_is_ended(place: Any) -> None:
    done = place.ended(place.start_run(stub={"generator-0": {"child": True}}))
    assert done.exit_code == 0
    assert (place.run_folder / "services" / "generator-0.child").exists()
    assert place.processes() == []


def test_everything_ends_when_the_command_is_killed(place: Any) -> None:
    # One generator is busy in native code and never runs its handler of SIGTERM.
    stub = {"trainer": {"iteration_s": 0.2}, "generator-1": {"deaf": True}}
    run = place.start_run("--set", "trainer.num_iterations=1000", stub=stub)
    _wait_until_training(place)
    assert len(place.processes()) >= 7
    # And one is stopped: a signal that asks it to end would wait until it goes on.
    os.kill(place.pid_of("generator-0"), signal.SIGSTOP)
    run.send_signal(signal.SIGKILL)
    run.communicate()
    place.eventually(lambda: place.processes() == [], timeout_s=20)
    status = place.call("status", "r", "--json").result
    assert (status["state"], status["services"]) == ("dead", [])


def test_bad_settings_are_told_before_anything_starts(place: Any) -> None:
    done = place.call("run", "job.toml", "--json", "--set", "trainer.num_iteration=3", STREAMRL_GENERATOR__TOP_P="0.9")
    assert done.exit_code == 2
    message = done.result["error"]["message"]
    assert "did you mean trainer.num_iterations?" in message and "generator.top_p is 0.9" in message
    assert not (place.folder / "runs").exists()


def test_what_a_services_check_finds_is_told_before_anything_starts(place: Any) -> None:
    stub = {"trainer": {"check_error": "data.train: no such file x.jsonl"}}
    done = place.ended(place.start_run(stub=stub))
    assert done.exit_code == 2
    assert done.result["error"]["message"] == "data.train: no such file x.jsonl"
    assert not (place.folder / "runs").exists()


def test_a_port_in_use_is_told_before_anything_starts(place: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        done = place.ended(place.start_run("--set", f"rpc.weights_address=127.0.0.1:{port}"))
    assert done.exit_code == 2
    assert f"port {port} is in use" in done.result["error"]["message"]
    assert not (place.folder / "runs").exists()


def test_a_broker_that_does_not_answer_is_told_before_anything_starts(place: Any) -> None:
    done = place.ended(place.start_run("--set", "kafka.bootstrap_servers=127.0.0.1:9"))
    assert done.exit_code == 1
    assert done.result["error"]["kind"] == "BrokerUnavailableError"
    assert "127.0.0.1:9" in done.result["error"]["message"]
    assert not (place.folder / "runs").exists()


def test_a_run_is_never_overwritten(place: Any) -> None:
    assert place.ended(place.start_run()).exit_code == 0
    done = place.ended(place.start_run())
    assert done.exit_code == 2
    assert "run r exists already" in done.result["error"]["message"]
    assert place.call("status", "r", "--json").result["state"] == "completed"


def test_a_dry_run_shows_settings_without_secrets_and_starts_nothing(place: Any) -> None:
    done = place.ended(place.start_run("--dry-run", "--set", "kafka.client.sasl.password=secret"))
    assert done.exit_code == 0
    assert done.result["settings"]["trainer"]["num_iterations"] == 5
    assert done.result["not_checked"]
    assert done.result["notes"] == []
    assert "secret" not in done.stdout + done.stderr
    assert not (place.folder / "runs").exists()


def test_a_dry_run_says_what_waits_for_whole_batches(place: Any) -> None:
    done = place.ended(place.start_run("--dry-run", "--set", "trainer.algorithm=reinforce_pp"))
    assert "when a batch's last sample is there" in done.result["notes"][0]


def test_status_names_every_service(place: Any) -> None:
    run = place.start_run("--set", "trainer.num_iterations=1000", stub=SLOW_RUN)
    _wait_until_training(place)
    status = place.call("status", "--json").result
    assert (status["run_id"], status["state"]) == ("r", "running")
    services = {service["instance"]: service for service in status["services"]}
    assert set(services) == {"broker", "trainer", "scheduler", "weights", "generator-0", "generator-1"}
    assert services["generator-0"] | {"pid": 0} == {
        "service": "generator",
        "instance": "generator-0",
        "pid": 0,
        "address": "127.0.0.1:1234",
        "weight_version": 1,
        "running": 3,
        "waiting": 2,
    }
    shown = place.call("status").stdout
    assert "generator-1" in shown and "batch 4 waits for version 3" in shown
    run.send_signal(signal.SIGTERM)
    assert place.ended(run).exit_code == 130


def test_stop_waits_for_the_end_of_the_run(place: Any) -> None:
    run = place.start_run("--set", "trainer.num_iterations=1000", stub=SLOW_RUN)
    _wait_until_training(place)
    done = place.call("stop", "--json")
    assert done.exit_code == 0
    assert done.result["state"] == "stopped"
    assert place.processes() == []
    assert place.ended(run).exit_code == 130
    assert "was over already" in place.call("stop", "--json").result["message"]


def test_stop_now_does_not_wait_for_the_iteration(place: Any) -> None:
    run = place.start_run(stub={"trainer": {"iteration_s": 1000}})
    place.eventually(lambda: (place.run_folder / "run.json").exists() and "generator-1" in _instances(place))
    assert place.call("stop", "--now", "--json").result["state"] == "stopped"
    assert place.ended(run).exit_code == 130
    assert place.processes() == []


def test_a_record_with_a_reused_process_id_harms_nobody(place: Any) -> None:
    assert place.ended(place.start_run()).exit_code == 0
    (place.run_folder / "summary.json").unlink()
    with subprocess.Popen(["sleep", "1000"]) as innocent:
        record = json.loads((place.run_folder / "run.json").read_text())
        record |= {"status": "running", "process": {"pid": innocent.pid, "start_ticks": 1}}
        record["services"] = [
            {"service": "trainer", "instance": "trainer", "address": "", "process": record["process"]}
        ]
        (place.run_folder / "run.json").write_text(json.dumps(record))
        assert place.call("stop", "r", "--json").result["state"] == "dead"
        assert innocent.poll() is None
        innocent.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_it_still_checks_ends_it_with_one_line(place: Any, number: signal.Signals) -> None:
    run = place.start_run(stub={"trainer": {"check_s": 1000}})
    assert run.stderr is not None
    assert "checking" in run.stderr.readline()
    run.send_signal(number)
    done = place.ended(run)
    assert done.exit_code == 130
    assert done.result["status"] == "stopped"
    assert place.processes() == []
    assert not (place.folder / "runs").exists()


def test_settings_of_several_sites_are_not_run_on_one_machine(place: Any) -> None:
    place.config.write_text(place.config.read_text() + "[sites.west]\nkafka.bootstrap_servers = 'west:9092'\n")
    done = place.ended(place.start_run("--set", "kafka.bootstrap_servers=127.0.0.1:1"))
    assert done.exit_code == 2
    assert "the settings name sites (west)" in done.result["error"]["message"]
    assert "streamrl serve" in done.result["error"]["message"]
    assert not place.run_folder.exists()
