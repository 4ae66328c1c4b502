"""How fast an engine is, as `streamrl profile` writes it to a file and an instance reads it from there."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from streamrl.v1.scheduler_pb2 import EngineProfile, StepLatency

_HOUR_MS = 3_600_000
_Size = Annotated[int, Field(gt=0, le=2**31 - 1)]
_Step = Annotated[float, Field(ge=1e-6, le=_HOUR_MS, allow_inf_nan=False)]
_Milliseconds = Annotated[float, Field(ge=0, le=_HOUR_MS, allow_inf_nan=False)]


class _Saved(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    ptl_ms: Annotated[dict[_Size, _Step], Field(min_length=1)]
    held_token_ms: _Milliseconds = 0.0
    prefill_token_ms: _Milliseconds = 0.0


def to_json(profile: EngineProfile) -> dict[str, Any]:
    """Milliseconds: of a step by batch size (as `streamrl plan dispatch` takes them), and of a token in the cache and
    of a prompt."""
    return {
        "ptl_ms": {str(step.batch_size): _rounded(1000 * _alone_s(step, profile)) for step in profile.steps},
        "held_token_ms": _rounded(1000 * profile.held_token_s),
        "prefill_token_ms": _rounded(1000 * profile.prefill_token_s),
    }


def from_file(file: Path) -> EngineProfile:
    """
    Raises:
        ValueError: it cannot be read, or is none.
    """
    try:
        saved = _Saved.model_validate_json(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the profile {file} cannot be read: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"{part}: " for part in first["loc"])
        raise ValueError(
            f"{file} is no profile as `streamrl profile --out` writes it: {place}{first['msg']}"
        ) from error
    return EngineProfile(
        steps=[
            StepLatency(batch_size=size, latency_s=latency_ms / 1000, num_steps=1)
            for size, latency_ms in sorted(saved.ptl_ms.items())
        ],
        held_token_s=saved.held_token_ms / 1000,
        prefill_token_s=saved.prefill_token_ms / 1000,
    )


def _alone_s(step: StepLatency, profile: EngineProfile) -> float:
    """Without what the tokens in the cache cost."""
    return max(step.latency_s - profile.held_token_s * step.held_tokens, 0.2 * step.latency_s)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
