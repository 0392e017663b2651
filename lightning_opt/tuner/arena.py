"""Trials: a candidate and the baseline, in processes of their own, take turns."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lightning_opt.tuner.baseline import MAX_BLOCK, Baseline, BaselineFailed, StartProcess
from lightning_opt.tuner.numerics import judge
from lightning_opt.tuner.probe import COMPARED_UPDATES, Observed
from lightning_opt.tuner.search import HOPELESS, TimeIsUp
from lightning_opt.tuner.trial import Objective, Switches, Trial
from lightning_opt.worker.training_process import FitFailed, TrainingProcess

MIN_ROUNDS, USUAL_ROUNDS = 4, 14
"""Rounds of turns of a trial that may gain: the fewest, and the usual most."""

HOPELESS_ROUNDS = 3
"""Rounds after which a trial may be called hopeless."""

PRECISE = 0.02
"""Half-width of an interval, as a share, at which more rounds are useless."""

TURN = 0.05
"""Seconds of a turn if both can alternate that often: in equal time it has less than half the noise
of turns of 150 ms, because the system favours one of two processes for times shorter than that."""

GRACE = 2.0
"""Seconds that a trial may continue when the budget has ended."""


class Candidate:
    """The process of a configuration, and its trial."""

    def __init__(
        self, trial: Trial, process: TrainingProcess, file: Path, alone: bool, deadline: float
    ) -> None:
        self.trial, self.process, self.file, self.alone = trial, process, file, alone
        self.trial.rounds = [[]]
        self._deadline, self._timeout = deadline, process.timeout

    def advance(self, steps: int) -> float:
        left = max(GRACE, self._deadline - time.monotonic())
        self.process.timeout = min(self._timeout, left)
        try:
            taken = self.process.advance(steps)
        except FitFailed as failure:
            if failure.kind == "timeout" and left < self._timeout:
                raise TimeIsUp from failure
            raise
        self.trial.losses += [step.loss for step in taken]
        self.trial.peak = self.process.peak_bytes
        return statistics.fmean(step.seconds for step in taken)

    def take_turn(self, steps: int) -> float:
        """Take a turn about as long as ``steps`` steps of the baseline, as workers send bursts."""
        return self.advance(max(steps, min(MAX_BLOCK, round(steps / (self.trial.ratio or 1.0)))))

    def add_round(self, reference: float, own: float) -> None:
        self.trial.rounds[0].append((reference, own))
        self.trial.set_times()

    @property
    def decided(self) -> bool:
        rounds, (ratio, low, high) = len(self.trial.rounds[0]), self.trial.interval
        width = (high - low) / 2 / ratio
        # Three rounds in a slow phase of the machine have called a gain of 10% a loss.
        loses = rounds >= HOPELESS_ROUNDS and low > HOPELESS
        precise = rounds >= MIN_ROUNDS and width < PRECISE
        clear = rounds > MIN_ROUNDS and high < 0.9 and width < 2 * PRECISE
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
            measure = self._measure_alone if self._one_at_a_time else self._measure_beside
            trial = measure(switches)
            trial.cost = round(time.monotonic() - started, 2)
            self._costs.append(trial.cost)
            yield trial

    def close(self) -> None:
        self.baseline.close()

    def _measure_beside(self, switches: Switches) -> Trial:
        """Try a configuration beside the baseline, and again alone if memory runs out."""
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
        trial = self._run(switches, self._take_lonely_turns, alone=True)
        self._one_at_a_time |= not trial.failed  # it runs, but not beside the baseline
        return trial

    @property
    def _compared_steps(self) -> int:
        """Steps whose losses are compared, or more if the baseline has taken more."""
        return COMPARED_UPDATES + 1 + (MIN_ROUNDS + 1) * self.baseline.block

    def _run(
        self, switches: Switches, take_turns: Callable[[Candidate], None], alone: bool = False
    ) -> Trial:
        trial, process = Trial(switches), None
        try:
            process, file = self._start(switches)
            # It may start as slowly as the baseline did, even if less of the budget is left.
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
        usual, trial = self.baseline.step, candidate.trial
        fastest, spent = math.inf, 0.0
        # The second step may compile again, and short steps are slow at first.
        while len(trial.losses) < 5 or spent < self.baseline.block_seconds:
            last = candidate.advance(1)
            spent += last
            fastest = min(fastest, last)
            if fastest <= self.objective.slowest * usual:
                return False
        if not candidate.alone:  # the machine may be slow now, and not the candidate
            usual = max(usual, self.baseline.take_turn(self.baseline.block))
        if fastest <= self.objective.slowest * usual:
            return False
        trial.verdict, trial.why = "too slow", f"stopped after {len(trial.losses)} steps"
        trial.ratio, trial.seconds = fastest / usual, fastest
        return True

    def _take_turns(self, candidate: Candidate) -> None:
        """Let baseline and candidate alternate until the trial is decided."""
        started, steps = time.monotonic(), self._turn_steps(candidate)
        startup = candidate.trial.startup or 0.0
        for count in itertools.count():
            now = time.monotonic()
            # Candidates that start slowly are measured for longer.
            decided = now - started > startup / 8 and candidate.decided
            exhausted = now - started > startup / 2 and count >= USUAL_ROUNDS
            if count >= 2 and (now > self.deadline or decided or exhausted):
                return
            turns = range(max(1, self.baseline.block // steps))
            pairs = [(self.baseline.take_turn(steps), candidate.take_turn(steps)) for _ in turns]
            candidate.add_round(*map(statistics.fmean, zip(*pairs, strict=True)))

    def _turn_steps(self, candidate: Candidate) -> int:
        """Return the steps of a turn: a whole block where shorter turns are biased.

        A GPU is waited for at the end of a turn, and a loader's workers pause between turns.
        """
        block, facts = self.baseline.block, Observed.read(candidate.file).facts
        if facts.device != "cpu" or facts.workers:
            return block
        return min(block, max(1, round(TURN / self.baseline.step)))

    def _take_lonely_turns(self, candidate: Candidate) -> None:
        for _ in range(MIN_ROUNDS + 1):
            candidate.add_round(self.baseline.step, candidate.take_turn(self.baseline.block))

    def _judge(self, candidate: Candidate) -> None:
        trial, limit = candidate.trial, self.objective.max_slowdown
        if trial.rounds[0]:
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
        """Return why it does not learn the same as the baseline; empty if it does."""
        own = Observed.read(candidate.file, candidate.trial.losses)
        if not candidate.alone:
            self.baseline.catch_up(min(len(own.losses), self._compared_steps))
        candidate.process.close()  # another run of the baseline may need its memory
        candidate.trial.agreement, why = judge(own, self.baseline.observed, self.baseline.other_run)
        return why
