"""Measures optimisations on a user's model and data, and returns the best combination."""

from __future__ import annotations

import contextlib
import re
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_opt.core.arguments import check_one_of, check_positive
from lightning_opt.core.measure.machine import describe_machine
from lightning_opt.core.measure.memory import MB
from lightning_opt.tuner.probe import Facts, TrialWatch
from lightning_opt.tuner.result import TuneResult
from lightning_opt.tuner.search import (
    OBJECTIVES,
    Objective,
    Outcome,
    Search,
    Switches,
    TimeIsUp,
    Trial,
)
from lightning_opt.tuner.space import Candidates, Space, check_candidates
from lightning_opt.tuner.trials import Baseline, Run, Trials
from lightning_opt.worker.gate import RUN_DEFAULTS
from lightning_opt.worker.recipes import Factory, Settings, check_factory, check_settings
from lightning_opt.worker.training_process import TrainingProcess

UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}

LIMITS = {"max_epochs": RUN_DEFAULTS["max_epochs"], "max_steps": -1, "max_time": None}
"""Limits for trials. They replace the user's limits."""

BLOCK_SECONDS = 0.2
"""Approximate duration of a block: the steps that each run takes in one round of a trial."""

START_TIMEOUT = 300.0
"""Default timeout in seconds: a minimum for the baseline, usually a maximum for trials."""


def autotune(
    model: Factory,
    data: Factory,
    *,
    objective: str = "throughput",
    budget: str | float = "10m",
    candidates: Candidates | None = None,
    base: Settings | None = None,
    max_slowdown: float = 1.5,
    timeout: float | None = None,
    progress: bool = True,
) -> TuneResult:
    """Find the best combination of optimisations for a model on this machine, by trying them.

    Each optimisation is a switch: an addition to the Trainer's arguments. Each trial is a training
    with some switches on, in its own process and on batches of your data. It takes turns with the
    baseline, which is your unmodified training. Switches that gain alone are combined, and switches
    that add nothing to the combination are dropped. If a trial runs out of memory, hangs, dies or
    raises, the failure is recorded in the result and the search continues.

    A trial is rejected if it does not learn the same as the baseline. All trials start from equal
    weights and see equal batches. The first gradient of each parameter must have the same direction
    as in the baseline. Then the weights must move about as far, and the losses must stay near the
    baseline's.

    Args:
        model: A function without arguments that makes the LightningModule, or its import path:
            ``"package.module:attribute"`` or ``"path/to/file.py:attribute"``.
        data: The same for a LightningDataModule or an iterable of batches such as a DataLoader.
        objective: ``"throughput"`` minimises the time of a step. ``"memory"`` minimises peak
            memory, to fit a larger model or batch.
        budget: Time for the search after the baseline is measured: seconds, or a text such as
            ``"90s"``, ``"10m"``, ``"1h"``.
        candidates: The switches to try; None for the tuner's own for the objective. A list replaces
            them: it contains names of the tuner's switches, and mappings from new names to Trainer
            arguments. A mapping changes them: a name with Trainer arguments adds a switch, a name
            with True adds a switch that the tuner tries only for another objective, a name with
            None removes a switch.
        base: Trainer arguments of the baseline and of all trials.
        max_slowdown: For ``"memory"``: the maximum time of a step, as a multiple of the baseline's.
        timeout: Maximum seconds for the start of a trial and for each of its turns. By default a
            quarter of the budget, between 30 and 300, but at least four times the baseline's start.
        progress: Whether to print the trials to standard error.

    Returns:
        The chosen switches, a table of all trials, an explanation, and the settings as Trainer
        arguments, YAML and JSON.

    Raises:
        FitFailed: If the baseline fails. The traceback of the training is printed above it.
        RuntimeError: If called in a rank above 0 of a distributed run.
        TypeError: If model, data or base are not factories.
        ValueError: For invalid arguments.

    Example:
        >>> result = lo.autotune(make_model, make_data, budget="2m")  # doctest: +SKIP
        >>> trainer = L.Trainer(**result.trainer_kwargs(max_epochs=3))  # doctest: +SKIP
    """
    rank = rank_zero_only.rank  # type: ignore[attr-defined] # Lightning's, also under SLURM
    if rank:
        raise RuntimeError(
            f"autotune was called in rank {rank} of a distributed run. Each rank would search and "
            "could find different settings. Search in a separate script, save the result with "
            "result.save(folder), and train with the settings in folder/trainer.yaml."
        )
    check_candidates(candidates)
    check_one_of("objective", objective, tuple(OBJECTIVES))
    return Tuning(
        model=check_factory("model", model),
        data=check_factory("data", data),
        base=check_settings("base", base),
        candidates=candidates,
        objective=Objective(objective, check_positive("max_slowdown", max_slowdown)),
        budget=parse_budget(budget),
        timeout=None if timeout is None else check_positive("timeout", timeout),
        progress=progress,
    ).run()


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


@dataclass(kw_only=True)
class Tuning:
    """One call of autotune. For the arguments see :func:`~lightning_opt.autotune`."""

    model: Factory
    data: Factory
    base: Settings
    objective: Objective
    budget: float
    candidates: Candidates | None = None
    timeout: float | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        self._space = Space("", Facts(), [], self.base)
        self._by_switches: dict[Switches, Trial] = {}
        self._processes = 0
        self._baseline = Baseline(self.start, BLOCK_SECONDS)
        self._trials = Trials(self.start, self._baseline, self.objective)

    def run(self) -> TuneResult:
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="lightning_opt_tune_") as folder:
            self._folder = Path(folder)
            try:
                self._measure_baseline()
                search = self._search()
                search.run()
                best = self._remeasure(search)
                self._by_switches[()].seconds = self._baseline.step_seconds
            finally:
                self._baseline.close()
        return TuneResult(
            self.objective.name,
            self._space,
            list(self._by_switches.values()),
            best,
            complete=search.complete,
            machine=describe_machine(self._space.facts.device),
            seconds=time.monotonic() - started,
        )

    def _measure_baseline(self) -> None:
        """Measure the baseline, and choose the switches to try."""
        baseline = self._baseline
        self._print("trying the baseline")
        baseline.ensure_running()
        # Even a budget that is shorter than the baseline's start allows one trial.
        self._trials.deadline = time.monotonic() + max(self.budget, 2 * baseline.startup)
        observed = baseline.observations
        self._space = Space(self.objective.name, observed.facts, self.candidates, self.base)
        peak = baseline.peak_after(len(observed.losses))
        self._by_switches[()] = Trial(
            (), "baseline", ratio=1.0, low=1.0, high=1.0, seconds=baseline.step_seconds, peak=peak,
            peak_ratio=1.0, losses=list(observed.losses),
        )  # fmt: skip
        self._print(
            f"A step takes {1e3 * baseline.step_seconds:.3g} ms and {peak / MB:,.0f} MiB. "
            f"Switches to try: {', '.join(self._space.switches) or 'none'}."
        )

    def _search(self) -> Search:
        space = self._space
        return Search(
            self._measure,
            tuple(space.switches),
            space.allows,
            late=tuple(n for n, switch in space.switches.items() if switch.kind == "compile"),
        )

    def _measure(self, switches: Switches) -> Outcome:
        """Measure a configuration, print the result, and pool it with an earlier one.

        Raises:
            TimeIsUp: If the remaining budget is shorter than the median trial.
        """
        started = time.monotonic()
        costs = [trial.cost for trial in self._by_switches.values() if trial.switches]
        if started + (statistics.median(costs) if costs else 0.0) > self._trials.deadline:
            raise TimeIsUp
        seconds_left = max(0.0, self._trials.deadline - started)
        self._print(f"trying {' + '.join(switches)} ({seconds_left:.0f} s left)")
        trial = self._trials.measure(switches)
        trial.cost = round(time.monotonic() - started, 2)
        shares = {"time": trial.ratio, "memory": trial.peak_ratio}
        parts = [f"{name} x {share:.3f}" for name, share in shares.items() if share]
        self._print(f"{trial.name}: {', '.join([trial.verdict, *parts])}")
        if switches in self._by_switches:
            trial = trial.pooled(self._by_switches[switches])
        self._by_switches[switches] = trial
        return self.objective.outcome(trial)

    def _remeasure(self, search: Search) -> Switches:
        """Measure the best configurations again in new processes. Return the winner."""
        repeated: set[Switches] = set()
        with contextlib.suppress(TimeIsUp):
            while (switches := search.next_to_remeasure(repeated)) is not None:
                search.outcomes[switches] = self._measure(switches)
                repeated.add(switches)
        return search.winner()

    def start(self, switches: Switches, reseed: int) -> Run:
        """Start the process of a configuration. ``reseed`` is added to its random seed."""
        self._processes += 1
        file = self._folder / f"{self._processes}.pt"
        watched = {"callbacks": [TrialWatch(file, reseed)], **LIMITS}
        settings = self._space.settings(switches, watched)
        timeout = start_timeout(self.budget, self._baseline.startup, self.timeout)
        return Run(TrainingProcess(self.model, self.data, settings, timeout=timeout), file)

    def _print(self, text: str) -> None:
        if self.progress:
            sys.stderr.write(text + "\n")


def start_timeout(budget: float, baseline_startup: float, given: float | None) -> float:
    """Return the timeout in seconds for the start of a process, and for each of its turns.

    Args:
        budget: The budget of the search.
        baseline_startup: Seconds that the baseline took to start; 0 if it has not started yet.
        given: The user's timeout. None for the default.
    """
    if not baseline_startup:
        return given or max(START_TIMEOUT, budget)
    return given or max(4 * baseline_startup, min(START_TIMEOUT, max(30.0, budget / 4)))
