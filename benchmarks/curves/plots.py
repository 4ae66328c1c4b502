"""A study's curves as an SVG: mean over seeds, and a band of their standard deviation."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.curves.kept_run import KeptRun

_PANELS = (
    ("reward/mean", "iteration", "mean reward of the batch's answers"),
    ("eval/accuracy", "weight version", "greedy accuracy, held out"),
)
_SIZE_INCHES = (9.0, 4.0)
_STYLE: dict[Any, Any] = {
    # Text stays text: smaller, and it can be searched.
    "svg.fonttype": "none",
    # The same data make the same file.
    "svg.hashsalt": "streamrl",
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_ALONE_ALPHA = 0.35


def draw(path: Path, arms: Mapping[str, Sequence[KeptRun]]) -> None:
    """
    Args:
        arms: kept runs by name of the arm; those without any are left out.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context(_STYLE):
        figure, axes = pyplot.subplots(1, len(_PANELS), figsize=_SIZE_INCHES, layout="constrained")
        for panel, (name, across, up) in zip(axes, _PANELS, strict=True):
            for number, (arm, runs) in enumerate(arms.items()):
                if runs:
                    _curve(panel, [run.figures[name] for run in runs], f"{arm} ({_seeds(len(runs))})", f"C{number}")
            panel.set_xlabel(across)
            panel.set_ylabel(up)
            panel.grid(alpha=0.3)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def _curve(panel: Any, series: Sequence[Any], label: str, colour: str) -> None:
    steps = np.array(series[0].steps)
    values = np.array([one.values for one in series])
    mean = values.mean(axis=0)
    panel.plot(steps, mean, color=colour, label=label, marker="o" if len(steps) < 10 else None, markersize=3)
    if len(values) > 1:
        deviation = values.std(axis=0, ddof=1)
        panel.fill_between(steps, mean - deviation, mean + deviation, color=colour, alpha=0.2, linewidth=0)
        for one in values:
            panel.plot(steps, one, color=colour, linewidth=0.5, alpha=_ALONE_ALPHA)


def _seeds(number: int) -> str:
    return "1 seed" if number == 1 else f"{number} seeds"
