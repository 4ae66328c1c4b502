"""How the fleet stands, and what should move: taken on the loop that owns the ledger, looked at in a thread.

A picture copies what it needs, in parts, so that the loop gets to its other work in between however large the fleet is.
What it leaves out: samples of instances that drain or are silent, and those whose answers are under way to the trainer.
What is found may be out of date by the time it is there; whoever asks for it looks whether it still holds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from scheduler_svc.balance import start_order
from scheduler_svc.observed_latency import fleet_profiles
from streamrl.identity import SampleKey
from streamrl.planning.dispatch import InstanceLoad, profile_of
from streamrl.planning.forecast import LengthForecast
from streamrl.planning.moves import Rules, choose_moves
from streamrl.planning.profile import InstanceProfile
from streamrl.planning.standing import Standing

if TYPE_CHECKING:
    from scheduler_svc.batches import Sample
    from scheduler_svc.registry import Life

_PART = 2_000
"""Samples that are copied at once: a few milliseconds."""
_TRANSFER_S = 0.3
"""From the request to an instance until another draws the next token, prompts not counted: the way of two messages of
the heartbeat stream, said at once, and of a record."""
_BATCH_RANKS, _EVALUATION_RANKS = 2.0**24, 2.0**50
"""Answers are shorter than that, and batches closer together."""


@dataclass(frozen=True, slots=True)
class Wish:
    """A sample that should go from one instance to another."""

    key: SampleKey
    dispatch: int
    source: "Life"
    target: "Life"
    begun: bool


@dataclass(frozen=True, slots=True)
class _Seen:
    """A sample that has not ended."""

    key: SampleKey
    dispatch: int
    life: int
    row: int
    """Of its group's forecast."""
    begun: bool
    tokens_there: int
    prompt_tokens: int
    rank: float
    movable: bool


class Picture:
    """Of instances that take work, two or more."""

    def __init__(self, lives: Sequence["Life"], *, move_running: bool, over_versions: bool) -> None:
        """
        Args:
            move_running: whether answers that have begun may move.
            over_versions: whether they may go on under another weight version than that of the instance that has them.
        """
        self._lives = lives
        self._move_running = move_running
        self._over_versions = over_versions
        measured = fleet_profiles(lives)
        self._all_measured = all(life.name in measured for life in lives)
        self._profiles = _with_prefill(
            [measured.get(life.name) or profile_of(InstanceLoad(life.name, life.request.max_running)) for life in lives]
        )
        self._versions = [life.heartbeat.weight_version for life in lives]
        self._seen: list[_Seen] = []
        self._lengths: list[Sequence[float]] = []
        self._rows: dict[tuple[int, int, int], int] = {}

    def parts(self) -> Iterator[None]:
        """Takes the picture, a part with each step. What changes between two steps may be seen twice or not at all."""
        since = 0
        for index, life in enumerate(self._lives):
            waiting = [sample for sample in life.samples.values() if sample.key not in life.begun]
            num_waiting = life.heartbeat.waiting
            # Of those that have not begun, as far as is known, the first have by now.
            waits = sorted(waiting, key=start_order)[-num_waiting:] if num_waiting else []
            runs = [life.samples[key] for key in life.tokens_there if key in life.samples]
            for sample in (*runs, *waits):
                self._copy(index, life, sample)
            since += len(life.samples)
            if since >= _PART:
                since = 0
                yield

    def _copy(self, index: int, life: "Life", sample: "Sample") -> None:
        key, group = sample.key, sample.group
        row = self._rows.setdefault((key.purpose, key.batch, key.group), len(self._lengths))
        if row == len(self._lengths):
            self._lengths.append(group.lengths)
        is_evaluation = key.batch_key.is_evaluation
        begun = key in life.tokens_there
        self._seen.append(
            _Seen(
                key=key,
                dispatch=sample.dispatch,
                life=index,
                row=row,
                begun=begun,
                tokens_there=life.tokens_there.get(key, sample.tokens_there),
                prompt_tokens=len(group.prompt.token_ids),
                rank=key.batch * _BATCH_RANKS - sample.expected_tokens - is_evaluation * _EVALUATION_RANKS,
                # Evaluations are pinned to a version.
                movable=not (is_evaluation or key in life.moves or key in life.revokes),
            )
        )

    def look(self) -> list[Wish]:
        """What should move. Pure: for a thread."""
        seen = self._seen
        if not seen:
            return []
        standing = Standing(
            forecast=LengthForecast(np.array(self._lengths, dtype=np.float64)),
            row=np.array([one.row for one in seen], dtype=np.int64),
            instance=np.array([one.life for one in seen], dtype=np.int64),
            running=np.array([one.begun for one in seen], dtype=bool),
            tokens_there=np.array([one.tokens_there for one in seen], dtype=np.float64),
            prompt_tokens=np.array([one.prompt_tokens for one in seen], dtype=np.float64),
            rank=np.array([one.rank for one in seen], dtype=np.float64),
        )
        rules = Rules(
            transfer_s=_TRANSFER_S,
            # By a guess of how fast instances are nobody knows whether the cost of moving comes back.
            move_running=self._move_running and self._all_measured,
            movable=np.array([one.movable for one in seen], dtype=bool),
            versions=None if self._over_versions else np.array(self._versions, dtype=np.int64),
        )
        return [
            Wish(
                seen[move.answer].key,
                seen[move.answer].dispatch,
                self._lives[seen[move.answer].life],
                self._lives[move.target],
                seen[move.answer].begun,
            )
            for move in choose_moves(standing, self._profiles, rules)
        ]


def _with_prefill(profiles: Sequence[InstanceProfile]) -> list[InstanceProfile]:
    """Where nothing is known of prompts, a token of one is taken to cost as much as one that is drawn in a full batch:
    more than it does. Equal ones stay one object."""
    found: dict[int, InstanceProfile] = {}
    for profile in profiles:
        if not profile.prefill_token_s:
            size = profile.max_running
            found.setdefault(id(profile), replace(profile, prefill_token_s=profile.token_latency(size) / size))
    return [found.get(id(profile), profile) for profile in profiles]
