"""Four problems that end a run or slow it down, each without and with lightning_opt.

1. A bad batch: one loss is a spike, a later one is NaN.
2. Out of memory: a GPT under a hard limit that its batch does not fit.
3. Half the memory of training: a GPT whose activations dominate.
4. A slow link: two processes, joined at 100 Mbit/s.

Everything runs on a CPU in separate processes. Nothing is downloaded. ``--act 2`` runs one act.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from matplotlib.axes import Axes
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RECORD = ROOT / "benchmarks" / "results" / "demo.json"
sys.path.insert(0, str(ROOT))

Found = dict[str, Any]
PLAIN, OURS, OTHER, INK, FAINT = "#D1495B", "#00798C", "#E3A857", "#22303C", "#8795A1"
SIDES = {
    1: ("bad_batch", ("plain", "ours")),
    2: ("out_of_memory", ("plain", "ours", "reference")),
    3: ("half_the_memory", ("all",)),
}
ROOM = 170
"""Act 2: MiB that the process may allocate after training starts."""
COMPRESSED = {"dense": "plain DDP", "ddp_int8": "ddp_int8", "ddp_topk 1%": "ddp_topk"}
DILOCO = {"diloco, H=16": "diloco"}
LINKS = {**COMPRESSED, **DILOCO}
CODE = {
    1: "Trainer(callbacks=[lo.NonFiniteGuard(spike=6)])",
    2: 'Trainer(callbacks=[lo.MicroBatching("auto")])',
    3: 'Trainer(callbacks=[lo.ActivationCheckpointing("auto", budget=0.35)])',
    4: 'Trainer(strategy="ddp_topk", devices=2)',
}

# --- running ------------------------------------------------------------------------------------


def play(act: int, quick: bool) -> Found:
    """Run an act, and return the results of its sides."""
    if act == 4:
        return slow_link(quick)
    name, sides = SIDES[act]
    # Each side is a fork of one process, which has imported torch and Lightning.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lightning.pytorch"])
    # With a fixed threshold, freed memory returns to the system, so that peaks are accurate.
    settings = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}
    with mock.patch.dict(os.environ, settings), ProcessPoolExecutor(len(sides), context) as pool:
        found = dict(zip(sides, pool.map(partial(run_side, name, quick), sides), strict=True))
    whole: Found = found.get("all", found)
    return whole


def run_side(name: str, quick: bool, side: str) -> Found:
    """Run one side of an act in this process."""
    import demo_acts

    return demo_acts.run(name, side, quick)


def slow_link(quick: bool) -> Found:
    """Time a step between two network namespaces, or return the recorded run."""
    from benchmarks.strategies import compression, diloco

    reason = compression.why_not()
    if reason is None:
        link = "100 Mbit/s"
        dense = ["--steps", 1 if quick else 2, "--seconds", 0.0, "--only", *COMPRESSED]
        each = compression.measure(compression.MODULE, 2, link, dense, 800.0)["seconds"]
        local = ["--seconds", 0.0, "--only", *DILOCO]
        windows = compression.measure(diloco.MODULE, 2, link, local, 300.0)["seconds"]
        return {name: statistics.median(values) for name, values in {**each, **windows}.items()}
    recorded: Found = json.loads(RECORD.read_text())["acts"]["4"]
    return {**recorded, "recorded": f"no slow link can be made here ({reason})"}


# --- text ---------------------------------------------------------------------------------------


def outcomes(act: int, found: Found) -> dict[str, str]:
    """Describe the outcome of each side."""
    if act == 1:
        return {
            {"plain": "plain", "ours": "NonFiniteGuard"}[side]: (
                f"all {run['lost']:,} weights lost"
                if run["lost"]
                else f"goes on, to a validation loss of {run['curve'][-1][1]:.2f}"
            )
            for side, run in found.items()
        }
    if act == 2:
        ours, reference = found["ours"], found["reference"]
        error = largest_difference(ours, reference)
        return {
            "plain": f"dies at step {len(found['plain']['losses']) + 1}",
            "MicroBatching": f"all {len(ours['losses'])} steps; losses and weights within "
            f"{error:.0e} of a run without a limit",
        }
    if act == 3:
        plain = found["plain"]
        return {
            side: f"{run['peak']:.0f} MiB, {run['peak'] / plain['peak']:.2f} of the memory "
            f"for {run['time']:.2f} of the time"
            for side, run in found.items()
        }
    return {
        label: f"{found[name]:.2f} s a step"
        + ("" if name == "dense" else f", {found['dense'] / found[name]:.1f} times faster")
        for name, label in LINKS.items()
        if name in found  # an older record may lack a strategy
    }


def largest_difference(ours: Found, reference: Found) -> float:
    """Return the largest relative difference of losses and of the norms of weights."""
    pairs = [*zip(ours["losses"], reference["losses"], strict=True)]
    pairs += zip(ours["weights"], reference["weights"], strict=True)
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)


TITLES = {1: "A bad batch", 2: "Out of memory", 3: "Half the memory of training", 4: "A slow link"}

# --- drawing ------------------------------------------------------------------------------------


def draw(acts: dict[int, Found]) -> Figure:
    """Draw one panel per act."""
    many = len(acts) > 1
    figure = Figure(figsize=(12.4, 8.2) if many else (6.6, 4.4), dpi=130, layout="constrained")
    panels = figure.subplots(2, 2).flat if many else [figure.subplots()]
    for axes, (act, found) in zip(panels, acts.items(), strict=False):
        {1: draw_losses, 2: draw_memory, 3: draw_peaks, 4: draw_link}[act](axes, found)
        axes.set_title(f"{act}   {TITLES[act]}", loc="left", weight="bold", size=15, pad=26)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(FAINT)
        axes.tick_params(colors=INK, labelsize=10)
        axes.xaxis.label.set_color(INK)
        axes.yaxis.label.set_color(INK)
    for axes in list(panels)[len(acts) :] if many else []:
        axes.set_axis_off()
    figure.get_layout_engine().set(w_pad=0.18, h_pad=0.18)  # type: ignore[union-attr]
    return figure


def subtitle(axes: Axes, text: str) -> None:
    axes.text(0, 1.035, text, transform=axes.transAxes, color=FAINT, size=11, va="bottom")


def draw_losses(axes: Axes, found: Found) -> None:
    subtitle(axes, "one loss is a spike, a later one is NaN")
    for side, colour in (("plain", PLAIN), ("ours", OURS)):
        points = [point for point in found[side]["curve"] if math.isfinite(point[1])]
        axes.plot(*zip(*points, strict=True), color=colour, lw=2.4, solid_capstyle="round")
        if side == "plain" and found[side]["lost"]:
            axes.plot(*points[-1], "x", color=colour, ms=11, mew=3)
            axes.annotate("plain: weights lost", points[-1], color=colour, size=11,
                          weight="bold", xytext=(11, -3), textcoords="offset points")  # fmt: skip
        if side == "ours":
            axes.annotate("NonFiniteGuard goes on", points[-1], color=colour, size=11, ha="right",
                          weight="bold", xytext=(0, -18), textcoords="offset points")  # fmt: skip
    curves = [value for run in found.values() for _, value in run["curve"] if math.isfinite(value)]
    axes.set_ylim(min(curves) - 0.35, min(max(curves), 4.4))
    for step, label in ((90, "spike"), (170, "NaN")):
        axes.axvline(step, color=FAINT, lw=1, ls=(0, (3, 3)), zorder=0)
        axes.text(step + 2, axes.get_ylim()[1], label, color=FAINT, size=10, va="top")
    axes.set(xlabel="step", ylabel="validation loss", xlim=(0, 262))


def draw_memory(axes: Axes, found: Found) -> None:
    subtitle(axes, "a GPT whose batch does not fit under a hard limit")
    axes.axhline(ROOM, color=INK, lw=1.6)
    axes.text(1, ROOM, f"limit: {ROOM} MiB ", color=INK, size=11, ha="right", va="bottom",
              transform=axes.get_yaxis_transform())  # fmt: skip
    times, sizes = zip(*found["ours"]["samples"], strict=True)
    axes.fill_between(times, sizes, color=OURS, alpha=0.16, lw=0)
    axes.plot(times, sizes, color=OURS, lw=1.3)
    steps = len(found["ours"]["losses"])
    axes.text(0.98, 0.09, f"MicroBatching: all {steps} steps, with the same gradient",
              color=OURS, size=10.5, weight="bold", ha="right", transform=axes.transAxes,
              bbox={"color": "white", "alpha": 0.9, "lw": 0, "pad": 3})  # fmt: skip
    points = found["plain"]["samples"]
    peak = max(range(len(points)), key=lambda index: points[index][1])
    times, sizes = zip(*points[: peak + 1], strict=True)
    axes.plot(times, sizes, color=PLAIN, lw=2.4)
    axes.plot(times[-1], sizes[-1], "x", color=PLAIN, ms=11, mew=3)
    axes.annotate(f"plain: dies at step {len(found['plain']['losses']) + 1}", (times[-1], ROOM),
                  xytext=(6, 14), textcoords="offset points", color=PLAIN, size=11,
                  weight="bold")  # fmt: skip
    axes.set(xlabel="seconds", ylabel="memory, MiB", ylim=(0, ROOM * 1.25))
    axes.set_xlim(left=0)


def draw_peaks(axes: Axes, found: Found) -> None:
    subtitle(axes, "weights, gradients, optimizer and activations of a GPT")
    plain = found["plain"]
    labels = {"plain": "plain", "every layer": "every layer\nrecomputed", "auto": '"auto"'}
    colours = {"plain": PLAIN, "every layer": OTHER, "auto": OURS}
    for place, (side, run) in enumerate(found.items()):
        axes.bar(place, run["peak"], 0.62, color=colours[side])
        share, slower = run["peak"] / plain["peak"], run["time"]
        text = f"{run['peak']:.0f} MiB" if side == "plain" else f"{share:.2f} of the memory"
        below = f"{run['seconds']:.2f} s a step" if side == "plain" else f"{slower:.2f} of the time"
        axes.annotate(f"{text}\n{below}", (place, run["peak"]), xytext=(0, 5), ha="center",
                      textcoords="offset points", color=INK, size=10.5, weight="bold")  # fmt: skip
    axes.set_xticks(range(len(found)), [labels[side] for side in found], size=11)
    axes.set(ylabel="peak, MiB", ylim=(0, plain["peak"] * 1.28))


def draw_link(axes: Axes, found: Found) -> None:
    recorded = "; a recorded run" if "recorded" in found else ""
    subtitle(axes, f"two processes at 100 Mbit/s, 33.6 MB of gradients{recorded}")
    shown = {name: label for name, label in LINKS.items() if name in found}
    for place, name in enumerate(shown):
        seconds = found[name]
        axes.barh(place, seconds, 0.58, color=PLAIN if name == "dense" else OURS)
        text = f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"
        if name != "dense":
            text += f",  {found['dense'] / seconds:.1f} times faster"
        inside = seconds > 0.7 * found["dense"]
        axes.annotate(text, (seconds, place), xytext=(-8 if inside else 8, 0), va="center",
                      ha="right" if inside else "left", textcoords="offset points", size=12,
                      color="white" if inside else INK, weight="bold")  # fmt: skip
    axes.set_yticks(range(len(shown)), list(shown.values()), size=11)
    axes.invert_yaxis()
    axes.set(xlabel="seconds a step", xlim=(0, found["dense"] * 1.04))


# --- the command --------------------------------------------------------------------------------


def run(acts: Sequence[int], quick: bool) -> dict[int, Found]:
    """Run the acts in order, and print the outcome of each side."""
    found = {}
    for act in acts:
        print(f"\n{act}. {TITLES[act]}", flush=True)
        began = time.perf_counter()
        found[act] = play(act, quick)
        if "recorded" in found[act]:
            print(f"   RECORDED, not run: {found[act]['recorded']}")
        for side, outcome in outcomes(act, found[act]).items():
            print(f"   {side + ':':16} {outcome}")
        print(f"   ({time.perf_counter() - began:.0f} s)   {CODE[act]}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--act", type=int, choices=TITLES, action="append", help="all by default")
    parser.add_argument("--quick", action="store_true", help="few steps, as a test of the script")
    parser.add_argument("--out", type=Path, default=Path("demo.png"), help="picture (%(default)s)")
    arguments = parser.parse_args()
    began = time.perf_counter()
    found = run(arguments.act or list(TITLES), arguments.quick)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    draw(found).savefig(arguments.out)
    print(f"\n{arguments.out.resolve()} drawn, {time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
