"""The figure of a search: time against memory of every trial that ran."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_opt.memory.figures import new_figure
from lightning_opt.tuner.trial import Trial

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLES = {
    "accepted": ("#0072B2", "o", "learns the same"),
    "rejected": ("#D55E00", "X", "changes the result"),
    "no gain": ("#9a9a9a", "o", "no gain"),
    "too slow": ("#9a9a9a", "v", "too slow"),
    "baseline": ("#222222", "s", "baseline"),
}


def draw(trials: Sequence[Trial], best: Trial, title: str) -> Figure:
    """Draw the trials and the answer.

    Raises:
        ImportError: Without matplotlib; the message names the extra.
    """
    figure = new_figure("autotune", figsize=(9.5, 6.0), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    shown = [trial for trial in trials if trial.ratio is not None and trial.peak_ratio is not None]
    for verdict, (colour, marker, label) in STYLES.items():
        places = [(t.ratio, t.peak_ratio) for t in shown if t.verdict == verdict]
        if places:
            across, up = zip(*places, strict=True)
            axes.scatter(across, up, s=55, color=colour, marker=marker, label=label)
    for trial in shown:
        axes.annotate(
            trial.name, (trial.ratio or 0.0, trial.peak_ratio or 0.0), fontsize=7.5,
            xytext=(6, 5), textcoords="offset points",
            weight="bold" if trial is best else "normal",
        )  # fmt: skip
    if any((trial.ratio or 0.0) > 3 for trial in shown):
        axes.set_xscale("log")
    axes.axvline(1, color="#222222", lw=0.6, ls=":")
    axes.axhline(1, color="#222222", lw=0.6, ls=":")
    axes.set_xlabel("time of a step, as a share of the baseline's (left is better)")
    axes.set_ylabel("peak memory, as a share of the baseline's (lower is better)")
    axes.set_title(title, loc="left", fontsize=11, weight="bold")
    axes.grid(alpha=0.2)
    axes.legend(fontsize=8)
    return figure
