"""Cutting trainable samples into micro-batches by token budget, and micro-batches as tensors and bytes.

Plans are pure functions over lengths. A row is one prompt and one answer, or several answers to it (rows.py decides
which), padded on the right: under causal attention nothing that is trained can see padding there, so no attention mask
is needed while each row holds one answer. Where a row holds several, `segments` says what may see what, and
`position_ids` where each answer would stand if it were alone.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol, Self, TypeVar

import safetensors.torch
import torch
from torch import Tensor

from trainer_svc.losses import Aggregation

T = TypeVar("T")

_NUMBERS = ("first_target", "num_samples")
_OPTIONAL_FIELDS = ("reference_logprobs", "proximal_logprobs", "values", "returns")
"""Of samples and micro-batches alike."""

_PASSES_PER_BUDGET = 32
"""A pass costs what does not depend on its size (launches, Python): as much as this part of a full one's tokens."""


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One answer as the trainer learns from it."""

    identity: tuple[int, int, int]
    """Batch, group, sample."""
    prompt_token_ids: Sequence[int]
    answer_token_ids: Sequence[int]
    behaviour_logprobs: Sequence[float]
    """Of each answer token, of the distribution that was sampled, in nats."""
    advantage: float | Tensor
    """Of all its tokens, or (tokens,) of each; 0 until it is known."""
    own_version: Sequence[bool]
    """Of each answer token: drawn under the weight version that is being trained now."""
    reference_logprobs: Tensor | None = None
    """(tokens,), of the reference, in nats. This and what follows is None where nobody needs it, or not computed."""
    proximal_logprobs: Tensor | None = None
    """(tokens,), of the policy at the batch's start, in nats."""
    values: Tensor | None = None
    """(tokens,), of the state before each token, by the critic at the batch's start."""
    returns: Tensor | None = None
    """(tokens,), that the critic is fitted to."""

    def __post_init__(self) -> None:
        num_tokens = len(self.answer_token_ids)
        if not self.prompt_token_ids or not num_tokens:
            raise ValueError(f"sample {self.identity} needs a prompt and an answer of at least one token each")
        if len(self.behaviour_logprobs) != num_tokens or len(self.own_version) != num_tokens:
            raise ValueError(
                f"sample {self.identity} has {num_tokens} answer tokens, {len(self.behaviour_logprobs)} log-probs and "
                f"{len(self.own_version)} version marks; they must be as many"
            )

    @property
    def num_tokens(self) -> int:
        """Length of its row: prompt and answer."""
        return len(self.prompt_token_ids) + len(self.answer_token_ids)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward and backward pass takes; `width` is its longest row.

    Position t of the targets belongs to the prediction of token `first_target + t`, made at the token before it. Tokens
    before `first_target` are prompt in every row: no logits are computed for them.
    """

    token_ids: Tensor
    """(rows, width), int64."""
    first_target: int
    num_samples: int
    behaviour_logprobs: Tensor
    """(rows, width - first_target), float32, as `TrainSample` has it; 0 for prompt and padding, here and below."""
    advantages: Tensor
    """(rows, width - first_target), float32."""
    sample_index: Tensor
    """(rows, width - first_target), int64: which sample a token is of, below `num_samples`; any where its weight is
    0."""
    weights: Tensor
    """(rows, width - first_target), float32: the token's weight in the loss."""
    own_version: Tensor
    """(rows, width - first_target), bool."""
    reference_logprobs: Tensor | None = None
    """(rows, width - first_target), float32. This and the next three are None where a sample lacks it."""
    proximal_logprobs: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    segments: Tensor | None = None
    """(rows, width), int64: 0 for a prompt, which all of its row may see, j for its j-th answer, -1 for padding. None:
    each row holds one answer."""
    position_ids: Tensor | None = None
    """(rows, width), int64; with `segments`."""

    def to(self, device: torch.device) -> Self:
        """The same on another device; without a copy when it is there already."""
        tensors = {name: tensor.to(device, non_blocking=True) for name, tensor in self.tensors().items()}
        return type(self)(first_target=self.first_target, num_samples=self.num_samples, **tensors)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by field name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


class HasTokens(Protocol):
    """What can be cut: a row, or a sample that has a row of its own."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def identity(self) -> tuple[int, int, int]: ...


Cut = TypeVar("Cut", bound=HasTokens)


def cut(rows: Sequence[Cut], micro_batch_tokens: int, num_ranks: int = 1) -> list[list[Cut]]:
    """Cuts rows into micro-batches of at most `micro_batch_tokens`, padding counted; `deal` gives them to ranks.

    Longest first (equal lengths by identity), so that neighbours are alike, and the largest pass comes first: memory
    that suffices for it suffices for all. Ranks wait for each other, so a round of a micro-batch for each takes as long
    as its largest: of cuts into rounds that fill every rank of a round up to that, the cheapest is taken, where a round
    costs its largest micro-batch's tokens, padding counted, and a 32nd of the budget for being a pass of its own. No
    row is split; one that is longer than the budget gets a micro-batch of its own. The same rows are cut in the same
    way whatever order they come in.
    """
    if micro_batch_tokens < 1:
        raise ValueError(f"micro_batch_tokens must be at least 1, got {micro_batch_tokens}")
    ordered = sorted(rows, key=lambda row: (-row.num_tokens, row.identity))
    lengths = [row.num_tokens for row in ordered]
    sizes = _cheapest_sizes(lengths, micro_batch_tokens, num_ranks)
    micro_batches = []
    start = 0
    while start < len(ordered):
        for end in _round_ends(lengths, start, sizes[start], num_ranks):
            micro_batches.append(ordered[start:end])
            start = end
    return micro_batches


def _cheapest_sizes(lengths: Sequence[int], micro_batch_tokens: int, num_ranks: int) -> list[int]:
    """For every position of falling lengths: the tokens of the largest micro-batch of a round that starts there, if all
    from there on is cut at the least cost."""
    pass_cost = micro_batch_tokens / _PASSES_PER_BUDGET
    costs = [0.0] * (len(lengths) + 1)
    sizes = [0] * len(lengths)
    for start in range(len(lengths) - 1, -1, -1):
        width = lengths[start]
        best = math.inf
        for num_rows in _row_counts(max(1, micro_batch_tokens // width)):
            # A row that is longer than the budget does not make the others' micro-batches larger than it.
            size = min(num_rows * width, micro_batch_tokens)
            end = _round_ends(lengths, start, size, num_ranks)[-1]
            if (cost := num_rows * width + pass_cost + costs[end]) < best:
                best, sizes[start] = cost, size
            if end == len(lengths):
                # Larger ones hold no more.
                break
        costs[start] = best
    return sizes


def _row_counts(most: int) -> Iterator[int]:
    """1 to `most`: all small ones, then every 16th part further."""
    count = 1
    while count < most:
        yield count
        count += max(1, count // 16)
    yield most


def _round_ends(lengths: Sequence[int], start: int, size: int, num_ranks: int) -> list[int]:
    """Where the micro-batches of a round end, each of a row at least and filled up to `size` tokens; fewer than ranks
    where rows run out."""
    ends: list[int] = []
    while start < len(lengths) and len(ends) < num_ranks:
        start = min(len(lengths), start + max(1, size // lengths[start]))
        ends.append(start)
    return ends


def deal(micro_batches: Sequence[T], num_ranks: int, empty: T) -> list[list[T]]:
    """Rounds of one micro-batch a rank, neighbours together, the last one filled with `empty`.

    Every rank makes the same number of passes, and those of one round cost about the same if they were cut for so many.
    """
    padded = [*micro_batches, *[empty] * (-len(micro_batches) % num_ranks)]
    return [padded[start : start + num_ranks] for start in range(0, len(padded), num_ranks)]


def row_tokens(row: Sequence[TrainSample]) -> int:
    """Length of a row of answers to one prompt, whose last token is there once for each answer."""
    return len(row[0].prompt_token_ids) - 1 + sum(1 + len(sample.answer_token_ids) for sample in row)


class Place(NamedTuple):
    """Where a sample's answer stands in a micro-batch."""

    row: int
    block: slice
    """Of the row's tokens: the prompt's last token and the answer."""

    def targets(self, first_target: int) -> slice:
        """Of the row's targets: the answer."""
        return slice(self.block.start + 1 - first_target, self.block.stop - first_target)


def places(rows: Sequence[Sequence[TrainSample]]) -> list[Place]:
    """Of the samples, row by row, as `collate` lays them out."""
    found = []
    for number, row in enumerate(rows):
        start = len(row[0].prompt_token_ids) - 1
        for sample in row:
            end = start + 1 + len(sample.answer_token_ids)
            found.append(Place(number, slice(start, end)))
            start = end
    return found


def collate(rows: Sequence[Sequence[TrainSample]], aggregation: Aggregation) -> MicroBatch:
    """The tensors of one micro-batch.

    Args:
        rows: at least one, each of one sample or of several that have the same prompt. Samples are numbered row by row.
    """
    prompts = [row[0].prompt_token_ids for row in rows]
    width, first_target = max(row_tokens(row) for row in rows), min(len(prompt) for prompt in prompts)
    shape = len(rows), width - first_target
    token_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    segments = torch.full((len(rows), width), -1, dtype=torch.int64)
    position_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    for number, prompt in enumerate(prompts):
        shared_part = slice(0, len(prompt) - 1)
        token_ids[number, shared_part] = torch.tensor(prompt[:-1], dtype=torch.int64)
        segments[number, shared_part] = 0
        position_ids[number, shared_part] = torch.arange(len(prompt) - 1)
    samples = [sample for row in rows for sample in row]
    optional = [name for name in _OPTIONAL_FIELDS if all(getattr(sample, name) is not None for sample in samples)]
    by_token = {name: torch.zeros(shape) for name in ("behaviour_logprobs", "advantages", "weights", *optional)}
    sample_index = torch.zeros(shape, dtype=torch.int64)
    own_version = torch.zeros(shape, dtype=torch.bool)
    segment_numbers = [segment for row in rows for segment in range(1, len(row) + 1)]
    for index, (sample, place, segment) in enumerate(zip(samples, places(rows), segment_numbers, strict=True)):
        number, block = place
        answer = place.targets(first_target)
        prompt_length, num_tokens = len(sample.prompt_token_ids), len(sample.answer_token_ids)
        token_ids[number, block] = torch.tensor([sample.prompt_token_ids[-1], *sample.answer_token_ids])
        segments[number, block] = segment
        position_ids[number, block] = torch.arange(prompt_length - 1, prompt_length + num_tokens)
        by_token["behaviour_logprobs"][number, answer] = torch.tensor(sample.behaviour_logprobs)
        by_token["advantages"][number, answer] = sample.advantage
        by_token["weights"][number, answer] = aggregation.token_weight(num_tokens)
        for name in optional:
            by_token[name][number, answer] = getattr(sample, name)
        sample_index[number, answer] = index
        own_version[number, answer] = torch.tensor(sample.own_version)
    shared = len(samples) > len(rows)
    return MicroBatch(
        token_ids=token_ids,
        first_target=first_target,
        num_samples=len(samples),
        sample_index=sample_index,
        own_version=own_version,
        segments=segments if shared else None,
        position_ids=position_ids if shared else None,
        **by_token,
    )


def attention_mask(segments: Tensor) -> Tensor:
    """Who may see whom: (rows, 1, width, width), bool, from `MicroBatch.segments`."""
    width = segments.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool, device=segments.device).tril()
    seen, seeing = segments[:, None, :], segments[:, :, None]
    return (causal & ((seen == 0) | (seen == seeing)))[:, None]


def empty_micro_batch() -> MicroBatch:
    """A pass that changes nothing, for a rank that has no samples left while others have: one token of weight 0."""
    return MicroBatch(
        token_ids=torch.zeros(1, 2, dtype=torch.int64),
        first_target=1,
        num_samples=1,
        sample_index=torch.zeros(1, 1, dtype=torch.int64),
        own_version=torch.zeros(1, 1, dtype=torch.bool),
        **{name: torch.zeros(1, 1) for name in ("behaviour_logprobs", "advantages", "weights", *_OPTIONAL_FIELDS)},
    )


def encode(micro_batch: MicroBatch) -> bytes:
    """A micro-batch as safetensors, for another rank."""
    numbers = {name: torch.tensor(getattr(micro_batch, name)) for name in _NUMBERS}
    return safetensors.torch.save({**micro_batch.tensors(), **numbers})


def decode(data: bytes) -> MicroBatch:
    """The inverse of `encode`."""
    tensors = safetensors.torch.load(data)
    numbers = {name: int(tensors.pop(name)) for name in _NUMBERS}
    return MicroBatch(**numbers, **tensors)  # type: ignore[arg-type]


def loss_count(samples: Sequence[TrainSample], aggregation: Aggregation) -> float:
    """What these samples add to the number that the summed gradients are divided by."""
    return sum(aggregation.count(len(sample.answer_token_ids)) for sample in samples)
