"""The counting task: "to 68 from 47" is to be answered "48 49 … 68". Data only: no model, no torch.

Made for a first run on two cores: an exact checker, and answers whose length is decided by what the prompt says and not
by how long it is. The distance from A to B is log-normal, so lengths have a long tail (median 24 tokens, longest 128).
A model that was shown clerks who often stop at a round number (see tiny_model.py) learns by reinforcement to go on.
"""

from dataclasses import dataclass

import numpy as np

MAX_NUMBER = 127
NUM_HELD_OUT = 512
NUM_TRAIN = 2048
# Longest answer with its end token: from 0 to 127.
MAX_ANSWER_TOKENS = MAX_NUMBER + 1
# Stretch of the answer, log-normal: exp(mean of the logarithm), standard deviation of the logarithm.
MEDIAN_DISTANCE = 24.0
DISTANCE_SIGMA = 0.9

# The held-out prompts are the same in every run, whatever its seed: accuracies stay comparable and a cached model never
# saw them.
_HELD_OUT_SEED = 20261129


@dataclass(frozen=True)
class CountingPrompt:
    """Count from `start` (left out) to `stop` (included); 0 <= start < stop <= 127."""

    start: int
    stop: int

    @property
    def text(self) -> str:
        """The prompt: four words for every prompt."""
        return f"to {self.stop} from {self.start}"

    @property
    def answer(self) -> str:
        """The one right answer: `stop - start` words."""
        return " ".join(str(number) for number in range(self.start + 1, self.stop + 1))

    @property
    def id(self) -> str:
        return f"counting-{self.start}-{self.stop}"


def draw_prompt(generator: np.random.Generator, median_distance: float, sigma: float) -> CountingPrompt:
    """A prompt whose distance is log-normal, redrawn until it is 1 to 127, and whose start is uniform where it fits."""
    while True:
        distance = round(generator.lognormal(np.log(median_distance), sigma))
        if 1 <= distance <= MAX_NUMBER:
            start = int(generator.integers(0, MAX_NUMBER - distance + 1))
            return CountingPrompt(start, start + distance)


def held_out_prompts() -> list[CountingPrompt]:
    """The 512 prompts of evaluation, in a fixed order; no training and no warm start may use them."""
    return _draw_distinct(np.random.default_rng(_HELD_OUT_SEED), NUM_HELD_OUT, excluded=frozenset())


def train_prompts(seed: int) -> list[CountingPrompt]:
    """2,048 distinct prompts for training, none of them held out, of the same distribution."""
    return _draw_distinct(np.random.default_rng(seed), NUM_TRAIN, excluded=frozenset(held_out_prompts()))


def _draw_distinct(
    generator: np.random.Generator, count: int, excluded: frozenset[CountingPrompt]
) -> list[CountingPrompt]:
    drawn: dict[CountingPrompt, None] = {}
    while len(drawn) < count:
        prompt = draw_prompt(generator, MEDIAN_DISTANCE, DISTANCE_SIGMA)
        if prompt not in excluded:
            drawn[prompt] = None
    return list(drawn)
