"""Tests of trainer_svc.reward_model, against a real server."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from trainer_svc.reward_input import RewardError, RewardInput
from trainer_svc.reward_model import HttpLimits, RewardModel
from trainer_svc.rewards import load_rewards
from trainer_svc.settings import RewardSection

WAIT_S = 30.0
Answer = Callable[[Sequence[dict[str, Any]]], tuple[int, Any]]
"""Status and body for the samples of a request."""


def rewards_of_lengths(samples: Sequence[dict[str, Any]]) -> tuple[int, Any]:
    return 200, {"rewards": [len(sample["response"]) / 10 for sample in samples]}


class Server(ThreadingHTTPServer):
    """Scores answers as the test says."""

    daemon_threads = True

    def __init__(self, port: int = 0, answer: Answer = rewards_of_lengths) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.answer = answer
        self.requests: list[tuple[dict[str, str], Any]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.seen = threading.Semaphore(0)
        self.drips_s = 0.0
        self.ended = threading.Event()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/score"

    def close(self) -> None:
        self.gate.set()
        self.ended.set()
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((dict(self.headers), body))
        self.server.seen.release()
        self.server.gate.wait(WAIT_S)
        status, answer = self.server.answer(body["samples"])
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        if self.server.drips_s:
            self._drip()
            return
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _drip(self) -> None:
        """Blanks, for ever."""
        self.close_connection = True
        self.send_header("Content-Length", str(10**6))
        self.end_headers()
        with contextlib.suppress(OSError):  # the client goes
            while not self.server.ended.wait(self.server.drips_s):
                self.wfile.write(b" ")

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def model(server: Server) -> Iterator[Callable[..., RewardModel]]:
    """Clients of the server, which end with the test."""
    models: list[RewardModel] = []

    def make(url: str = "", *, token: str = "", **limits: Any) -> RewardModel:
        settings = {"timeout_s": WAIT_S, "patience_s": WAIT_S, "batch_size": 3, "connections": 1}
        models.append(RewardModel(url or server.url, HttpLimits(**{**settings, **limits}), token))
        return models[-1]

    yield make
    for one in models:
        one.close()


def sample(response: str) -> RewardInput:
    return RewardInput("What?", response, "42", True, {"level": (1, 2)})


def test_what_waits_goes_in_one_request_and_comes_back_in_its_order(
    server: Server, model: Callable[..., RewardModel]
) -> None:
    client = model(token="secret")
    server.gate.clear()
    futures = [client.submit(sample("x"))]
    assert server.seen.acquire(timeout=WAIT_S)
    futures += [client.submit(sample("x" * number)) for number in range(2, 7)]
    server.gate.set()
    assert [future.result(WAIT_S) for future in futures] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    headers, body = server.requests[0]
    assert headers["Authorization"] == "Bearer secret"
    assert body == {
        "samples": [
            {"prompt": "What?", "response": "x", "answer": "42", "finished": True, "metadata": {"level": [1, 2]}}
        ]
    }
    assert [len(body["samples"]) for _, body in server.requests] == [1, 3, 2]


def test_a_server_that_is_overloaded_broken_or_slow_is_asked_again(
    server: Server, model: Callable[..., RewardModel]
) -> None:
    client = model()
    assert client.submit(sample("x")).result(WAIT_S) == 0.1
    answers = iter([(429, {}), (503, b"busy"), (200, {"rewards": [1]})])
    server.answer = lambda _samples: next(answers)
    assert client.submit(sample("x")).result(WAIT_S) == 1.0
    assert len(server.requests) == 4


def test_a_server_that_drips_its_answer_is_not_waited_for(server: Server, model: Callable[..., RewardModel]) -> None:
    client = model(timeout_s=0.5, patience_s=0.1)
    assert client.submit(sample("x")).result(WAIT_S) == 0.1
    server.drips_s = 0.02
    with pytest.raises(RewardError, match=r"has not answered within 0\.5 s \(reward\.timeout_s\)"):
        client.submit(sample("x")).result(WAIT_S)


def test_a_server_that_comes_back_is_found_and_one_that_does_not_costs_samples_only(
    server: Server, model: Callable[..., RewardModel]
) -> None:
    client = model(patience_s=1.0)
    assert client.submit(sample("x")).result(WAIT_S) == 0.1
    server.answer = lambda _samples: (500, b"out of memory")
    with pytest.raises(RewardError, match="answers with status 500: out of memory"):
        client.submit(sample("x")).result(WAIT_S)
    # The patience of the outage is used up: the next sample is tried once.
    before = len(server.requests)
    with pytest.raises(RewardError):
        client.submit(sample("x")).result(WAIT_S)
    assert len(server.requests) == before + 1
    server.answer = rewards_of_lengths
    assert client.submit(sample("xx")).result(WAIT_S) == 0.2


def test_samples_of_a_batch_that_is_refused_are_given_one_by_one(
    server: Server, model: Callable[..., RewardModel]
) -> None:
    def answer(samples: Sequence[dict[str, Any]]) -> tuple[int, Any]:
        if any(sample["response"] == "bad" for sample in samples):
            return 422, b"too bad"
        return rewards_of_lengths(samples)

    client = model()
    server.answer = answer
    server.gate.clear()
    futures = [client.submit(sample(response)) for response in ("x", "xx", "bad", "xxxx")]
    server.gate.set()
    assert [futures[index].result(WAIT_S) for index in (0, 1, 3)] == [0.1, 0.2, 0.4]
    with pytest.raises(RewardError, match="refuses it with status 422: too bad"):
        futures[2].result(WAIT_S)


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (200, {"rewards": [None]}, "gave no reward"),
        (200, {"rewards": [True]}, "gave True, expected a number"),
        (200, {"rewards": [1e31]}, "gave 1e[+]31, expected a number"),
        (200, b'{"rewards": [NaN]}', "gave nan, expected a number"),
        (200, {"rewards": [1, 2]}, "expected rewards of 1 samples"),
        (200, {"scores": [1]}, "expected {.rewards"),
        (200, [1], "expected {.rewards"),
        (200, b"<html>", "expected {.rewards"),
        (401, b"who?", r"status 401 \(see reward\.http_token_env\): who\?"),
        (404, b"", "status 404 .is the address right"),
        (301, b"", "status 301, expected 200"),
    ],
)
def test_an_answer_that_is_no_reward_is_told(
    server: Server, model: Callable[..., RewardModel], status: int, body: Any, message: str
) -> None:
    server.answer = lambda _samples: (status, body)
    with pytest.raises(RewardError, match=message):
        model().submit(sample("x")).result(WAIT_S)
    assert len(server.requests) == 1


def test_a_server_that_is_not_there_is_told_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_svc.reward_model._START_PATIENCE_S", 0.5)
    gone = Server()
    gone.close()
    rewards = load_rewards(RewardSection(functions={gone.url: 1.0}))
    with pytest.raises(ValueError, match=r"tried before the run, reward http://127.* cannot be reached"):
        rewards.check("prompt", "answer", {})
    rewards.close()


def test_a_hanging_server_is_not_waited_for_when_the_run_ends(
    server: Server, model: Callable[..., RewardModel]
) -> None:
    client = model()
    server.gate.clear()
    futures = [client.submit(sample("x")) for _ in range(5)]
    assert server.seen.acquire(timeout=WAIT_S)
    client.close()
    assert all(future.cancelled() for future in futures[3:])


def test_a_model_is_a_reward_by_its_address_and_its_token_comes_from_the_environment(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = RewardSection(functions={server.url: 2.0, "exact_match": 1.0}, http_token_env="REWARD_TOKEN")
    monkeypatch.delenv("REWARD_TOKEN", raising=False)
    with pytest.raises(ValueError, match=r"reward\.http_token_env is REWARD_TOKEN, and the environment"):
        load_rewards(section)
    monkeypatch.setenv("REWARD_TOKEN", "t")
    rewards = load_rewards(section)
    assert rewards.check("prompt", "12345", {}).total == pytest.approx(2.0)
    assert server.requests[-1][0]["Authorization"] == "Bearer t"
    rewards.close()
