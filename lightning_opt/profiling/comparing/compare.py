"""Compares Trainer configurations in turns: step time, memory and loss."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from lightning_opt.core.arguments import check_at_least, check_between, check_positive, check_share
from lightning_opt.core.measure.timing import rotated, take_turns
from lightning_opt.profiling.comparing.result import Comparison, Run, Training
from lightning_opt.worker.recipes import Factory, Settings, check_factory, check_settings
from lightning_opt.worker.training_process import FitFailed, TrainingProcess

MIN_TURN_SECONDS = 0.1
"""Minimum duration of a turn if ``steps`` is None."""


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
    """Train under several Trainer configurations in turns, and test whether they differ.

    Each configuration is a real run in its own process. All processes are alive at once and take
    turns of a few steps, in rotating order, so that a slow minute of the machine affects all of
    them. All processes are started ``starts`` times, because one process can stay a little faster
    than another with the same settings. If a configuration fails, its row states the failure, and
    the other configurations continue.

    ``"no difference"`` means that the confidence interval of the ratio to the first configuration
    contains 1, or that the ratio is within ``tolerance`` of 1. It does not prove that the two are
    equal. The interval, and a note below the table, give the smallest detectable difference.

    A step is one batch. Its time runs from the end of the previous batch to its own end, so it
    includes data and callbacks. Validation and checkpoints are included only if the settings enable
    them. Loggers write nothing. Loader workers pause between turns, and the first step after a
    pause is not timed. Ratios are computed from means of turns. They include work that happens
    every few steps, but not work so rare that it is missing from most turns.

    Args:
        model: A function without arguments that makes the LightningModule, or its import path
            ``"package.module:attribute"`` or ``"path/to/file.py:attribute"``.
        data: The same for a LightningDataModule or a DataLoader.
        configurations: Trainer arguments by configuration name, or functions that return them
            (called for each run, so that callbacks are new). The first is the reference.
        steps: Timed steps of each run. None: enough for turns of at least a tenth of a second
            and at least 2 steps.
        rounds: Turns of each run.
        starts: Starts of each configuration's process.
        warmup: Steps at the start of each run that are not timed.
        seed: Seed of all random numbers; the same for all runs, so that losses are comparable.
        seconds: Time limit. The result then contains the measurements so far, but at least two
            turns of each run.
        timeout: Maximum seconds for the start of a run, and for each turn.
        confidence: Confidence level of the interval.
        tolerance: Smaller differences count as no difference: 0.01 is one percent.

    Raises:
        TypeError: If model, data or settings are not factories.
        ValueError: If there are no configurations, or a number is out of range.

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
    checked_settings = {
        str(name): check_settings(f"The configuration {name!r}", settings)
        for name, settings in configurations.items()
    }
    check_at_least("rounds", rounds, 1)
    check_at_least("starts", starts, 1)
    check_at_least("warmup", warmup, 1)
    if steps is not None and check_at_least("steps", steps, 1) < rounds:
        raise ValueError(
            f"There must be at least one step per turn: steps is {steps} and rounds {rounds}."
        )
    check_positive("timeout", timeout)
    check_share("confidence", confidence)
    check_between("tolerance", tolerance, 0.0, 1.0)
    if seconds is not None:
        check_positive("seconds", seconds)
    end = math.inf if seconds is None else time.monotonic() + seconds
    runs = {name: Run(name) for name in checked_settings}
    recipe = {"model": model, "data": data, "seed": seed, "timeout": timeout}
    for start in range(starts):
        alive = {name: s for name, s in checked_settings.items() if runs[name].failure is None}
        now = time.monotonic()
        deadline = now + max(0.0, end - now) / (starts - start)
        _train_in_turns(recipe, alive, runs, start, steps, rounds, warmup, deadline)
        if time.monotonic() >= end:
            break
    return Comparison(runs, confidence=confidence, tolerance=tolerance)


def _train_in_turns(
    recipe: Mapping[str, Any],
    settings: Mapping[str, Settings],
    runs: Mapping[str, Run],
    start: int,
    steps: int | None,
    rounds: int,
    warmup: int,
    end: float,
) -> None:
    with contextlib.ExitStack() as stack:
        processes: dict[str, TrainingProcess] = {}
        paces: list[float] = []
        for name in rotated(list(settings), start):
            with _failure_recorded(runs[name], processes):
                processes[name] = process = stack.enter_context(
                    TrainingProcess(**recipe, settings=settings[name])
                )
                runs[name].summary = dict(process.summary)
                runs[name].trainings.append(Training(process.steps))
                paces.append(min(step.seconds for step in process.advance(warmup)))
        lengths = _turns(steps, rounds, paces)

        def take_turn(name: str) -> float:
            run, process, taken = runs[name], processes[name], []
            turns = run.trainings[-1].turns
            with _failure_recorded(run, timers):
                taken = process.advance(1 + lengths[len(turns)])[1:]
                turns[len(turns)] = taken
                run.peak = max(run.peak or 0, process.peak_bytes)
            return math.fsum(step.seconds for step in taken)

        timers = {name: partial(take_turn, name) for name in settings if name in processes}
        for rounds_taken, _ in enumerate(take_turns(timers, first=start), start=1):
            if rounds_taken == rounds or (rounds_taken >= 2 and time.monotonic() >= end):
                break
        for process in processes.values():
            process.ask_to_end()  # processes end in parallel; the stack then waits for each


@contextlib.contextmanager
def _failure_recorded(run: Run, running: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except FitFailed as failure:
        run.failure = failure
        running.pop(run.name, None)


def _turns(steps: int | None, rounds: int, paces: list[float]) -> list[int]:
    if steps is None:
        slowest = max(paces, default=1.0)
        steps = rounds * max(2, math.ceil(MIN_TURN_SECONDS / max(slowest, 1e-6)))
    return [steps // rounds + (turn_index < steps % rounds) for turn_index in range(rounds)]
