"""Trials: the processes of a candidate and of the baseline take turns."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lightning_opt.tuner.baseline import MAX_STEPS_PER_BLOCK, Baseline, BaselineFailed, StartProcess
from lightning_opt.tuner.numerics import judge
from lightning_opt.tuner.probe import COMPARED_UPDATES, Observed
from lightning_opt.tuner.search import HOPELESS, TimeIsUp
from lightning_opt.tuner.trial import Objective, Switches, Trial
from lightning_opt.worker.training_process import FitFailed, TrainingProcess

MIN_ROUNDS, MAX_ROUNDS = 4, 14
"""Minimum rounds of a trial that may gain, and maximum rounds of one that starts fast."""

HOPELESS_ROUNDS = 3
"""Minimum rounds before a trial may be called hopeless."""

MAX_HALF_WIDTH = 0.02
"""A trial ends when the half-width of its interval is below this share of its ratio."""

TURN_SECONDS = 0.05
"""Duration of a turn on a CPU without workers. In equal time, turns of 150 ms have more than twice
the noise, because the system favours one of two processes for periods shorter than that."""

GRACE_SECONDS = 2.0
"""Seconds that a trial may continue after the budget has ended."""


class Candidate:
    """A trial and its process."""

    def __init__(
        self, trial: Trial, process: TrainingProcess, file: Path, alone: bool, deadline: float
    ) -> None:
        self.trial, self.process, self.file, self.alone = trial, process, file, alone
        self.trial.pairs_by_start = [[]]
        self._deadline, self._timeout = deadline, process.timeout

    def advance(self, steps: int) -> float:
        seconds_left = max(GRACE_SECONDS, self._deadline - time.monotonic())
        self.process.timeout = min(self._timeout, seconds_left)
        try:
            taken = self.process.advance(steps)
        except FitFailed as failure:
            if failure.kind == "timeout" and seconds_left < self._timeout:
                raise TimeIsUp from failure
            raise
        self.trial.losses += [step.loss for step in taken]
        self.trial.peak = self.process.peak_bytes
        return statistics.fmean(step.seconds for step in taken)

    def take_turn(self, steps: int) -> float:
        """Take a turn about as long as ``steps`` steps of the baseline.

        Workers deliver batches in bursts, so shorter turns would be biased.
        """
        return self.advance(
            max(steps, min(MAX_STEPS_PER_BLOCK, round(steps / (self.trial.ratio or 1.0))))
        )

    def add_round(self, baseline_seconds: float, seconds: float) -> None:
        self.trial.pairs_by_start[0].append((baseline_seconds, seconds))
        self.trial.set_times()

    @property
    def decided(self) -> bool:
        rounds, (ratio, low, high) = len(self.trial.pairs_by_start[0]), self.trial.interval
        width = (high - low) / 2 / ratio
        # In a slow phase of the machine three rounds can make a gain of 10% look like a loss.
        loses = rounds >= HOPELESS_ROUNDS and low > HOPELESS
        precise = rounds >= MIN_ROUNDS and width < MAX_HALF_WIDTH
        clear = rounds > MIN_ROUNDS and high < 0.9 and width < 2 * MAX_HALF_WIDTH
        return loses or precise or clear


class Arena:
    """Tries configurations against a baseline that stays alive."""

    def __init__(
        self,
        start: StartProcess,
        baseline: Baseline,
        objective: Objective,
        *,
        deadline: float = math.inf,
        on_start: Callable[[Switches], None] = lambda switches: None,
    ) -> None:
        self._start, self.baseline, self.objective = start, baseline, objective
        self.deadline, self._on_start = deadline, on_start
        self._one_at_a_time = False
        self._costs: list[float] = []

    def measure(self, configurations: Sequence[Switches]) -> Iterator[Trial]:
        """Yield the trials of configurations, in order.

        Raises:
            TimeIsUp: If the budget does not allow the next.
        """
        for switches in configurations:
            started = time.monotonic()
            if started + (statistics.median(self._costs) if self._costs else 0.0) > self.deadline:
                raise TimeIsUp
            self._on_start(switches)
            measure = self._measure_alone if self._one_at_a_time else self._measure_with_baseline
            trial = measure(switches)
            trial.cost = round(time.monotonic() - started, 2)
            self._costs.append(trial.cost)
            yield trial

    def close(self) -> None:
        self.baseline.close()

    def _measure_with_baseline(self, switches: Switches) -> Trial:
        """Try a configuration while the baseline is alive, and again alone if memory runs out."""
        try:
            self.baseline.ensure_running()
            trial = self._run(switches, self._take_turns)
        except BaselineFailed as failure:
            if failure.kind not in ("out of memory", "died"):
                raise
            self._one_at_a_time = True  # the candidate took the baseline's memory
            trial = Trial(switches, "out of memory")
        return self._measure_alone(switches) if trial.verdict == "out of memory" else trial

    def _measure_alone(self, switches: Switches) -> Trial:
        """Try a configuration alone on the device, against the baseline's earlier turns."""
        # The baseline's losses must reach as far as the candidate's, to be compared.
        self.baseline.catch_up(self._compared_steps)
        self.baseline.close()
        trial = self._run(switches, self._take_turns_alone, alone=True)
        self._one_at_a_time |= not trial.failed  # it fits in memory only without the baseline
        return trial

    @property
    def _compared_steps(self) -> int:
        """Number of steps whose losses are compared."""
        return COMPARED_UPDATES + 1 + (MIN_ROUNDS + 1) * self.baseline.steps_per_block

    def _run(
        self, switches: Switches, take_turns: Callable[[Candidate], None], alone: bool = False
    ) -> Trial:
        trial, process = Trial(switches), None
        try:
            process, file = self._start(switches)
            # A trial may take twice the start of the baseline, even if less of the budget is left.
            started = time.monotonic() + 2 * self.baseline.startup
            candidate = Candidate(trial, process, file, alone, max(self.deadline, started))
            trial.startup = candidate.advance(1)
            if not self._is_too_slow(candidate):
                # The updates whose gradients are compared precede all timed steps.
                candidate.advance(max(1, COMPARED_UPDATES - len(trial.losses)))
                take_turns(candidate)
            self._judge(candidate)
        except BaselineFailed:
            raise
        except FitFailed as failure:
            trial.verdict, trial.why = failure.kind, failure.message
            trial.details = failure.details[-4000:]
        finally:
            if process is not None:
                process.close()
        return trial

    def _is_too_slow(self, candidate: Candidate) -> bool:
        baseline_seconds, trial = self.baseline.step_seconds, candidate.trial
        fastest, spent = math.inf, 0.0
        # The second step may compile again, and short steps are slow at first.
        while len(trial.losses) < 5 or spent < self.baseline.block_seconds:
            last = candidate.advance(1)
            spent += last
            fastest = min(fastest, last)
            if fastest <= self.objective.give_up_ratio * baseline_seconds:
                return False
        if not candidate.alone:  # the whole machine may be slow now
            baseline_seconds = max(
                baseline_seconds, self.baseline.take_turn(self.baseline.steps_per_block)
            )
        if fastest <= self.objective.give_up_ratio * baseline_seconds:
            return False
        trial.verdict, trial.why = "too slow", f"stopped after {len(trial.losses)} steps"
        trial.ratio, trial.seconds = fastest / baseline_seconds, fastest
        return True

    def _take_turns(self, candidate: Candidate) -> None:
        """Let baseline and candidate alternate until the trial is decided."""
        started, steps = time.monotonic(), self._turn_steps(candidate)
        startup = candidate.trial.startup or 0.0
        for count in itertools.count():
            now = time.monotonic()
            # Candidates that start slowly are measured for longer.
            decided = now - started > startup / 8 and candidate.decided
            exhausted = now - started > startup / 2 and count >= MAX_ROUNDS
            if count >= 2 and (now > self.deadline or decided or exhausted):
                return
            turns = range(max(1, self.baseline.steps_per_block // steps))
            pairs = [(self.baseline.take_turn(steps), candidate.take_turn(steps)) for _ in turns]
            candidate.add_round(*map(statistics.fmean, zip(*pairs, strict=True)))

    def _turn_steps(self, candidate: Candidate) -> int:
        """Return the steps of a turn: a whole block where shorter turns are biased.

        The end of a turn synchronizes with a GPU, and workers of loaders pause between turns.
        """
        block, facts = self.baseline.steps_per_block, Observed.read(candidate.file).facts
        if facts.device != "cpu" or facts.workers:
            return block
        return min(block, max(1, round(TURN_SECONDS / self.baseline.step_seconds)))

    def _take_turns_alone(self, candidate: Candidate) -> None:
        for _ in range(MIN_ROUNDS + 1):
            candidate.add_round(
                self.baseline.step_seconds, candidate.take_turn(self.baseline.steps_per_block)
            )

    def _judge(self, candidate: Candidate) -> None:
        trial, limit = candidate.trial, self.objective.max_slowdown
        if trial.pairs_by_start[0]:
            trial.startup = max(0.0, (trial.startup or 0.0) - (trial.seconds or 0.0))
        reference = self.baseline.peak_after(len(trial.losses))
        trial.peak_ratio = (trial.peak or 0) / reference if reference else None
        if trial.verdict == "too slow":
            return
        if self.objective.name != "throughput" and (trial.ratio or 0.0) > limit:
            trial.verdict = "too slow"
            trial.why = f"more than {limit:g} times the baseline's time"
        elif not self.objective.may_gain(trial):
            trial.verdict = "no gain"
        elif why := self._learning_difference(candidate):
            trial.verdict, trial.why = "rejected", why

    def _learning_difference(self, candidate: Candidate) -> str:
        """Return how the candidate learns differently from the baseline; empty if it does not."""
        observed = Observed.read(candidate.file, candidate.trial.losses)
        if not candidate.alone:
            self.baseline.catch_up(min(len(observed.losses), self._compared_steps))
        candidate.process.close()  # a reference run may need its memory
        candidate.trial.agreement, why = judge(
            observed, self.baseline.observed, self.baseline.reference_run
        )
        return why
