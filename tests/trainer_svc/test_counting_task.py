"""Tests of trainer_svc.counting_task."""

import numpy as np

from trainer_svc.counting_task import (
    MAX_ANSWER_TOKENS,
    NUM_HELD_OUT,
    NUM_TRAIN,
    CountingPrompt,
    held_out_prompts,
    train_prompts,
)


def test_a_prompt_says_where_to_stop_and_the_answer_goes_there() -> None:
    prompt = CountingPrompt(start=47, stop=50)
    assert (prompt.text, prompt.answer, prompt.id) == ("to 50 from 47", "48 49 50", "counting-47-50")


def test_prompts_are_distinct_and_held_out_ones_are_never_trained() -> None:
    held_out = held_out_prompts()
    assert len(set(held_out)) == len(held_out) == NUM_HELD_OUT
    for seed in range(3):
        train = train_prompts(seed)
        assert len(set(train)) == len(train) == NUM_TRAIN
        assert not set(train) & set(held_out)


def test_training_prompts_depend_on_the_seed_and_held_out_ones_do_not() -> None:
    assert train_prompts(1) == train_prompts(1)
    assert train_prompts(1) != train_prompts(2)
    assert held_out_prompts() == held_out_prompts()


def test_answers_are_long_tailed_and_prompts_do_not_show_it() -> None:
    for prompts in (held_out_prompts(), train_prompts(0)):
        lengths = np.array([len(prompt.answer.split()) + 1 for prompt in prompts])
        assert lengths.min() >= 2
        assert lengths.max() <= MAX_ANSWER_TOKENS
        assert np.median(lengths) < lengths.max() / 4
        assert np.percentile(lengths, 90) > 2 * np.median(lengths)
        assert {len(prompt.text.split()) for prompt in prompts} == {4}
