"""Finds reward functions by name, and sees whether they can be called. A user's is `module:function`.

Finding a user's function runs the user's code: only the processes of trainer_svc/reward_worker.py do it.
"""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_svc import reward_functions
from trainer_svc.nearest_name import nearest
from trainer_svc.reward_input import ARGUMENTS


@dataclass(frozen=True)
class NamedReward:
    """A reward that has a name of its own."""

    call: Callable[..., float]
    in_process: bool = False
    """Quick and harmless whatever the answer says: needs no other process."""
    cpu_limit_s: float | None = None
    """Processor time of one answer."""
    package: str = ""
    """That it imports; it takes seconds, and is not to count against the first answer's limits."""


_MATH_CPU_S = 5.0

NAMED: Mapping[str, NamedReward] = {
    "exact_match": NamedReward(reward_functions.exact_match, in_process=True),
    "last_number": NamedReward(reward_functions.last_number, in_process=True),
    "graded": NamedReward(reward_functions.graded, in_process=True),
    # Checkers of tasks calculate what answers say, which may be 9^9^9^9.
    "reasoning_gym": NamedReward(reward_functions.reasoning_gym, package="reasoning_gym"),
    "math_verify": NamedReward(reward_functions.math_verify, cpu_limit_s=_MATH_CPU_S, package="math_verify"),
}


def find(name: str) -> Callable[..., Any]:
    """The function of that name; imports a user's module.

    Raises:
        ValueError: an unknown name, a module or function that is not there, or a function that asks for arguments
            nobody gives.
    """
    if name in NAMED:
        named = NAMED[name]
        if named.package and importlib.util.find_spec(named.package) is None:
            raise ValueError(f"reward.functions: {name} needs the package {named.package}: install it first")
        if named.package:
            importlib.import_module(named.package)
        return named.call
    module_name, function_name = module_and_function(name)
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
            f"reward.functions: {module_name} has no function {function_name}{nearest(function_name, there)} "
            f"(it has {', '.join(sorted(there)) or 'none'})"
        )
    _check_signature(name, function)
    return function


def module_and_function(name: str) -> tuple[str, str]:
    """The two parts of a user's name.

    Raises:
        ValueError: it has other parts, or is a misspelt name of a reward.
    """
    module, colon, function = name.partition(":")
    if not colon or not module or not function:
        raise ValueError(
            f"reward.functions: there is no reward named {name!r}{nearest(name, list(NAMED))}; expected one of "
            f"{', '.join(NAMED)}, your own as module:function, or the address of a reward model as http://…"
        )
    return module, function


def accepted_arguments(function: Callable[..., Any]) -> tuple[str, ...]:
    """Those of the arguments of a reward that it takes."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return ARGUMENTS
    return tuple(parameter.name for parameter in parameters if parameter.name in ARGUMENTS)


def _find_module(name: str, module: str) -> None:
    """Sees to it that the module can be found, beside the installed ones also in the current folder."""
    folder = str(Path.cwd())
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
                f"reward.functions: {name} asks for {parameter.name!r}{nearest(parameter.name, ARGUMENTS)}; a reward "
                f"may take {', '.join(ARGUMENTS)}, any of them by name"
            )
