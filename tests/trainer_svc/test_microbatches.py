import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer_svc.losses import aggregation_of
from trainer_svc.microbatches import (
    TrainSample,
    attention_mask,
    collate,
    cut,
    cut_packed,
    deal,
    decode,
    empty_micro_batch,
    encode,
    loss_count,
    places,
)
from trainer_svc.packed_attention import Spans

_TOKEN_MEAN, _SEQUENCE_MEAN = aggregation_of("token_mean", 16), aggregation_of("sequence_mean", 16)


def _sample(index, prompt_length, answer_length, advantage=1.0):
    return TrainSample(
        identity=(0, index, 0),
        prompt_token_ids=[1] * prompt_length,
        answer_token_ids=list(range(10, 10 + answer_length)),
        behaviour_logprobs=[-float(token) for token in range(1, answer_length + 1)],
        advantage=advantage,
        own_version=[token % 2 == 0 for token in range(answer_length)],
    )


_SAMPLES = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 60)), min_size=1, max_size=40).map(
    lambda sizes: [_sample(index, *size) for index, size in enumerate(sizes)]
)


@given(_SAMPLES, st.integers(1, 200))
def test_a_cut_holds_every_sample_once_within_the_budget(samples, budget):
    micro_batches = cut(samples, budget)
    assert sorted(sample.identity for part in micro_batches for sample in part) == [
        sample.identity for sample in samples
    ]
    for part in micro_batches:
        padded = len(part) * max(sample.num_tokens for sample in part)
        assert padded <= budget or len(part) == 1


@given(_SAMPLES, st.integers(1, 200), st.randoms())
def test_a_cut_does_not_depend_on_the_order_of_arrival(samples, budget, random):
    shuffled = list(samples)
    random.shuffle(shuffled)
    assert cut(shuffled, budget) == cut(samples, budget)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=7), st.integers(1, 200))
def test_no_other_cut_costs_less(answer_lengths, budget):
    micro_batches = cut([_sample(index, 1, length) for index, length in enumerate(answer_lengths)], budget)
    lengths = [sample.num_tokens for part in micro_batches for sample in part]
    assert lengths == sorted(lengths, reverse=True)

    def cost(widths_of_parts):
        if any(len(widths) * widths[0] > budget and len(widths) > 1 for widths in widths_of_parts):
            return float("inf")
        return sum(len(widths) * widths[0] + budget / 32 for widths in widths_of_parts)

    others = []
    for marks in itertools.product([False, True], repeat=len(lengths) - 1):
        edges = [0, *(place for place, mark in enumerate(marks, start=1) if mark), len(lengths)]
        others.append(cost([lengths[start:end] for start, end in itertools.pairwise(edges)]))
    assert cost([[sample.num_tokens for sample in part] for part in micro_batches]) == pytest.approx(min(others))


def test_a_budget_below_one_token_is_refused():
    with pytest.raises(ValueError, match="micro_batch_tokens"):
        cut([_sample(0, 1, 1)], 0)


@given(st.lists(st.integers()), st.integers(1, 5))
def test_every_rank_gets_as_many_micro_batches(micro_batches, num_ranks):
    rounds = deal(micro_batches, num_ranks, empty=None)
    assert all(len(dealt) == num_ranks for dealt in rounds)
    assert [part for dealt in rounds for part in dealt if part is not None] == micro_batches
    assert len(rounds) == -(-len(micro_batches) // num_ranks)


def test_collated_tensors_line_up_with_the_tokens_they_are_of():
    samples = [_sample(0, 3, 2, advantage=0.5), _sample(1, 2, 5, advantage=-1.0)]
    micro_batch = collate([[sample] for sample in samples], _TOKEN_MEAN)
    assert micro_batch.token_ids.tolist() == [[1, 1, 1, 10, 11, 0, 0], [1, 1, 10, 11, 12, 13, 14]]
    assert micro_batch.targets.tolist() == [2, 3, 4, 5, 6]
    assert micro_batch.weights.tolist() == [[0, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert micro_batch.behaviour_logprobs.tolist() == [[0, -1, -2, 0, 0], [-1, -2, -3, -4, -5]]
    assert micro_batch.own_version.tolist() == [[False, True, False, False, False], [True, False, True, False, True]]
    assert micro_batch.advantages.tolist() == [[0, 0.5, 0.5, 0, 0], [-1, -1, -1, -1, -1]]
    assert micro_batch.sample_index.tolist()[0][1:3] == [0, 0]
    assert micro_batch.sample_index.tolist()[1] == [1, 1, 1, 1, 1]
    assert micro_batch.segments is None


def test_answers_in_one_row_stand_where_they_would_alone():
    rows = [[_sample(0, 3, 2, advantage=0.5), _sample(0, 3, 1, advantage=-1.0)], [_sample(1, 2, 4, advantage=2.0)]]
    micro_batch = collate(rows, _TOKEN_MEAN)
    assert micro_batch.token_ids.tolist() == [[1, 1, 1, 10, 11, 1, 10], [1, 1, 10, 11, 12, 13, 0]]
    assert micro_batch.segments.tolist() == [[0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, -1]]
    assert micro_batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 2, 3], [0, 1, 2, 3, 4, 5, 0]]
    assert micro_batch.targets.tolist() == [2, 3, 4, 5, 6]
    assert micro_batch.weights.tolist() == [[0, 1, 1, 0, 1], [1, 1, 1, 1, 0]]
    assert micro_batch.behaviour_logprobs.tolist() == [[0, -1, -2, 0, -1], [-1, -2, -3, -4, 0]]
    assert micro_batch.sample_index.tolist() == [[0, 0, 0, 0, 1], [2, 2, 2, 2, 0]]
    assert micro_batch.advantages.tolist() == [[0, 0.5, 0.5, 0, -1], [2, 2, 2, 2, 0]]
    assert micro_batch.num_samples == 3


def test_packed_rows_stand_one_behind_the_other_and_answers_alone_are_targets():
    rows = [[_sample(0, 3, 2, advantage=0.5), _sample(0, 3, 1, advantage=-1.0)], [_sample(1, 2, 4, advantage=2.0)]]
    micro_batch = collate(rows, _TOKEN_MEAN, packed=True)
    assert micro_batch.token_ids.tolist() == [[1, 1, 1, 10, 11, 1, 10, 1, 1, 10, 11, 12, 13]]
    assert micro_batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 2, 3, 0, 1, 2, 3, 4, 5]]
    assert micro_batch.targets.tolist() == [3, 4, 6, 9, 10, 11, 12]
    assert micro_batch.weights.tolist() == [[1] * 7]
    assert micro_batch.behaviour_logprobs.tolist() == [[-1, -2, -1, -1, -2, -3, -4]]
    assert micro_batch.sample_index.tolist() == [[0, 0, 1, 2, 2, 2, 2]]
    assert micro_batch.advantages.tolist() == [[0.5, 0.5, -1, 2, 2, 2, 2]]
    assert micro_batch.own_version.tolist() == [[True, False, True, True, False, True, False]]
    assert micro_batch.segments is None
    assert micro_batch.num_samples == 3


def test_what_every_sample_has_of_its_tokens_is_laid_out_with_them():
    tokens = torch.tensor([0.25, 0.5])
    whole = dataclasses.replace(
        _sample(0, 3, 2), advantage=tokens, values=tokens, returns=tokens, reference_logprobs=tokens
    )
    micro_batch = collate([[whole], [dataclasses.replace(_sample(1, 2, 2), values=tokens)]], _TOKEN_MEAN)
    assert micro_batch.advantages.tolist() == [[0, 0.25, 0.5], [1, 1, 0]]
    assert micro_batch.values.tolist() == [[0, 0.25, 0.5], [0.25, 0.5, 0]]
    assert micro_batch.returns is micro_batch.reference_logprobs is micro_batch.proximal_logprobs is None


def test_places_say_where_collate_puts_answers():
    rows = [[_sample(0, 3, 2), _sample(0, 3, 1)], [_sample(1, 2, 4)]]
    for packed in (False, True):
        micro_batch = collate(rows, _TOKEN_MEAN, packed=packed)
        for sample, place in zip([sample for row in rows for sample in row], places(rows, packed=packed), strict=True):
            answer = micro_batch.targets[place.answer]
            assert micro_batch.token_ids[place.row, answer].tolist() == sample.answer_token_ids


def test_an_answer_sees_its_prompt_and_itself():
    mask = attention_mask(torch.tensor([[0, 0, 1, 1, 2, -1]]))
    assert mask.shape == (1, 1, 6, 6)
    seen = [[index for index in range(6) if row[index]] for row in mask[0, 0].tolist()]
    assert seen == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 4], [0, 1, 5]]


@given(_SAMPLES)
def test_weights_of_a_sample_add_up_to_what_its_aggregation_counts(samples):
    for aggregation in (_TOKEN_MEAN, _SEQUENCE_MEAN):
        weights = collate([[sample] for sample in samples], aggregation).weights.sum(dim=1)
        counts = [loss_count([sample], aggregation) for sample in samples]
        torch.testing.assert_close(weights, torch.tensor(counts), rtol=1e-6, atol=1e-6)


def test_the_empty_micro_batch_weighs_nothing():
    assert empty_micro_batch().weights.sum() == 0


def test_a_micro_batch_survives_the_way_to_another_rank():
    shared = [[_sample(0, 3, 2)], [_sample(1, 2, 5), _sample(2, 2, 1)]]
    for rows, packed in ((shared, False), (shared, True), (shared[:1], True)):
        micro_batch = collate(rows, _SEQUENCE_MEAN, packed=packed)
        arrived = decode(encode(micro_batch))
        assert arrived.num_samples == micro_batch.num_samples
        assert arrived.tensors().keys() == micro_batch.tensors().keys()
        for name, tensor in micro_batch.tensors().items():
            assert torch.equal(arrived.tensors()[name], tensor)
            assert arrived.tensors()[name].dtype == tensor.dtype
        assert (arrived.spans is not None) == packed
        for field in dataclasses.fields(Spans) if packed else ():
            mine, theirs = getattr(arrived.spans, field.name), getattr(micro_batch.spans, field.name)
            assert torch.equal(mine, theirs) if isinstance(theirs, torch.Tensor) else mine == theirs


@pytest.mark.parametrize(("logprobs", "marks"), [([-1.0], [True, True]), ([-1.0, -1.0], [True])])
def test_a_sample_whose_parts_differ_in_length_is_refused(logprobs, marks):
    with pytest.raises(ValueError, match="as many"):
        TrainSample((0, 0, 0), [1], [2, 3], logprobs, 1.0, marks)


def test_a_sample_without_an_answer_is_refused():
    with pytest.raises(ValueError, match="at least one token"):
        TrainSample((0, 0, 0), [1], [], [], 1.0, [])


@given(_SAMPLES, st.integers(1, 200), st.integers(2, 5))
def test_a_cut_for_several_ranks_holds_every_sample_once_within_the_budget(samples, budget, num_ranks):
    rounds = deal(cut(samples, budget, num_ranks), num_ranks, [])
    assert sorted(sample.identity for dealt in rounds for part in dealt for sample in part) == [
        sample.identity for sample in samples
    ]
    for dealt in rounds:
        assert dealt[0]
        for part in filter(None, dealt):
            assert len(part) == 1 or len(part) * part[0].num_tokens <= budget
            assert len(part) == 1 or len(part) * part[0].num_tokens <= len(dealt[0]) * dealt[0][0].num_tokens
    # Only where samples have run out do ranks have nothing.
    assert all(all(dealt) for dealt in rounds[:-1])


def _slowest(rounds):
    """What all ranks wait for: of each round the largest micro-batch."""
    return sum(max(len(part) * part[0].num_tokens for part in dealt if part) for dealt in rounds)


def test_ranks_have_as_much_to_do_as_each_other():
    """Lengths with a long tail, as answers have them."""
    lengths = [max(1, round(24 * 2.718 ** (0.9 * (((index * 37) % 101) / 25 - 2)))) for index in range(256)]
    samples = [_sample(index, 4, min(length, 400)) for index, length in enumerate(lengths)]
    tokens = sum(sample.num_tokens for sample in samples)
    for num_ranks in (2, 4, 8):
        together = _slowest(deal(cut(samples, 4096, num_ranks), num_ranks, []))
        one_by_one = _slowest(deal(cut(samples, 4096), num_ranks, []))
        assert together <= one_by_one
        # Within a quarter of what no cut can do better than.
        assert together * num_ranks <= 1.25 * tokens


@given(_SAMPLES, st.integers(1, 200), st.integers(1, 5), st.randoms())
def test_a_packed_cut_holds_every_sample_once_within_the_budget_whatever_the_order(samples, budget, num_ranks, random):
    micro_batches = cut_packed(samples, budget, num_ranks)
    assert sorted(sample.identity for part in micro_batches for sample in part) == [
        sample.identity for sample in samples
    ]
    sizes = [sum(sample.num_tokens for sample in part) for part in micro_batches]
    assert sizes == sorted(sizes, reverse=True)
    assert all(size <= budget or len(part) == 1 for size, part in zip(sizes, micro_batches, strict=True))
    shuffled = list(samples)
    random.shuffle(shuffled)
    assert cut_packed(shuffled, budget, num_ranks) == micro_batches


def test_packed_ranks_wait_for_next_to_nothing():
    """Lengths with a long tail, as answers have them: no padding, and as few rounds as hold the tokens."""
    lengths = [max(1, round(24 * 2.718 ** (0.9 * (((index * 37) % 101) / 25 - 2)))) for index in range(256)]
    samples = [_sample(index, 4, min(length, 400)) for index, length in enumerate(lengths)]
    tokens = sum(sample.num_tokens for sample in samples)
    for num_ranks in (1, 2, 4, 8):
        rounds = deal(cut_packed(samples, 2048, num_ranks), num_ranks, [])
        assert len(rounds) == -(-tokens // (2048 * num_ranks))
        slowest = sum(max(sum(sample.num_tokens for sample in part) for part in dealt) for dealt in rounds)
        assert slowest * num_ranks <= 1.02 * tokens


def test_a_few_equal_samples_are_spread_over_all_ranks():
    samples = [_sample(index, 2, 8) for index in range(8)]
    assert [len(part) for part in cut(samples, 1000, 4)] == [2, 2, 2, 2]
