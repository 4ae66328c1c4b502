"""How long answers will be, from all that is known: answers that came before, the ranker, or an oracle. Pure state.

A prompt that was answered before is best foretold by its last answers (history.py), a new one by the ranker, which
knows prompts like it. Where there are both they are weighed by how far each was off lately. What the ranker is to do is
noted here and fetched by whoever talks to its process (ranker/process.py); nothing waits for it except, for a moment, a
batch whose new prompts it is just looking at.
"""

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from scheduler_svc.history import LengthHistory
from scheduler_svc.ranker.examples import Example, seen_of
from scheduler_svc.recall import ForecastCheck, RecallFigures
from streamrl.planning.forecast import LEVELS, mean_length
from streamrl.v1.records_pb2 import Prompt

T = TypeVar("T")

PATIENCE_S = 0.5
"""A batch waits for so long for the ranker to look at new prompts."""

_MOST_FORECASTS = 100_000
_MOST_TO_LEARN = 10_000
_MOST_LEARNED = 500_000
_HELD_OUT_OF = 16
"""Of so many prompts one is never learned from, so that it can always be told how well new ones are foretold."""
_FIRST_ERROR, _FIRST_WEIGHT = 0.1, 32.0
_MEMORY = 0.998
"""Errors lose weight with each later one."""


@dataclass(frozen=True, slots=True)
class Foretold:
    """What was expected of a prompt's answers when they were dispatched, in tokens; None: nothing was known."""

    by_ranker: float | None
    by_history: float | None
    is_new: bool
    """The ranker had learned nothing from answers to this prompt."""


@dataclass(frozen=True, slots=True)
class RankerRequests:
    """What the ranker is to do."""

    to_score: Sequence[tuple[str, tuple[int, ...]]] = ()
    """Prompts: id, and token ids as the ranker sees them."""
    to_learn: Sequence[Example] = ()


@dataclass(slots=True)
class _LogError:
    """Mean square of the logarithm of what came over what was expected."""

    total: float = _FIRST_ERROR * _FIRST_WEIGHT
    weight: float = _FIRST_WEIGHT

    def add(self, expected: float, came: float) -> None:
        self.total = _MEMORY * self.total + math.log(came / expected) ** 2
        self.weight = _MEMORY * self.weight + 1.0

    @property
    def mean(self) -> float:
        return self.total / self.weight


class LengthEstimates:
    """Forecasts of answers' lengths."""

    def __init__(
        self, *, known_lengths: Mapping[str, Sequence[float]] | None = None, uses_ranker: bool = False
    ) -> None:
        """
        Args:
            known_lengths: of the answers to prompts, by id: what will come is no question.
            uses_ranker: whether to note what a ranker is to do.
        """
        self.history = LengthHistory()
        self._known = known_lengths or {}
        self.uses_ranker = uses_ranker
        self._ranker_is_ready = False
        self._refresh = False
        self._forecasts: dict[str, tuple[float, ...]] = {}
        """By the ranker, at `forecast.LEVELS`, by prompt."""
        self._learned: dict[str, None] = {}
        self._check = ForecastCheck()
        self._history_error, self._ranker_error = _LogError(), _LogError()
        self._to_score: dict[str, tuple[int, ...]] = {}
        self._asked_until: dict[str, float] = {}
        """Prompts that it was asked for and that have no forecast, and until when that is waited for."""
        self._to_learn: dict[str, Example] = {}

    # Forecasts.

    def forecast(self, prompt_id: str, max_tokens: int) -> tuple[float, ...]:
        """The distribution of the length of an answer, cut at `max_tokens`: lengths at `forecast.LEVELS`."""
        if (known := self._known.get(prompt_id)) is not None:
            lengths: Sequence[float] = quantiles_of(known)
        elif (ranked := self._forecasts.get(prompt_id)) is None:
            return self.history.forecast(prompt_id, max_tokens)
        elif self.history.last_mean(prompt_id) is None:
            lengths = ranked
        else:
            share = self._ranker_error.mean / (self._ranker_error.mean + self._history_error.mean)
            lengths = mixed(self.history.forecast(prompt_id, max_tokens), ranked, share)
        return tuple(max(1.0, min(length, float(max_tokens))) for length in lengths)

    def expected_tokens(self, prompt_id: str, max_tokens: int) -> int:
        """The mean of an answer's length; where there is only the history, what that expects.

        Returns:
            1 to `max_tokens`.
        """
        if (known := self._known.get(prompt_id)) is not None:
            expected = sum(min(length, max_tokens) for length in known) / len(known)
        elif prompt_id in self._forecasts:
            expected = mean_length(self.forecast(prompt_id, max_tokens))
        else:
            return self.history.expected_tokens(prompt_id, max_tokens)
        return max(1, min(round(expected), max_tokens))

    def foretell(self, prompt: Prompt) -> Foretold:
        """What is to be compared with the answers when they are there (`take_answers`)."""
        ranked = self._forecasts.get(prompt.prompt_id)
        most = float(prompt.sampling.max_tokens)
        return Foretold(
            None if ranked is None else mean_length([min(length, most) for length in ranked]),
            self.history.last_mean(prompt.prompt_id),
            is_new=prompt.prompt_id not in self._learned,
        )

    def recall(self) -> RecallFigures | None:
        """How well the ranker has foretold prompts that it had learned nothing of; None: too few have come."""
        return self._check.figures()

    # What comes.

    def take_prompt(self, prompt: Prompt) -> None:
        """A prompt that will have to be answered."""
        if self._ranker_is_ready:
            self._to_score[prompt.prompt_id] = seen_of(prompt.token_ids)

    def take_answers(
        self, prompt: Prompt, batch: int, answers: Sequence[tuple[int, bool]], foretold: Foretold | None
    ) -> None:
        """All answers to a prompt of a training batch, when that is over.

        Args:
            answers: tokens, 1 or more, and whether the answer was cut there; one answer or more.
        """
        prompt_id, came = prompt.prompt_id, sum(length for length, _ in answers) / len(answers)
        if foretold is not None and foretold.by_ranker is not None:
            if foretold.is_new:
                self._check.add(foretold.by_ranker, came)
            if foretold.by_history is not None:
                self._ranker_error.add(foretold.by_ranker, came)
                self._history_error.add(foretold.by_history, came)
        if not self.uses_ranker or is_held_out(prompt_id):
            return
        lengths, cut = zip(*answers, strict=True)
        _put_last(self._to_learn, prompt_id, Example(prompt_id, batch, seen_of(prompt.token_ids), lengths, cut))
        _forget_first(self._to_learn, _MOST_TO_LEARN)

    # The ranker.

    @property
    def num_to_learn(self) -> int:
        return len(self._to_learn)

    @property
    def has_requests(self) -> bool:
        return bool(self._to_score or self._to_learn)

    def take_requests(self, now: float) -> RankerRequests:
        """Everything that it is to do since the last call."""
        requests = RankerRequests(list(self._to_score.items()), list(self._to_learn.values()))
        for prompt_id in self._to_score:
            if prompt_id not in self._forecasts:
                self._asked_until[prompt_id] = now + PATIENCE_S
        self._note_learned(self._to_learn)
        self._to_score, self._to_learn = {}, {}
        return requests

    def take_forecasts(self, forecasts: Iterable[tuple[str, Sequence[float]]]) -> None:
        """Lengths at `forecast.LEVELS`, by prompt."""
        for prompt_id, lengths in forecasts:
            self._asked_until.pop(prompt_id, None)
            _put_last(self._forecasts, prompt_id, tuple(lengths))
        _forget_first(self._forecasts, _MOST_FORECASTS)

    def take_restored(self, examples: Iterable[Example]) -> None:
        """What it had learned from in an earlier life: these answers are part of the history again."""
        for example in examples:
            self._note_learned([example.prompt_id])
            for length in example.lengths:
                self.history.observe(example.prompt_id, example.batch, length)

    def ranker_learned(self) -> None:
        """It can forecast, or better than before."""
        self._ranker_is_ready = self._refresh = True

    def take_refresh(self) -> bool:
        """Whether prompts that wait should be looked at again (`take_prompt`)."""
        refresh, self._refresh = self._refresh, False
        return refresh

    def ranker_ended(self) -> None:
        """Nothing will come from it any more; what it has said still counts."""
        self.uses_ranker = self._ranker_is_ready = self._refresh = False
        self._to_score, self._to_learn, self._asked_until = {}, {}, {}

    def awaits(self, prompt_id: str, now: float) -> bool:
        """Whether a forecast of a new prompt is about to come."""
        if prompt_id in self._forecasts or self.history.last_mean(prompt_id) is not None:
            return False
        return prompt_id in self._to_score or now < self._asked_until.get(prompt_id, now)

    def next_deadline(self, now: float) -> float | None:
        """When, after `now`, a forecast is not waited for any more; None: none is."""
        while self._asked_until:
            prompt_id, until = next(iter(self._asked_until.items()))  # they were asked for in this order
            if until > now:
                return until
            del self._asked_until[prompt_id]
        return None

    def _note_learned(self, prompt_ids: Iterable[str]) -> None:
        for prompt_id in prompt_ids:
            _put_last(self._learned, prompt_id, None)
        _forget_first(self._learned, _MOST_LEARNED)


def quantiles_of(lengths: Sequence[float]) -> tuple[float, ...]:
    """Lengths at `forecast.LEVELS` of an answer that is as long as one of these, which are one or more."""
    ordered = sorted(lengths)
    return tuple(ordered[max(0, math.ceil(level * len(ordered)) - 1)] for level in LEVELS)


def mixed(first: Sequence[float], second: Sequence[float], share_of_first: float) -> tuple[float, ...]:
    """Two forecasts as one: at each level the geometric mean of their lengths, so weighed.

    Args:
        first, second: lengths at `forecast.LEVELS`, above 0.
        share_of_first: 0 to 1.
    """
    return tuple(a**share_of_first * b ** (1 - share_of_first) for a, b in zip(first, second, strict=True))


def is_held_out(prompt_id: str) -> bool:
    """Whether a prompt is never learned from: one in `_HELD_OUT_OF`, the same in every run."""
    return zlib.crc32(prompt_id.encode()) % _HELD_OUT_OF == 0


def _put_last(entries: dict[str, T], key: str, value: T) -> None:
    entries.pop(key, None)
    entries[key] = value


def _forget_first(entries: dict[str, T], most: int) -> None:
    for key in list(islice(entries, max(0, len(entries) - most))):
        del entries[key]
