"""Find the module that made the first NaN or Inf."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_opt.core.modules.batches import tensors_of
from lightning_opt.core.modules.compiling import has_compiled_parts
from lightning_opt.core.numerics.scalars import wide_dtype
from lightning_opt.gradients.health.diagnosis import CRITICAL, WARNING, Issue
from lightning_opt.gradients.health.measures import largest_magnitude, read_together


class ActivationWatch:
    """Finds the first output of a leaf module that is not finite.

    Each module output, and each input that is not the output of another module, costs one
    reduction. Nothing is read until :meth:`take`. Modules under ``torch.compile`` are not watched,
    and functional calls cannot be.
    """

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._active = False
        self._reduced: dict[int, ref[Tensor]] = {}  # tensors of this batch
        self._calls: list[tuple[str, Tensor, Tensor]] = []
        self._batches: list[tuple[int, int, tuple[str, ...], Tensor]] = []
        self._cause: Issue | None = None  # the first issue of consecutive bad reports
        self._batch = (0, 0)

    def watch(self, model: nn.Module) -> bool:
        """Add the hooks, and return whether there are any: a compiled model gets none."""
        self.stop()
        if has_compiled_parts(model):
            return False
        for name, module in model.named_modules():
            if name and next(module.children(), None) is None:
                self._handles.append(module.register_forward_hook(self._hook(name)))
        return bool(self._handles)

    def stop(self) -> None:
        """Remove the hooks and reset all state."""
        for handle in self._handles:
            handle.remove()
        self.__init__()  # type: ignore[misc]

    def start_batch(self, epoch: int, batch: int) -> None:
        """Activate the hooks for one batch."""
        self._active, self._batch = True, (epoch, batch)

    def _hook(self, name: str) -> Any:
        @torch.no_grad()
        def reduce_activations(module: nn.Module, inputs: Any, output: Any) -> None:
            if not self._active:
                return
            given = [self._reduce(tensor) for tensor in _floats(inputs) if self._is_new(tensor)]
            for tensor in _floats(output):
                largest = self._reduce(tensor)
                total = torch.stack(given).sum() if given else torch.zeros_like(largest)
                self._calls.append((name, total, largest))

        return reduce_activations

    def _is_new(self, tensor: Tensor) -> bool:
        known = self._reduced.get(id(tensor))
        return known is None or known() is not tensor

    def _reduce(self, tensor: Tensor) -> Tensor:
        self._reduced[id(tensor)] = ref(tensor)
        return largest_magnitude(tensor.detach()).to(wide_dtype(tensor.device))

    def end_batch(self) -> None:
        """Deactivate the hooks, and locate the batch's first bad output on the device."""
        self._active, self._reduced = False, {}
        if not self._calls:
            return
        names, inputs, outputs = zip(*self._calls, strict=True)
        self._calls = []
        values = torch.stack([torch.stack(inputs), torch.stack(outputs)])
        bad = values[1].isfinite().logical_not()
        first = bad.to(torch.int8).argmax()
        given, made = values.index_select(1, first[None]).unbind()  # `[:, first]` would read it
        found = torch.cat([bad.any()[None], first[None], made.isnan(), given.isfinite()])
        last = self._batches[-1][2] if self._batches else None
        self._batches.append((*self._batch, last if last == names else names, found))

    def take(self, *, scaled: bool) -> tuple[Issue, ...]:
        """Return the findings since the last call. Waits for the device.

        Args:
            scaled: Whether a loss scaler skips bad steps, so that they are not critical.
        """
        first = None
        rows = read_together([found for *_, found in self._batches])
        for (epoch, index, names, _), row in zip(self._batches, rows, strict=True):
            bad, place, nan, finite_inputs = map(int, row)
            if bad:
                kind = "nan" if nan else "inf"
                detail = f"the first {kind.upper()} came out of this module"
                if not finite_inputs:
                    detail = (
                        f"the first {kind.upper()} reached this module as its input: it was made "
                        "before it, in code between modules or in the batch itself"
                    )
                detail += f", at epoch {epoch}, batch {index}"
                first = Issue(kind, CRITICAL, names[place], detail)
                break
        # Once weights are NaN every output is, so the first of consecutive bad reports counts.
        self._cause = (self._cause or first) if first else None
        self._batches = []
        if self._cause is None:
            return ()
        return (replace(self._cause, severity=WARNING if scaled else CRITICAL),)


def _floats(values: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors among a module's inputs or outputs."""
    return (tensor for tensor in tensors_of(values) if tensor.is_floating_point())
