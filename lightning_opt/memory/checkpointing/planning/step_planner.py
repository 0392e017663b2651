"""From a step that can be tried to a plan that meets a budget: measure, plan, verify."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lightning_opt.core.modules.blocks import Block
from lightning_opt.core.modules.trial import TrialStep
from lightning_opt.memory.checkpointing.methods.forward import InputChangedError, Probe
from lightning_opt.memory.checkpointing.methods.policies import (
    AppliedPlan,
    Plan,
    Stretch,
    every_layer,
)
from lightning_opt.memory.checkpointing.methods.selective import OperatorProfile, Place, Selection
from lightning_opt.memory.checkpointing.planning.block_profile import (
    OperatorWatch,
    StepProfile,
    Stopwatch,
    Timeline,
    Unit,
)
from lightning_opt.memory.checkpointing.planning.knapsack import (
    Decision,
    Item,
    Option,
    Solution,
    smallest_peak,
    solve,
)
from lightning_opt.memory.checkpointing.planning.operator_times import (
    Seconds,
    by_kind,
    mean_by_kind,
    nested_selections,
    operator_seconds,
)
from lightning_opt.memory.meters import Meter, measuring

ROUNDS = 3
"""Each way to treat the blocks is timed so often; the fastest of them counts."""
LONGEST = 8
"""Blocks in a segment at most: longer ones win little, and take long to plan."""
UNSEEN = 0.02
"""What kernels need inside of themselves, as a share of the peak, where the meter does not see it:
convolutions on a CPU took so much."""


@dataclass(frozen=True)
class Agreement:
    """How the processes of a run come to the same decisions; by default there is one process.

    Attributes:
        first: Returns the first process's argument in every process.
        largest: Returns the largest of the processes' arguments in every process.
    """

    first: Callable[[Any], Any] = lambda value: value
    largest: Callable[[float], float] = lambda value: value


@dataclass(frozen=True)
class Outcome:
    """A plan, with what was predicted and measured.

    Attributes:
        plan: What is recomputed.
        solution: The planner's decisions behind it.
        peak: Measured peak of a step's activations, in bytes.
        fits: Whether that is within the budget.
    """

    plan: Plan
    solution: Solution
    peak: int
    fits: bool


class StepPlanner:
    """Plans for one step on one batch.

    Args:
        step: The step.
        blocks: What may be recomputed.
        device: Where the step runs.
        segments: Whether neighbours may be recomputed together.
        room: Bytes that activations may take at all; what is predicted above is not tried.
        agreement: Between several processes that each have such a step.

    Attributes:
        profile: What was measured.
        unchecked_peak: Peak of the step with everything kept, in bytes.
        unchecked_measured: Whether it was measured; else it is predicted.
        items: What the knapsack decides on: one a unit.
        unseen: Bytes above every peak here that kernels are allowed for.
    """

    def __init__(
        self,
        step: TrialStep,
        blocks: Sequence[Block],
        device: torch.device,
        segments: bool = True,
        room: float = math.inf,
        agreement: Agreement | None = None,
    ) -> None:
        self._step, self._device = step, device
        self._agreement = agreement or Agreement()
        self._blocks = list(blocks)
        self.profile = self._profile()
        # Longer segments than pay are for budgets that nothing else meets.
        self._lengths = (longest_segment(self.profile.units), LONGEST) if segments else (1,)
        # One list a unit: the sets of operators to try keeping, each containing the one before.
        self._levels: list[list[frozenset[Place]]] = self._agreement.first(self._choose_levels())
        self.unchecked_peak = round(self.profile.peak(kept=1.0))
        self.unchecked_measured = self._agreement.largest(self.unchecked_peak - room) < 0
        if self.unchecked_measured:
            self.unchecked_peak = self.measure_peak([])
            self._calibrate()
        self.unseen = 0 if device.type == "cuda" else round(UNSEEN * self.unchecked_peak)
        self.items = self._time()

    # -- measuring ---------------------------------------------------------------------------

    def _profile(self) -> StepProfile:
        """Run the step with every block recomputed by itself, for memory and for operators."""
        profile = self._run_timeline()
        profiles = {m: OperatorProfile() for unit in profile.units for m in unit.block.modules}
        self._run(every_layer([unit.block for unit in profile.units]), OperatorWatch(profiles))
        for unit in profile.units:
            unit.profiles = tuple(profiles[module] for module in unit.block.modules)
        for unit, following in zip(profile.units, profile.units[1:], strict=False):
            if unit.profiles[-1].remakes_output and unit.calls == 1:
                # The last thing that it saved is its output, which is the next one's input.
                unit.internals = max(0, unit.internals - following.inputs)
        return profile

    def _run_timeline(self) -> StepProfile:
        found: list[Timeline] = []

        def inside(stack: ExitStack) -> None:
            found.append(Timeline(self._blocks, stack.enter_context(measuring(self._device))))
            applied.watch(found[0])

        while not found:
            with AppliedPlan(every_layer(self._blocks)) as applied:
                try:
                    self._step.run()  # what happens only once, as learning of buffers, is over then
                    self._step.run(inside)
                except InputChangedError as error:
                    # Its input is gone when it is needed again: such a block is left alone.
                    self._blocks = [b for b in self._blocks if error.module not in b.modules]
        return found[0].finish()

    def _run(self, plan: Plan, probe: Probe, keep_all: bool = False) -> None:
        with AppliedPlan(plan) as applied:
            self._step.run(lambda _: applied.watch(probe, keep_all))

    def measure_peak(self, plan: Plan) -> int:
        """Return the peak of the step under ``plan``, in bytes above its start."""
        meters: list[Meter] = []
        with AppliedPlan(plan):
            self._step.run(
                lambda stack: meters.append(stack.enter_context(measuring(self._device)))
            )
        return meters[0].mark()

    def _calibrate(self) -> None:
        """Scale the internals so that keeping everything gives the peak that was measured."""
        low, high = 0.0, 2.0
        for _ in range(20):
            middle = (low + high) / 2
            too_much = self.profile.peak(kept=middle) > self.unchecked_peak
            low, high = (low, middle) if too_much else (middle, high)
        for unit in self.profile.units:
            unit.internals = int(unit.internals * low)

    def _choose_levels(self) -> list[list[frozenset[Place]]]:
        levels = by_kind(self.profile.units, nested_selections)
        return [
            levels[unit.block]
            if len(unit.profiles) == 1 and not unit.profiles[0].walked_twice
            else []
            for unit in self.profile.units
        ]

    def _time(self) -> list[Item]:
        """Time the ways to treat the units, and return the planner's items.

        Of selections only the largest is timed. Between them they differ by the operators that they
        keep, whose times are known from one and the same run, and therefore less noisy.
        """
        units = self.profile.units
        blocks = [unit.block for unit in units]
        alone = every_layer(blocks)
        ways = {"keep": (alone, True)} if self.unchecked_measured else {}
        ways["recompute"] = alone, False
        if any(self._levels):
            in_part = [Stretch((b,), self._selection(order, -1)) for order, b in enumerate(blocks)]
            ways["select"] = in_part, False
        runs = [{name: self._stopwatch(*way) for name, way in ways.items()} for _ in range(ROUNDS)]
        best = {name: {b: min(run[name][b] for run in runs) for b in blocks} for name in ways}
        # Where nothing was kept: recomputing adds little to the forward pass itself.
        kept = best.pop("keep", dict.fromkeys(blocks, 0.0))
        cost = {
            # Never nothing: a recomputation that seems free is noise.
            name: mean_by_kind(
                units, {b: max(0.05 * seconds[b], seconds[b] - kept[b]) for b in blocks}
            )
            for name, seconds in best.items()
        }
        spent = by_kind(units, operator_seconds)
        return [
            self._item(order, {name: own[block] for name, own in cost.items()}, spent[block])
            for order, block in enumerate(blocks)
        ]

    def _item(self, order: int, cost: dict[str, float], spent: Seconds) -> Item:
        unit, levels = self.profile.units[order], self._levels[order]
        again = [op for profile in unit.profiles for op in profile.again()]
        total = sum(spent[op.place] for op in again) * unit.calls
        # A recorded operator has taken longer than one that nobody watches.
        scale = min(1.0, cost["recompute"] / total) * unit.calls if total else 0.0
        recompute = Option("recompute", 0, cost["recompute"])
        options = [recompute, Option("keep", unit.internals, 0.0)]
        saved = [scale * sum(spent[place] for place in places) for places in levels]
        # What the contexts of a selection cost by themselves.
        extra = max(0.0, cost["select"] - cost["recompute"] + saved[-1]) if levels else 0.0
        for level, places in enumerate(levels):
            held = sum(op.nbytes for op in again if op.place in places) * unit.calls
            seconds = max(0.05 * cost["recompute"], cost["recompute"] - saved[level] + extra)
            options.append(Option(str(level), held, seconds))
        last = unit.profiles[-1]
        return Item(
            options=tuple(options),
            recompute=recompute if unit.calls == 1 else None,
            follows=unit.follows,
            inputs=unit.inputs,
            internals=unit.internals,
            forward_peak=unit.forward_peak,
            backward_peak=unit.backward_peak,
            remainder=scale * sum(spent[op.place] for op in last.operators[len(last.again()) :]),
        )

    def _stopwatch(self, plan: Plan, keep_all: bool) -> dict[Block, float]:
        """Return for each block the seconds of its runs and recomputations."""
        watch = Stopwatch([block for stretch in plan for block in stretch.blocks], self._device)
        self._run(plan, watch, keep_all)
        return watch.seconds

    def time(self, plan: Plan) -> float:
        """Return the seconds of a step under ``plan``."""
        with AppliedPlan(plan):
            return self._step.run()

    # -- planning ----------------------------------------------------------------------------

    def plan(self, budget: float) -> Outcome:
        """Return the fastest plan within ``budget`` bytes, or the one with the smallest peak.

        Of the budget, ``unseen`` bytes are left to kernels. What is returned has been measured. A
        plan that misses the budget is made anew once, with the budget lowered by what it missed.
        """
        budget -= self.unseen
        target = budget
        for _ in range(2):
            tried = (
                solve(self.items, self.profile.head_peak, target, length)
                for length in self._lengths
            )
            solution = self._agreement.first(next(filter(None, tried), None))
            if solution is None:
                break
            outcome, excess = self._verify(solution, budget)
            if outcome.fits:
                return outcome
            target -= 1.1 * excess
        by_itself = [Decision(i, i + 1, item.options[0]) for i, item in enumerate(self.items)]
        measured = Solution(tuple(by_itself), round(self.profile.peak()), 0.0)
        outcomes = [
            self._verify(self._agreement.first(solution), budget)
            for solution in (self.smallest(), measured)
        ]
        return min(outcomes, key=lambda found: found[1])[0]

    def smallest(self) -> Solution:
        """Return the plan with the smallest predicted peak."""
        return smallest_peak(self.items, self.profile.head_peak, self._lengths[-1])

    def _verify(self, solution: Solution, budget: float) -> tuple[Outcome, float]:
        plan = self.make_plan(solution)
        peak = self.measure_peak(plan)
        excess = self._agreement.largest(peak - budget)
        return Outcome(plan, solution, peak, excess <= 0), excess

    def make_plan(self, solution: Solution) -> Plan:
        """Return what the decisions mean for the model."""
        plan = []
        for decision in solution.decisions:
            units = self.profile.units[decision.start : decision.stop]
            if decision.option.name == "keep":
                continue
            choice = None
            if decision.option.name != "recompute":
                choice = self._selection(decision.start, int(decision.option.name))
            plan.append(Stretch(tuple(unit.block for unit in units), choice))
        return plan

    def _selection(self, order: int, level: int) -> Callable[[], Selection] | None:
        levels = self._levels[order]
        return partial(Selection, None, levels[level]) if levels else None


def longest_segment(units: Sequence[Unit]) -> int:
    """Return how many blocks a segment may have: one where segments cannot win.

    Of n blocks, segments of k hold n / k inputs, and bring back the internals of k. Their sum is
    smallest at a k of sqrt(n * inputs / internals): about one in transformers, four in an MLP. The
    last segments of a plan are longer than that, since fewer blocks come after them.
    """
    inputs, internals = (sum(getattr(u, name) for u in units) for name in ("inputs", "internals"))
    best = round(math.sqrt(len(units) * inputs / max(1, internals)))
    return min(LONGEST, 2 * best) if best > 1 else 1
