"""The figure of a search: time against memory of every trial that ran."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_opt.memory.figures import new_figure
from lightning_opt.tuner.trials.trial import Trial

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY, BLACK = "#0072B2", "#D55E00", "#9a9a9a", "#222222"
STYLES = {
    "accepted": (BLUE, "o", "learns the same"),
    "rejected": (ORANGE, "X", "changes the result"),
    "no gain": (GREY, "o", "no gain"),
    "too slow": (GREY, "v", "stopped: too slow"),
    "baseline": (BLACK, "s", "baseline"),
}


def front(trials: Sequence[Trial]) -> list[Trial]:
    """Return the accepted trials than which none is both faster and smaller, by time.

    Args:
        trials: Those that ran, the baseline among them.
    """
    able = [trial for trial in trials if trial.verdict in ("accepted", "baseline")]
    able.sort(key=lambda trial: (trial.ratio or 0.0, trial.peak_ratio or 0.0))
    found: list[Trial] = []
    for trial in able:
        if not found or (trial.peak_ratio or 0.0) < (found[-1].peak_ratio or 0.0):
            found.append(trial)
    return found


def draw(trials: Sequence[Trial], best: Trial, title: str) -> Figure:
    """Draw the trials, the Pareto front and the answer.

    Raises:
        ImportError: Without matplotlib; the message names the extra.
    """
    figure = new_figure("autotune", figsize=(9.5, 6.0), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    shown = [trial for trial in trials if trial.ratio is not None and trial.peak_ratio is not None]

    def places(some: Sequence[Trial]) -> tuple[list[float], list[float]]:
        return [trial.ratio or 0.0 for trial in some], [trial.peak_ratio or 0.0 for trial in some]

    for verdict, (colour, marker, label) in STYLES.items():
        of_kind = [trial for trial in shown if trial.verdict == verdict]
        if of_kind:
            axes.scatter(*places(of_kind), s=55, color=colour, marker=marker, label=label, zorder=3)
    line = front(shown)
    axes.step(
        *places(line), where="post", color=BLUE, lw=1, alpha=0.6, label="Pareto front", zorder=2
    )
    if best in shown:
        axes.scatter(*places([best]), s=260, facecolors="none",
                     edgecolors=BLUE, linewidths=2, label="the answer", zorder=4)  # fmt: skip
    for trial in shown:
        named = trial in line or len(shown) <= 12
        if named:
            axes.annotate(
                trial.name, (trial.ratio or 0.0, trial.peak_ratio or 0.0), fontsize=7.5,
                xytext=(6, 5), textcoords="offset points",
            )  # fmt: skip
    if any((trial.ratio or 0.0) > 3 for trial in shown):
        axes.set_xscale("log")
    axes.axvline(1, color=BLACK, lw=0.6, ls=":")
    axes.axhline(1, color=BLACK, lw=0.6, ls=":")
    axes.set_xlabel("time of a step, as a share of the baseline's (left is better)")
    axes.set_ylabel("peak memory, as a share of the baseline's (lower is better)")
    axes.set_title(title, loc="left", fontsize=11, weight="bold")
    axes.grid(alpha=0.2)
    axes.legend(fontsize=8)
    return figure
