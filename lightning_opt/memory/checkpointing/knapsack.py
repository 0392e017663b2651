"""The fastest plan that does not exceed a peak: a knapsack over the blocks of a step.

While a block runs forward or backward, all earlier blocks hold the bytes that they keep. The peak
of a plan is the maximum over the forward and backward passes of all blocks: the peak of that pass
with every block recomputed, plus the bytes held by the earlier blocks. Dynamic programming over the
blocks finds the fastest plan, with the held bytes as state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

# Number of byte totals that are tracked. With fewer, the fastest plan may be missed; whether
# any plan meets the limit is always exact.
MAX_STATES = 400


@dataclass(frozen=True)
class Option:
    """One way to treat a block.

    Attributes:
        name: ``"keep"``, ``"recompute"`` or the index of a selection of operators.
        nbytes: Bytes held between forward and backward pass; recomputing the block is 0.
        seconds: Time added to a step that keeps everything.
    """

    name: str
    nbytes: int
    seconds: float


@dataclass(eq=False)
class Item:
    """A block, in order of execution.

    Attributes:
        options: Ways to treat it. The first one recomputes it fully.
        joinable: Whether it can be recomputed in a segment with its neighbours.
        takes_previous_output: Whether its input is the output of the previous block.
        inputs: Bytes of its input. A segment keeps only those of its first block.
        internal_bytes: Bytes that its recomputation allocates.
        forward_peak: Peak of the step while it runs, with every block recomputed.
        backward_peak: Peak from its recomputation to the recomputation of the next block.
        remainder: Additional seconds of its recomputation inside a segment. There it runs to the
            end, because the next block needs its output; alone, it stops at the last saved tensor.
    """

    options: tuple[Option, ...] = ()
    joinable: bool = False
    takes_previous_output: bool = False
    inputs: int = 0
    internal_bytes: int = 0
    forward_peak: int = 0
    backward_peak: int = 0
    remainder: float = 0.0


@dataclass(frozen=True)
class Decision:
    """The option for the items from ``start`` up to ``stop``; several items form one segment.

    ``nbytes`` and ``seconds`` are totals of the segment. ``peak`` is its peak without the bytes
    held by earlier items.
    """

    start: int
    stop: int
    option: Option
    nbytes: int = 0
    seconds: float = 0.0
    peak: int = 0


@dataclass(frozen=True)
class Solution:
    """Decisions for all items.

    Attributes:
        decisions: In order of execution.
        peak: Predicted peak in bytes.
        seconds: Predicted time above a step that keeps everything.
    """

    decisions: tuple[Decision, ...]
    peak: int
    seconds: float


@dataclass
class _State:
    held: int = 0
    seconds: float = 0.0
    peak: int = 0
    decision: Decision | None = None
    previous: _State | None = None


class _States:
    """The fastest state for each byte total, and the state that holds the least."""

    def __init__(self, grain: int) -> None:
        self._grain = grain
        self._fastest: dict[int, _State] = {}
        self._least: _State | None = None

    def add(self, previous: _State, decision: Decision) -> None:
        held = previous.held + decision.nbytes
        seconds = previous.seconds + decision.seconds
        known = self._fastest.get(held // self._grain)
        is_fastest = known is None or (seconds, held) < (known.seconds, known.held)
        least = self._least
        is_least = least is None or (held, seconds) < (least.held, least.seconds)
        if not is_fastest and not is_least:
            return
        peak = max(previous.peak, previous.held + decision.peak)
        state = _State(held, seconds, peak, decision, previous)
        if is_fastest:
            self._fastest[held // self._grain] = state
        if is_least:  # if any plan meets the limit, this state does
            self._least = state

    def all(self) -> list[_State]:
        least = [] if self._least is None else [self._least]
        return [*self._fastest.values(), *least]


def solve(items: Sequence[Item], head_peak: int, limit: float, longest: int = 1) -> Solution | None:
    """Return the fastest plan with a predicted peak of at most ``limit``, or ``None``.

    Args:
        items: The blocks.
        head_peak: Peak between the last block's forward and backward pass, with every block
            recomputed.
        limit: Maximum peak in bytes.
        longest: Maximum number of blocks in a segment.
    """
    total = sum(max(option.nbytes for option in item.options) for item in items)
    grain = max(1, total // MAX_STATES)
    reached = [_States(grain) for _ in range(len(items) + 1)]
    states = [_State()]
    for start in range(len(items)):
        decisions = list(_decisions(items, start, longest))
        for state in states:
            for decision in decisions:
                if state.held + decision.peak <= limit:
                    reached[decision.stop].add(state, decision)
        states = _undominated(reached[start + 1].all())
    ends = [state for state in states if state.held + head_peak <= limit]
    if not ends:
        return None
    best = min(ends, key=lambda state: (state.seconds, state.peak))
    path = list[Decision]()
    last: _State | None = best
    while last is not None and last.decision is not None:
        path.insert(0, last.decision)
        last = last.previous
    return Solution(tuple(path), max(best.peak, best.held + head_peak), best.seconds)


def smallest_peak(items: Sequence[Item], head_peak: int, longest: int = 1) -> Solution:
    peaks = [max(item.forward_peak, item.backward_peak) for item in items]
    low, high = 0.0, float(max(head_peak, *peaks, 0))
    best = solve(items, head_peak, high, longest)
    assert best is not None, "the measured step recomputes every block, so it meets this limit"
    while (high - low) > 0.002 * high:
        middle = (low + high) / 2
        solution = solve(items, head_peak, middle, longest)
        if solution is None:
            low = middle
        else:
            best, high = solution, min(middle, solution.peak)
    return best


def _decisions(items: Sequence[Item], start: int, longest: int) -> Iterator[Decision]:
    """Yield the decisions for the item at ``start``: its options and the segments from it on."""
    item = items[start]
    peak = max(item.forward_peak, item.backward_peak)
    for option in item.options:
        yield Decision(start, start + 1, option, option.nbytes, option.seconds, peak)
    held = 0
    seconds = 0.0
    recomputed = 0
    for stop in range(start + 1, min(start + longest, len(items)) + 1):
        last = items[stop - 1]
        if not last.joinable or (stop - start > 1 and not last.takes_previous_output):
            return
        # The recomputed tensors of the whole segment are live when its backward pass begins.
        peak = max(peak, last.forward_peak + held, last.backward_peak + recomputed)
        recomputed += last.internal_bytes
        recompute = last.options[0]
        seconds += recompute.seconds
        if stop - start > 1:
            held -= last.inputs
            seconds += items[stop - 2].remainder
            yield Decision(start, stop, recompute, held, seconds, peak)


def _undominated(states: Iterable[_State]) -> list[_State]:
    """Return the states to which no other one is better in both bytes and time."""
    best: list[_State] = []
    for state in sorted(states, key=lambda state: (state.held, state.seconds)):
        if not best or state.seconds < best[-1].seconds:
            best.append(state)
    return best
