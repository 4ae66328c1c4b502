"""All ranks as one learner: rank 0 decides and says what comes next, the others follow.

Every method of `Learner` but `follow` is called by rank 0 alone. It first tells the other ranks, which sit in `follow`,
and then all do the same; so they make the same passes in the same order, however samples arrive. While there is nothing
to do rank 0 says so now and then, so that a dead rank is noticed.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from trainer_svc.adapters import WeightForm
from trainer_svc.checkpoint import save_checkpoint
from trainer_svc.critic import Critic, CriticStats
from trainer_svc.losses import Aggregation
from trainer_svc.microbatches import (
    MicroBatch,
    TrainSample,
    collate,
    cut,
    cut_packed,
    deal,
    decode,
    empty_micro_batch,
    encode,
    places,
)
from trainer_svc.networks import Networks
from trainer_svc.policy import StepStats
from trainer_svc.ranks import Ranks
from trainer_svc.rows import Row, RowCost, make_rows

logger = logging.getLogger(__name__)


class Learner:
    """Networks and ranks behind a few verbs."""

    def __init__(
        self,
        networks: Networks,
        ranks: Ranks,
        *,
        aggregation: Aggregation,
        micro_batch_tokens: int,
        row_cost: RowCost | None,
    ) -> None:
        """
        Args:
            row_cost: decides which answers to one prompt share a row; None: none do.
        """
        self._networks = networks
        self._policy = networks.policy
        self._ranks = ranks
        self._aggregation = aggregation
        self._micro_batch_tokens = micro_batch_tokens
        self._row_cost = row_cost
        self._packed = networks.policy.packs

    @property
    def num_ranks(self) -> int:
        return self._ranks.world_size

    def prepare(self, samples: Sequence[TrainSample]) -> list[TrainSample]:
        """The same samples, in another order, with all that forward passes say of them."""
        prepared = []
        self._say("begin_preparing")
        self._networks.begin_preparing()
        for parts, own in self._rounds("prepare", samples):
            found = self._gather_found(self._networks.prepare(own))
            for part, of_rank in zip(parts, found, strict=False):
                rows = [row.samples for row in part]
                whose = (sample for row in rows for sample in row)
                for sample, place in zip(whose, places(rows, packed=self._packed), strict=True):
                    of_sample = {name: values[place.row, place.answer].clone() for name, values in of_rank.items()}
                    prepared.append(replace(sample, **of_sample))  # type: ignore[arg-type]
        self._say("end_preparing")
        self._networks.end_preparing()
        return prepared

    def accumulate(self, samples: Sequence[TrainSample]) -> None:
        """Adds the samples' un-normalised gradients to the policy's, in micro-batches dealt to the ranks."""
        for _, own in self._rounds("accumulate", samples):
            self._policy.accumulate(own)

    def accumulate_values(self, samples: Sequence[TrainSample]) -> None:
        """The same to the critic's."""
        for _, own in self._rounds("accumulate_values", samples):
            self._critic.accumulate(own)

    def _rounds(self, task: str, samples: Sequence[TrainSample]) -> Iterator[tuple[list[list[Row]], MicroBatch]]:
        """Cuts samples into micro-batches and deals them; of each round what every rank has (those at the end may have
        nothing), and what this one has."""
        # A row that is longer than a rank's part would leave others without work.
        part_tokens = sum(sample.num_tokens for sample in samples) // self.num_ranks
        rows = make_rows(samples, self._row_cost, min(self._micro_batch_tokens, part_tokens))
        parts = (cut_packed if self._packed else cut)(rows, self._micro_batch_tokens, self.num_ranks)
        for round_ in deal(parts, self.num_ranks, []):
            micro_batches = [self._collated(part) if part else empty_micro_batch() for part in round_]
            if self.num_ranks > 1:
                self._say(task, {}, [encode(micro_batch) for micro_batch in micro_batches])
            yield [part for part in round_ if part], micro_batches[0]

    def _collated(self, rows: Sequence[Row]) -> MicroBatch:
        return collate([row.samples for row in rows], self._aggregation, packed=self._packed)

    def _gather_found(self, own: Mapping[str, Tensor]) -> list[Mapping[str, Tensor]]:
        """What each rank has found, on every rank."""
        if self.num_ranks == 1:
            return [own]
        return [safetensors.torch.load(found) for found in self._ranks.gather_bytes(safetensors.torch.save(dict(own)))]

    @property
    def _critic(self) -> Critic:
        assert self._networks.critic is not None, "there is no critic"
        return self._networks.critic

    def step(self, global_count: float) -> StepStats:
        """One optimizer step with the gradients since the last one, divided by the batch's count."""
        self._say("step", {"global_count": global_count})
        return self._policy.step(global_count)

    def step_critic(self, global_count: float) -> CriticStats:
        """The same of the critic."""
        self._say("step_critic", {"global_count": global_count})
        return self._critic.step(global_count)

    def weights(self, form: WeightForm = "merged") -> list[tuple[str, Tensor]]:
        """CPU copies of all tensors, by name, as `ShardedModel.weights`."""
        self._say("weights", {"form": form})
        return list(self._policy.weights(form))

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs of every token but the first of each sequence, before temperature."""
        self._say("score", {"sequences": [list(sequence) for sequence in sequences]})
        return self._policy.score(sequences)

    def save(self, folder: Path, *, attempt: int, iteration: int, state: Mapping[str, Any], keep: int) -> Path:
        """Makes a checkpoint of weights, optimizer, random states and `state`; returns its folder."""
        facts = {"attempt": attempt, "iteration": iteration, "keep": keep}
        self._say("save", {"folder": str(folder), **facts})
        return self._save(folder, state=state, **facts)

    def idle(self) -> None:
        """Nothing yet. Raises ServiceDiedError when a rank has ended."""
        self._say("idle")

    def end(self) -> None:
        """Lets the other ranks go."""
        self._say("end")

    def follow(self) -> None:
        """What every rank but 0 does: as it is told, until the end."""
        while True:
            task, facts, payloads = _unpack(self._ranks.broadcast_bytes(None))
            match task:
                case "begin_preparing":
                    self._networks.begin_preparing()
                case "end_preparing":
                    self._networks.end_preparing()
                case "prepare":
                    self._gather_found(self._networks.prepare(decode(payloads[self._ranks.rank])))
                case "accumulate":
                    self._policy.accumulate(decode(payloads[self._ranks.rank]))
                case "accumulate_values":
                    self._critic.accumulate(decode(payloads[self._ranks.rank]))
                case "step":
                    self._policy.step(facts["global_count"])
                case "step_critic":
                    self._critic.step(facts["global_count"])
                case "weights":
                    for _ in self._policy.weights(facts["form"]):
                        pass
                case "score":
                    self._policy.score(facts["sequences"])
                case "save":
                    self._save(Path(facts.pop("folder")), state={}, **facts)
                case "end":
                    return

    def _save(self, folder: Path, *, attempt: int, iteration: int, state: Mapping[str, Any], keep: int) -> Path:
        return save_checkpoint(
            folder,
            attempt=attempt,
            iteration=iteration,
            saved=self._networks,
            state=state,
            keep=keep,
            ranks=self._ranks,
        )

    def _say(self, task: str, facts: Mapping[str, Any] | None = None, payloads: Sequence[bytes] = ()) -> None:
        if self.num_ranks > 1:
            self._ranks.broadcast_bytes(_pack(task, facts or {}, payloads))


def _pack(task: str, facts: Mapping[str, Any], payloads: Sequence[bytes]) -> bytes:
    header = json.dumps({"task": task, "facts": facts, "sizes": [len(payload) for payload in payloads]})
    return b"\n".join([header.encode(), b"".join(payloads)])


def _unpack(message: bytes) -> tuple[str, dict[str, Any], list[bytes]]:
    header, _, body = message.partition(b"\n")
    said = json.loads(header)
    payloads = []
    start = 0
    for size in said["sizes"]:
        payloads.append(body[start : start + size])
        start += size
    return said["task"], said["facts"], payloads
