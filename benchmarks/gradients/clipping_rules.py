"""Thresholds of each clipping rule on known sequences of norms.

Supports the choice of ``Robust`` as the default of ``AdaptiveClipping``. Norms are lognormal with a
deviation of 0.2 around 1. Each scenario runs over many seeds; the table has medians. ``NOTES``
describes the scenarios.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np

import lightning_opt as lo
from benchmarks.harness import parse_arguments, publish

RULES: dict[str, Callable[[], lo.NormRule]] = {
    "Robust()": lo.Robust,
    "MeanStd(k=3)": lambda: lo.MeanStd(k=3.0),
    "MeanStd(k=3, history='clipped')": lambda: lo.MeanStd(k=3.0, history="clipped"),
    "MeanStd()": lo.MeanStd,
    "ZClip()": lo.ZClip,
    "Percentile()": lo.Percentile,
    "Percentile(90, window=200)": lambda: lo.Percentile(90.0, 200),
}

NOTES = [
    "`steady`: share of steps clipped if nothing happens, over 9,000 steps.",
    "`spike`: size to which a norm of 100 times the usual is clipped, at step 600; 1x is the usual "
    "norm.",
    "`burst`: size to which the last of ten such norms in a row is clipped.",
    "`shift`: steps until a norm that stays ten times as large is accepted, that is until at most "
    "5% of the next 50 steps are clipped.",
    "`drift`: share of steps clipped while the norm grows by 0.5% per step.",
    "`decay`: share of steps clipped while the norm falls from ten times the usual, as at the "
    "start of a training.",
    "`early`: size to which a norm of 100 times the usual is clipped at step 150, after another "
    "one during warm-up, at step 5.",
]


def thresholds(rule: lo.NormRule, norms: np.ndarray) -> np.ndarray:
    """Return the threshold of each step."""
    state = rule.init()
    return np.array([rule.limit(float(norm), state) for norm in norms])


def steps_to_accept(clipped: np.ndarray, start: int) -> int:
    """Return the steps after ``start`` from which at most 5% of the next 50 are clipped."""
    for step in range(start, len(clipped) - 50):
        if clipped[step : step + 50].mean() <= 0.05:
            return step - start
    return len(clipped) - start


def measure(make: Callable[[], lo.NormRule], seeds: int) -> dict[str, float | str]:
    """Run every scenario over ``seeds`` seeds."""
    seen: dict[str, list[float]] = {}
    for seed in range(seeds):
        rng = np.random.default_rng(seed)

        def usual(steps: int, rng: np.random.Generator = rng) -> np.ndarray:
            return np.exp(0.2 * rng.standard_normal(steps))

        def run(norms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            limits = thresholds(make(), norms)
            return norms > limits, np.minimum(norms, limits)

        clipped, _ = run(usual(10_000))
        seen.setdefault("steady", []).append(100 * clipped[1000:].mean())

        norms = usual(700)
        norms[600] = 100.0
        seen.setdefault("spike", []).append(run(norms)[1][600])

        norms = usual(700)
        norms[600:610] *= 100.0
        seen.setdefault("burst", []).append(run(norms)[1][609])

        norms = usual(3000)
        norms[600:] *= 10.0
        seen.setdefault("shift", []).append(steps_to_accept(run(norms)[0], 600))

        norms = usual(2000) * 1.005 ** np.arange(2000)
        seen.setdefault("drift", []).append(100 * run(norms)[0][200:].mean())

        norms = usual(2000) * (1.0 + 9.0 * np.exp(-np.arange(2000) / 50.0))
        seen.setdefault("decay", []).append(100 * run(norms)[0].mean())

        norms = usual(300)
        norms[[5, 150]] = 100.0
        seen.setdefault("early", []).append(run(norms)[1][150])
    median = {name: statistics.median(values) for name, values in seen.items()}
    return {
        "steady": f"{median['steady']:.1f}%",
        "spike": f"{median['spike']:.2f}x",
        "burst": f"{median['burst']:.2f}x",
        "shift": "never" if median["shift"] >= 2350 else int(median["shift"]),
        "drift": f"{median['drift']:.1f}%",
        "decay": f"{median['decay']:.1f}%",
        "early": f"{median['early']:.2f}x",
    }


def main() -> None:
    """Measure every rule and publish the table."""
    arguments = parse_arguments(__doc__)
    seeds = 2 if arguments.quick else 15
    rows = [{"rule": name, **measure(make, seeds)} for name, make in RULES.items()]
    report = lo.Report("Clipping rules on known sequences of norms", rows, NOTES)
    publish("clipping_rules", report, arguments, seeds=seeds)


if __name__ == "__main__":
    main()
