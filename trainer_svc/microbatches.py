"""Cutting trainable samples into micro-batches by token budget, and micro-batches as tensors and bytes.

Plans are pure functions over lengths. A row is one prompt and one answer, or several answers to it (rows.py decides
which). A micro-batch holds its rows in one of two ways:

* padded: below each other, padded on the right. Under causal attention nothing that is trained can see padding there,
  so no attention mask is needed while each row holds one answer. Where a row holds several, `segments` says what may
  see what.
* packed: one behind the other in one row, without padding, where the model has taken trainer_svc/packed_attention.py,
  whose `spans` say what may see what.

`position_ids` say where each answer would stand if it were alone.
"""

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import safetensors.torch
import torch
from torch import Tensor

from trainer_svc.losses import Aggregation
from trainer_svc.packed_attention import Spans, lay_out

T = TypeVar("T")

_SPANS = "spans."
"""Before the names of their parts in an encoded micro-batch."""
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
    """What one forward and backward pass takes; `width` is its longest row, or its only one where it is packed."""

    token_ids: Tensor
    """(rows, width), int64."""
    targets: Tensor
    """(targets,), int64: the places of the tokens that are predicted, each from the token before it; the same in every
    row. No logits are computed for others, which are prompt in every row."""
    num_samples: int
    behaviour_logprobs: Tensor
    """(rows, targets), float32, as `TrainSample` has it; 0 for prompt and padding, here and below."""
    advantages: Tensor
    """(rows, targets), float32."""
    sample_index: Tensor
    """(rows, targets), int64: which sample a token is of, below `num_samples`; any where its weight is
    0."""
    weights: Tensor
    """(rows, targets), float32: the token's weight in the loss."""
    own_version: Tensor
    """(rows, targets), bool."""
    reference_logprobs: Tensor | None = None
    """(rows, targets), float32. This and the next three are None where a sample lacks it."""
    proximal_logprobs: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    segments: Tensor | None = None
    """(rows, width), int64: 0 for a prompt, which all of its row may see, j for its j-th answer, -1 for padding. None:
    it is packed, or each row holds one answer."""
    spans: Spans | None = None
    """None: it is padded."""
    position_ids: Tensor | None = None
    """(rows, width), int64; with `segments` or `spans`."""

    def to(self, device: torch.device) -> Self:
        """The same on another device; without a copy when it is there already."""
        tensors: dict[str, Any] = {name: each.to(device, non_blocking=True) for name, each in self.tensors().items()}
        return replace(self, spans=self.spans.to(device) if self.spans is not None else None, **tensors)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by field name, those of the spans apart."""
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


def cut_packed(rows: Sequence[Cut], micro_batch_tokens: int, num_ranks: int = 1) -> list[list[Cut]]:
    """Cuts rows into packed micro-batches of at most `micro_batch_tokens`; `deal` gives them to ranks.

    In as few rounds of one micro-batch a rank as hold them (to a 32nd), all of about as many tokens: longest first,
    each row goes to the micro-batch that has the fewest so far. No row is split; one that is longer than the budget
    gets a micro-batch of its own. The largest comes first. The same rows are cut in the same way whatever order they
    come in.
    """
    if micro_batch_tokens < 1:
        raise ValueError(f"micro_batch_tokens must be at least 1, got {micro_batch_tokens}")
    ordered = sorted(rows, key=lambda row: (-row.num_tokens, row.identity))
    num_tokens = sum(min(row.num_tokens, micro_batch_tokens) for row in ordered)
    num_rounds = -(-num_tokens // (micro_batch_tokens * num_ranks))
    while True:
        micro_batches = _spread(ordered, num_rounds * num_ranks)
        if all(len(part) <= 1 or _tokens(part) <= micro_batch_tokens for part in micro_batches):
            break
        # Rows of a little over half the budget need far more rounds than their tokens do.
        num_rounds += max(1, num_rounds // 32)
    return sorted(filter(None, micro_batches), key=lambda part: (-_tokens(part), part[0].identity))


def _spread(rows: Sequence[Cut], num_parts: int) -> list[list[Cut]]:
    """Rows in falling order of length into parts of about as many tokens; some are empty where rows are few."""
    parts: list[list[Cut]] = [[] for _ in range(num_parts)]
    smallest = [(0, number) for number in range(num_parts)]
    for row in rows:
        num_tokens, number = smallest[0]
        parts[number].append(row)
        heapq.heapreplace(smallest, (num_tokens + row.num_tokens, number))
    return parts


def _tokens(rows: Sequence[HasTokens]) -> int:
    return sum(row.num_tokens for row in rows)


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
    answer: slice
    """Of the row's targets."""


def places(rows: Sequence[Sequence[TrainSample]], *, packed: bool) -> list[Place]:
    """Of the samples, row by row, as `collate` lays them out."""
    first_target = min(len(row[0].prompt_token_ids) for row in rows)
    found: list[Place] = []
    num_targets = 0
    for (number, start), row in zip(_corners(rows, packed=packed), rows, strict=True):
        start += len(row[0].prompt_token_ids) - 1
        for sample in row:
            num_tokens = len(sample.answer_token_ids)
            # A padded row's targets are all tokens from the first on, a packed row's are the answers alone.
            first = num_targets if packed else start + 1 - first_target
            found.append(Place(number, slice(start, start + 1 + num_tokens), slice(first, first + num_tokens)))
            start += 1 + num_tokens
            num_targets += num_tokens
    return found


def _corners(rows: Sequence[Sequence[TrainSample]], *, packed: bool) -> list[tuple[int, int]]:
    """Of each row, in which of the micro-batch's it begins, and at which token."""
    if not packed:
        return [(number, 0) for number in range(len(rows))]
    ends = itertools.accumulate((row_tokens(row) for row in rows), initial=0)
    return [(0, start) for start, _ in zip(ends, rows, strict=False)]


def collate(rows: Sequence[Sequence[TrainSample]], aggregation: Aggregation, *, packed: bool = False) -> MicroBatch:
    """The tensors of one micro-batch.

    Args:
        rows: at least one, each of one sample or of several that have the same prompt. Samples are numbered row by row.
        packed: rows stand one behind the other instead of below each other.
    """
    where = places(rows, packed=packed)
    lengths = [row_tokens(row) for row in rows]
    num_rows, width = (1, sum(lengths)) if packed else (len(rows), max(lengths))
    if packed:
        targets = torch.cat([torch.arange(place.block.start + 1, place.block.stop) for place in where])
    else:
        targets = torch.arange(min(len(row[0].prompt_token_ids) for row in rows), width)
    token_ids = torch.zeros(num_rows, width, dtype=torch.int64)
    segments = torch.full((num_rows, width), -1, dtype=torch.int64)
    position_ids = torch.zeros(num_rows, width, dtype=torch.int64)
    for (number, start), row in zip(_corners(rows, packed=packed), rows, strict=True):
        shared = row[0].prompt_token_ids[:-1]
        shared_part = slice(start, start + len(shared))
        token_ids[number, shared_part] = torch.tensor(shared, dtype=torch.int64)
        segments[number, shared_part] = 0
        position_ids[number, shared_part] = torch.arange(len(shared))
    samples = [sample for row in rows for sample in row]
    optional = [name for name in _OPTIONAL_FIELDS if all(getattr(sample, name) is not None for sample in samples)]
    shape = num_rows, len(targets)
    by_token = {name: torch.zeros(shape) for name in ("behaviour_logprobs", "advantages", "weights", *optional)}
    sample_index = torch.zeros(shape, dtype=torch.int64)
    own_version = torch.zeros(shape, dtype=torch.bool)
    segment_numbers = [segment for row in rows for segment in range(1, len(row) + 1)]
    for index, (sample, place, segment) in enumerate(zip(samples, where, segment_numbers, strict=True)):
        number, block, answer = place
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
    masked = not packed and len(samples) > len(rows)
    return MicroBatch(
        token_ids=token_ids,
        targets=targets,
        num_samples=len(samples),
        sample_index=sample_index,
        own_version=own_version,
        segments=segments if masked else None,
        spans=_spans(rows) if packed else None,
        position_ids=position_ids if packed or masked else None,
        **by_token,
    )


def _spans(rows: Sequence[Sequence[TrainSample]]) -> Spans:
    """Of rows that stand one behind the other."""
    return lay_out(
        [(len(row[0].prompt_token_ids) - 1, [1 + len(sample.answer_token_ids) for sample in row]) for row in rows]
    )


def attention_mask(segments: Tensor) -> Tensor:
    """Who may see whom: (rows, 1, width, width), bool, from `MicroBatch.segments`."""
    width = segments.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool, device=segments.device).tril()
    seen, seeing = segments[:, None, :], segments[:, :, None]
    return (causal & ((seen == 0) | (seen == seeing)))[:, None]


def empty_micro_batch() -> MicroBatch:
    """A pass that changes nothing, for a rank that has no samples left while others have: one token of weight 0."""
    zeros: dict[str, Any] = {
        name: torch.zeros(1, 1) for name in ("behaviour_logprobs", "advantages", "weights", *_OPTIONAL_FIELDS)
    }
    return MicroBatch(
        token_ids=torch.zeros(1, 2, dtype=torch.int64),
        targets=torch.ones(1, dtype=torch.int64),
        num_samples=1,
        sample_index=torch.zeros(1, 1, dtype=torch.int64),
        own_version=torch.zeros(1, 1, dtype=torch.bool),
        **zeros,
    )


def encode(micro_batch: MicroBatch) -> bytes:
    """A micro-batch as safetensors, for another rank."""
    parts: dict[str, Any] = {**micro_batch.tensors(), "num_samples": micro_batch.num_samples}
    if micro_batch.spans is not None:
        parts |= {_SPANS + field.name: getattr(micro_batch.spans, field.name) for field in fields(Spans)}
    return safetensors.torch.save({name: torch.as_tensor(part) for name, part in parts.items() if part is not None})


def decode(data: bytes) -> MicroBatch:
    """The inverse of `encode`."""
    tensors: dict[str, Any] = safetensors.torch.load(data)
    parts: dict[str, Any] = {"key_positions": None}
    for name in [name for name in tensors if name.startswith(_SPANS)]:
        part = tensors.pop(name)
        parts[name.removeprefix(_SPANS)] = part if part.ndim else int(part)
    num_samples = int(tensors.pop("num_samples"))
    spans = Spans(**parts) if "query_bounds" in parts else None
    return MicroBatch(**tensors, num_samples=num_samples, spans=spans)


def loss_count(samples: Sequence[TrainSample], aggregation: Aggregation) -> float:
    """What these samples add to the number that the summed gradients are divided by."""
    return sum(aggregation.count(len(sample.answer_token_ids)) for sample in samples)
