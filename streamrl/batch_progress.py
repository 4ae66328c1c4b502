"""How far answers are, as heartbeats carry it: a few bytes an answer."""

from collections.abc import Iterable, Mapping

from streamrl.identity import BatchKey, SampleKey
from streamrl.v1.scheduler_pb2 import BatchProgress


def progress_proto(num_tokens: Mapping[SampleKey, int]) -> list[BatchProgress]:
    """From tokens by sample."""
    batches: dict[BatchKey, BatchProgress] = {}
    for key, count in num_tokens.items():
        batch = batches.get(key.batch_key)
        if batch is None:
            batch = batches[key.batch_key] = BatchProgress(purpose=key.purpose, batch=key.batch)  # type: ignore[arg-type]
        batch.groups.append(key.group)
        batch.samples.append(key.sample)
        batch.num_tokens.append(count)
    return list(batches.values())


def progress_of(batches: Iterable[BatchProgress]) -> dict[SampleKey, int]:
    """The inverse. Lists of different lengths, which nobody sends, are read as far as the shortest."""
    return {
        SampleKey(batch.purpose, batch.batch, group, sample): count
        for batch in batches
        for group, sample, count in zip(batch.groups, batch.samples, batch.num_tokens, strict=False)
    }
