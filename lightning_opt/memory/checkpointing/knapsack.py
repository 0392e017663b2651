"""The fastest plan that does not exceed a peak: a knapsack over the blocks of a step.

While a block runs forward or backward, all earlier blocks hold the bytes that they keep. The peak
of a plan is a maximum over all blocks. The value of a block is its peak with every block
recomputed, plus the bytes held by the earlier blocks. Dynamic programming over the blocks finds the
fastest plan, with the held bytes as state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_opt.memory.checkpointing.selective import OperatorKey

# Maximum number of byte totals that are tracked. Because of it, the fastest plan may be missed. A
# plan that meets the limit is always found if one exists.
MAX_STATES = 400


@dataclass(frozen=True)
class Option:
    """One way to treat a block.

    Attributes:
        kept: The operators whose outputs are kept; ``None`` keeps all outputs.
        nbytes: Bytes held between forward and backward pass, without the input.
        seconds: Time added to a step that keeps everything.
    """

    kept: frozenset[OperatorKey] | None
    nbytes: int
    seconds: float


@dataclass(eq=False)
class Item:
    """A block, in order of execution.

    Attributes:
        options: Ways to treat it. One of them holds no bytes.
        peak: Peak of the step during its forward and backward pass, with every block recomputed.
    """

    options: tuple[Option, ...] = ()
    peak: int = 0


@dataclass(frozen=True)
class Solution:
    """One option for each item.

    Attributes:
        options: In order of execution.
        peak: Predicted peak in bytes.
        seconds: Predicted time above a step that keeps everything.
    """

    options: tuple[Option, ...]
    peak: int
    seconds: float


@dataclass
class _State:
    held: int = 0
    seconds: float = 0.0
    peak: int = 0
    option: Option | None = None
    previous: _State | None = None

    def path(self) -> Iterator[Option]:
        if self.previous is not None and self.option is not None:
            yield from self.previous.path()
            yield self.option


def solve(items: Sequence[Item], head_peak: int, limit: float) -> Solution | None:
    """Return the fastest plan with a predicted peak of at most ``limit`` bytes, or ``None``.

    ``head_peak`` is the peak between the last block's forward and backward pass, with every block
    recomputed.
    """
    total = sum(max(option.nbytes for option in item.options) for item in items)
    grain = max(1, total // MAX_STATES)
    states = [_State()]
    for item in items:
        following = [
            _State(
                state.held + option.nbytes,
                state.seconds + option.seconds,
                max(state.peak, state.held + item.peak),
                option,
                state,
            )
            for state in states
            if state.held + item.peak <= limit
            for option in item.options
        ]
        states = _best(following, grain)
    ends = [state for state in states if state.held + head_peak <= limit]
    if not ends:
        return None
    best = min(ends, key=lambda state: (state.seconds, state.peak))
    return Solution(tuple(best.path()), max(best.peak, best.held + head_peak), best.seconds)


def _best(states: list[_State], grain: int) -> list[_State]:
    """Return the fastest state of each byte total, except if a state that holds less is as fast.

    The state that holds the least is always included. If any plan meets the limit, this one does.
    """
    best: list[_State] = []
    for state in sorted(states, key=lambda state: (state.held, state.seconds)):
        if best and state.seconds >= best[-1].seconds:
            continue
        if len(best) > 1 and best[-1].held // grain == state.held // grain:
            best.pop()
        best.append(state)
    return best
