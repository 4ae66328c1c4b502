"""One answer to draw, as an instance keeps it from assignment to rollout, and which assignments are possible."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

from generator_svc.answer_prefix import Prefix
from streamrl.identity import BatchKey, SampleKey
from streamrl.v1.records_pb2 import Assignment


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer to draw. Fields are those of `Assignment` and `SampleDraw`."""

    key: SampleKey
    dispatch: int
    prompt_token_ids: tuple[int, ...]
    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int
    min_weight_version: int
    exact_weight_version: int | None
    priority: int
    received_s: float
    """Unix time."""
    prefix: Prefix = field(default_factory=Prefix)
    """What is there of the answer from another instance."""

    @property
    def batch_key(self) -> BatchKey:
        return self.key.batch_key

    @property
    def is_pinned(self) -> bool:
        """Whether every token must come from one version."""
        return self.exact_weight_version is not None

    @property
    def required_version(self) -> int:
        """It cannot begin before this version is announced."""
        return self.min_weight_version if self.exact_weight_version is None else self.exact_weight_version

    def may_begin_with(self, weight_version: int) -> bool:
        if self.exact_weight_version is not None:
            return weight_version == self.exact_weight_version
        return weight_version >= self.min_weight_version


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the model can take."""

    max_model_len: int
    """Most tokens of a prompt and its answer together."""
    vocab_size: int

    @classmethod
    def of(cls, model_folder: Path, max_model_len: int) -> "ModelLimits":
        """Reads the model's config.

        Args:
            max_model_len: as set; 0: what the config says.

        Raises:
            ValueError: the config is missing or does not say.
        """
        path = model_folder / "config.json"
        if not path.is_file():
            raise ValueError(f"{path} is missing: expected the model's config among the files of weight version 0")
        config = json.loads(path.read_text())
        config = config.get("text_config", config)
        length, vocab_size = max_model_len or config.get("max_position_embeddings"), config.get("vocab_size")
        if not isinstance(length, int) or not isinstance(vocab_size, int):
            raise ValueError(f"{path} does not say max_position_embeddings and vocab_size: set generator.max_model_len")
        return cls(length, vocab_size)


def samples_of(assignment: Assignment, received_s: float) -> list[Sample]:
    """The samples that an assignment asks for, in its order."""
    prompt_token_ids = tuple(assignment.token_ids)
    stop_token_ids = tuple(assignment.sampling.stop_token_ids)
    exact = assignment.exact_weight_version if assignment.HasField("exact_weight_version") else None
    return [
        Sample(
            key=SampleKey(assignment.purpose, assignment.batch, assignment.group, draw.sample),
            dispatch=draw.dispatch,
            prompt_token_ids=prompt_token_ids,
            temperature=assignment.sampling.temperature,
            max_tokens=assignment.sampling.max_tokens,
            stop_token_ids=stop_token_ids,
            seed=draw.seed,
            min_weight_version=assignment.min_weight_version,
            exact_weight_version=exact,
            priority=assignment.priority,
            received_s=received_s,
            prefix=Prefix.from_proto(draw.prefix),
        )
        for draw in assignment.draws
    ]


def problem_of(assignment: Assignment, limits: ModelLimits) -> str:
    """Why an assignment can never be generated, whatever the instance; empty when it can."""
    sampling, num_tokens = assignment.sampling, len(assignment.token_ids)
    if not assignment.draws:
        return "it has no samples to draw"
    if num_tokens == 0:
        return "its prompt has no tokens"
    if any(not 0 <= token < limits.vocab_size for token in assignment.token_ids):
        return f"its prompt has a token outside the vocabulary of {limits.vocab_size}"
    if sampling.max_tokens <= 0:
        return f"max_tokens is {sampling.max_tokens}"
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        return f"temperature is {sampling.temperature}"
    if num_tokens + sampling.max_tokens > limits.max_model_len:
        return (
            f"a prompt of {num_tokens} tokens and an answer of up to {sampling.max_tokens} are longer than the "
            f"{limits.max_model_len} that the model takes: lower generator.max_tokens or data.max_prompt_tokens, or "
            "raise generator.max_model_len"
        )
    for draw in assignment.draws:
        problem = Prefix.from_proto(draw.prefix).problem(
            max_tokens=sampling.max_tokens, stop_token_ids=sampling.stop_token_ids, vocab_size=limits.vocab_size
        )
        if problem:
            return f"sample {draw.sample}: {problem}"
    return ""
