"""Identities of samples, and what derives from them alone."""

import hashlib
from typing import NamedTuple

from streamrl.v1.sample_pb2 import PURPOSE_EVALUATION, PURPOSE_TRAIN, SampleId


class BatchKey(NamedTuple):
    """A batch of one purpose. Train: the trainer iteration; evaluation: the weight version that is evaluated."""

    purpose: int
    batch: int

    @property
    def is_evaluation(self) -> bool:
        return self.purpose == PURPOSE_EVALUATION

    def __str__(self) -> str:
        return f"{'evaluation' if self.is_evaluation else 'batch'} {self.batch}"


class SampleKey(NamedTuple):
    """The identity of one answer, hashable. It survives re-dispatch."""

    purpose: int
    batch: int
    group: int
    sample: int

    @classmethod
    def from_proto(cls, sample_id: SampleId) -> "SampleKey":
        return cls(sample_id.purpose, sample_id.batch, sample_id.group, sample_id.sample)

    def to_proto(self) -> SampleId:
        return SampleId(purpose=self.purpose, batch=self.batch, group=self.group, sample=self.sample)  # type: ignore[arg-type]

    @property
    def batch_key(self) -> BatchKey:
        return BatchKey(self.purpose, self.batch)

    def __str__(self) -> str:
        kind = "e" if self.purpose == PURPOSE_EVALUATION else ""
        return f"{kind}{self.batch}/{self.group}/{self.sample}"


def sample_seed(run_seed: int, key: SampleKey, num_tokens_there: int = 0) -> int:
    """The seed of a sample's random draws: the same whoever draws it and whenever, another one after each prefix.

    Returns:
        A number of 63 bits (engines take signed 64-bit seeds).
    """
    text = f"{run_seed}/{key.purpose}/{key.batch}/{key.group}/{key.sample}/{num_tokens_there}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def group_key(key: SampleKey) -> bytes:
    """The Kafka key of a rollout: samples of one group stay in one partition, in order."""
    return f"{key.purpose}/{key.batch}/{key.group}".encode()


__all__ = ["PURPOSE_EVALUATION", "PURPOSE_TRAIN", "BatchKey", "SampleKey", "group_key", "sample_seed"]
