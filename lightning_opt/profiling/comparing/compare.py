"""Configurations of the Trainer beside each other: their time, memory and loss."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_opt.core.arguments import at_least, between, positive, share
from lightning_opt.profiling.comparing.result import Comparison, Run
from lightning_opt.worker.recipes import Factory, Settings, check_factory, check_settings
from lightning_opt.worker.training_process import Fit, FitFailed

TURN = 0.1
"""Seconds that a turn takes at least, where nothing is said about steps."""


def compare(
    model: Factory,
    data: Factory,
    configurations: Mapping[str, Settings],
    *,
    steps: int | None = None,
    rounds: int = 12,
    starts: int = 3,
    warmup: int = 3,
    seed: int = 0,
    seconds: float | None = None,
    timeout: float = 120.0,
    confidence: float = 0.95,
    tolerance: float = 0.01,
) -> Comparison:
    """Train under several Trainer configurations, interleaved, and tell whether they differ.

    Each configuration is a real run in its own process. All are alive at once and take turns of a
    few steps, in rotating order, so that a slow minute of the machine hits all of them. Then all
    processes are restarted, ``starts`` times in all, because one process may be a little faster
    than another for its whole life, with the same settings. A configuration that fails becomes a
    row that says how; the others continue.

    ``"no difference"`` means that the confidence interval of the ratio to the first configuration
    contains 1, or that the ratio is within ``tolerance`` of 1. It does not mean that the two are
    equal: the interval, and a note below the table, say how small a difference could be seen.

    A step is a batch. Time counts from the end of one batch to the end of the next as the Trainer
    makes it: data and callbacks are in, validation and checkpoints only where the settings ask for
    them; loggers write nothing. The first step after a pause is not timed; workers of a loader
    pause too. Ratios come from means of turns, so that what happens every few steps is in them, but
    not what is so rare that most turns lack it.

    Args:
        model: A function without arguments that makes the LightningModule, or its import path
            ``"package.module:attribute"`` or ``"path/to/file.py:attribute"``.
        data: The same for a LightningDataModule or a DataLoader.
        configurations: By name the arguments of the Trainer, or functions that return them (called
            for each run, so that callbacks are new). The first is what others are compared
            with.
        steps: Timed steps of each run. None: as many as fill turns of a tenth of a second,
            and 2 a turn at least.
        rounds: Turns of each run in which it takes them.
        starts: How often all are started anew.
        warmup: Steps at the start of each run that are not timed.
        seed: Of everything random; the same for all, so that losses can be compared.
        seconds: Stop after so long, with what has been measured until then; at least two turns of
            each are taken.
        timeout: Seconds that the start of a run or one turn may take.
        confidence: Of the interval.
        tolerance: Differences below this are called none: 0.01 is one percent.

    Raises:
        TypeError: If a factory is none.
        ValueError: Without configurations, or for an impossible number.

    Example:
        >>> result = lo.compare(  # doctest: +SKIP
        ...     Model, make_data, {"plain": {}, "bf16": {"precision": "bf16-mixed"}}
        ... )
        >>> print(result)  # doctest: +SKIP
    """
    check_factory("model", model)
    check_factory("data", data)
    if not isinstance(configurations, Mapping) or not configurations:
        raise ValueError(
            "configurations must be a dict from names to Trainer arguments with at least one "
            f"entry, got {configurations!r}."
        )
    named = {
        str(name): check_settings(f"The configuration {name!r}", settings)
        for name, settings in configurations.items()
    }
    at_least("rounds", rounds, 1)
    at_least("starts", starts, 1)
    at_least("warmup", warmup, 1)
    if steps is not None and at_least("steps", steps, 1) < rounds:
        raise ValueError(
            f"There must be at least one step a turn: steps is {steps} and rounds {rounds}."
        )
    positive("timeout", timeout)
    share("confidence", confidence)
    between("tolerance", tolerance, 0.0, 1.0)
    if seconds is not None:
        positive("seconds", seconds)
    end = None if seconds is None else time.monotonic() + seconds
    runs = {name: Run(name) for name in named}
    recipe = {"model": model, "data": data, "seed": seed}
    for start in range(starts):
        alive = {name: s for name, s in named.items() if runs[name].failure is None}
        ends = None if end is None else _share_of_time(end, starts - start)
        _train_in_turns(recipe, alive, runs, start, steps, rounds, warmup, timeout, ends)
        if end is not None and time.monotonic() >= end:
            break
    return Comparison(runs, confidence=confidence, tolerance=tolerance)


def _share_of_time(end: float, starts: int) -> float:
    now = time.monotonic()
    return now + max(0.0, end - now) / starts


def _turned(names: list[str], number: int) -> list[str]:
    turn = number % len(names) if names else 0
    return names[turn:] + names[:turn]


def _train_in_turns(
    recipe: Mapping[str, Any],
    settings: Mapping[str, Settings],
    runs: Mapping[str, Run],
    start: int,
    steps: int | None,
    rounds: int,
    warmup: int,
    timeout: float,
    end: float | None,
) -> None:
    """Train all in turns, from their start to their end."""
    with contextlib.ExitStack() as stack:
        fits: dict[str, Fit] = {}
        for name in _turned(list(settings), start):
            with _recorded(runs[name], fits):
                fits[name] = stack.enter_context(
                    Fit(**recipe, settings=settings[name], timeout=timeout)
                )
                runs[name].begin(fits[name].summary)
                runs[name].add(fits[name].advance(warmup), warmup)
        turns = _turns(steps, rounds, [runs[name].pace() for name in fits])
        for number, length in enumerate(turns):
            for name in _turned([name for name in settings if name in fits], number + start):
                with _recorded(runs[name], fits):
                    runs[name].add(fits[name].advance(1 + length), 1 + length, number)
                    runs[name].peak = max(runs[name].peak or 0, fits[name].peak_bytes)
            if number >= 1 and end is not None and time.monotonic() >= end:
                break
        for fit_of_name in fits.values():
            fit_of_name.ask_to_end()  # all at once, and then each is waited for


@contextlib.contextmanager
def _recorded(run: Run, fits: dict[str, Fit]) -> Iterator[None]:
    """Have a failure end this run alone."""
    try:
        yield
    except FitFailed as failure:
        run.failure = failure
        fits.pop(run.name, None)


def _turns(steps: int | None, rounds: int, paces: list[float]) -> list[int]:
    """Return the timed steps of each turn."""
    if steps is None:
        slowest = max(paces, default=1.0)
        steps = rounds * max(2, math.ceil(TURN / max(slowest, 1e-6)))
    return [steps // rounds + (number < steps % rounds) for number in range(rounds)]
