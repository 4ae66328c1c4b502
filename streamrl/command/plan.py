"""`streamrl plan`: planning by hand, JSON in and JSON out, with the functions that the scheduler uses."""

import sys
from argparse import Namespace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from streamrl.command.report import EXIT_COMPLETED, write_json
from streamrl.json_object import object_of
from streamrl.planning.dispatch import POLICIES, InstanceLoad, Piece
from streamrl.planning.dispatch import plan as plan_pieces
from streamrl.planning.profile import InstanceProfile, TokenLatency
from streamrl.planning.skewness import Objective, instance_latency_s, plan_by_skewness

_SKEWNESS: dict[str, Objective] = {"paper": "sum", "paper_max": "max"}

_MOST = 1e12
"""Of tokens and milliseconds: sums of squares of such are still far from what a float holds."""
_MOST_INSTANCES = 100_000
_MOST_PROBLEMS = 5
"""That are told of one request."""

_Positive = Annotated[float, Field(gt=0, le=_MOST, allow_inf_nan=False, strict=True)]
_Count = Annotated[int, Field(gt=0, strict=True)]


class DispatchRequest(BaseModel):
    """What `plan dispatch` reads."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lengths: Annotated[list[_Positive], Field(min_length=1)]
    """Estimated tokens of each answer."""
    num_instances: Annotated[int, Field(gt=0, le=_MOST_INSTANCES, strict=True)]
    ptl_ms: Annotated[dict[Annotated[int, Field(gt=0)], _Positive], Field(min_length=1)]
    """Milliseconds of a token, by the number of sequences in the running batch."""
    max_batch: _Count
    """Sequences that an instance runs at once."""
    policy: str
    length_p50: _Positive | None = None
    """Of recent answers; policies `paper` and `paper_max` need both."""
    length_p90: _Positive | None = None
    alpha: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, strict=True)] = 0.2
    """Share of the answers that is the long tail."""
    seed: Annotated[int, Field(ge=0, strict=True)] = 0
    """Of policies that draw."""


def dispatch(arguments: Namespace) -> int:
    """Reads a request from a file or standard input and writes the plan to standard output.

    Raises:
        ValueError: the request makes no sense.
    """
    write_json(plan_dispatch(parse_request(_read(arguments.request))))
    return EXIT_COMPLETED


def parse_request(text: str) -> DispatchRequest:
    """
    Raises:
        ValueError: naming each key that is wrong, what was expected, and what came.
    """
    try:
        given = object_of(text)
    except ValueError as error:
        raise ValueError(f"plan dispatch: {error}") from error
    try:
        request = DispatchRequest.model_validate(given)
    except ValidationError as error:
        problems = [_problem(detail) for detail in error.errors()[:_MOST_PROBLEMS]]
        if error.error_count() > _MOST_PROBLEMS:
            problems.append(f"and {error.error_count() - _MOST_PROBLEMS} more")
        raise ValueError(f"plan dispatch: {'; '.join(problems)}") from error
    known = list(POLICIES)
    if request.policy not in known:
        raise ValueError(f"plan dispatch: policy {request.policy!r} is unknown: expected one of {', '.join(known)}")
    for name in ("length_p50", "length_p90"):
        if request.policy in _SKEWNESS and getattr(request, name) is None:
            raise ValueError(f"plan dispatch: policy {request.policy} needs {name}: tokens, above 0")
    return request


def plan_dispatch(request: DispatchRequest) -> dict[str, Any]:
    """The answer to a request that `parse_request` has checked."""
    token_latency = TokenLatency({size: latency_ms / 1000 for size, latency_ms in request.ptl_ms.items()})
    if request.policy in _SKEWNESS:
        assert request.length_p50 is not None and request.length_p90 is not None
        skewness = plan_by_skewness(
            request.lengths,
            request.num_instances,
            token_latency=token_latency,
            max_batch=request.max_batch,
            length_p50=request.length_p50,
            length_p90=request.length_p90,
            alpha=request.alpha,
            objective=_SKEWNESS[request.policy],
        )
        return {
            "policy": request.policy,
            "long_tail_instances": skewness.num_long_tail,
            "regular_instances": request.num_instances - skewness.num_long_tail,
            "instances": skewness.instances,
            "estimated_s": skewness.estimated_s,
        }
    instances = _shares(request, token_latency)
    lengths = request.lengths
    return {
        "policy": request.policy,
        "long_tail_instances": None,
        "regular_instances": None,
        "instances": instances,
        "estimated_s": [
            instance_latency_s(
                len(share),
                sum(lengths[index] for index in share) / max(1, len(share)),
                request.max_batch,
                token_latency,
            )
            for share in instances
        ],
    }


def _shares(request: DispatchRequest, token_latency: TokenLatency) -> list[list[int]]:
    """For each instance the indices of its answers, the longest first, as the scheduler would deal them."""
    width = len(str(request.num_instances))
    names = [str(index).zfill(width) for index in range(request.num_instances)]
    lengths = request.lengths
    by_length = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    # Pieces hold whole tokens; in this order those that are equal then are still dealt the longest first.
    pieces = [Piece(turn, (0,), round(lengths[index])) for turn, index in enumerate(by_length)]
    profile = InstanceProfile(token_latency, request.max_batch)
    dealt = plan_pieces(
        request.policy,
        pieces,
        [InstanceLoad(name, request.max_batch, profile=profile) for name in names],
        seed=request.seed,
    )
    return [[by_length[turn] for turn in sorted(piece.group for piece in dealt.get(name, ()))] for name in names]


def _read(file: Path | None) -> str:
    try:
        if file is not None:
            return file.read_text()
        if sys.stdin is None:  # it was closed before Python began
            raise ValueError("it is closed")
        return sys.stdin.read()
    except (OSError, ValueError) as error:
        raise ValueError(f"plan dispatch: {file or 'standard input'} cannot be read: {error}") from error


def _problem(detail: Any) -> str:
    place = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "missing":
        return f"{place} is missing"
    if detail["type"] == "extra_forbidden":
        return f"{place} is unknown: expected {', '.join(DispatchRequest.model_fields)}"
    message = detail["msg"]
    return f"{place}: {message[0].lower()}{message[1:]}, got {detail['input']!r}"[:300]
