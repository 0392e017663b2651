"""The figure of a comparison: timings, and ratios with their intervals. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lightning_opt.core.ratios import Ratio

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {"slower": "#c0504d", "faster": "#2e8b57", "no difference": "#7f7f7f"}


def draw_ratios(
    owner: str, timings: Mapping[str, Sequence[float]], ratios: Mapping[str, Ratio], unit: str
) -> Figure:
    """Draw a box of the timings for each name, and beside it its ratio to the first.

    Raises:
        ImportError: Without matplotlib; the message names the extra.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"The figure of {owner} needs matplotlib: pip install 'lightning-opt[plots]'."
        ) from error
    names = list(timings)
    figure = Figure(figsize=(10, 1.6 + 0.5 * len(names)), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
    places = range(len(names))
    measured = [place for place in places if timings[names[place]]]
    left.boxplot(
        [list(timings[names[place]]) for place in measured],
        positions=measured,
        orientation="horizontal",
        showfliers=False,
    )
    left.set_yticks(list(places), names)
    left.set_xlabel(unit)
    left.set_xlim(left=0)
    left.invert_yaxis()
    right.axvline(1.0, color="black", linewidth=0.8)
    for place, name in enumerate(names):
        ratio = ratios.get(name)
        if ratio is not None:
            colour = COLOURS[ratio.verdict]
            right.plot([ratio.low, ratio.high], [place, place], color=colour, linewidth=2)
            right.plot([ratio.value], [place], "o", color=colour)
    right.set_xlabel(f"ratio to {names[0]}, with its interval")
    return figure
