"""One instance in simulated time: continuous batching, from event to event. Pure.

Sequences are admitted by priority into a bounded number of places and a bounded cache; each step gives every running
one a token and takes as long as the profile says for that many sequences and the tokens that they hold. When the cache
is full the sequence of the last priority goes back to wait and its tokens are computed again, as vLLM does. Whoever
drives it decides what time is: generator_svc's fake engine plays it by the clock, simulated_fleet.py as fast as it can.
What it leaves out: prompts that are shared between sequences, and steps that mix a prompt with running sequences.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from streamrl.planning.profile import InstanceProfile


@dataclass(slots=True, eq=False)
class SimulatedSequence:
    """An answer that is being drawn."""

    key: Hashable
    num_tokens: int
    """When it ends."""
    priority: float
    """Lower first."""
    prompt_tokens: int = 0
    tokens_there: int = 0
    """Tokens that it had when it was last admitted, or waits with."""
    order: int = 0
    """Of equal priorities, the first to come goes first."""
    running: bool = False
    _admission: int = field(default=0, repr=False)
    _first_step: int = field(default=0, repr=False)
    _held_offset: float = field(default=0.0, repr=False)

    @property
    def held_tokens(self) -> int:
        """What its prompt and its answer take in the cache when it is admitted."""
        return self.prompt_tokens + self.tokens_there


class SimulatedInstance:
    """Time and steps go on in `advance` only."""

    def __init__(
        self, profile: InstanceProfile, on_steps: Callable[[int, float, float, float], None] | None = None
    ) -> None:
        """
        Args:
            on_steps: told of (batch size, seconds, number of steps, perhaps broken, tokens held, the mean over these
                steps) whenever steps are made.
        """
        self.profile = profile
        self.time_s = 0.0
        """How far it has come. It may be ahead of what `advance` was asked for, by the prompts that it computes."""
        self.running: dict[Hashable, SimulatedSequence] = {}
        self.waiting: dict[Hashable, SimulatedSequence] = {}
        self.computed_tokens = 0
        """Of prompts, and of answers that went on: each computed at once, not in a step."""
        self._steps = 0.0
        """Since the start, the fraction of the one under way included."""
        self._on_steps = on_steps
        self._held_offsets = 0.0
        """Tokens held now are this and, for each running sequence, the steps since the start."""
        self._order = itertools.count()
        self._queue: list[tuple[float, int, SimulatedSequence]] = []
        self._endings: list[tuple[int, int, SimulatedSequence]] = []
        self._step_s = [0.0, *map(profile.token_latency, range(1, profile.max_running + 1))]

    def submit(self, sequence: SimulatedSequence) -> None:
        """One that waits from now on."""
        sequence.order = next(self._order)
        self._wait(sequence)

    def withdraw(self, key: Hashable) -> SimulatedSequence | None:
        """Takes a sequence away with the tokens that it has; None: it has ended, or was never here."""
        sequence = self.waiting.pop(key, None)
        if sequence is None and key in self.running:
            sequence = self._stop(self.running[key])
        return sequence

    def tokens_there(self, sequence: SimulatedSequence) -> int:
        """Tokens of a sequence's answer by now."""
        if not sequence.running:
            return sequence.tokens_there
        return sequence.tokens_there + max(0, math.floor(self._steps) - sequence._first_step)

    @property
    def held_tokens(self) -> float:
        """Tokens in the cache."""
        return self._held_offsets + len(self.running) * self._steps

    def admit(self) -> list[SimulatedSequence]:
        """Fills free places, by priority.

        Returns:
            Those that begin, or go on, to run.
        """
        admitted = []
        while self._queue and len(self.running) < self.profile.max_running:
            sequence = self._queue[0][2]
            if self.waiting.get(sequence.key) is not sequence:
                heapq.heappop(self._queue)
                continue
            # One that would only be driven out by the next step does not begin. One alone always does.
            needed = self.held_tokens + sequence.held_tokens + len(self.running) + 1
            if self.running and needed > self.profile.kv_cache_tokens:
                break
            heapq.heappop(self._queue)
            del self.waiting[sequence.key]
            self._start(sequence)
            admitted.append(sequence)
        return admitted

    def next_event_s(self) -> float:
        """When the next sequence ends or is driven out; infinity when nothing runs."""
        if not self.running:
            return math.inf
        steps = self._next_event_step() - self._steps
        return self.time_s + self._duration_s(steps)

    def advance(self, until_s: float) -> list[tuple[SimulatedSequence, float]]:
        """Goes on until a time, admitting on the way; until nothing is left, if that is infinite.

        Returns:
            The sequences that ended, and when.
        """
        ended: list[tuple[SimulatedSequence, float]] = []
        self.admit()
        while self.running and self.time_s < until_s:
            ended += [(sequence, self.time_s) for sequence in self.step(until_s)]
            self.admit()
        if until_s < math.inf:
            self.stand_until(until_s)
        return ended

    def stand_until(self, time_s: float) -> None:
        """Lets time pass without a step."""
        self.time_s = max(self.time_s, time_s)

    def step(self, until_s: float) -> list[SimulatedSequence]:
        """Goes on to the next event, or to a time if that is earlier; something must run. Admits nothing.

        Returns:
            The sequences that ended.
        """
        target = self._next_event_step()
        num_steps = target - self._steps
        duration_s = self._duration_s(num_steps)
        if self.time_s + duration_s > until_s:
            duration_s = max(until_s - self.time_s, 0.0)
            num_steps = min(self._steps_in(duration_s), num_steps)
            target = self._steps + num_steps
        if self._on_steps is not None:
            size = len(self.running)
            self._on_steps(size, duration_s, num_steps, self.held_tokens + size * num_steps / 2)
        self.time_s += duration_s
        self._steps = target
        return self._end_sequences()

    def _end_sequences(self) -> list[SimulatedSequence]:
        ended = []
        endings = self._endings
        while endings and endings[0][0] <= self._steps:
            _, admission, sequence = heapq.heappop(endings)
            if self._is_current(admission, sequence):
                self._stop(sequence)
                ended.append(sequence)
        if not ended:
            self._drive_out()
        return ended

    def _drive_out(self) -> None:
        """Makes room for the next step."""
        while len(self.running) > 1 and self.held_tokens + 1e-6 >= self.profile.kv_cache_tokens:
            self._wait(self._stop(max(self.running.values(), key=lambda sequence: (sequence.priority, sequence.order))))

    def _wait(self, sequence: SimulatedSequence) -> None:
        self.waiting[sequence.key] = sequence
        heapq.heappush(self._queue, (sequence.priority, sequence.order, sequence))

    def _start(self, sequence: SimulatedSequence) -> None:
        self.computed_tokens += sequence.held_tokens
        self.time_s += sequence.held_tokens * self.profile.prefill_token_s
        sequence.running = True
        sequence._admission = next(self._order)
        sequence._first_step = math.ceil(self._steps)
        sequence._held_offset = sequence.held_tokens - self._steps
        self._held_offsets += sequence._held_offset
        self.running[sequence.key] = sequence
        last_step = sequence._first_step + sequence.num_tokens - sequence.tokens_there
        heapq.heappush(self._endings, (last_step, sequence._admission, sequence))

    def _stop(self, sequence: SimulatedSequence) -> SimulatedSequence:
        sequence.tokens_there = self.tokens_there(sequence)
        sequence.running = False
        self._held_offsets -= sequence._held_offset
        del self.running[sequence.key]
        return sequence

    def _next_event_step(self) -> float:
        endings = self._endings
        while not self._is_current(*endings[0][1:]):
            heapq.heappop(endings)
        step: float = endings[0][0]
        if len(self.running) > 1 and self.profile.kv_cache_tokens < math.inf:
            full = (self.profile.kv_cache_tokens - self._held_offsets) / len(self.running)
            step = min(step, max(full, self._steps))
        return step

    def _is_current(self, admission: int, sequence: SimulatedSequence) -> bool:
        """Whether a planned ending is of a sequence that still runs here, not of a stay that was cut short."""
        return self.running.get(sequence.key) is sequence and sequence._admission == admission

    def _duration_s(self, num_steps: float) -> float:
        """Of steps from now on, while nothing begins or ends. The tokens held grow by one a sequence and step; between
        whole steps time goes on evenly."""
        size, held_s = len(self.running), self.profile.held_token_s
        return num_steps * (self._step_s[size] + held_s * (self.held_tokens + size * num_steps / 2))

    def _steps_in(self, duration_s: float) -> float:
        """The inverse of `_duration_s`."""
        size, held_s = len(self.running), self.profile.held_token_s
        linear = self._step_s[size] + held_s * self.held_tokens
        return 2 * duration_s / (linear + math.sqrt(linear * linear + 2 * held_s * size * duration_s))
