"""Error feedback: what compression left out of one step is added to the gradient of the next.

References:
    Seide, Fu, Droppo, Li and Yu (2014), *1-Bit Stochastic Gradient Descent and its Application to
    Data-Parallel Distributed Training of Speech DNNs*. Karimireddy, Rebjock, Stich and Jaggi
    (2019), *Error Feedback Fixes SignSGD and other Gradient Compression Schemes*.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lightning_opt.core.modules.sharding import reads_are_free


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
        if not reads_are_free(lost.device):
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
            if self._flushed or reads_are_free(condition.device):
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
        return sum(condition is None for condition in self._held.values()) == len(self.parts)

    def commit(self, lost: Tensor) -> None:
        """The step has been applied, but to the parameters that were held."""
        for name, condition in self._held.items():
            part = self.parts[name]
            own = self.pending[part]
            kept = self.kept[part]
            own.copy_(kept if condition is None else torch.where(condition, kept, own))
        self.owes = not self._flushed or bool(self._held)
        super().commit(lost)
