"""Times functions in turns, and tests whether they differ."""

from __future__ import annotations

import contextlib
import gc
import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from lightning_opt.core.arguments import check_at_least, check_positive
from lightning_opt.core.measure.timing import time_calls, time_in_turns
from lightning_opt.core.numerics.ratios import Ratio, compare_pairs
from lightning_opt.core.output.report import Report
from lightning_opt.profiling.comparing.compare import (
    TOLERANCE,
    Measured,
    ratio_columns,
    verdict_note,
)

OFFSET = 0.005
"""Assumed standard deviation of the constant difference between two equal functions in a process,
which is caused by the different addresses of their memory."""

MAX_CALLS = 1 << 20


class BenchmarkResult(Measured):
    """The result of :func:`benchmark`.

    Attributes:
        report: One row per function: median of the seconds per call, the ratio to the first
            function with its interval, and a verdict.
        seconds: Seconds per call in each round, by function.
        ratios: The :class:`Ratio` of each function to the first function. It excludes the first.
        calls: Number of calls in one timing, by function.
    """

    def __init__(
        self,
        seconds: Mapping[str, list[float]],
        ratios: Mapping[str, Ratio],
        calls: Mapping[str, int],
        notes: list[str],
    ) -> None:
        self.seconds, self.calls = dict(seconds), dict(calls)
        rows = []
        for name, values in self.seconds.items():
            middle = statistics.median(values)
            row: dict[str, Any] = {
                "function": name,
                "median": format_seconds(middle),
                "seconds": middle,
                "calls": self.calls[name] * len(values),
            }
            if ratios:
                row |= ratio_columns(ratios.get(name))
            rows.append(row)
        super().__init__(Report("Seconds per call", rows, notes), ratios)


def benchmark(
    functions: Callable[[], object] | Mapping[str, Callable[[], object]],
    *,
    warmup: int = 3,
    min_seconds: float = 0.005,
    rounds: int = 30,
    device: torch.device | str | None = None,
) -> BenchmarkResult:
    """Time functions in turns, and test whether they differ.

    Each function is timed once per round, in rotating order, so that a slow moment of the machine
    affects all of them. The ratio to the first function is the median of the ratios within rounds.
    Its 95% interval allows for outliers and for correlated rounds. It also allows for a constant
    difference of half a percent, which two equal functions in a process can have.

    ``"no difference"`` means that the interval contains 1, or that the ratio is within 1% of 1. It
    does not prove that the two are equal: a difference as small as the interval is possible.

    Args:
        functions: One function without arguments, or several by name; the first is the reference.
        warmup: Rounds whose timings are discarded.
        min_seconds: Minimum duration of a timing, which calls the function repeatedly.
        rounds: Timings of each function.
        device: The device to wait for at both ends of a timing. None: the GPU if torch has
            initialized one, else the CPU.

    Raises:
        TypeError: If ``functions`` is neither a function nor a non-empty dict of functions.
        ValueError: If a number is out of range.

    Example:
        >>> import lightning_opt as lo, torch
        >>> x = torch.randn(64, 64)
        >>> result = lo.benchmark({"one": lambda: x @ x, "two": lambda: x @ x @ x}, rounds=8)
        >>> result.ratios["two"].verdict  # doctest: +SKIP
        'slower'
    """
    named = _named(functions)
    check_at_least("warmup", warmup, 0)
    check_at_least("rounds", rounds, 2)
    check_positive("min_seconds", min_seconds)
    target = torch.device(device or ("cuda" if torch.cuda.is_initialized() else "cpu"))
    with _automatic_collection_off():
        for function in named.values():
            for _ in range(max(1, warmup)):
                function()
        calls = {name: _calls(function, min_seconds, target) for name, function in named.items()}
        seconds = time_in_turns(
            named,
            rounds=rounds,
            calls=calls,
            device=target,
            warmup=warmup,
            after_round=partial(gc.collect, 0),
        )
    first, *others = named
    ratios = {}
    for name in others:
        pairs = list(zip(seconds[first], seconds[name], strict=True))
        ratio = compare_pairs([pairs], offset=OFFSET, tolerance=TOLERANCE)
        if ratio is not None:
            ratios[name] = ratio
    notes = [f"{rounds} rounds, each function once per round; garbage collected between rounds."]
    if ratios:
        notes.append(verdict_note(ratios))
    return BenchmarkResult(seconds, ratios, calls, notes)


def _named(functions: Any) -> dict[str, Callable[[], object]]:
    if callable(functions):
        return {getattr(functions, "__name__", "function"): functions}
    if isinstance(functions, Mapping) and functions and all(map(callable, functions.values())):
        return {str(name): function for name, function in functions.items()}
    raise TypeError(
        "benchmark takes a function without arguments, or a dict of such functions by name, got "
        f"{functions!r}."
    )


def _calls(function: Callable[[], object], seconds: float, device: torch.device) -> int:
    """Find the number of calls that take ``seconds``, by the shorter of two timings."""
    calls = 1
    while calls < MAX_CALLS:
        taken = calls * min(time_calls(function, calls, device) for _ in range(2))
        if taken >= seconds:
            break
        calls = max(calls + 1, min(calls * 8, int(1.1 * calls * seconds / max(taken, 1e-9))))
    return calls


@contextlib.contextmanager
def _automatic_collection_off() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def format_seconds(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds / 1e-9:.4g} ns"
