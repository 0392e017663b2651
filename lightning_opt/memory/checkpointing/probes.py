"""Probes that measure the memory, the time and the operators of each block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from lightning_opt.core.measure.timing import wait_for
from lightning_opt.core.modules.blocks import Block
from lightning_opt.memory.checkpointing.forward import Probe
from lightning_opt.memory.checkpointing.knapsack import Item
from lightning_opt.memory.checkpointing.selective import (
    Operator,
    OperatorKey,
    OperatorProfile,
    Selection,
)
from lightning_opt.memory.meters import Meter


@dataclass(eq=False)
class Unit(Item):
    """A block and its measurements.

    Attributes:
        block: The block.
        calls: Number of its calls in the step.
        profiles: The operators of its modules.
        selections: Sets of operators to try keeping; each set contains the previous one.
    """

    block: Block = field(kw_only=True)
    calls: int = 0
    profiles: tuple[OperatorProfile, ...] = ()
    selections: list[frozenset[OperatorKey]] = field(default_factory=list)

    @property
    def operators(self) -> list[Operator]:
        return [operator for profile in self.profiles for operator in profile.operators]

    @property
    def repeated_operators(self) -> list[Operator]:
        return [op for profile in self.profiles for op in profile.repeated_operators()]

    def selection_factory(self, index: int) -> Callable[[], Selection]:
        return partial(Selection, None, self.selections[index])


class Timeline(Probe):
    """Reads the meter whenever a block runs or is recomputed.

    Args:
        blocks: The blocks.
        meter: Measures bytes allocated since the start of the step.

    Attributes:
        units: The blocks that ran, in the order of their first call.
        head_peak: Peak between the last block's forward pass and the first recomputation.
    """

    def __init__(self, blocks: Iterable[Block], meter: Meter) -> None:
        self.units: list[Unit] = []
        self.head_peak = 0
        self._meter = meter
        self._unit_of = {m: unit for b in blocks for unit in [Unit(block=b)] for m in b.modules}
        self._current: Unit | None = None  # the unit whose backward pass runs
        self._counted: set[int] = set()
        self._outputs: list[ref[Tensor]] = []

    @contextmanager
    def forward(self, module: nn.Module, inputs: Sequence[Tensor]) -> Iterator[None]:
        unit = self._unit_of[module]
        if self._current is not None:  # a second forward pass, e.g. for a GAN discriminator
            self._record_peak()
            self._current = None
        is_first = module is unit.block.modules[0]
        if is_first:
            unit.inputs += self._new_bytes(inputs)
            unit.takes_previous_output = any(
                output() is tensor for output in self._outputs for tensor in inputs
            )
        # Memory used between blocks is attributed to the next block.
        yield
        unit.forward_peak = max(unit.forward_peak, self._meter.mark())
        unit.calls += is_first
        if unit not in self.units:
            self.units.append(unit)

    def after_forward(self, module: nn.Module, outputs: Sequence[Tensor]) -> None:
        """Store the outputs, to recognize them among the inputs of the next block."""
        self._outputs = [ref(tensor) for tensor in outputs]

    @contextmanager
    def recompute(self, module: nn.Module) -> Iterator[None]:
        """Measure a recomputation by the bytes still allocated after it."""
        unit = self._unit_of[module]
        if unit is not self._current or module is unit.block.modules[0]:
            self._record_peak()
        self._current = unit
        before = self._meter.live()
        try:
            yield
        finally:
            unit.internal_bytes += self._meter.live() - before

    def _new_bytes(self, inputs: Sequence[Tensor]) -> int:
        """Return the bytes of inputs that are not parameters and were not counted before."""
        total = 0
        for tensor in inputs:
            storage = tensor.untyped_storage()
            if not isinstance(tensor, nn.Parameter) and id(storage) not in self._counted:
                self._counted.add(id(storage))
                total += storage.nbytes()
        return total

    def _record_peak(self) -> None:
        peak = self._meter.mark()
        if self._current is not None:
            self._current.backward_peak = max(self._current.backward_peak, peak)
        else:
            self.head_peak = max(self.head_peak, peak)

    def finish(self) -> None:
        """Record the last peak, after the backward pass."""
        self._record_peak()
        for unit in self.units:
            unit.joinable = unit.calls == 1


class OperatorProbe(Probe):
    """Records the operators of the latest run of each module."""

    def __init__(self, profiles: Mapping[nn.Module, OperatorProfile]) -> None:
        self._profiles = profiles

    def forward(self, module: nn.Module, inputs: Sequence[Tensor]) -> AbstractContextManager[Any]:
        return self._profiles[module].forward()

    def recompute(self, module: nn.Module) -> AbstractContextManager[Any]:
        return self._profiles[module].recompute()


class Stopwatch(Probe):
    """Measures the time of all runs and recomputations of each block.

    Attributes:
        seconds: Total seconds of each block.
    """

    def __init__(self, blocks: Iterable[Block], device: torch.device) -> None:
        self._block_of = {module: block for block in blocks for module in block.modules}
        self._device = device
        self.seconds: dict[Block, float] = dict.fromkeys(self._block_of.values(), 0.0)

    def forward(self, module: nn.Module, inputs: Sequence[Tensor]) -> AbstractContextManager[Any]:
        return self.recompute(module)

    @contextmanager
    def recompute(self, module: nn.Module) -> Iterator[None]:
        wait_for(self._device)
        start = perf_counter()
        try:
            yield
        finally:
            wait_for(self._device)
            self.seconds[self._block_of[module]] += perf_counter() - start
