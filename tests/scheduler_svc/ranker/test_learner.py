"""The learner, on rules that a second is enough to learn."""

from pathlib import Path

import numpy as np
import pytest

from scheduler_svc.ranker.examples import Example
from scheduler_svc.ranker.kept import load_ranker, save_ranker
from scheduler_svc.ranker.learner import LengthLearner
from scheduler_svc.ranker.messages import FILE
from scheduler_svc.recall import recall_of_longest
from streamrl.planning.forecast import LEVELS, LengthForecast

LIMIT = 60


def difference_examples(count: int, seed: int, *, limit: int = 10_000) -> list[Example]:
    """Prompts of four tokens; answers are as long as the second says, and a little by chance."""
    generator = np.random.default_rng(seed)
    found = []
    for index in range(count):
        number = int(generator.integers(1, 100))
        whole = np.maximum(1, np.round(number * generator.lognormal(0, 0.1, 4))).astype(int)
        lengths, cut = np.minimum(whole, limit), whole > limit
        prompt = (5, 10 + number, 6, int(generator.integers(200, 230)))
        found.append(Example(f"{seed}-{index}", 0, prompt, tuple(lengths.tolist()), tuple(cut.tolist())))
    return found


@pytest.fixture(scope="module")
def learner() -> LengthLearner:
    """Has learned from answers that were cut at LIMIT."""
    learner = LengthLearner("", seed=0)
    learner.learn(difference_examples(600, seed=1, limit=LIMIT), 200)
    return learner


@pytest.mark.slow
def test_it_ranks_new_prompts(learner: LengthLearner) -> None:
    new = difference_examples(200, seed=2)
    forecasts = LengthForecast(learner.forecast([one.token_ids for one in new])).mean
    # Nothing tells apart those that it saw cut: they are about two fifths.
    assert recall_of_longest(forecasts.tolist(), [sum(one.lengths) for one in new], 0.4) > 0.8


@pytest.mark.slow
def test_answers_that_were_cut_are_foretold_to_be_longer_than_the_cut(learner: LengthLearner) -> None:
    long, short = learner.forecast([(5, 10 + 99, 6, 210), (5, 10 + 8, 6, 210)])
    median = LEVELS.index(0.5)
    assert long[median] > LIMIT
    assert short[median] == pytest.approx(8, rel=0.4)


@pytest.mark.slow
def test_the_order_and_company_of_prompts_changes_no_forecast(learner: LengthLearner) -> None:
    prompts = [(5, 20, 6, 210), (5, 90, 6), (7, 7, 7, 7, 7, 7, 7), (1,)]
    together = learner.forecast(prompts)
    for index, prompt in enumerate(prompts):
        assert np.allclose(learner.forecast([prompt])[0], together[index], rtol=1e-4)


@pytest.mark.slow
def test_what_is_kept_goes_on_as_it_was(learner: LengthLearner, tmp_path: Path) -> None:
    examples = difference_examples(70, seed=3)
    save_ranker(tmp_path / "ranker", "", learner, examples)
    other = LengthLearner("", seed=9)
    assert load_ranker(tmp_path / "ranker", "", other) == examples
    assert other.num_steps == learner.num_steps
    prompts = [one.token_ids for one in examples]
    assert np.array_equal(other.forecast(prompts), learner.forecast(prompts))


@pytest.mark.slow
def test_what_is_damaged_or_of_another_model_is_not_taken(learner: LengthLearner, tmp_path: Path) -> None:
    other = LengthLearner("", seed=9)
    with pytest.raises(FileNotFoundError):
        load_ranker(tmp_path, "", other)
    save_ranker(tmp_path, "", learner, [])
    with pytest.raises(ValueError, match="base model"):
        load_ranker(tmp_path, "some/model", other)
    file = tmp_path / FILE
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match="damaged"):
        load_ranker(tmp_path, "", other)
    assert other.num_steps == 0


def test_it_stands_on_a_base_model_too(tmp_path: Path) -> None:
    from transformers import Qwen2Config, Qwen2Model

    config = Qwen2Config(
        vocab_size=300,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=64,
    )
    Qwen2Model(config).save_pretrained(tmp_path)
    learner = LengthLearner(str(tmp_path), seed=0)
    examples = difference_examples(64, seed=4)
    first = learner.learn(examples, 1)
    assert learner.learn(examples, 20) < first
    assert learner.forecast([(5, 20, 6, 210)]).shape == (1, len(LEVELS))
    with pytest.raises(ValueError, match="policy's tokens"):
        learner.forecast([(5, 300)])
