"""Scores answers: finds the reward functions by name, checks them before the run, and adds them up.

Where a function runs:
* exact_match, last_number and graded here, at once;
* the other named ones and a user's `module:function` in processes of their own (trainer_svc/reward_pool.py);
* `http://…` on a server (trainer_svc/reward_model.py).

A function that raises, hangs, ends its process or returns no finite number makes no reward of 0: the sample has none,
and whoever asked must treat it as failed. Only an answer that takes a named reward too much processor time is wrong.
"""

import logging
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from trainer_svc.reward_input import LARGEST_REWARD, RewardError, RewardInput
from trainer_svc.reward_lookup import NAMED, NamedReward, accepted_arguments, module_and_function
from trainer_svc.reward_model import HttpLimits, RewardModel, check_url
from trainer_svc.reward_pool import PoolLimits, RewardCpuLimitError, RewardPool
from trainer_svc.settings import RewardSection

logger = logging.getLogger(__name__)

_HTTP = ("http://", "https://")
_GIB = 2**30


@dataclass(frozen=True)
class RewardScore:
    """The reward of one answer, and what it is made of."""

    total: float
    """Sum of weight times value."""
    values: Mapping[str, float]
    """What each function returned, by its name, before weighting."""


class _Owned(Protocol):
    def close(self) -> None: ...


Submit = Callable[[RewardInput], "Future[float]"]
"""Has a sample scored by one function; the result raises RewardError when it has no reward."""


@dataclass(frozen=True)
class _Function:
    name: str
    weight: float
    submit: Submit


class RewardSum:
    """The weighted sum of reward functions; made by `load_rewards`. Thread-safe."""

    def __init__(self, functions: Sequence[_Function], owned: Sequence[_Owned]) -> None:
        """
        Args:
            owned: closed with this.
        """
        self._functions = tuple(functions)
        self._owned = tuple(owned)

    def submit(self, sample: RewardInput) -> "Future[RewardScore]":
        """Has an answer scored by all functions at once. Many may be under way.

        Returns:
            Its score. Raises RewardError when a function gives none: which, why and the sample are in the log too.
        """
        result: Future[RewardScore] = Future()
        futures = [function.submit(sample) for function in self._functions]
        waiting = len(futures)
        lock = threading.Lock()

        def count(_done: "Future[float]") -> None:
            nonlocal waiting
            with lock:
                waiting -= 1
                last = waiting == 0
            if last:
                self._finish(sample, futures, result)

        for future in futures:
            future.add_done_callback(count)
        return result

    def score(self, sample: RewardInput) -> RewardScore:
        """The reward of one answer, waited for.

        Raises:
            RewardError: a function gave none.
        """
        return self.submit(sample).result()

    def check(self, prompt: str, answer: str, metadata: Mapping[str, Any]) -> RewardScore:
        """Tries every function on a prompt answered with its own key and with nothing; call it before a run.

        Returns:
            The reward of the key as an answer.

        Raises:
            ValueError: a function gave no reward, or a server does not answer.
        """
        try:
            self.score(RewardInput(prompt, "", answer, finished=False, metadata=metadata))
            return self.score(RewardInput(prompt, answer, answer, finished=True, metadata=metadata))
        except RewardError as error:
            raise ValueError(f"reward.functions: tried before the run, {error}") from error

    def close(self) -> None:
        """Ends what the functions started; answers that are not scored yet are cancelled."""
        for owned in self._owned:
            owned.close()

    def _finish(self, sample: RewardInput, futures: Sequence["Future[float]"], result: "Future[RewardScore]") -> None:
        try:
            values = {f.name: future.result() for f, future in zip(self._functions, futures, strict=True)}
            total = math.fsum(f.weight * values[f.name] for f in self._functions)
            if not abs(total) <= LARGEST_REWARD:
                raise RewardError(f"the weighted sum of the rewards {values} is too large")
        except RewardError as error:
            logger.error("%s; sample: %s", error, sample)
            failure = RewardError(f"{error}; sample: {sample}")
            failure.__cause__ = error
            result.set_exception(failure)
        except BaseException as error:  # whoever waits must learn of it: cancelled, or a mistake of ours
            result.set_exception(error)
        else:
            result.set_result(RewardScore(total, values))


def load_rewards(section: RewardSection) -> RewardSum:
    """Finds the reward functions, and starts what they need.

    Raises:
        ValueError: an unknown name, a module or function that is not there, a function that asks for arguments nobody
            gives, or a token that is not there.
    """
    names = _by_place(section)
    token = _token(section) if names.http else ""
    owned: list[_Owned] = []
    submits: dict[str, Submit] = {name: _here(name, NAMED[name]) for name in names.here}
    if names.pool:
        memory_bytes = int(section.memory_gib * _GIB)
        pool = RewardPool(names.pool, PoolLimits(section.num_workers, section.timeout_s, memory_bytes))
        owned.append(pool)
        submits |= {name: _in_pool(pool, name) for name in names.pool}
    limits = HttpLimits(section.timeout_s, section.http_patience_s, section.http_batch_size, section.http_connections)
    for name in names.http:
        model = RewardModel(name, limits, token)
        owned.append(model)
        submits[name] = model.submit
    return RewardSum([_Function(name, weight, submits[name]) for name, weight in section.functions.items()], owned)


def check_rewards(section: RewardSection) -> None:
    """Looks whether the functions are there and take what they are given; imports a user's modules, in a process of
    its own. Servers are not asked.

    Raises:
        ValueError: as `load_rewards`.
    """
    names = _by_place(section)
    if names.http:
        _token(section)
    own = [name for name in names.pool if name not in NAMED]
    if own:
        limits = PoolLimits(1, section.timeout_s, int(section.memory_gib * _GIB))
        RewardPool(own, limits).close()


@dataclass(frozen=True)
class _Names:
    """The functions by where they run."""

    here: Sequence[str]
    pool: Sequence[str]
    http: Sequence[str]


def _by_place(section: RewardSection) -> _Names:
    """
    Raises:
        ValueError: a name cannot be one of a reward.
    """
    http = [name for name in section.functions if name.startswith(_HTTP)]
    here = [name for name in section.functions if name in NAMED and NAMED[name].in_process]
    pool = [name for name in section.functions if name not in http and name not in here]
    for name in http:
        check_url(name)
    for name in pool:
        if name not in NAMED:
            module_and_function(name)
    return _Names(here, pool, http)


def _token(section: RewardSection) -> str:
    """From the environment: settings are written into the run's folder and to the tracker."""
    variable = section.http_token_env
    token = os.environ.get(variable, "") if variable else ""
    if variable and not token:
        raise ValueError(
            f"reward.http_token_env is {variable}, and the environment of the trainer has no such variable, or an "
            "empty one: set it to the token of the reward model"
        )
    return token


def _here(name: str, reward: NamedReward) -> Submit:
    names = accepted_arguments(reward.call)

    def submit(sample: RewardInput) -> "Future[float]":
        future: Future[float] = Future()
        try:
            future.set_result(reward.call(**{argument: getattr(sample, argument) for argument in names}))
        except Exception as error:  # keys and answers may say anything; the run goes on without the sample
            future.set_exception(RewardError(f"reward {name} raised {type(error).__name__}: {error}"))
        return future

    return submit


def _in_pool(pool: RewardPool, name: str) -> Submit:
    cpu_limit_s = NAMED[name].cpu_limit_s if name in NAMED else None

    def submit(sample: RewardInput) -> "Future[float]":
        arguments = sample.to_json(pool.arguments[name])
        return _zero_over_limit(pool.submit(name, arguments, cpu_limit_s=cpu_limit_s), sample)

    return submit


def _zero_over_limit(future: "Future[float]", sample: RewardInput) -> "Future[float]":
    """An answer that takes a named reward too long to check is wrong: in processor time, for how busy the machine is
    must not decide whether an answer is right."""
    result: Future[float] = Future()

    def hand_over(done: "Future[float]") -> None:
        try:
            result.set_result(done.result())
        except RewardCpuLimitError as error:
            logger.warning("%s: the answer counts as wrong: %.200r", error, sample.response)
            result.set_result(0.0)
        except BaseException as error:  # whoever waits must learn of it
            result.set_exception(error)

    future.add_done_callback(hand_over)
    return result
