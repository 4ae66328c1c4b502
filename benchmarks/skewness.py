"""Dispatch policies on the paper's lengths and latencies: makespan of a batch over that of random FIFO.

A cell is a fleet and a batch; a seed draws lengths, estimates and the random deal, the same for all policies. What is
gained is told as g = (1 - ratio) / (1 - bound): the ratio is the makespan over random FIFO's, the bound the larger of
the longest answer alone and all work at full batches on all instances, over the same. Cells where 1 - bound is under
0.05 are left out. The simulated instances are those of generator_svc's fake engine. The batch limit stands for the KV
cache, as in the paper's Eq 2; prompts are free, tokens that are computed again after a move are not.

Ours (`makespan`) dispatches once, and then looks at the progress a few times and moves work.
"""

import itertools
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks import paper_workload
from benchmarks.result import Cell, Result
from streamrl.planning.completion import Work
from streamrl.planning.forecast import Array, LengthForecast
from streamrl.planning.makespan import FleetMember, plan_makespan
from streamrl.planning.moves import Rules, choose_moves
from streamrl.planning.profile import InstanceProfile
from streamrl.planning.simulated_fleet import SimulatedFleet, makespan_s, run
from streamrl.planning.simulated_instance import SimulatedSequence
from streamrl.planning.skewness import plan_by_skewness
from streamrl.planning.standing import Standing

logger = logging.getLogger(__name__)

NUM_SEEDS = 20
HELD_TOKEN_S = (0.0, paper_workload.HELD_TOKEN_S)
NUM_INSTANCES = (4, 16, 64)
BATCH_LIMITS = (32, 64, 256)
NUM_PROMPTS = (512, 1024, 4096)
ESTIMATES: dict[str, paper_workload.Estimate] = {
    "true_lengths": paper_workload.true_lengths,
    "log_normal_error": paper_workload.log_normal_error,
    "overlooked_tail": paper_workload.overlooked_tail,
}
TRANSFER_S = 0.3
NUM_LOOKS = 12
"""How often, over the expected makespan, the scheduler looks at the progress; towards its end 8 times as often."""
LEAST_ROOM = 0.05
GOALS = {
    ("true_lengths", "two_waves_or_more"): 0.80,
    ("true_lengths", "fewer_waves"): 0.80,
    ("log_normal_error", "two_waves_or_more"): 0.75,
    ("log_normal_error", "fewer_waves"): 0.30,
}
OURS = "makespan"
POLICIES = (OURS, "round_robin", "paper", "paper_max")

Shares = Sequence[Sequence[int]]
Makespans = dict[tuple[str, str], float]
"""Seconds by (estimate, policy); ("", "random_fifo") and ("", "bound") are of all estimates."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A cell."""

    held_token_s: float
    num_instances: int
    batch_limit: int
    num_prompts: int

    @property
    def name(self) -> str:
        held = "held_context" if self.held_token_s else "no_held_context"
        return f"{held}/{self.num_instances}_instances/batch_{self.batch_limit}/{self.num_prompts}_prompts"

    @property
    def regime(self) -> str:
        waves = self.num_prompts / (self.num_instances * self.batch_limit)
        return "two_waves_or_more" if waves >= 2 else "fewer_waves"

    @property
    def profile(self) -> InstanceProfile:
        return InstanceProfile(
            paper_workload.TOKEN_LATENCY,
            self.batch_limit,
            held_token_s=self.held_token_s,
            prefill_token_s=paper_workload.PREFILL_TOKEN_S,
        )


def measure() -> Result:
    """All cells; a quarter of an hour of one core."""
    played = {}
    for setup in setups():
        started = time.process_time()
        played[setup] = [play(setup, seed) for seed in range(NUM_SEEDS)]
        logger.info("%s: %.1f s", setup.name, time.process_time() - started)
    return summarise(played)


def summarise(played: Mapping[Setup, Sequence[Makespans]]) -> Result:
    """From the makespans of each cell, a row a seed, to what is reported."""
    result = Result(
        "skewness",
        {
            "num_seeds": len(next(iter(played.values()))),
            "num_looks": NUM_LOOKS,
            "transfer_s": TRANSFER_S,
            "prefill_token_s": paper_workload.PREFILL_TOKEN_S,
            "held_token_s": paper_workload.HELD_TOKEN_S,
            "log_error": paper_workload.LOG_ERROR,
        },
    )
    gains: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    worse: Counter[tuple[str, str, str]] = Counter()
    for setup, rows in played.items():
        for estimate, policy in itertools.product(ESTIMATES, POLICIES):
            cell, gain, worse_than = _compare(setup, rows, estimate, policy)
            result.cells.append(cell)
            worse.update((estimate, policy, other) for other in worse_than)
            if gain is not None:
                gains[estimate, policy, setup.regime].append(gain)
    for (estimate, policy, regime), values in sorted(gains.items()):
        mean, unit = float(np.mean(values)), f"mean g of {len(values)} cells"
        goal = GOALS.get((estimate, regime)) if policy == OURS else None
        met = None if goal is None else mean >= goal
        result.cells.append(Cell(f"g/{estimate}/{policy}/{regime}", mean, unit, "bound", None, goal, met))
    for estimate, policy, other in itertools.product(ESTIMATES, POLICIES, ("random_fifo", "round_robin")):
        if policy != other:
            count = worse[estimate, policy, other]
            goal, met = (0, count == 0) if policy == OURS else (None, None)
            name = f"worse_by_two_standard_errors/{estimate}/{policy}"
            result.cells.append(Cell(name, count, f"of {len(played)} cells", other, None, goal, met))
    return result


def setups() -> Iterator[Setup]:
    """The cells."""
    for values in itertools.product(HELD_TOKEN_S, NUM_INSTANCES, BATCH_LIMITS, NUM_PROMPTS):
        yield Setup(*values)


def play(setup: Setup, seed: int) -> Makespans:
    """One seed of a cell."""
    generator = np.random.default_rng([seed, setup.num_instances, setup.batch_limit, setup.num_prompts])
    lengths = paper_workload.draw_lengths(setup.num_prompts, generator)
    shuffled = generator.permutation(setup.num_prompts)
    size = setup.num_instances
    random = [np.sort(shuffled[turn::size]).tolist() for turn in range(size)]
    found = {
        ("", "random_fifo"): _still(setup, random, lengths, np.zeros(len(lengths))),
        ("", "bound"): bound_s(setup, lengths),
    }
    for name, estimate in ESTIMATES.items():
        estimates, forecast = estimate(lengths, generator)
        by_length = np.argsort(-estimates, kind="stable").tolist()
        found[name, "round_robin"] = _still(setup, [by_length[turn::size] for turn in range(size)], lengths, estimates)
        for policy in ("paper", "paper_max"):
            plan = plan_by_skewness(
                estimates.tolist(),
                size,
                token_latency=paper_workload.TOKEN_LATENCY,
                max_batch=setup.batch_limit,
                length_p50=paper_workload.LENGTH_P50,
                length_p90=paper_workload.LENGTH_P90,
                objective="sum" if policy == "paper" else "max",
            )
            found[name, policy] = _still(setup, plan.instances, lengths, estimates)
        found[name, OURS] = _ours(setup, lengths, forecast)
    return found


def bound_s(setup: Setup, lengths: NDArray[np.int64]) -> float:
    """No plan is faster: the longest answer alone, or all work at full batches on all instances."""
    latency, held_s = paper_workload.TOKEN_LATENCY, setup.held_token_s
    longest = float(lengths.max())
    alone = latency(1) * longest + held_s * longest**2 / 2
    work = lengths * latency(setup.batch_limit) / setup.batch_limit + held_s * lengths.astype(np.float64) ** 2 / 2
    return max(alone, float(work.sum()) / setup.num_instances)


def _still(setup: Setup, shares: Shares, lengths: NDArray[np.int64], estimates: Array) -> float:
    """When nothing moves."""
    return makespan_s(_sequences(shares, lengths, estimates), [setup.profile] * setup.num_instances)


def _ours(setup: Setup, lengths: NDArray[np.int64], forecast: LengthForecast) -> float:
    profiles = [setup.profile] * setup.num_instances
    work = Work(forecast, np.ones(len(lengths), dtype=np.int64), np.zeros(len(lengths)))
    plan = plan_makespan(work, [FleetMember(profile) for profile in profiles])
    expected = forecast.mean
    fleet = SimulatedFleet(profiles, transfer_s=TRANSFER_S)
    for instance, sequences in enumerate(_sequences(plan.shares, lengths, expected)):
        fleet.submit(instance, sequences)

    def look(fleet: SimulatedFleet) -> None:
        keys, standing = _standing(fleet, forecast, expected)
        for move in choose_moves(standing, profiles, Rules(transfer_s=TRANSFER_S)):
            fleet.move(keys[move.answer], int(standing.instance[move.answer]), move.target)

    most_s, least_s = plan.expected_s / NUM_LOOKS, plan.expected_s / (8 * NUM_LOOKS)
    return run(fleet, look, lambda now_s: max(min(most_s, (plan.expected_s - now_s) / 2), least_s))


def _sequences(shares: Shares, lengths: NDArray[np.int64], estimates: Array) -> list[list[SimulatedSequence]]:
    tokens, priorities = lengths.tolist(), (-estimates).tolist()
    return [[SimulatedSequence(index, tokens[index], priorities[index]) for index in share] for share in shares]


def _standing(fleet: SimulatedFleet, forecast: LengthForecast, expected: Array) -> tuple[list[int], Standing]:
    """What a scheduler sees."""
    seen = [
        (sequence.key, number, sequence.running, instance.tokens_there(sequence))
        for number, instance in enumerate(fleet.instances)
        for sequence in (*instance.running.values(), *instance.waiting.values())
    ]
    keys = [int(str(key)) for key, _, _, _ in seen]
    rows = np.array(keys, dtype=np.int64)
    return keys, Standing(
        forecast=forecast,
        row=rows,
        instance=np.array([number for _, number, _, _ in seen], dtype=np.int64),
        running=np.array([running for _, _, running, _ in seen], dtype=bool),
        tokens_there=np.array([tokens for _, _, _, tokens in seen], dtype=np.float64),
        prompt_tokens=np.zeros(len(seen)),
        rank=-expected[rows],
    )


def _compare(
    setup: Setup, rows: Sequence[Makespans], estimate: str, policy: str
) -> tuple[Cell, float | None, list[str]]:
    """One policy in one cell: its mean ratio, g where there is room, and what it is worse than by 2 standard errors."""
    makespans = np.array([row[estimate, policy] for row in rows])
    random = np.array([row["", "random_fifo"] for row in rows])
    bound = np.array([row["", "bound"] for row in rows])
    room = 1 - bound.mean() / random.mean()
    gain = float((1 - makespans.mean() / random.mean()) / room) if room >= LEAST_ROOM else None
    worse_than = []
    for other, theirs in (
        ("random_fifo", random),
        ("round_robin", np.array([row[estimate, "round_robin"] for row in rows])),
    ):
        difference = (makespans - theirs) / random
        if other != policy and difference.mean() > 2 * _standard_error(difference) + 1e-9:
            worse_than.append(other)
    ratios = makespans / random
    told = "no room" if gain is None else f"g {gain:.3f}"
    unit = f"of the makespan, standard error {_standard_error(ratios):.4f}, {told}"
    if worse_than:
        unit += f", worse than {' and '.join(worse_than)}"
    name = f"{estimate}/{policy}/{setup.name}"
    return Cell(name, float(ratios.mean()), unit, "random_fifo", float(ratios.mean())), gain, worse_than


def _standard_error(values: Array) -> float:
    return float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
