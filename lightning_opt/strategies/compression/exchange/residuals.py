"""Error feedback: what compression left out of one step is added to the gradient of the next.

References:
    Seide, Fu, Droppo, Li and Yu (2014), *1-Bit Stochastic Gradient Descent and its Application to
    Data-Parallel Distributed Training of Speech DNNs*. Karimireddy, Rebjock, Stich and Jaggi
    (2019), *Error Feedback Fixes SignSGD and other Gradient Compression Schemes*.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_opt.core.sharding import wants_host


class Owed:
    """What was not sent of a flat tensor, before and after the step that is under way.

    Only when a step has been applied is it known which of the two holds: a step that a guard or a
    loss scaler leaves out must leave no trace.

    Args:
        kept: What is owed as long as the step has not been applied.

    Attributes:
        kept: See above.
        pending: What is owed once it has.
    """

    def __init__(self, kept: Tensor) -> None:
        self.kept = kept
        self.pending = torch.empty_like(kept)

    def commit(self, lost: Tensor) -> None:
        """The step has been applied, unless ``lost``, which is 0-dimensional."""
        if not wants_host(lost.device):
            torch.where(lost, self.kept, self.pending, out=self.kept)
        elif not lost:  # on a CPU
            self.kept, self.pending = self.pending, self.kept


class Residual(Owed):
    """What this rank owes to the parameters of one bucket.

    Args:
        kept: Flat, one value for each element.
        parts: Where each parameter lies, by its name.

    Attributes:
        owes: Whether ``kept`` may hold anything.
        lost: Whether the latest step was applied to no parameter, as far as a device alone knows:
            0-dimensional.
    """

    def __init__(self, kept: Tensor, parts: Mapping[str, slice]) -> None:
        super().__init__(kept)
        self.parts = parts
        self.owes = True
        self.lost = self._applied = torch.zeros((), dtype=torch.bool, device=kept.device)
        self._held: dict[str, Tensor | None] = {}
        self._flushed = False

    @property
    def name(self) -> str:
        """What to call the bucket in a checkpoint: its first parameter's name."""
        return next(iter(self.parts))

    def add(self, gradient: Tensor, scale: Tensor) -> None:
        """Begin a step: add a gradient that is multiplied with ``scale``."""
        self._held.clear()
        self._flushed, self.lost = False, self._applied
        torch.addcdiv(self.kept, gradient, scale, out=self.pending)

    def set_aside(self, name: str) -> None:
        """Keep out of the step what a parameter is owed, since it takes no part in it."""
        part = self.parts[name]
        self.pending[part].sub_(self.kept[part])
        self._held[name] = None

    def flush(self, gradient: Tensor, scale: Tensor) -> None:
        """Put into a gradient all that is pending, which it is then sent with."""
        gradient.copy_(self.pending.mul_(scale))
        self.pending.zero_()
        self._flushed = True

    def hold(self, names: Iterable[str], condition: Tensor | None = None) -> None:
        """Leave parameters out of the next :meth:`commit`: their update was not applied.

        Args:
            names: The parameters; those of other buckets do not matter.
            condition: Where that is so, 0-dimensional; None if it is.
        """
        names = [name for name in names if name in self.parts]
        if condition is not None:
            condition = condition > 0
            if self._flushed or wants_host(condition.device):
                # Waits for a device once, after the first step that is not compressed any more, or
                # nobody would know that nothing is owed.
                if not condition:
                    return
                condition = None
            elif len(names) == len(self.parts):  # an optimizer of the whole bucket
                self.lost = self.lost | condition
                return
        for name in names:
            known = self._held.get(name, condition)
            self._held[name] = None if condition is None or known is None else known | condition

    @property
    def is_left_out(self) -> bool:
        """Whether the step was applied to no parameter, as far as that is known."""
        held = [condition for condition in self._held.values() if condition is None]
        return len(held) == len(self.parts)

    def commit(self, lost: Tensor) -> None:
        """The step has been applied, but to the parameters that were held."""
        for name, condition in self._held.items():
            part = self.parts[name]
            own = self.pending[part]
            kept = self.kept[part]
            own.copy_(kept if condition is None else torch.where(condition, kept, own))
        self.owes = not self._flushed or bool(self._held)
        super().commit(lost)


class Residuals:
    """One value for each element of each parameter, kept by the parameter's name.

    DDP hands out gradients in buckets and arranges them anew after the first steps, with other
    orders for other settings. What a parameter had in an earlier arrangement moves with it.
    """

    def __init__(self) -> None:
        self._bound: list[Residual] = []
        self._loose: dict[str, Tensor] = {}

    def bind(self, names: Sequence[str], numels: Sequence[int], like: Tensor) -> Residual:
        """Return the residual of a bucket, with what its parameters have had up to now.

        Args:
            names: The bucket's parameters in order.
            numels: Their numbers of elements.
            like: The bucket's gradient: its device, and its dtype if that is wider than float32.
        """
        self.unbind(names)
        parts, end = {}, 0
        for name, numel in zip(names, numels, strict=True):
            parts[name] = slice(end, end + numel)
            end += numel
        dtype = torch.promote_types(like.dtype, torch.float32)
        residual = Residual(torch.zeros(end, dtype=dtype, device=like.device), parts)
        for name, part in parts.items():
            if name in self._loose:
                residual.kept[part].copy_(self._loose.pop(name))  # after a resume from the host
        self._bound.append(residual)
        return residual

    def unbind(self, names: Sequence[str]) -> None:
        """Take apart the residuals that any of these parameters belongs to."""
        for residual in [one for one in self._bound if not one.parts.keys().isdisjoint(names)]:
            self._bound.remove(residual)
            self._loose.update(_by_name(residual))

    @property
    def owes(self) -> bool:
        """Whether anything may be owed."""
        return bool(self._loose) or any(residual.owes for residual in self._bound)

    def norm(self) -> float:
        """Return the L2 norm of everything kept. Reads one number from the device."""
        parts = [*self._loose.values(), *(residual.kept for residual in self._bound)]
        norms = [part.norm() for part in parts] or [torch.zeros(())]
        return float(torch.stack([norm.to(norms[0].device) for norm in norms]).norm())

    def averaged(self, group: dist.ProcessGroup | None = None) -> dict[str, Tensor]:
        """Return the mean over ranks, on the CPU. All ranks must call it.

        The mean can be restored at any number of ranks, and the sum over ranks, which is what the
        model is still owed, stays the same.
        """
        parts = dict(self._loose)
        for residual in self._bound:
            parts.update(_by_name(residual))
        mean = {}
        for name in sorted(parts):
            part = parts[name] / dist.get_world_size(group)
            dist.all_reduce(part, group=group)
            mean[name] = part.cpu()
        return mean

    def load(self, mean: Mapping[str, Tensor]) -> None:
        """Take over what :meth:`averaged` returned, in place of everything kept."""
        self._bound = []
        self._loose = {name: part.clone() for name, part in mean.items()}


def _by_name(residual: Residual) -> dict[str, Tensor]:
    return {name: residual.kept[part] for name, part in residual.parts.items()}
