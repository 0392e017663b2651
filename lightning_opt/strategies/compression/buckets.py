"""Buckets with residuals: values that one step does not send are added to the next gradient.

References:
    Seide, Fu, Droppo, Li and Yu (2014), *1-Bit Stochastic Gradient Descent and its Application to
    Data-Parallel Distributed Training of Speech DNNs*. Karimireddy, Rebjock, Stich and Jaggi
    (2019), *Error Feedback Fixes SignSGD and other Gradient Compression Schemes*. Lin, Han, Mao,
    Wang and Dally (2018), *Deep Gradient Compression: Reducing the Communication Bandwidth for
    Distributed Training* (local gradient clipping).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_opt.core.modules.sharding import largest_over_ranks, reads_are_free
from lightning_opt.core.numerics.scalars import Scalar
from lightning_opt.strategies.compression.exchange import Exchange, Residual
from lightning_opt.strategies.compressors import Compressor
from lightning_opt.strategies.packing import is_finite


class Bucket(Residual):
    """The residual of one bucket, and the exchange of the bucket.

    Args:
        committed: The residual before the first step: flat, one value per element.
        parts: The slice of each parameter, by its name.

    Attributes:
        parts: The slice of each parameter, by its name.
        exchange: Exchanges the bucket; None until it is first compressed.
        compressor: The compressor of ``exchange``.
        may_be_nonzero: Whether ``committed`` may have values other than 0.
    """

    def __init__(self, committed: Tensor, parts: Mapping[str, slice]) -> None:
        super().__init__(committed)
        self.parts = parts
        self.exchange: Exchange | None = None
        self.compressor: Compressor | None = None
        self.may_be_nonzero = True
        self._skipped_names: set[str] = set()  # parameters to which the step is not applied
        self._sent_all = False

    def begin_step(self, unused: Collection[str]) -> Tensor:
        """Return the residual to add to the gradient: 0 for the ``unused`` parameters.

        Args:
            unused: Parameters that this rank does not use in this step; they keep their residual.
        """
        self._skipped_names = set(unused)
        self._sent_all = False
        residual = self.committed.clone() if unused else self.committed
        for part in map(self.parts.__getitem__, unused):
            residual[part] = 0.0
        return residual

    def send_all(self, residual: Tensor, gradient: Tensor, scale: Tensor) -> None:
        """Add the residual to a gradient that will be sent uncompressed."""
        gradient.add_(residual * scale)
        self.pending.zero_()
        self._sent_all = True

    def skip(self, names: Iterable[str], condition: Tensor | None = None) -> None:
        """Exclude parameters from the next :meth:`commit`, because their update was not applied.

        Args:
            names: The parameters. Parameters of other buckets are ignored.
            condition: Positive if the update was not applied, 0-dimensional; None for always.
        """
        names = [name for name in names if name in self.parts]
        # The host waits for a device only once, after the first uncompressed step, to check whether
        # any residual is left.
        if condition is None or self._sent_all or reads_are_free(condition.device):
            if condition is None or condition > 0:
                self._skipped_names.update(names)
        elif self.exchange is not None and len(names) == len(self.parts):
            self.exchange.skipped.logical_or_(condition > 0)
        else:
            for part in map(self.parts.__getitem__, names):
                pending, committed = self.pending[part], self.committed[part]
                pending.copy_(torch.where(condition > 0, committed, pending))

    def commit_step(self) -> None:
        """Commit the latest step for all parameters to which it was applied."""
        if len(self._skipped_names) == len(self.parts):
            return
        for part in map(self.parts.__getitem__, self._skipped_names):
            self.pending[part].copy_(self.committed[part])
        self.may_be_nonzero = not self._sent_all or bool(self._skipped_names)
        if self.exchange is None:
            self.commit()
        else:
            self.exchange.commit()

    def by_parameter(self) -> dict[str, Tensor]:
        """Return the committed residual by parameter, as views."""
        if self.exchange is not None:
            self.exchange.fold()
        return {name: self.committed[part] for name, part in self.parts.items()}


class Buckets:
    """All buckets of the current layout.

    DDP rearranges its buckets after the first steps, and a resumed run may have other buckets. The
    residuals move to the new buckets with their parameters.

    Attributes:
        current: The buckets of the current layout, by the names of their parameters.
    """

    def __init__(self) -> None:
        self.current: dict[tuple[str, ...], Bucket] = {}
        self._unassigned: dict[str, Tensor] = {}  # residuals by parameter

    def get(self, parameters: Mapping[str, Tensor], gradient: Tensor) -> Bucket:
        """Return the bucket of these parameters."""
        names = tuple(parameters)
        if names not in self.current:
            for other in [one for one in self.current if not parameters.keys().isdisjoint(one)]:
                self._unassigned.update(self.current.pop(other).by_parameter())
            parts, end = {}, 0
            for name, parameter in parameters.items():
                parts[name] = slice(end, end + parameter.numel())
                end += parameter.numel()
            dtype = torch.promote_types(gradient.dtype, torch.float32)
            bucket = Bucket(torch.zeros(end, dtype=dtype, device=gradient.device), parts)
            for name, part in parts.items():
                if name in self._unassigned:  # after a resume it is on the CPU
                    bucket.committed[part].copy_(self._unassigned.pop(name))
            self.current[names] = bucket
        return self.current[names]

    @property
    def may_be_nonzero(self) -> bool:
        return bool(self._unassigned) or any(one.may_be_nonzero for one in self.current.values())

    def norm(self) -> float:
        """Return the L2 norm of all committed residuals. Reads one number from the device."""
        parts = [*self._unassigned.values(), *(one.committed for one in self.current.values())]
        norms = [part.norm() for part in parts] or [torch.zeros(())]
        return float(torch.stack([norm.to(norms[0].device) for norm in norms]).norm())

    def averaged(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean residual over ranks by parameter, on the CPU. All ranks must call it.

        The mean can be restored at any number of ranks, and the sum over ranks, which is
        still to be sent, stays the same.

        Args:
            parameters: All parameters by name. Some ranks may have a residual of a parameter, and
                others none.
        """
        residuals = dict(self._unassigned)
        for bucket in self.current.values():
            residuals.update(bucket.by_parameter())
        device = next(iter(parameters.values())).device
        exists = largest_over_ranks([float(name in residuals) for name in parameters], device)
        means = {}
        for (name, parameter), any_rank in zip(parameters.items(), exists, strict=True):
            if any_rank:
                wide = torch.promote_types(parameter.dtype, torch.float32)
                own = residuals.get(name, torch.zeros(parameter.numel()))
                mean = own.to(parameter.device, wide) / dist.get_world_size()
                dist.all_reduce(mean)
                means[name] = mean.cpu()
        return means

    def load(self, means: Mapping[str, Tensor]) -> None:
        self.current.clear()
        self._unassigned = {name: mean.clone() for name, mean in means.items()}


def clip_locally(gradient: Tensor, bound: Scalar, algorithm: str, world: int) -> None:
    """Clip one rank's gradient before compression, in place. Non-finite gradients stay non-finite.

    Without clipping, an outlier would leak out of the residual for many steps. Nothing is read
    from a device. If the gradients of ``world`` ranks are independent and each has a norm of at
    most ``bound / sqrt(world)``, the norm of their sum is at most about ``bound``.

    Args:
        gradient: A bucket, flat.
        bound: ``gradient_clip_val``, times the loss scale.
        algorithm: ``"norm"`` or ``"value"``.
        world: Number of ranks.
    """
    if algorithm == "value":
        limit = torch.where(is_finite(gradient), bound, math.inf)
        gradient.clamp_(-limit, limit)
        return
    wide = torch.promote_types(gradient.dtype, torch.float32)
    norm = torch.linalg.vector_norm(gradient, dtype=wide)
    gradient.mul_((bound / math.sqrt(world) / norm).clamp_(max=1.0))
