"""What the ranker learns from."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.ranker.examples import MOST_PROMPT_TOKENS, Example, Examples, draw, seen_of


def example(prompt_id: str, batch: int = 0) -> Example:
    return Example(prompt_id, batch, (1, 2), (3, 4), (False, True))


def test_the_newest_answers_of_the_newest_prompts_are_kept() -> None:
    examples = Examples(most=2)
    for prompt_id, batch in (("a", 0), ("b", 0), ("a", 1), ("c", 1)):
        examples.add(example(prompt_id, batch))
    assert examples.all() == [example("a", 1), example("c", 1)]


@given(st.integers(1, 2000), st.integers(1, 64), st.integers(0, 5))
def test_a_step_takes_each_example_once_at_most(num_examples: int, count: int, seed: int) -> None:
    indices = draw(num_examples, count, np.random.default_rng(seed)).tolist()
    assert len(indices) == len(set(indices)) == min(count, num_examples)
    assert set(indices) <= set(range(num_examples))


@given(st.lists(st.integers(0, 50_000), max_size=3 * MOST_PROMPT_TOKENS))
def test_of_a_long_prompt_beginning_and_end_are_seen(token_ids: list[int]) -> None:
    seen = list(seen_of(token_ids))
    assert len(seen) == min(len(token_ids), MOST_PROMPT_TOKENS)
    assert seen[:32] == token_ids[:32] and seen[-128:] == token_ids[-128:][-len(seen) :]
