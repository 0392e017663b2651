"""Which module made the first NaN."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_opt.core.modules.compiling import has_compiled_parts
from lightning_opt.core.modules.splitting import tensors_of
from lightning_opt.core.numerics.scalars import wide_dtype
from lightning_opt.gradients.health.issues import CRITICAL, WARNING, Issue
from lightning_opt.gradients.health.measures import largest_magnitude, read_together


class ActivationWatch:
    """Finds the first output of a leaf module that is not finite.

    Each tensor that leaves a module or enters the first costs one reduction; nothing is read until
    :meth:`take`. Modules under ``torch.compile`` are not watched, and functional calls cannot be.
    """

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._active = False
        self._known: dict[int, ref[Tensor]] = {}  # looked at in this batch
        self._calls: list[tuple[str, Tensor, Tensor]] = []
        self._batches: list[tuple[int, int, tuple[str, ...], Tensor]] = []
        self._cause: Issue | None = None  # of an unbroken row of bad windows
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

    def start_batch(self, epoch: int, batch: int) -> None:
        """Look from here on."""
        self._active, self._when = True, (epoch, batch)

    def _look(self, name: str) -> Any:
        @torch.no_grad()
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            if not self._active:
                return
            given = [self._reduce(tensor) for tensor in _floats(inputs) if self._is_new(tensor)]
            for tensor in _floats(output):
                largest = self._reduce(tensor)
                came = torch.stack(given).sum() if given else torch.zeros_like(largest)
                self._calls.append((name, came, largest))

        return look

    def _is_new(self, tensor: Tensor) -> bool:
        known = self._known.get(id(tensor))
        return known is None or known() is not tensor

    def _reduce(self, tensor: Tensor) -> Tensor:
        self._known[id(tensor)] = ref(tensor)
        return largest_magnitude(tensor.detach()).to(wide_dtype(tensor.device))

    def end_batch(self) -> None:
        """Look no longer, and note on the device whether this batch had the first bad output."""
        self._active, self._known = False, {}
        if not self._calls:
            return
        names, inputs, outputs = zip(*self._calls, strict=True)
        self._calls = []
        values = torch.stack([torch.stack(inputs), torch.stack(outputs)])
        bad = values[1].isfinite().logical_not()
        first = bad.to(torch.int8).argmax()
        came, made = values.index_select(1, first[None]).unbind()  # `[:, first]` would read it
        seen = torch.cat([bad.any()[None], first[None], made.isnan(), came.isfinite()])
        last = self._batches[-1][2] if self._batches else None
        self._batches.append((*self._when, last if last == names else names, seen))

    def take(self, *, scaled: bool) -> tuple[Issue, ...]:
        """Return what was found since the last call. Waits for the device.

        Args:
            scaled: Whether a loss scaler skips bad steps, which makes them less than critical.
        """
        first = None
        read = read_together([seen for *_, seen in self._batches])
        for (epoch, index, names, _), row in zip(self._batches, read, strict=True):
            found, place, nan, made = map(int, row)
            if found:
                kind = "nan" if nan else "inf"
                first = bad_output(kind, names[place], f"epoch {epoch}, batch {index}", bool(made))
                break
        # Once weights are NaN every output is: what matters is the first of an unbroken row.
        self._cause = (self._cause or first) if first else None
        self._batches = []
        if self._cause is None:
            return ()
        return (replace(self._cause, severity=WARNING if scaled else CRITICAL),)


def bad_output(kind: str, module: str, when: str, made: bool) -> Issue:
    """Return what is said of the first output of a batch that was not finite.

    Args:
        kind: ``"nan"`` or ``"inf"``.
        module: The name of the module it came out of.
        when: Epoch and batch.
        made: Whether its inputs were finite, so that the module made it.
    """
    what = f"the first {kind.upper()} came out of this module at {when}"
    if not made:
        what = (
            f"the first {kind.upper()} reached this module as its input at {when}: it was made "
            "before it, in code between modules or in the batch itself"
        )
    return Issue(kind, CRITICAL, module, what)


def _floats(values: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors among a module's inputs or outputs."""
    return (tensor for tensor in tensors_of(values) if tensor.is_floating_point())
