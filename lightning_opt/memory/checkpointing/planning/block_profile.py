"""What each block holds, what its recomputation costs, and when the step is at its peak.

A unit is a block as the planner sees it: one thing to keep or to recompute. The measurement runs
with every unit recomputed by itself, which fits where anything does, and tells what keeping would
add: what a recomputation brings back is what keeping would have held.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from lightning_opt.core.measure.timing import wait_for
from lightning_opt.core.modules.blocks import Block
from lightning_opt.memory.checkpointing.methods.forward import Probe
from lightning_opt.memory.checkpointing.methods.selective import OperatorProfile
from lightning_opt.memory.meters import Meter


@dataclass
class Unit:
    """What is known of a block.

    Attributes:
        block: The block.
        internals: Bytes that keeping everything inside of it adds to recomputing it.
        inputs: Bytes of its inputs, which recomputing it keeps.
        forward_peak: Peak of the step while it ran, with every unit recomputed.
        backward_peak: The same from its recomputation to the next one's.
        calls: How often it ran in the step.
        follows: Whether an input of it is the output of the unit before.
        profiles: The operators of its modules.
    """

    block: Block
    internals: int = 0
    inputs: int = 0
    forward_peak: int = 0
    backward_peak: int = 0
    calls: int = 0
    follows: bool = False
    profiles: tuple[OperatorProfile, ...] = ()


@dataclass
class StepProfile:
    """A step with every unit recomputed by itself.

    Attributes:
        units: Those that ran, in the order of their first call.
        head_peak: Peak between the last unit's forward pass and the first recomputation.
    """

    units: list[Unit]
    head_peak: int = 0

    def peak(self, kept: float = 0.0) -> float:
        """Return the peak of the step if units kept this share of their internals."""
        peak, held = 0.0, 0.0
        for unit in self.units:
            peak = max(peak, held + max(unit.forward_peak, unit.backward_peak))
            held += kept * unit.internals
        return max(peak, held + self.head_peak)


class Timeline(Probe):
    """Watches units run and be recomputed, and reads the meter at each turn.

    Args:
        blocks: The units.
        meter: Bytes above the start of the step.
    """

    def __init__(self, blocks: Iterable[Block], meter: Meter) -> None:
        self._meter = meter
        self._unit_of = {m: unit for b in blocks for unit in [Unit(b)] for m in b.modules}
        self._profile = StepProfile([])
        self._current: Unit | None = None  # whose backward pass it is
        self._seen: set[int] = set()
        self._outputs: list[ref[Tensor]] = []

    @contextmanager
    def forward(self, module: nn.Module, inputs: Sequence[Tensor]) -> Iterator[None]:
        """Count a first run."""
        unit = self._unit_of[module]
        if self._current is not None:  # a second forward pass, as of a discriminator
            self._close()
            self._current = None
        if module is unit.block.modules[0]:
            unit.inputs += self._new_bytes(inputs)
            unit.follows = any(output() is tensor for output in self._outputs for tensor in inputs)
        # What the model does on its own before the unit counts as the unit's.
        yield
        unit.forward_peak = max(unit.forward_peak, self._meter.mark())
        if module is unit.block.modules[0]:
            unit.calls += 1
        if unit not in self._profile.units:
            self._profile.units.append(unit)

    def returned(self, module: nn.Module, outputs: Sequence[Tensor]) -> None:
        """Remember the outputs, to recognise them among the inputs of the next."""
        self._outputs = [ref(tensor) for tensor in outputs]

    @contextmanager
    def recompute(self, module: nn.Module) -> Iterator[None]:
        """Count a recomputation: what is there after it and was not before."""
        unit = self._unit_of[module]
        if unit is not self._current or module is unit.block.modules[0]:
            self._close()
        self._current = unit
        before = self._meter.live()
        try:
            yield
        finally:
            unit.internals += self._meter.live() - before

    def _new_bytes(self, inputs: Sequence[Tensor]) -> int:
        """Return the size of what is no parameter and was no unit's input before."""
        total = 0
        for tensor in inputs:
            storage = tensor.untyped_storage()
            if not isinstance(tensor, nn.Parameter) and id(storage) not in self._seen:
                self._seen.add(id(storage))
                total += storage.nbytes()
        return total

    def _close(self) -> None:
        """Add the peak since the last turn to the phase that ends."""
        peak = self._meter.mark()
        if self._current is not None:
            self._current.backward_peak = max(self._current.backward_peak, peak)
        else:
            self._profile.head_peak = max(self._profile.head_peak, peak)

    def finish(self) -> StepProfile:
        """Return what was seen. Call it after the backward pass."""
        self._close()
        return self._profile


class Stopwatch(Probe):
    """Takes the time of runs, first ones and recomputations, by block.

    Attributes:
        seconds: Of all runs of each block.
    """

    def __init__(self, blocks: Iterable[Block], device: torch.device) -> None:
        self._block_of = {module: block for block in blocks for module in block.modules}
        self._device = device
        self.seconds: dict[Block, float] = dict.fromkeys(self._block_of.values(), 0.0)

    def forward(self, module: nn.Module, inputs: Sequence[Tensor]) -> AbstractContextManager[Any]:
        """Time a first run."""
        return self.recompute(module)

    @contextmanager
    def recompute(self, module: nn.Module) -> Iterator[None]:
        """Time a recomputation."""
        wait_for(self._device)
        start = perf_counter()
        try:
            yield
        finally:
            wait_for(self._device)
            self.seconds[self._block_of[module]] += perf_counter() - start


class OperatorWatch(Probe):
    """Records the operators of each module in its latest run."""

    def __init__(self, profiles: Mapping[nn.Module, OperatorProfile]) -> None:
        self._profiles = profiles

    def forward(self, module: nn.Module, inputs: Sequence[Tensor]) -> AbstractContextManager[Any]:
        """Record a first run."""
        return self._profiles[module].forward()

    def recompute(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Count what a recomputation runs."""
        return self._profiles[module].recompute()
