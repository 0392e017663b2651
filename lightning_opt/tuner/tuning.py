"""One search from its start to its answer: processes, journal, clock and what is shown of it."""

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
from lightning_opt.tuner.fingerprint import fingerprint
from lightning_opt.tuner.journal import Journal
from lightning_opt.tuner.progress import Progress
from lightning_opt.tuner.report.explaining import describe_step
from lightning_opt.tuner.report.result import TuneResult
from lightning_opt.tuner.search.objective import Objective
from lightning_opt.tuner.search.search import Outcome, Search, TimeIsUp
from lightning_opt.tuner.search.settings import in_float32, join, plain
from lightning_opt.tuner.search.space import Candidates, Facts, Space, added
from lightning_opt.tuner.trial import Switches, Trial
from lightning_opt.tuner.trials.arena import Arena
from lightning_opt.tuner.trials.baseline import Baseline, Observed
from lightning_opt.worker.recipes import Factory, Settings
from lightning_opt.worker.training_process import Fit, FitFailed

PROFILER = "lightning_opt.profiling.steps.step_profiler.StepProfiler"
QUIETLY = {"log_every_n_steps": 0, "flops": False, "print_table": False}

LIMITS = {"max_epochs": 100_000, "max_steps": -1, "max_time": None}
"""Instead of the user's own; finite, since schedules are made from what is to come."""

PATIENT = 300.0
"""Seconds that the baseline may take to start, however short the budget is."""


@dataclass(frozen=True)
class Plan:
    """What to tune, and how; the arguments of :func:`~lightning_opt.autotune`, checked."""

    model: Factory
    data: Factory
    base: Settings
    candidates: Candidates | None
    objective: Objective
    budget: float
    timeout: float | None = None

    def patience(self, startup: float) -> float:
        """Return how many seconds a trial may take to start, or to answer.

        Args:
            startup: What the baseline took to start; 0 for the baseline itself.
        """
        if self.timeout is not None:
            return self.timeout
        if not startup:
            return max(PATIENT, self.budget)
        return max(4 * startup, min(PATIENT, max(30.0, self.budget / 4)))

    def key(self) -> dict[str, Any]:
        """Return what has to be the same for trials of an earlier search to be worth something."""
        names = ("model", "data", "base", "candidates")
        key = {name: fingerprint(getattr(self, name)) for name in names}
        key["objective"] = fingerprint(dataclasses.astuple(self.objective))
        cpu = {"cpu": fingerprint(sorted(cpu_flags())), "threads": torch.get_num_threads()}
        return key | cpu | machine()


class Tuning:
    """A search that is run once.

    Args:
        plan: What to tune.
        journal: The file to go on from and to write to, or None.
        progress: Is told how far it is.
    """

    def __init__(self, plan: Plan, journal: str | Path | None, progress: Progress) -> None:
        self._plan, self._path, self._progress = plan, journal, progress
        self._begun = time.monotonic()
        self._space = Space("", Facts(), [], plan.base)
        self._trials: dict[Switches, Trial] = {}
        self._known: dict[Switches, list[Trial]] = defaultdict(list)
        self._processes = 0
        self._baseline = Baseline(self._start, block_seconds=min(0.6, max(0.15, plan.budget / 800)))
        self._arena = Arena(
            self._start,
            self._baseline,
            plan.objective,
            on_begin=self._say,
        )

    def run(self) -> TuneResult:
        """Search, and return the answer."""
        with tempfile.TemporaryDirectory(prefix="lightning_opt_tune_") as folder:
            self._folder = Path(folder)
            self._journal = Journal(self._path, self._plan.key())
            try:
                self._read_journal()
                self._begin()
                search = self._search()
                best = self._race(search, search.run())
                self._arena.close()
                batches = {}
                if self._plan.objective.name == "batch":
                    batches = self._largest_batches(best)
            except KeyboardInterrupt:
                on = self._path or "here, with journal='tune.jsonl'"
                self._progress.say(f"The same call goes on from {on}.")
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
            seconds=time.monotonic() - self._begun,
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
            first="data_pipeline" if facts.starved else "",
            late=tuple(n for n, switch in space.switches.items() if switch.kind == "compile"),
        )

    def _read_journal(self) -> None:
        if self._journal.note:
            self._progress.say(self._journal.note)
        for record in self._journal.records:
            if record["kind"] == "baseline":
                self._baseline.restore(record)
            else:
                trial = Trial(**record["trial"])
                self._known[trial.switches].append(trial)

    # --- trials -----------------------------------------------------------------------------------

    def _start(self, switches: Switches, role: str = "") -> tuple[Fit, Path]:
        """Start the process of a trial; it writes about itself into the file.

        Args:
            switches: What is on.
            role: ``"account"`` has it say where the steps go, unless it has a profiler; ``"noise"``
                has the model draw other random numbers; ``"float32"`` trains in eager float32
                whatever the user's precision; ``"batch"`` finds the largest batch that fits.
        """
        self._processes += 1
        file = self._folder / f"{self._processes}.pt"
        watch = {
            "class_path": "lightning_opt.tuner.trials.probe.TrialWatch",
            "init_args": {"file": str(file), "reseed": int(role == "noise")},
        }
        more: dict[str, Any] = {"callbacks": [watch]}
        base = plain(self._plan.base)
        if any(base.get(name) is not None for name in LIMITS):
            more |= LIMITS  # a trial trains for as long as it is told
        if role == "account" and not base.get("profiler"):
            more["profiler"] = {"class_path": PROFILER, "init_args": QUIETLY}
        if role == "batch":
            more = join([added("DynamicBatchSize", find="largest", scale_lr="linear"), more])
        settings = self._space.settings(switches, more)
        fit = Fit(
            self._plan.model,
            self._plan.data,
            partial(in_float32, settings) if role == "float32" else settings,
            timeout=self._plan.patience(self._baseline.startup),
            wait=False,
        )
        return fit, file

    def _begin(self) -> None:
        """Run the baseline, and find out what there is to try."""
        baseline = self._baseline
        if not baseline.known:
            self._progress.begin((), Trial(()))
            baseline.ensure()
            # A model may take longer to start than the search may last.
            self._progress.deadline = time.monotonic() + self._plan.budget
            self._journal.add({"kind": "baseline", **baseline.to_dict()})
        self._arena.deadline = self._progress.deadline
        facts = baseline.observed.facts
        self._space = Space(
            self._plan.objective.name, facts, self._plan.candidates, self._plan.base
        )
        losses = list(baseline.losses)
        self._trials[()] = Trial(
            (), "baseline", ratio=1.0, low=1.0, high=1.0, seconds=baseline.step,
            peak=baseline.peak_after(len(losses)), peak_ratio=1.0, losses=losses,
        )  # fmt: skip
        self._progress.say("\n".join(describe_step(self._space, self._trials[()])))

    def _say(self, switches: Switches) -> None:
        score = self._plan.objective.outcome
        best = min(self._trials.values(), key=lambda t: score(t).score, default=Trial(()))
        self._progress.begin(switches, best)

    def _largest_batches(self, best: Switches) -> dict[Switches, int]:
        """Return the samples of the largest batch that trains, as it is and with the answer."""
        found = {}
        for switches in dict.fromkeys(((), best)):
            self._progress.begin(switches, self._trials[best])
            fit, file = self._start(switches, "batch")
            try:
                fit.advance(2)
                found[switches] = Observed.read(file).facts.samples
            except FitFailed as failure:
                self._progress.say(f"No largest batch was found: {failure.message}")
            finally:
                fit.close()
        return found

    def _measure(self, configurations: Sequence[Switches]) -> Iterator[Outcome]:
        for trial in self._try(configurations):
            self._trials[trial.switches] = trial
            yield self._plan.objective.outcome(trial)

    def _try(self, configurations: Sequence[Switches]) -> Iterator[Trial]:
        """Yield trials: those in the journal, or those that are run and written there."""
        running = self._arena.measure([names for names in configurations if not self._known[names]])
        for names in configurations:
            known = bool(self._known[names])
            trial = self._known[names].pop(0) if known else next(running)
            if not known:
                self._journal.add({"kind": "trial", "trial": dataclasses.asdict(trial)})
            self._progress.end(trial, known)
            yield trial

    def _race(self, search: Search, best: Switches) -> Switches:
        """Measure again what is undecided, the most promising first, and a small gain in any case.

        The best of many measurements is partly luck.
        """
        starts: Counter[Switches] = Counter()
        while (names := search.undecided(best, starts)) is not None:
            try:
                again = next(self._try([names]))
            except TimeIsUp:
                break
            starts[names] += 1
            self._trials[names] = again = again.pooled(self._trials[names])
            search.outcomes[names] = self._plan.objective.outcome(again)
            best = search.winner()
        return best


def machine() -> dict[str, Any]:
    """Return on what, and with which versions, trials run."""
    versions = {made.__name__: made.__version__ for made in (torch, lightning, lightning_opt)}
    counts = {"cpus": available_cpus(), "gpus": torch.cuda.device_count()}
    names = {"machine": platform.machine(), "python": platform.python_version()}
    return names | counts | versions
