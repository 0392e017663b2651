"""The figure of a run's time: what a step is made of, along the run. Measures nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lightning_opt.profiling.steps.step_measures import Measures


def draw_steps(measures: Measures) -> Figure:
    """Draw a bar for each stretch of the run: milliseconds a step, by phase.

    Raises:
        ImportError: Without matplotlib; the message names the extra.
        ValueError: If no step was profiled.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "The figure of StepProfiler needs matplotlib: pip install 'lightning-opt[plots]'."
        ) from error
    timeline, names = measures.clock.timeline, measures.clock.phases.names
    if not timeline.steps:
        raise ValueError("No training step was profiled, so there is nothing to draw.")
    totals: dict[int, float] = {}
    for stretch in timeline.stretches:
        for phase, seconds in stretch.items():
            totals[phase] = totals.get(phase, 0.0) + seconds
    figure = Figure(figsize=(12, 6), dpi=110, layout="constrained")
    axes = figure.subplots()
    starts = [timeline.steps_each * place for place in range(len(timeline.steps))]
    bottom = [0.0] * len(starts)
    colours = colormaps["tab20"]
    for place, phase in enumerate(sorted(totals, key=lambda number: -totals[number])):
        heights = [
            1e3 * stretch.get(phase, 0.0) / steps
            for stretch, steps in zip(timeline.stretches, timeline.steps, strict=True)
        ]
        share = totals[phase] / sum(totals.values())
        axes.bar(
            starts, heights, bottom=bottom, width=timeline.steps_each, align="edge",
            color=colours(place % 20),
            label=f"{names[phase]} {100 * share:.1f}%",
        )  # fmt: skip
        bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
    axes.set_title("What a training step takes", loc="left", fontsize=11)
    axes.set_xlabel("batch")
    axes.set_ylabel("ms a step, on the host")
    axes.grid(axis="y", alpha=0.25)
    # The handles of bars come in the order of the stack, so read from the bottom up.
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True)
    return figure
