"""Measures optimisations on a user's model and data, and returns those that pay."""

from __future__ import annotations

import re

from lightning_opt.core.arguments import check_fraction, check_one_of, check_positive
from lightning_opt.tuner.result import TuneResult
from lightning_opt.tuner.space import Candidates, check_candidates
from lightning_opt.tuner.trial import OBJECTIVES, Objective
from lightning_opt.tuner.tuning import Tuning
from lightning_opt.worker.recipes import Factory, Settings, check_factory, check_settings

UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def autotune(
    model: Factory,
    data: Factory,
    *,
    objective: str = "throughput",
    budget: str | float = "10m",
    candidates: Candidates | None = None,
    base: Settings | None = None,
    max_slowdown: float = 1.5,
    min_gain: float = 0.03,
    timeout: float | None = None,
    progress: bool = True,
) -> TuneResult:
    """Find the optimisations that pay for a model on this machine, by trying them.

    Each trial is a run in a process of its own, on batches of your data, that takes turns with your
    unmodified baseline. Switches that gain alone are combined, switches that interact are tried in
    pairs, and switches that add nothing are dropped. A trial that runs out of memory, hangs, dies
    or raises is reported as such, and the others continue.

    A gain counts only if the run still learns the same: from equal weights and batches its first
    gradients must point in the baseline's directions, parameter by parameter; then its weights must
    move about as far and its losses stay near.

    Args:
        model: A function without arguments that makes the LightningModule, or its import path:
            ``"package.module:attribute"`` or ``"path/to/file.py:attribute"``.
        data: The same for a LightningDataModule or an iterable of batches such as a DataLoader.
        objective: ``"throughput"`` minimises the time of a step; ``"memory"`` the peak within
            ``max_slowdown``, to fit the largest model; ``"batch"`` does the same, and then searches
            the largest batch, with the answer and without.
        budget: Time for the search after the baseline is measured: seconds, or a text such as
            ``"90s"``, ``"10m"``, ``"1h"``.
        candidates: None for the tuner's switches for the objective. A list is exact: names of the
            tuner's switches, and mappings from own names to Trainer arguments. A mapping changes
            the default choice: from a name to arguments for an own switch, to True for a switch
            that is not tried by default, to None to exclude one.
        base: Trainer arguments of the baseline, all trials and the answer.
        max_slowdown: For ``"memory"`` and ``"batch"``: the allowed time of a step, as a multiple of
            the baseline's.
        min_gain: The least share that each switch of the answer must gain.
        timeout: Seconds that a trial may take to start, or for one turn; by default a quarter of
            the budget, from 30 to 300, but at least four times the baseline's start.
        progress: Whether to print the trials to standard error.

    Returns:
        The answer, with a table of all trials, an explanation, and the settings as
        Trainer arguments, Python, YAML and JSON.

    Raises:
        FitFailed: If the baseline itself cannot run.
        TypeError: If model, data or base are not factories.
        ValueError: For impossible arguments.

    Example:
        >>> result = lo.autotune(make_model, make_data, budget="2m")  # doctest: +SKIP
        >>> trainer = L.Trainer(**result.trainer_kwargs(max_epochs=3))  # doctest: +SKIP
    """
    seconds = parse_budget(budget)
    check_candidates(candidates)
    goal = Objective(
        check_one_of("objective", objective, tuple(OBJECTIVES)),
        check_positive("max_slowdown", max_slowdown),
        check_fraction("min_gain", min_gain),
    )
    return Tuning(
        check_factory("model", model),
        check_factory("data", data),
        base=check_settings("base", base),
        candidates=candidates,
        objective=goal,
        budget=seconds,
        timeout=None if timeout is None else check_positive("timeout", timeout),
        progress=progress,
    ).run()


def parse_budget(budget: str | float) -> float:
    """Return the seconds of ``90``, ``"90s"``, ``"1.5m"`` or ``"1h"``."""
    if isinstance(budget, str):
        match = re.fullmatch(r"\s*(\d+\.?\d*)\s*(s|m|min|h|)\s*", budget)
        if not match or float(match[1]) <= 0:
            raise ValueError(
                f"budget must be seconds or a text such as '90s', '10m' or '1h', got {budget!r}."
            )
        return float(match[1]) * UNITS[match[2]]
    return check_positive("budget", budget)
