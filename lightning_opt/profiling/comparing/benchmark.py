"""How long functions take beside each other, and whether they differ."""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from lightning_opt.core.arguments import at_least, between, positive, share
from lightning_opt.core.measure.timing import wait_for
from lightning_opt.core.numerics.ratios import Ratio, compare_pairs, quartiles
from lightning_opt.core.output.report import Report
from lightning_opt.profiling.comparing.measured import (
    Measured,
    format_seconds,
    ratio_columns,
    verdict_note,
)

OFFSET = 0.005
"""By how much two equal functions of one process may differ for good, by their memory: a guess."""

_MAX_CALLS = 1 << 20


class BenchmarkResult(Measured):
    """The result of :func:`benchmark`.

    Attributes:
        report: A row a function: median and quartiles of the seconds of a call, the ratio to the
            first with its interval, and a verdict.
        seconds: For each function the seconds of one call, one number a round.
        ratios: For each function but the first its :class:`Ratio` to the first.
        calls: For each function how many calls were timed together.
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
            low, middle, high = quartiles(values)
            row: dict[str, Any] = {
                "function": name,
                "median": format_seconds(middle),
                "quartiles": f"{format_seconds(low)} to {format_seconds(high)}",
                "seconds": middle,
                "calls": self.calls[name] * len(values),
            }
            if ratios:
                row |= ratio_columns(ratios.get(name))
            rows.append(row)
        report = Report("Seconds of a call", rows, notes)
        super().__init__(report, ratios)

    def to_json(self) -> str:
        """Return report and timings as JSON."""
        details = {"seconds_of_rounds": self.seconds, "calls_of_a_timing": self.calls}
        return json.dumps({**json.loads(self.report.to_json()), **details}, indent=2)


def benchmark(
    functions: Callable[[], object] | Mapping[str, Callable[[], object]],
    *,
    warmup: int = 3,
    iterations: int | None = None,
    min_seconds: float = 0.005,
    rounds: int = 30,
    device: torch.device | str | None = None,
    confidence: float = 0.95,
    tolerance: float = 0.01,
) -> BenchmarkResult:
    """Time functions, interleaved, and tell whether they differ.

    Each is timed once a round, in an order that rotates, so that a slow moment of the machine hits
    all of them. The ratio to the first is the centre of the ratios within rounds. Its interval
    allows for outliers, for rounds that depend on each other, and for the half percent by which
    two equal functions of a process differ for good.

    ``"no difference"`` means that the interval contains 1, or that the ratio is within
    ``tolerance`` of 1. It does not mean that the two are equal: a difference that lies within the
    interval may well be there.

    Args:
        functions: One function without arguments, or several by name; the first is what others
            are compared with.
        warmup: Rounds that are not kept.
        iterations: Calls that are timed together, for all functions. None: for each as many as take
            ``min_seconds``.
        min_seconds: How long a timing takes at least.
        rounds: Timings of each function.
        device: What to wait for at both ends of a timing. None: the GPU in use, if one is.
        confidence: Of the interval.
        tolerance: Differences below this are called none: 0.01 is one percent.

    Raises:
        TypeError: If there is no function.
        ValueError: For an impossible number.

    Example:
        >>> import lightning_opt as lo, torch
        >>> x = torch.randn(64, 64)
        >>> result = lo.benchmark({"one": lambda: x @ x, "two": lambda: x @ x @ x}, rounds=8)
        >>> result.ratios["two"].verdict  # doctest: +SKIP
        'slower'
    """
    named = _named(functions)
    at_least("warmup", warmup, 0)
    at_least("rounds", rounds, 2)
    positive("min_seconds", min_seconds)
    share("confidence", confidence)
    between("tolerance", tolerance, 0.0, 1.0)
    place = _device(device)
    with _no_collection():
        for function in named.values():
            for _ in range(max(1, warmup)):
                function()
        if iterations is None:
            calls = {name: _calls(function, min_seconds, place) for name, function in named.items()}
        else:
            calls = dict.fromkeys(named, at_least("iterations", iterations, 1))
        seconds: dict[str, list[float]] = {name: [] for name in named}
        names = list(named)
        for number in range(-warmup, rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                taken = _time(named[name], calls[name], place)
                if number >= 0:
                    seconds[name].append(taken / calls[name])
            gc.collect(0)  # between timings, as it may not run within them
    first = names[0]
    ratios = {}
    for name in names[1:]:
        pairs = list(zip(seconds[first], seconds[name], strict=True))
        ratio = compare_pairs([pairs], confidence=confidence, offset=OFFSET, tolerance=tolerance)
        if ratio is not None:
            ratios[name] = ratio
    notes = [f"{rounds} rounds, each function once a round; garbage collected between timings."]
    if ratios:
        notes.append(verdict_note(ratios, confidence, tolerance))
    return BenchmarkResult(seconds, ratios, calls, notes)


def _named(functions: Any) -> dict[str, Callable[[], object]]:
    if callable(functions):
        return {getattr(functions, "__name__", "function"): functions}
    if (
        isinstance(functions, Mapping)
        and functions
        and all(callable(function) for function in functions.values())
    ):
        return {str(name): function for name, function in functions.items()}
    raise TypeError(
        "benchmark takes a function without arguments, or a dict of such functions by name, got "
        f"{functions!r}."
    )


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.device("cuda" if torch.cuda.is_initialized() else "cpu")


def _time(function: Callable[[], object], calls: int, device: torch.device) -> float:
    wait_for(device)
    start = time.perf_counter()
    for _ in range(calls):
        function()
    wait_for(device)
    return time.perf_counter() - start


def _calls(function: Callable[[], object], seconds: float, device: torch.device) -> int:
    """Return how many calls take ``seconds``: what the shorter of two timings says."""
    calls = 1
    while calls < _MAX_CALLS:
        taken = min(_time(function, calls, device) for _ in range(2))
        if taken >= seconds:
            break
        calls = max(calls + 1, min(calls * 8, int(1.1 * calls * seconds / max(taken, 1e-9))))
    return calls


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
