"""Runs autotune: measures the baseline, searches, measures the best again, prints progress."""

from __future__ import annotations

import importlib
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import lightning_opt
from lightning_opt.core.measure.machine import available_cpus
from lightning_opt.tuner.baseline import Baseline, Run
from lightning_opt.tuner.facts import Facts
from lightning_opt.tuner.result import TuneResult
from lightning_opt.tuner.search import Search, TimeIsUp
from lightning_opt.tuner.space import Candidates, Space, added, in_float32, join
from lightning_opt.tuner.trial import Objective, Outcome, Switches, Trial
from lightning_opt.tuner.trials import Trials
from lightning_opt.worker.recipes import Factory, Settings, as_mapping
from lightning_opt.worker.training_process import FitFailed, TrainingProcess

PROFILER = "lightning_opt.profiling.steps.step_profiler.StepProfiler"
PROFILER_ARGUMENTS = {"log_every_n_steps": 0, "flops": False, "print_table": False}

LIMITS = {"max_epochs": 100_000, "max_steps": -1, "max_time": None}
"""Limits for trials. They replace the user's limits. The number of epochs is finite, because
learning rate schedules may be computed from it."""

MAX_START = 300.0
"""Minimum of the default timeout for the baseline's start, in seconds."""


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
        block_seconds = min(0.6, max(0.15, self.budget / 800))
        self._baseline = Baseline(self.start, block_seconds)
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
                self._baseline.close()
                is_batch = self.objective.name == "batch"
                batches = self._largest_batches(best) if is_batch else {}
            finally:
                self._baseline.close()
        return TuneResult(
            self.objective.name,
            self._space,
            list(self._by_switches.values()),
            best,
            complete=search.complete,
            facts=machine(self._space.facts),
            seconds=time.monotonic() - started,
            batches=batches,
        )

    def _measure_baseline(self) -> None:
        """Measure the baseline, and use its facts to choose the switches to try."""
        baseline = self._baseline
        self._print("trying the baseline")
        baseline.ensure_running()
        # The budget excludes the baseline's start, which may take longer than the budget.
        self._trials.deadline = time.monotonic() + self.budget
        observed = baseline.observations
        self._space = self._make_space(observed.facts)
        peak = baseline.peak_after(len(observed.losses))
        self._by_switches[()] = Trial(
            (), "baseline", ratio=1.0, low=1.0, high=1.0, seconds=baseline.step_seconds, peak=peak,
            peak_ratio=1.0, losses=list(observed.losses),
        )  # fmt: skip
        self._print(self._space.describe(baseline.step_seconds, peak))

    def _make_space(self, facts: Facts) -> Space:
        return Space(self.objective.name, facts, self.candidates, self.base)

    def _search(self) -> Search:
        space, first = self._space, "data_pipeline"
        is_first = space.facts.data_bound and first in space.switches
        return Search(
            self._measure,
            tuple(space.switches),
            space.allows,
            self.objective.min_gain,
            first=first if is_first else "",
            late=tuple(n for n, switch in space.switches.items() if switch.kind == "compile"),
        )

    def _measure(self, switches: Switches) -> Outcome:
        self._by_switches[switches] = trial = self._try(switches)
        return self.objective.outcome(trial)

    def _try(self, switches: Switches) -> Trial:
        """Measure a configuration, and print the result.

        Raises:
            TimeIsUp: If the remaining budget is shorter than the median trial.
        """
        started = time.monotonic()
        costs = [trial.cost for trial in self._by_switches.values() if trial.switches]
        if started + (statistics.median(costs) if costs else 0.0) > self._trials.deadline:
            raise TimeIsUp
        self._print_start(switches)
        trial = self._trials.measure(switches)
        trial.cost = round(time.monotonic() - started, 2)
        parts = [trial.verdict, _ratios(trial)]
        self._print(f"{trial.name}: {', '.join(filter(None, parts))}")
        return trial

    def _remeasure(self, search: Search) -> Switches:
        """Measure the best configurations again in new processes. Return the best of all."""
        repeats: Counter[Switches] = Counter()
        while (switches := search.next_to_remeasure(repeats)) is not None:
            try:
                again = self._try(switches)
            except TimeIsUp:
                break
            repeats[switches] += 1
            self._by_switches[switches] = again = again.pooled(self._by_switches[switches])
            search.outcomes[switches] = self.objective.outcome(again)
        return search.winner()

    def _largest_batches(self, best: Switches) -> dict[Switches, int]:
        """Find the largest batch size, without switches and with the best ones."""
        sizes: dict[Switches, int] = {}
        for switches in dict.fromkeys(((), best)):
            self._print_start(switches)
            run = self.start(switches, "batch")
            try:
                run.advance(2)
                sizes[switches] = run.observations.facts.samples
            except FitFailed as failure:
                self._print(f"The search for the largest batch failed: {failure.message}")
            finally:
                run.close()
        return sizes

    def start(self, switches: Switches, role: str) -> Run:
        """Start the process of a configuration.

        Args:
            switches: The switches that are on.
            role: The purpose of the process. ``""``: a trial. ``"profile"``: profile the first
                steps, unless the user has set a profiler. ``"noise"``: train with other random
                numbers. ``"float32"``: train in eager float32. ``"batch"``: search for the largest
                batch.
        """
        self._processes += 1
        file = self._folder / f"{self._processes}.pt"
        watch = {
            "class_path": "lightning_opt.tuner.probe.TrialWatch",
            "init_args": {"file": str(file), "reseed": int(role == "noise")},
        }
        more: dict[str, Any] = {"callbacks": [watch], **LIMITS}
        if role == "profile" and not as_mapping(self.base).get("profiler"):
            more["profiler"] = {"class_path": PROFILER, "init_args": PROFILER_ARGUMENTS}
        if role == "batch":
            more = join([added("DynamicBatchSize", find="largest", scale_lr="linear"), more])
        settings = self._space.settings(switches, more)
        process = TrainingProcess(
            self.model,
            self.data,
            partial(in_float32, settings) if role == "float32" else settings,
            timeout=start_timeout(self.budget, self._baseline.startup, self.timeout),
        )
        return Run(process, file)

    # --- progress ---------------------------------------------------------------------------------

    def _print(self, text: str) -> None:
        if self.progress:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()

    def _print_start(self, switches: Switches) -> None:
        seconds_left, name = self._trials.deadline - time.monotonic(), " + ".join(switches)
        time_left = f"{max(0.0, seconds_left):.0f} s left"
        best = min(self._by_switches.values(), key=lambda t: self.objective.outcome(t).score)
        so_far = f"; best so far: {best.name}, {_ratios(best)}" if best.switches else ""
        self._print(f"trying {name or 'the baseline'} ({time_left}{so_far})")


def start_timeout(budget: float, baseline_startup: float, given: float | None) -> float:
    """Return the timeout in seconds for the start of a process, and for each of its turns.

    Args:
        budget: The budget of the search.
        baseline_startup: Seconds that the baseline took to start; 0 if it has not started yet.
        given: The user's timeout. None for the default.
    """
    if given is not None:
        return given
    if not baseline_startup:
        return max(MAX_START, budget)
    return max(4 * baseline_startup, min(MAX_START, max(30.0, budget / 4)))


def machine(facts: Facts) -> dict[str, Any]:
    modules = (torch, importlib.import_module(facts.package), lightning_opt)
    versions = {module.__name__: module.__version__ for module in modules}
    counts = {"cpus": available_cpus(), "gpus": torch.cuda.device_count()}
    names = {"machine": platform.machine(), "python": platform.python_version()}
    return names | counts | versions | {"device": facts.device}


def _ratios(trial: Trial) -> str:
    shares = {"time": trial.ratio, "memory": trial.peak_ratio}
    return ", ".join(f"{of} x {share:.3f}" for of, share in shares.items() if share)
