"""Measures optimisations on a user's model and data, and returns the best combination."""

from __future__ import annotations

import os
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
    """Find the best combination of optimisations for a model on this machine, by trying them.

    Each optimisation is a switch: an addition to the Trainer's arguments. Each trial is a training
    with some switches on, in its own process and on batches of your data. It takes turns with the
    baseline, which is your unmodified training. Switches that gain alone are combined, and switches
    that add nothing to the combination are dropped. If a trial runs out of memory, hangs, dies or
    raises, the failure is recorded in the result and the search continues.

    A trial is rejected if it does not learn the same. All trials start from equal weights and see
    equal batches. The first gradient of each parameter must have the same direction as in the
    baseline. Then the weights must move about as far, and the losses must stay near the baseline's.

    Args:
        model: A function without arguments that makes the LightningModule, or its import path:
            ``"package.module:attribute"`` or ``"path/to/file.py:attribute"``.
        data: The same for a LightningDataModule or an iterable of batches such as a DataLoader.
        objective: ``"throughput"`` minimises the time of a step. ``"memory"`` minimises peak
            memory, to fit a larger model. ``"batch"`` does the same, and then finds the largest
            batch with and without the chosen switches.
        budget: Time for the search after the baseline is measured: seconds, or a text such as
            ``"90s"``, ``"10m"``, ``"1h"``.
        candidates: The switches to try; None for the tuner's own for the objective. A list replaces
            them: it contains names of the tuner's switches, and mappings from new names to Trainer
            arguments. A mapping changes them: a name with Trainer arguments adds a switch, a name
            with True adds one of the tuner's for another objective, a name with None removes one.
        base: Trainer arguments of the baseline and of all trials.
        max_slowdown: For ``"memory"`` and ``"batch"``: the maximum time of a step, as a multiple of
            the baseline's.
        min_gain: Minimum gain of each chosen switch, as a share.
        timeout: Maximum seconds for the start of a trial and for each of its turns. By default a
            quarter of the budget, between 30 and 300, but at least four times the baseline's start.
        progress: Whether to print the trials to standard error.

    Returns:
        The chosen switches, a table of all trials, an explanation, and the settings as Trainer
        arguments, Python, YAML and JSON.

    Raises:
        FitFailed: If the baseline fails. Its traceback includes that of the training.
        RuntimeError: If called in a rank above 0 of a distributed run.
        TypeError: If model, data or base are not factories.
        ValueError: For invalid arguments.

    Example:
        >>> result = lo.autotune(make_model, make_data, budget="2m")  # doctest: +SKIP
        >>> trainer = L.Trainer(**result.trainer_kwargs(max_epochs=3))  # doctest: +SKIP
    """
    _check_rank()
    seconds = parse_budget(budget)
    check_candidates(candidates)
    goal = Objective(
        check_one_of("objective", objective, tuple(OBJECTIVES)),
        check_positive("max_slowdown", max_slowdown),
        check_fraction("min_gain", min_gain),
    )
    return Tuning(
        model=check_factory("model", model),
        data=check_factory("data", data),
        base=check_settings("base", base),
        candidates=candidates,
        objective=goal,
        budget=seconds,
        timeout=None if timeout is None else check_positive("timeout", timeout),
        progress=progress,
    ).run()


def _check_rank() -> None:
    rank = next((os.environ[name] for name in ("RANK", "LOCAL_RANK") if name in os.environ), "0")
    if rank != "0":
        raise RuntimeError(
            f"autotune was called in rank {rank} of a distributed run. Each rank would search and "
            "could find different settings. Search in a separate script, save the result with "
            "result.save(folder), and train with the settings in folder/trainer.yaml."
        )


def parse_budget(budget: str | float) -> float:
    """Convert a budget such as ``90``, ``"90s"``, ``"1.5m"`` or ``"1h"`` to seconds."""
    if isinstance(budget, str):
        match = re.fullmatch(r"\s*(\d+\.?\d*)\s*(s|m|min|h|)\s*", budget)
        if not match or float(match[1]) <= 0:
            raise ValueError(
                f"budget must be seconds or a text such as '90s', '10m' or '1h', got {budget!r}."
            )
        return float(match[1]) * UNITS[match[2]]
    return check_positive("budget", budget)
