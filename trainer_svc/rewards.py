"""Scores answers: finds the reward functions by name, checks them before the run, and adds them up.

The named functions are in reward_functions.py. A user's own is `module:function`; it takes any of the arguments of
`RewardInput` by name and returns a number. A function that raises or returns no finite number makes no reward of 0: the
sample has none, and whoever asked must treat it as failed.
"""

import difflib
import importlib
import importlib.util
import inspect
import logging
import math
import numbers
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamrl.errors import StreamRLError
from trainer_svc import reward_functions
from trainer_svc.math_verifier import MathVerifier

logger = logging.getLogger(__name__)

ARGUMENTS = ("prompt", "response", "answer", "finished", "metadata")
_NAMED: dict[str, Callable[..., float]] = {
    "exact_match": reward_functions.exact_match,
    "last_number": reward_functions.last_number,
    "graded": reward_functions.graded,
    "reasoning_gym": reward_functions.reasoning_gym,
}
LARGEST_REWARD = 1e30
REWARD_NAMES = (*_NAMED, "math_verify")


class RewardError(StreamRLError):
    """A reward function failed on one sample: the sample has no reward, which is not a reward of 0."""


@dataclass(frozen=True)
class RewardInput:
    """What a reward function may know of one answer."""

    prompt: str
    """The prompt's text as the data has it, before any template."""
    response: str
    """The answer's text, without its end token."""
    answer: str
    """The key."""
    finished: bool
    """The model ended the answer itself; false when it was cut by `max_tokens`."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The record's other fields."""


@dataclass(frozen=True)
class RewardScore:
    """The reward of one answer, and what it is made of."""

    total: float
    """Sum of weight times value."""
    values: Mapping[str, float]
    """What each function returned, by its name, before weighting."""


class RewardSum:
    """The weighted sum of reward functions; made by `load_rewards`."""

    def __init__(self, functions: "Sequence[_Function]", verifier: MathVerifier | None) -> None:
        self._functions = tuple(functions)
        self._verifier = verifier

    def score(self, sample: RewardInput) -> RewardScore:
        """The reward of one answer.

        Raises:
            RewardError: a function raised or returned no finite number. The sample is in the log.
        """
        values = {function.name: function(sample) for function in self._functions}
        total = sum(f.weight * values[f.name] for f in self._functions)
        if not abs(total) <= LARGEST_REWARD:
            raise RewardError(f"the weighted sum of the rewards {values} is too large; sample: {sample}")
        return RewardScore(total, values)

    def check(self, prompt: str, answer: str, metadata: Mapping[str, Any]) -> RewardScore:
        """Tries every function on a prompt answered with its own key and with nothing; call it before a run.

        Returns:
            The reward of the key as an answer.

        Raises:
            ValueError: a function raised or returned no finite number.
        """
        try:
            self.score(RewardInput(prompt, "", answer, finished=False, metadata=metadata))
            return self.score(RewardInput(prompt, answer, answer, finished=True, metadata=metadata))
        except RewardError as error:
            raise ValueError(f"reward.functions: tried before the run, {error}") from error

    def close(self) -> None:
        """Ends what the functions started."""
        if self._verifier is not None:
            self._verifier.close()


def load_rewards(functions: Sequence[str] | Mapping[str, float]) -> RewardSum:
    """Finds the reward functions; names without weights weigh 1 each.

    Raises:
        ValueError: no function at all, an unknown name, a module or function that is not there, or a function that asks
            for arguments nobody gives.
    """
    weights = _weights(functions)
    found = {name: _find(name) for name in weights if name != "math_verify"}
    verifier = None
    if "math_verify" in weights:
        verifier = MathVerifier()
        found["math_verify"] = _math_verify_with(verifier)
    return RewardSum(
        [_Function(name, weight, found[name], _accepted_arguments(found[name])) for name, weight in weights.items()],
        verifier,
    )


def check_rewards(functions: Sequence[str] | Mapping[str, float]) -> None:
    """Looks whether the functions are there and take what they are given; imports a user's modules.

    Raises:
        ValueError: as `load_rewards`.
    """
    for name in _weights(functions):
        if name not in REWARD_NAMES:
            _find(name)


@dataclass(frozen=True)
class _Function:
    name: str
    weight: float
    call: Callable[..., Any]
    arguments: tuple[str, ...]

    def __call__(self, sample: RewardInput) -> float:
        arguments = {name: getattr(sample, name) for name in self.arguments}
        try:
            value = self.call(**arguments)
            # Larger ones are mistakes, and their squares no floats any more.
            usable = isinstance(value, numbers.Real) and abs(float(value)) <= LARGEST_REWARD
        except (Exception, SystemExit) as error:  # a user's code may raise anything; the run goes on without the sample
            logger.exception("reward %s failed on %r", self.name, sample)
            raise RewardError(f"reward {self.name} raised {type(error).__name__}: {error}; sample: {sample}") from error
        if not usable:
            expected = f"a number from -{LARGEST_REWARD:g} to {LARGEST_REWARD:g}"
            logger.error("reward %s returned %r, not %s, on %r", self.name, value, expected, sample)
            raise RewardError(f"reward {self.name} returned {value!r}, expected {expected}; sample: {sample}")
        return float(value)


def _weights(functions: Sequence[str] | Mapping[str, float]) -> dict[str, float]:
    """Weight by name, in order."""
    names = list(functions)
    if not names:
        raise ValueError(
            f"reward.functions is empty: expected one or more of {', '.join(REWARD_NAMES)}, or module:function"
        )
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise ValueError(
            f"reward.functions names {', '.join(doubled)} more than once: use a table with weights instead"
        )
    weights = dict(functions) if isinstance(functions, Mapping) else dict.fromkeys(names, 1.0)
    for name, weight in weights.items():
        if not math.isfinite(weight):
            raise ValueError(f"reward.functions: the weight of {name} is {weight}, expected a finite number")
    return weights


def _find(name: str) -> Callable[..., Any]:
    if name in _NAMED:
        return _NAMED[name]
    module_name, function_name = _module_and_function(name)
    _find_module(name, module_name)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # importing runs a user's code, which may raise anything
        raise ValueError(
            f"reward.functions: importing {module_name} (for {name}) raised {type(error).__name__}: {error}"
        ) from error
    function: Callable[..., Any] | None = getattr(module, function_name, None)
    if function is None or not callable(function):
        there = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise ValueError(
            f"reward.functions: {module_name} has no function {function_name}{_nearest(function_name, there)} "
            f"(it has {', '.join(sorted(there)) or 'none'})"
        )
    _check_signature(name, function)
    return function


def _module_and_function(name: str) -> tuple[str, str]:
    module, colon, function = name.partition(":")
    if not colon or not module or not function:
        raise ValueError(
            f"reward.functions: there is no reward named {name!r}{_nearest(name, REWARD_NAMES)}; expected one of "
            f"{', '.join(REWARD_NAMES)}, or your own as module:function"
        )
    return module, function


def _find_module(name: str, module: str) -> None:
    """Sees to it that the module can be found, beside the installed ones also in the current folder."""
    folder = os.getcwd()  # noqa: PTH109  (an entry of sys.path is a string)
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise ValueError(
            f"reward.functions: there is no module {module} (for {name}). Install it, or start in the folder that "
            f"holds it (now {folder})"
        )


def _check_signature(name: str, function: Callable[..., Any]) -> None:
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"reward.functions: {name} is async, expected a plain function")
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ValueError(f"reward.functions: {name} takes {parameter.name!r} by position only, expected by name")
        if parameter.name not in ARGUMENTS and parameter.default is parameter.empty:
            raise ValueError(
                f"reward.functions: {name} asks for {parameter.name!r}{_nearest(parameter.name, ARGUMENTS)}; a reward "
                f"may take {', '.join(ARGUMENTS)}, any of them by name"
            )


def _accepted_arguments(function: Callable[..., Any]) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return ARGUMENTS
    return tuple(parameter.name for parameter in parameters if parameter.name in ARGUMENTS)


def _math_verify_with(verifier: MathVerifier) -> Callable[..., float]:
    def math_verify(*, response: str, answer: str, finished: bool) -> float:
        """1 when the answer is mathematically the same as the key and the model ended it."""
        return float(finished and verifier.verify(response=response, answer=answer))

    return math_verify


def _nearest(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {near[0]}?)" if near else ""
