"""The cheapest way to recompute that stays below a peak: a knapsack over the units of a step.

While a unit runs forward or backward, exactly the units before it hold what they keep. So with
every phase's peak known for the step in which each unit is recomputed by itself, the peak of any
plan is the largest, over the phases, of that phase's peak and what the units before it hold in
addition.
This is a knapsack in which each prefix has a limit of its own. It is solved by dynamic programming
over the units, with the held bytes as state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

STATES = 400
"""About so many different sums of bytes are followed, so that a plan may be slower than the best by
what their spacing hides. Whether there is a plan at all is exact."""


@dataclass(frozen=True)
class Option:
    """One way to treat a unit.

    Attributes:
        name: What it is called; ``"keep"``, ``"recompute"`` or a selective level.
        nbytes: Bytes held from its forward to its backward pass, above those of recomputing it.
        seconds: Time that a step takes longer than with everything kept.
    """

    name: str
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Item:
    """A unit to decide on; in order of execution.

    Attributes:
        options: At least one.
        recompute: The one of them that may be joined with neighbours into a segment; or ``None``.
        follows: Whether its input is the output of the item before, so that they can be joined.
        inputs: Bytes of its input, which a segment drops for all but its first unit.
        internals: Bytes that its recomputation brings back.
        forward_peak: Peak of the measured step while it ran.
        backward_peak: Peak of the measured step from its recomputation to the next one's.
        remainder: Time that its recomputation takes longer where another unit of the segment needs
            its output: by itself it is over with the last tensor that is saved.
    """

    options: tuple[Option, ...]
    recompute: Option | None
    follows: bool
    inputs: int
    internals: int
    forward_peak: int
    backward_peak: int
    remainder: float = 0.0


@dataclass(frozen=True)
class Decision:
    """``option`` for the items from ``start`` up to ``stop``, jointly if they are several."""

    start: int
    stop: int
    option: Option


@dataclass(frozen=True)
class Solution:
    """Decisions for all items, with what they lead to.

    Attributes:
        decisions: In order.
        peak: Predicted peak in bytes.
        seconds: Predicted time above a step that keeps everything.
    """

    decisions: tuple[Decision, ...]
    peak: int
    seconds: float


Step: TypeAlias = tuple[Decision, int, float, int]
"""What can be decided: with the bytes that it holds, its seconds, and the peak that it needs."""

LEAST = 1 << 62
"""The place of the state that holds least, which no number of bytes is."""


@dataclass
class _State:
    held: int = 0
    seconds: float = 0.0
    peak: int = 0
    chain: Any = ()  # the latest decision, behind the chain of those before it


def solve(
    items: Sequence[Item], head_peak: int, budget: float, longest: int = 1
) -> Solution | None:
    """Return the fastest plan with a predicted peak of at most ``budget``, or ``None``.

    Args:
        items: The units.
        head_peak: Peak of the measured step between the last unit's forward and backward pass.
        budget: In bytes, measured like the peaks.
        longest: How many units a segment may have.
    """
    total = sum(max(option.nbytes for option in item.options) for item in items)
    grain = max(1, total // STATES)
    reached: list[dict[int, _State]] = [{} for _ in range(len(items) + 1)]
    reached[0][0] = _State()
    for start in range(len(items)):
        steps = list(_steps(items, start, longest))
        for state in _undominated(reached[start].values()):
            for step in steps:
                if state.held + step[-1] <= budget:
                    _offer(reached[step[0].stop], state, step, grain)
    ends = [state for state in reached[-1].values() if state.held + head_peak <= budget]
    if not ends:
        return None
    best = min(ends, key=lambda state: (state.seconds, state.peak))
    chain, decisions = best.chain, list[Decision]()
    while chain:
        chain, decision = chain
        decisions.insert(0, decision)
    return Solution(tuple(decisions), max(best.peak, best.held + head_peak), best.seconds)


def smallest_peak(items: Sequence[Item], head_peak: int, longest: int = 1) -> Solution:
    """Return the plan with the smallest predicted peak."""
    peaks = [max(item.forward_peak, item.backward_peak) for item in items]
    low, high = 0.0, float(max(head_peak, *peaks, 0))
    best = solve(items, head_peak, high, longest)
    assert best is not None, "recomputing every unit is the step that was measured"
    while (high - low) > 0.002 * high:
        middle = (low + high) / 2
        solution = solve(items, head_peak, middle, longest)
        if solution is None:
            low = middle
        else:
            best, high = solution, min(middle, solution.peak)
    return best


def _steps(items: Sequence[Item], start: int, longest: int) -> Iterator[Step]:
    """Yield what can be decided at ``start``: with bytes held, seconds, and the peak it needs."""
    item = items[start]
    peak = max(item.forward_peak, item.backward_peak)
    for option in item.options:
        yield Decision(start, start + 1, option), option.nbytes, option.seconds, peak
    held, seconds, brought_back = 0, 0.0, 0
    for stop in range(start + 1, min(start + longest, len(items)) + 1):
        last = items[stop - 1]
        if last.recompute is None or (stop - start > 1 and not last.follows):
            return
        # When its backward pass begins, all of the segment is there at once.
        peak = max(peak, last.forward_peak + held, last.backward_peak + brought_back)
        brought_back += last.internals
        seconds += last.recompute.seconds
        if stop - start > 1:
            held -= last.inputs
            seconds += items[stop - 2].remainder
            yield Decision(start, stop, last.recompute), held, seconds, peak


def _offer(states: dict[int, _State], state: _State, step: Step, grain: int) -> None:
    """Keep the fastest of the states that hold about the same, and the one that holds least.

    With the latter, whatever can be met is met: only the time may be short of the best.
    """
    decision, nbytes, seconds, peak = step
    held, seconds = state.held + nbytes, state.seconds + seconds
    known, least = states.get(held // grain), states.get(LEAST)
    fastest = known is None or (seconds, held) < (known.seconds, known.held)
    smallest = least is None or (held, seconds) < (least.held, least.seconds)
    if fastest or smallest:
        new = _State(held, seconds, max(state.peak, state.held + peak), (state.chain, decision))
        states.update({held // grain: new} if fastest else {})
        states.update({LEAST: new} if smallest else {})


def _undominated(states: Iterable[_State]) -> list[_State]:
    """Return the states that no other beats in both bytes and time."""
    best: list[_State] = []
    for state in sorted(states, key=lambda state: (state.held, state.seconds)):
        if not best or state.seconds < best[-1].seconds:
            best.append(state)
    return best
