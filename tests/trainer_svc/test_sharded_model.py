import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer_svc import sharded_model
from trainer_svc.adapters import PublishedTensor


@given(st.lists(st.integers(1, 40), max_size=30))
def test_tensors_are_gathered_a_bucket_at_a_time(sizes):
    """ZeRO-3 never holds more whole than a bucket and the tensor that fills it."""
    tensors = [PublishedTensor(str(number), torch.empty(size)) for number, size in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_model, "_BUCKET_ELEMENTS", 50)
        buckets = list(sharded_model._buckets(tensors))
    assert [tensor.name for bucket in buckets for tensor in bucket] == [tensor.name for tensor in tensors]
    for bucket in buckets:
        assert bucket
        assert sum(tensor.base.numel() for tensor in bucket[:-1]) < 50
    assert all(sum(tensor.base.numel() for tensor in bucket) >= 50 for bucket in buckets[:-1])
