"""Tries optimisations on a user's model and data, and returns those that pay."""

from __future__ import annotations

import re
from pathlib import Path

from lightning_opt.core.arguments import fraction, one_of, positive
from lightning_opt.tuner.progress import Progress
from lightning_opt.tuner.report.result import TuneResult
from lightning_opt.tuner.search.objective import OBJECTIVES, Objective
from lightning_opt.tuner.search.space import Candidates, check_candidates
from lightning_opt.tuner.tuning import Plan, Tuning
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
    journal: str | Path | None = None,
    max_slowdown: float = 1.5,
    min_gain: float = 0.03,
    timeout: float | None = None,
    progress: bool = True,
) -> TuneResult:
    """Find which optimisations pay for a model on this machine, by trying them.

    Each trial is a run in a process of its own, on the batches of the user's data, that takes
    blocks of steps alternating with your unmodified baseline. What gains alone is combined, what
    interacts is tried in pairs, what adds nothing is left out again. A trial that runs out of
    memory, hangs, dies or raises is reported as such, and the others go on.

    A gain counts only if the run still learns the same: from equal weights and batches its first
    gradients must point where the baseline's do, module by module, and then its weights must move
    about as far and its losses stay near.

    Args:
        model: A function without arguments that makes the LightningModule, or its import path:
            ``"package.module:attribute"`` or ``"path/to/file.py:attribute"``.
        data: The same for a LightningDataModule or an iterable of batches such as a DataLoader.
        objective: ``"throughput"`` for the least time of a step; ``"memory"`` for the least peak
            within ``max_slowdown``, which leaves room for the largest model; ``"batch"`` for the
            same, and then the largest batch is tried out, with the answer and without.
        budget: Time for the search from when the baseline is measured: seconds, or a text such as
            ``"90s"``, ``"10m"``, ``"1h"``.
        candidates: None for what the tuner knows for the objective. A list says exactly which:
            names of the tuner's switches, and mappings from own names to Trainer arguments. A
            mapping changes the tuner's own choice: from a name to arguments for one of your own, to
            True for one that is not tried by itself, to None to leave one out.
        base: Trainer arguments of the baseline, which all trials and the answer have too.
        journal: A file of JSON lines to which each trial is written when it ends. A search that was
            interrupted goes on from it when it is called again; without the file it begins anew.
        max_slowdown: For ``"memory"`` and ``"batch"``: how many times the baseline's time a step
            may take.
        min_gain: Share that an answer must gain; less is not worth another switch.
        timeout: Seconds that a trial may take for one block, or to start; by default a quarter of
            the budget, from 30 to 300, but at least four times what the baseline took to start.
        progress: Whether to say on standard error how far the search is.

    Returns:
        The answer, with a table of all trials, an explanation, and the settings as
        Trainer arguments, Python, YAML and JSON.

    Raises:
        FitFailed: If the baseline itself cannot run.
        TypeError: If a factory is none.
        ValueError: For impossible arguments.

    Example:
        >>> result = lo.autotune(make_model, make_data, budget="2m")  # doctest: +SKIP
        >>> trainer = L.Trainer(**result.trainer_kwargs(max_epochs=3))  # doctest: +SKIP
    """
    seconds = parse_budget(budget)
    check_candidates(candidates)
    goal = one_of("objective", objective, tuple(OBJECTIVES))
    plan = Plan(
        check_factory("model", model),
        check_factory("data", data),
        check_settings("base", base),
        candidates,
        Objective(goal, positive("max_slowdown", max_slowdown), fraction("min_gain", min_gain)),
        seconds,
        None if timeout is None else positive("timeout", timeout),
    )
    return Tuning(plan, journal, Progress(seconds, progress)).run()


def parse_budget(budget: str | float) -> float:
    """Return the seconds of ``90``, ``"90s"``, ``"1.5m"`` or ``"1h"``.

    Raises:
        ValueError: For anything else.
    """
    if isinstance(budget, str):
        found = re.fullmatch(r"\s*(\d+\.?\d*)\s*(s|m|min|h|)\s*", budget)
        if not found or float(found[1]) <= 0:
            raise ValueError(
                f"budget must be seconds or a text such as '90s', '10m' or '1h', got {budget!r}."
            )
        return float(found[1]) * UNITS[found[2]]
    return positive("budget", budget)
