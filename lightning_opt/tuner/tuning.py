"""One search from its start to its answer: processes, journal, clock and what is shown of it."""

from __future__ import annotations

import dataclasses
import math
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch

from lightning_opt.core.cpus import available_cpus
from lightning_opt.tuner.journal import Journal
from lightning_opt.tuner.progress import Progress
from lightning_opt.tuner.report.result import TuneResult
from lightning_opt.tuner.search.objective import Objective
from lightning_opt.tuner.search.search import Outcome, Search, TimeIsUp
from lightning_opt.tuner.search.settings import fingerprint
from lightning_opt.tuner.search.space import Candidates, Facts, Space, Switches
from lightning_opt.tuner.trials.arena import Accept, Arena
from lightning_opt.tuner.trials.baseline import Baseline
from lightning_opt.tuner.trials.trial import Trial
from lightning_opt.worker.recipes import Factory, Settings
from lightning_opt.worker.training_process import Fit

SURE = 0.9
"""Score below which an answer is not measured a second time."""


@dataclass(frozen=True)
class Plan:
    """What to tune, and how; the arguments of :func:`~lightning_opt.autotune`, checked."""

    model: Factory
    data: Factory
    base: Settings
    candidates: Candidates | None
    objective: Objective
    accept: Accept
    seeds: int
    budget: float
    timeout: float
    parallel: int
    memory_limit: int | None

    def key(self) -> dict[str, Any]:
        """Return what has to be the same for trials of an earlier search to be worth something."""
        objective = dataclasses.astuple(self.objective)
        parts = {
            "model": self.model,
            "data": self.data,
            "base": self.base,
            "candidates": self.candidates,
            "objective": objective,
            "accept": [self.accept, self.seeds],
            "memory_limit": self.memory_limit,
        }
        key = {name: fingerprint(value) for name, value in parts.items()}
        return key | {"threads": torch.get_num_threads()} | machine()


class Tuning:
    """A search that is run once.

    Args:
        plan: What to tune.
        journal: The file to go on from and to write to, or None.
        resume: Whether to go on from it.
        progress: Is told how far it is.
    """

    def __init__(
        self, plan: Plan, journal: str | Path | None, resume: bool, progress: Progress
    ) -> None:
        self._plan, self._path, self._resume, self._progress = plan, journal, resume, progress
        self._begun = time.monotonic()
        self._space = Space("", Facts(), [], plan.base)
        self._trials: dict[Switches, Trial] = {}
        self._known: dict[Switches, Trial] = {}
        self._confirmed: dict[Switches, Trial] = {}
        self._processes = 0
        self._baseline = Baseline(
            self._start,
            block_seconds=min(0.6, max(0.15, plan.budget / 800)),
            horizon_seconds=min(20.0, plan.budget / 40),
        )
        self._arena = Arena(
            self._start,
            self._baseline,
            plan.objective,
            accept=plan.accept,
            seeds=plan.seeds,
            parallel=plan.parallel,
            deadline=self._begun + plan.budget,
            on_seed=self._add_seed,
            on_begin=progress.begin,
        )

    def run(self) -> TuneResult:
        """Search, and return the answer."""
        with tempfile.TemporaryDirectory(prefix="lightning_opt_tune_") as folder:
            self._folder = Path(folder)
            self._journal = Journal(self._path, self._plan.key(), resume=self._resume)
            try:
                self._read_journal()
                self._begin()
                search = self._search()
                best = self._confirm(search, search.run())
            except KeyboardInterrupt:
                self._progress.say(self._interrupted())
                raise
            finally:
                self._arena.close()
                self._progress.close()
        return TuneResult(
            self._plan.objective.name,
            self._space,
            list(self._trials.values()),
            best,
            complete=search.complete,
            facts=machine() | {"device": self._baseline.facts.device},
            seconds=time.monotonic() - self._begun,
        )

    def _search(self) -> Search:
        space = self._space
        self._progress.expect(len(space.switches) + 4)
        return Search(
            self._measure,
            tuple(space.switches),
            space.allows,
            space.interacts,
            self._plan.objective.min_gain,
        )

    # --- the journal ------------------------------------------------------------------------------

    def _read_journal(self) -> None:
        if self._journal.note:
            self._progress.say(self._journal.note)
        for record in self._journal.records:
            if record["kind"] == "baseline":
                self._baseline.restore(record)
            elif record["kind"] == "seed":
                self._baseline.seeds[record["seed"]] = [float(loss) for loss in record["losses"]]
            else:
                trial = Trial.from_dict(record)
                known = self._known if record["kind"] == "trial" else self._confirmed
                known[trial.switches] = trial

    def _add_seed(self, seed: int, losses: list[float]) -> None:
        self._journal.add({"kind": "seed", "seed": seed, "losses": [str(loss) for loss in losses]})

    def _interrupted(self) -> str:
        if self._path is None:
            return "Interrupted. With journal='tune.jsonl' the same call would go on from here."
        return f"Interrupted. The same call goes on from {self._path}."

    # --- trials -----------------------------------------------------------------------------------

    def _start(self, switches: Switches, seed: int, label: str) -> tuple[Fit, Path]:
        """Start the process of a trial; it writes about itself into the file."""
        self._processes += 1
        file = self._folder / f"{self._processes}.json"
        watch = {
            "class_path": "lightning_opt.tuner.trials.probe.TrialWatch",
            "init_args": {"file": str(file)},
        }
        fit = Fit(
            self._plan.model,
            self._plan.data,
            self._space.settings(switches, {"callbacks": [watch]}),
            seed=seed,
            timeout=self._plan.timeout,
            label=label,
            memory_limit=self._plan.memory_limit,
            wait=False,
        )
        return fit, file

    def _begin(self) -> None:
        """Run the baseline, and find out what there is to try."""
        known = self._baseline.known
        if not known:
            self._progress.begin([()])
            self._baseline.ensure()
            self._journal.add({"kind": "baseline", **self._baseline.to_dict()})
        facts = self._baseline.facts
        self._space = Space(
            self._plan.objective.name, facts, self._plan.candidates, self._plan.base
        )
        # On a CPU a limit holds for each process alone, so that another try would end alike.
        self._arena.shared = facts.device != "cpu" or self._plan.memory_limit is None
        self._trials[()] = self._baseline_trial()
        self._progress.end(self._trials[()], known)

    def _baseline_trial(self) -> Trial:
        baseline = self._baseline
        return Trial(
            (), "baseline", ratio=1.0, low=1.0, high=1.0, seconds=baseline.step,
            peak=baseline.peak_after(baseline.horizon), peak_ratio=1.0,
            losses=baseline.losses[: baseline.horizon], steps_ratio=1.0,
        )  # fmt: skip

    def _measure(self, configurations: Sequence[Switches]) -> Iterator[Outcome]:
        """Yield outcomes: of trials in the journal, or of those that are run and written there."""
        missing = [names for names in configurations if names not in self._known]
        trials = self._arena.measure(missing)
        for names in configurations:
            known = names in self._known
            trial = self._known[names] if known else next(trials)
            if not known:
                self._journal.add({"kind": "trial", **trial.to_dict()})
            self._progress.end(trial, known)
            self._trials[names] = trial
            yield self._plan.objective.outcome(trial)

    def _confirm(self, search: Search, best: Switches) -> Switches:
        """Measure an answer whose gain is small once more: the best of many is partly luck."""
        sure: set[Switches] = set()
        while best and best not in sure and search.outcomes[best].score >= SURE:
            again = self._second(best)
            if again is None:
                break
            sure.add(best)
            first, second = search.outcomes[best], self._plan.objective.outcome(again)
            search.outcomes[best] = Outcome(
                math.sqrt(first.score * second.score),
                math.sqrt(first.low * second.low),
                math.sqrt(first.high * second.high),
            )
            self._trials[best] = _mean(self._trials[best], again)
            best = search.winner()
        return best

    def _second(self, names: Switches) -> Trial | None:
        if names in self._confirmed:
            return self._confirmed[names]
        try:
            trial = next(self._arena.measure([names]))
        except TimeIsUp:
            return None
        self._journal.add({"kind": "confirmed", **trial.to_dict()})
        self._progress.end(trial)
        return trial


def _mean(first: Trial, second: Trial) -> Trial:
    """Return a trial that was measured twice, with the mean of the times."""
    if second.ratio is None or first.ratio is None or second.verdict != "accepted":
        return second
    return dataclasses.replace(
        second,
        ratio=math.sqrt(first.ratio * second.ratio),
        low=math.sqrt((first.low or 0.0) * (second.low or 0.0)),
        high=math.sqrt((first.high or math.inf) * (second.high or math.inf)),
        why="measured twice",
    )


def machine() -> dict[str, Any]:
    """Return on what, and with which versions, trials run."""
    return {
        "cpu": _cpu_name(),
        "cpus": available_cpus(),
        "gpus": torch.cuda.device_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "lightning_opt": sys.modules["lightning_opt"].__version__,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
