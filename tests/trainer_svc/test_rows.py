import random
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from trainer_svc.microbatches import TrainSample
from trainer_svc.packed_attention import PACKED
from trainer_svc.rows import RowCost, make_rows, row_cost_of

_TOKENS_ONLY = RowCost(each_token=1.0, each_pair=0.0)


def _sample(group: int, index: int, prompt_length: int, answer_length: int) -> TrainSample:
    return TrainSample(
        identity=(0, group, index),
        prompt_token_ids=[1] * prompt_length,
        answer_token_ids=[2] * answer_length,
        behaviour_logprobs=[-1.0] * answer_length,
        advantage=1.0,
        own_version=[True] * answer_length,
    )


_GROUPS = st.lists(st.tuples(st.integers(1, 30), st.lists(st.integers(1, 40), min_size=1, max_size=8)), max_size=6).map(
    lambda groups: [
        _sample(group, index, prompt_length, length)
        for group, (prompt_length, lengths) in enumerate(groups)
        for index, length in enumerate(lengths)
    ]
)
_COSTS = st.one_of(st.none(), st.builds(RowCost, st.floats(0, 100), st.floats(0, 10)))


@given(_GROUPS, _COSTS, st.integers(1, 200), st.randoms())
def test_every_sample_has_one_row_whatever_the_order_of_arrival(
    samples: list[TrainSample], cost: RowCost | None, max_tokens: int, order: random.Random
) -> None:
    rows = make_rows(samples, cost, max_tokens)
    assert sorted(sample.identity for row in rows for sample in row.samples) == [one.identity for one in samples]
    for row in rows:
        assert len({sample.identity[:2] for sample in row.samples}) == 1
        assert row.num_tokens <= max_tokens or len(row.samples) == 1
    shuffled = list(samples)
    order.shuffle(shuffled)
    assert make_rows(shuffled, cost, max_tokens) == rows


@given(_GROUPS, _COSTS)
def test_sharing_never_costs_more(samples: list[TrainSample], cost: RowCost | None) -> None:
    rows = make_rows(samples, cost, 10_000)
    if cost is None:
        assert len(rows) == len(samples)
        return
    shared = sum(cost(row.num_tokens, shared=len(row.samples) > 1) for row in rows)
    apart = sum(cost(sample.num_tokens, shared=False) for sample in samples)
    assert shared <= apart * (1 + 1e-9)


def test_short_answers_to_a_long_prompt_share_it() -> None:
    samples = [_sample(0, index, 60, 6) for index in range(8)]
    (row,) = make_rows(samples, RowCost(135e6, 2 * 576 * 30), 2048)
    assert len(row.samples) == 8
    assert row.num_tokens == 59 + 8 * 7


def test_long_answers_to_a_short_prompt_do_not() -> None:
    samples = [_sample(0, index, 4, 4000) for index in range(8)]
    assert len(make_rows(samples, RowCost(135e6, 2 * 576 * 30), 100_000)) == 8


def test_in_packed_rows_every_prompt_is_shared() -> None:
    cost = row_cost_of(SimpleNamespace(_attn_implementation=PACKED), 1000)
    assert len(make_rows([_sample(0, index, 4, 4000) for index in range(8)], cost, 100_000)) == 1
    # There is nothing before the prompt's last token.
    assert len(make_rows([_sample(0, index, 1, 3) for index in range(8)], cost, 100_000)) == 8


def test_groups_do_not_mix() -> None:
    samples = [_sample(0, 0, 9, 1), _sample(1, 0, 9, 1)]
    assert len(make_rows(samples, _TOKENS_ONLY, 100)) == 2


def test_a_model_whose_attention_takes_no_mask_shares_nothing() -> None:
    config = SimpleNamespace(hidden_size=8, num_hidden_layers=2, _attn_implementation="sdpa", layer_types=None)
    config.sliding_window = 4
    assert row_cost_of(config, 1000) is None
    config.sliding_window = None
    assert row_cost_of(config, 1000) == RowCost(1000.0, 32.0)
    config.layer_types = ["full_attention", "sliding_attention"]
    assert row_cost_of(config, 1000) is None
    config.layer_types, config._attn_implementation = None, "flash_attention_2"
    assert row_cost_of(config, 1000) is None
