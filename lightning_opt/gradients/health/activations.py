"""Which module made the first NaN, and which activations are saturated."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_opt.core.compiling import has_compiled_parts
from lightning_opt.core.sharding import wants_host
from lightning_opt.gradients.health.findings import CRITICAL, WARNING, Finding
from lightning_opt.gradients.health.measures import read_together

SATURATED_SHARE = 0.95
"""Share of an activation's outputs at its bounds from which it is called saturated."""

BOUNDS: dict[type[nn.Module], tuple[float, float]] = {
    nn.Sigmoid: (0.01, 0.99),
    nn.Tanh: (-0.99, 0.99),
    nn.Hardtanh: (-0.99, 0.99),
    nn.Hardsigmoid: (0.0, 1.0),
    nn.ReLU: (0.0, math.inf),
    nn.ReLU6: (0.0, 6.0),
}
"""Outputs at or beyond these have next to no gradient."""


@dataclass(frozen=True, slots=True)
class BadOutput:
    """The first output of a batch that was not finite.

    Attributes:
        module: The name of the module it came out of.
        kind: ``"nan"`` or ``"inf"``.
        made: Whether its inputs were finite, so that the module made it.
        epoch, batch: When: the batch counts within the epoch, from 0.
    """

    module: str
    kind: str
    made: bool
    epoch: int
    batch: int

    def finding(self, severity: str) -> Finding:
        """Return this as a finding of a report."""
        when = f"epoch {self.epoch}, batch {self.batch}"
        what = f"the first {self.kind.upper()} came out of this module at {when}"
        if not self.made:
            what = (
                f"the first {self.kind.upper()} reached this module as its input at {when}: it was "
                "made before it, in code between modules or in the batch itself"
            )
        return Finding(self.kind, severity, self.module, what)


class ActivationWatch:
    """Looks at the outputs of all leaf modules during training batches.

    On an accelerator each output costs one reduction, and each input that is not the output of the
    module before another; nothing is read until :meth:`take`. On a CPU it is one sum an output.
    Modules under ``torch.compile`` are not watched, and functional calls cannot be.
    """

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._active = self._saturation = False
        self._last: Tensor | None = None
        self._calls: list[tuple[str, Tensor, Tensor]] = []
        self._record: Tensor | None = None
        self._batches: list[tuple[int, int, tuple[str, ...]]] = []
        self._shares: dict[str, Tensor] = {}
        self._first: BadOutput | None = None  # of this window
        self._cause: BadOutput | None = None  # of an unbroken row of bad windows
        self._when = (0, 0)

    def watch(self, model: nn.Module) -> bool:
        """Put the hooks on, and return whether there are any: a compiled model gets none."""
        self.stop()
        if has_compiled_parts(model):
            return False
        for name, module in model.named_modules():
            if name and next(module.children(), None) is None:
                self._handles.append(module.register_forward_hook(self._look(name)))
        return bool(self._handles)

    def stop(self) -> None:
        """Take the hooks off and let go of what they saw."""
        for handle in self._handles:
            handle.remove()
        self.__init__()  # type: ignore[misc]

    def start_batch(self, epoch: int, batch: int, *, saturation: bool) -> None:
        """Look from here on; at saturation too where a report is due."""
        self._active, self._saturation, self._when = True, saturation, (epoch, batch)

    def _look(self, name: str) -> Any:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            if not self._active:
                return
            with torch.no_grad():
                for tensor in _floats(output):
                    self._check(name, tensor.detach(), inputs)
                    if self._saturation and type(module) in BOUNDS:
                        low, high = BOUNDS[type(module)]
                        outside = (tensor <= low) | (tensor >= high)
                        self._shares[name] = outside.mean(dtype=torch.float32)

        return look

    def _check(self, name: str, output: Tensor, inputs: Any) -> None:
        if wants_host(output.device):
            if self._first is None and not math.isfinite(output.sum().item()):
                if output.isfinite().all():
                    return  # only the sum overflowed
                made = all(bool(tensor.isfinite().all()) for tensor in _floats(inputs))
                kind = "nan" if bool(output.isnan().any()) else "inf"
                self._first = BadOutput(name, kind, made, *self._when)
            return
        given = [_largest(tensor) for tensor in _floats(inputs) if tensor is not self._last]
        self._last = output
        largest = _largest(output)
        came = torch.stack(given).sum() if given else torch.zeros_like(largest)
        self._calls.append((name, came, largest))

    def end_batch(self) -> None:
        """Look no longer, and note on the device whether this batch had the first bad output."""
        self._active, self._last = False, None
        if not self._calls:
            return
        names, inputs, outputs = zip(*self._calls, strict=True)
        self._calls = []
        values = torch.stack([torch.stack(inputs), torch.stack(outputs)]).double()
        bad = values[1].isfinite().logical_not()
        first = bad.to(torch.int8).argmax()
        came, made = values.index_select(1, first[None]).unbind()  # `[:, first]` would read it
        number = torch.full_like(made, len(self._batches))
        seen = torch.cat([bad.any()[None], first[None], number, made.isnan(), came.isfinite()])
        if self._record is not None:
            seen = torch.where(self._record[0] > 0, self._record, seen)
        self._record = seen
        last = self._batches[-1][2] if self._batches else None
        self._batches.append((*self._when, last if last == names else names))

    def take(self, *, scaled: bool) -> tuple[Finding, ...]:
        """Return what was found since the last call. Waits for the device.

        Args:
            scaled: Whether a loss scaler skips bad steps, which makes them less than critical.
        """
        record = [] if self._record is None else [self._record]
        read = read_together([*record, *self._shares.values()])
        if record:
            found, place, batch, nan, made = map(int, read.pop(0))
            if found:
                epoch, index, names = self._batches[batch]
                kind = "nan" if nan else "inf"
                self._first = BadOutput(names[place], kind, bool(made), epoch, index)
        shares = {name: share[0] for name, share in zip(self._shares, read, strict=True)}
        # Once weights are NaN every output is: what matters is the first of an unbroken row.
        self._cause = (self._cause or self._first) if self._first else None
        self._first, self._record, self._batches, self._shares = None, None, [], {}
        findings = [
            Finding("saturated", WARNING, name, f"{share:.1%} of its outputs have no slope", share)
            for name, share in shares.items()
            if share >= SATURATED_SHARE
        ]
        if self._cause is not None:
            findings.append(self._cause.finding(WARNING if scaled else CRITICAL))
        return tuple(findings)


def _largest(tensor: Tensor) -> Tensor:
    if not tensor.numel():
        return torch.zeros((), device=tensor.device)
    largest: Tensor = torch.linalg.vector_norm(tensor.detach(), math.inf)
    return largest.float()


def _floats(values: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors among a module's inputs or outputs."""
    if isinstance(values, Tensor):
        if values.is_floating_point():
            yield values
    elif isinstance(values, dict):
        for value in values.values():
            yield from _floats(value)
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _floats(value)
