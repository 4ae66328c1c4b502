"""A reward that a server gives over HTTP: a model of preferences, a sandbox for code, anything that scores answers.

    POST the address, Content-Type: application/json, Authorization: Bearer … where reward.http_token_env names one
    {"samples": [{"prompt": "…", "response": "…", "answer": "…", "finished": true, "metadata": {…}}, …]}
    200
    {"rewards": [0.5, null, …]}

One reward a sample, in their order; null: this one has none, and is not trained. `metadata` is the record's other
fields, as far as JSON can say them.

A request holds what waits when a connection is free, so that batches are as large as the server is slow. A server that
is away, overloaded (429) or broken (5xx) is asked again, with growing pauses; one that refuses a batch for what it
holds (another 4xx) is given its samples one by one.
"""

import json
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from trainer_svc.reward_input import LARGEST_REWARD, RewardError, RewardInput

logger = logging.getLogger(__name__)

_START_PATIENCE_S = 5.0
"""Until a server has answered once: it is to be told soon that its address is wrong."""
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 10.0
_AGAIN = frozenset({408, 425, 429})
"""Beside 5xx."""
_SETTINGS_ARE_WRONG = frozenset({401, 403, 404, 405, 407})
_LONGEST_ANSWER = 300


@dataclass(frozen=True)
class HttpLimits:
    """How a server is asked."""

    timeout_s: float
    """Of one request."""
    patience_s: float
    """How long one that does not answer is asked again."""
    batch_size: int
    connections: int


class _AgainError(Exception):
    """The same request may succeed later."""


class _RefusedError(RewardError):
    """The server does not want what the request holds."""


class RewardModel:
    """A server that gives rewards. Thread-safe; `close` it."""

    def __init__(self, url: str, limits: HttpLimits, token: str = "") -> None:
        """Asks nothing yet.

        Args:
            token: sent as a bearer token unless empty.
        """
        import httpx

        self._url = url
        self._limits = limits
        self._client = httpx.Client(
            timeout=limits.timeout_s,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            limits=httpx.Limits(max_connections=limits.connections, max_keepalive_connections=limits.connections),
        )
        self._closed = threading.Event()
        self._changed = threading.Condition()
        self._waiting: deque[tuple[RewardInput, Future[float]]] = deque()
        self._has_answered = False
        self._away_since_s: float | None = None
        self._is_given_up = False
        # Daemons: the end of the process is not to wait for a server.
        for number in range(limits.connections):
            threading.Thread(target=self._send_what_waits, name=f"reward-http-{number}", daemon=True).start()

    def submit(self, sample: RewardInput) -> "Future[float]":
        """Has a sample scored. The result raises RewardError when the server gives it no reward."""
        future: Future[float] = Future()
        with self._changed:
            self._waiting.append((sample, future))
            self._changed.notify()
        return future

    def close(self) -> None:
        """Cancels what waits or is under way, and ends the connections."""
        self._closed.set()
        with self._changed:
            waiting = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        for _, future in waiting:
            future.cancel()
        self._client.close()

    def _send_what_waits(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed.is_set())
                if self._closed.is_set():
                    return
                batch = [self._waiting.popleft() for _ in range(min(self._limits.batch_size, len(self._waiting)))]
            self._send(batch)

    def _send(self, batch: Sequence[tuple[RewardInput, "Future[float]"]]) -> None:
        """Gives each future its result. Never raises."""
        try:
            rewards = self._ask_patiently([sample for sample, _ in batch])
        except _RefusedError as error:
            if len(batch) == 1:
                batch[0][1].set_exception(error)
            else:
                for one in batch:
                    self._send([one])
            return
        except Exception as error:  # the edge of a thread: whoever waits must learn of it
            for _, future in batch:
                future.set_exception(CancelledError() if self._closed.is_set() else error)
            return
        for (_, future), reward in zip(batch, rewards, strict=True):
            if reward is None:
                future.set_exception(RewardError(f"reward {self._url} gave no reward (null)"))
            else:
                future.set_result(reward)

    def _ask_patiently(self, samples: Sequence[RewardInput]) -> list[float | None]:
        body = {"samples": [sample.to_json() for sample in samples]}
        started_s, pause_s = time.monotonic(), _FIRST_PAUSE_S
        while True:
            try:
                rewards = self._ask(body, len(samples))
            except _AgainError as error:
                # All connections share the time that the server is away: an outage is waited for once.
                now_s = time.monotonic()
                self._away_since_s = self._away_since_s or now_s
                patience_s = self._limits.patience_s if self._has_answered else _START_PATIENCE_S
                if self._is_given_up or now_s + pause_s > min(started_s, self._away_since_s) + patience_s:
                    self._is_given_up = True
                    raise RewardError(f"reward {self._url} {error}") from error
                logger.warning("reward %s %s: asked again in %.1f s", self._url, error, pause_s)
            else:
                return rewards
            # Not all at once when the server comes back.
            if self._closed.wait(pause_s * random.uniform(0.5, 1.0)):
                raise CancelledError
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _ask(self, body: Mapping[str, Any], num_samples: int) -> list[float | None]:
        """One request.

        Raises:
            _AgainError: the server is away, overloaded or broken.
            RewardError: it will not answer this request.
        """
        import httpx

        try:
            status, content = self._post(body)
        except httpx.TimeoutException as error:
            raise _AgainError(f"has not answered within {self._limits.timeout_s:g} s (reward.timeout_s)") from error
        except httpx.RequestError as error:
            raise _AgainError(f"cannot be reached ({error})") from error
        text = content.decode(errors="replace")[:_LONGEST_ANSWER]
        if status >= 500 or status in _AGAIN:
            raise _AgainError(f"answers with status {status}: {text}")
        self._has_answered, self._away_since_s, self._is_given_up = True, None, False
        if status in _SETTINGS_ARE_WRONG:
            hint = "see reward.http_token_env" if status in (401, 403) else "is the address right?"
            raise RewardError(f"reward {self._url} answers with status {status} ({hint}): {text}")
        if status >= 400:
            raise _RefusedError(f"reward {self._url} refuses it with status {status}: {text}")
        if status != 200:
            raise RewardError(f"reward {self._url} answers with status {status}, expected 200: {text}")
        try:
            rewards = json.loads(content)["rewards"]
        except (ValueError, TypeError, KeyError, LookupError) as error:
            raise RewardError(f'reward {self._url}: expected {{"rewards": [number, …]}}, got {text}') from error
        if not isinstance(rewards, list) or len(rewards) != num_samples:
            raise RewardError(f"reward {self._url}: expected rewards of {num_samples} samples, got {text}")
        return [_number(self._url, reward) for reward in rewards]

    def _post(self, body: Mapping[str, Any]) -> tuple[int, bytes]:
        """Status and content. httpx's own timeout is that of each read: a server that drips would never reach it."""
        import httpx

        deadline_s = time.monotonic() + self._limits.timeout_s
        content = bytearray()
        with self._client.stream("POST", self._url, json=body) as response:
            for part in response.iter_bytes():
                content += part
                if time.monotonic() > deadline_s:
                    raise httpx.ReadTimeout("the whole answer", request=response.request)
        return response.status_code, bytes(content)


def check_url(name: str) -> None:
    """Looks at an address without asking anybody.

    Raises:
        ValueError: it is none.
    """
    try:
        parts = urlsplit(name)
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        right = False
    if not right:
        raise ValueError(f"reward.functions: {name} is no address: expected http://HOST:PORT/PATH, or https://…")


def _number(url: str, reward: object) -> float | None:
    if reward is None:
        return None
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) <= LARGEST_REWARD:
        expected = f"a number from -{LARGEST_REWARD:g} to {LARGEST_REWARD:g}, or null"
        raise RewardError(f"reward {url} gave {reward!r}, expected {expected}")
    return float(reward)
