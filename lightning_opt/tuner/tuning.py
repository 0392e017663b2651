"""One search from its start to its result: processes, journal and progress."""

from __future__ import annotations

import dataclasses
import platform
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch

import lightning_opt
from lightning_opt.core.measure.machine import available_cpus, cpu_flags
from lightning_opt.tuner.arena import Arena
from lightning_opt.tuner.baseline import Baseline
from lightning_opt.tuner.facts import Facts
from lightning_opt.tuner.fingerprint import fingerprint
from lightning_opt.tuner.journal import Journal, Progress
from lightning_opt.tuner.probe import Observed
from lightning_opt.tuner.result import TuneResult
from lightning_opt.tuner.search import Search, TimeIsUp
from lightning_opt.tuner.space import Candidates, Space, added, in_float32, join
from lightning_opt.tuner.trial import Objective, Outcome, Switches, Trial
from lightning_opt.worker.recipes import Factory, Settings, plain
from lightning_opt.worker.training_process import FitFailed, TrainingProcess

PROFILER = "lightning_opt.profiling.steps.step_profiler.StepProfiler"
PROFILER_ARGUMENTS = {"log_every_n_steps": 0, "flops": False, "print_table": False}

LIMITS = {"max_epochs": 100_000, "max_steps": -1, "max_time": None}
"""Replace the user's limits; finite, because schedules are made from the number of epochs."""

MAX_START = 300.0
"""Seconds that the baseline may take to start, however short the budget is."""


@dataclass(frozen=True)
class Plan:
    """The checked arguments of :func:`~lightning_opt.autotune`."""

    model: Factory
    data: Factory
    base: Settings
    candidates: Candidates | None
    objective: Objective
    budget: float
    timeout: float | None = None

    def timeout_after(self, startup: float) -> float:
        if self.timeout is not None:
            return self.timeout
        if not startup:
            return max(MAX_START, self.budget)
        return max(4 * startup, min(MAX_START, max(30.0, self.budget / 4)))

    def key(self) -> dict[str, Any]:
        """Return the identity of the search, by which trials of an earlier one are reused."""
        names = ("model", "data", "base", "candidates")
        key = {name: fingerprint(getattr(self, name)) for name in names}
        key["objective"] = fingerprint(dataclasses.astuple(self.objective))
        cpu = {"cpu": fingerprint(sorted(cpu_flags())), "threads": torch.get_num_threads()}
        return key | cpu | machine()


class Tuning:
    """A search that is run once."""

    def __init__(self, plan: Plan, journal: str | Path | None, progress: Progress) -> None:
        self._plan, self._path, self._progress = plan, journal, progress
        self._started = time.monotonic()
        self._space = Space("", Facts(), [], plan.base)
        self._trials: dict[Switches, Trial] = {}
        self._from_journal: dict[Switches, list[Trial]] = defaultdict(list)
        self._processes = 0
        self._baseline = Baseline(self._start, block_seconds=min(0.6, max(0.15, plan.budget / 800)))
        self._arena = Arena(self._start, self._baseline, plan.objective, on_start=self._show_start)

    def run(self) -> TuneResult:
        with tempfile.TemporaryDirectory(prefix="lightning_opt_tune_") as folder:
            self._folder = Path(folder)
            self._journal = Journal(self._path, self._plan.key())
            try:
                self._read_journal()
                self._measure_baseline()
                search = self._search()
                best = self._remeasure_undecided(search, search.run())
                self._arena.close()
                batches = {}
                if self._plan.objective.name == "batch":
                    batches = self._largest_batches(best)
            except KeyboardInterrupt:
                place = self._path or "a journal, with journal='tune.jsonl'"
                self._progress.write(f"The same call continues from {place}.")
                raise
            finally:
                self._arena.close()
        return TuneResult(
            self._plan.objective.name,
            self._space,
            list(self._trials.values()),
            best,
            complete=search.complete,
            facts=machine() | {"device": self._baseline.observed.facts.device},
            seconds=time.monotonic() - self._started,
            batches=batches,
        )

    def _search(self) -> Search:
        space, facts = self._space, self._baseline.observed.facts
        return Search(
            self._measure,
            tuple(space.switches),
            space.allows,
            space.interacts,
            self._plan.objective.min_gain,
            first="data_pipeline" if facts.data_bound else "",
            late=tuple(n for n, switch in space.switches.items() if switch.kind == "compile"),
        )

    def _read_journal(self) -> None:
        if self._journal.note:
            self._progress.write(self._journal.note)
        for record in self._journal.records:
            if record["kind"] == "baseline":
                self._baseline.restore(record)
            else:
                trial = Trial(**record["trial"])
                self._from_journal[trial.switches].append(trial)

    def _measure_baseline(self) -> None:
        """Run the baseline, unless the journal has it, and build the space from its facts."""
        baseline = self._baseline
        if not baseline.measured:
            self._progress.start_trial((), Trial(()))
            baseline.ensure_running()
            # The budget starts now, as a model may take longer to start than the search.
            self._progress.deadline = time.monotonic() + self._plan.budget
            self._journal.add({"kind": "baseline", **baseline.to_dict()})
        self._arena.deadline = self._progress.deadline
        self._space = Space(
            self._plan.objective.name,
            baseline.observed.facts,
            self._plan.candidates,
            self._plan.base,
        )
        losses = list(baseline.losses)
        peak = baseline.peak_after(len(losses))
        self._trials[()] = Trial(
            (), "baseline", ratio=1.0, low=1.0, high=1.0, seconds=baseline.step_seconds, peak=peak,
            peak_ratio=1.0, losses=losses,
        )  # fmt: skip
        self._progress.write(self._space.describe(baseline.step_seconds, peak))

    # --- trials -----------------------------------------------------------------------------------

    def _start(self, switches: Switches, role: str = "") -> tuple[TrainingProcess, Path]:
        """Start the process of a configuration, and return it with the file of its observations.

        Args:
            switches: The switches that are on.
            role: ``"profile"`` profiles the first steps, unless the user has a profiler;
                ``"noise"`` gives the model other random numbers; ``"float32"`` trains in eager
                float32; ``"batch"`` searches the largest batch that fits.
        """
        self._processes += 1
        file = self._folder / f"{self._processes}.pt"
        watch = {
            "class_path": "lightning_opt.tuner.probe.TrialWatch",
            "init_args": {"file": str(file), "reseed": int(role == "noise")},
        }
        more: dict[str, Any] = {"callbacks": [watch]}
        base = plain(self._plan.base)
        if any(base.get(name) is not None for name in LIMITS):
            more |= LIMITS
        if role == "profile" and not base.get("profiler"):
            more["profiler"] = {"class_path": PROFILER, "init_args": PROFILER_ARGUMENTS}
        if role == "batch":
            more = join([added("DynamicBatchSize", find="largest", scale_lr="linear"), more])
        settings = self._space.settings(switches, more)
        process = TrainingProcess(
            self._plan.model,
            self._plan.data,
            partial(in_float32, settings) if role == "float32" else settings,
            timeout=self._plan.timeout_after(self._baseline.startup),
            wait=False,
        )
        return process, file

    def _show_start(self, switches: Switches) -> None:
        score = self._plan.objective.outcome
        best = min(self._trials.values(), key=lambda t: score(t).score, default=Trial(()))
        self._progress.start_trial(switches, best)

    def _largest_batches(self, best: Switches) -> dict[Switches, int]:
        """Return the samples of the largest batch that fits, without switches and with the best."""
        sizes: dict[Switches, int] = {}
        for switches in dict.fromkeys(((), best)):
            self._progress.start_trial(switches, self._trials[best])
            process, file = self._start(switches, "batch")
            try:
                process.advance(2)
                sizes[switches] = Observed.read(file).facts.samples
            except FitFailed as failure:
                self._progress.write(f"No largest batch was found: {failure.message}")
            finally:
                process.close()
        return sizes

    def _measure(self, configurations: Sequence[Switches]) -> Iterator[Outcome]:
        for trial in self._try(configurations):
            self._trials[trial.switches] = trial
            yield self._plan.objective.outcome(trial)

    def _try(self, configurations: Sequence[Switches]) -> Iterator[Trial]:
        new = [switches for switches in configurations if not self._from_journal[switches]]
        measured = self._arena.measure(new)
        for switches in configurations:
            from_journal = bool(self._from_journal[switches])
            if from_journal:
                trial = self._from_journal[switches].pop(0)
            else:
                trial = next(measured)
                self._journal.add({"kind": "trial", "trial": dataclasses.asdict(trial)})
            self._progress.end_trial(trial, from_journal)
            yield trial

    def _remeasure_undecided(self, search: Search, best: Switches) -> Switches:
        """Measure undecided configurations again, and a small gain of the answer in any case.

        The best of many measurements is partly luck.
        """
        repeats: Counter[Switches] = Counter()
        while (switches := search.next_to_remeasure(best, repeats)) is not None:
            try:
                again = next(self._try([switches]))
            except TimeIsUp:
                break
            repeats[switches] += 1
            self._trials[switches] = again = again.pooled(self._trials[switches])
            search.outcomes[switches] = self._plan.objective.outcome(again)
            best = search.winner()
        return best


def machine() -> dict[str, Any]:
    versions = {module.__name__: module.__version__ for module in (torch, lightning, lightning_opt)}
    counts = {"cpus": available_cpus(), "gpus": torch.cuda.device_count()}
    names = {"machine": platform.machine(), "python": platform.python_version()}
    return names | counts | versions
