"""The buckets that gradients travel in: what this rank owes to each, and how it is sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_opt.strategies.compression.exchange.channels import Channel
from lightning_opt.strategies.compression.exchange.residuals import Residual
from lightning_opt.strategies.compressors import Compressor


@dataclass
class Bucket:
    """One bucket of the present layout.

    Attributes:
        residual: What this rank owes to it.
        channel: How it travels; None before it has its first.
        compressor: What the channel was made for.
    """

    residual: Residual
    channel: Channel | None = None
    compressor: Compressor | None = None

    def fold(self) -> dict[str, Tensor]:
        """Gather in the residual all that this rank owes, and return it by parameter."""
        if self.channel is not None:
            self.channel.fold()
        return {name: self.residual.kept[part] for name, part in self.residual.parts.items()}

    def commit(self) -> None:
        """The latest step has been applied, unless it was not finite on some rank."""
        if self.channel is None:
            self.residual.commit(self.residual.lost)
        else:
            self.channel.commit(self.residual.lost | self.channel.flagged)


class Buckets:
    """All buckets, with one value owed for each element of each parameter, by its name.

    DDP hands out gradients in buckets and arranges them anew after the first steps, with other
    orders for other settings. What a parameter had in an earlier arrangement moves with it.

    Attributes:
        present: The buckets of the present layout, by the names of their parameters.
    """

    def __init__(self) -> None:
        self.present: dict[tuple[str, ...], Bucket] = {}
        self._loose: dict[str, Tensor] = {}

    def of(self, parameters: Mapping[str, Tensor], like: Tensor) -> Bucket:
        """Return the bucket of these parameters, with what they have had up to now.

        Args:
            parameters: In order, by name.
            like: The bucket's gradient: its device, and its dtype if that is wider than float32.
        """
        names = tuple(parameters)
        if names not in self.present:
            for other in [one for one in self.present if not parameters.keys().isdisjoint(one)]:
                self._loose.update(self.present.pop(other).fold())
            parts, end = {}, 0
            for name, parameter in parameters.items():
                parts[name] = slice(end, end + parameter.numel())
                end += parameter.numel()
            dtype = torch.promote_types(like.dtype, torch.float32)
            residual = Residual(torch.zeros(end, dtype=dtype, device=like.device), parts)
            for name, part in parts.items():
                if name in self._loose:
                    residual.kept[part].copy_(self._loose.pop(name))  # after a resume from the host
            self.present[names] = Bucket(residual)
        return self.present[names]

    @property
    def any_owed(self) -> bool:
        """Whether anything may be owed."""
        return bool(self._loose) or any(one.residual.owes for one in self.present.values())

    def norm(self) -> float:
        """Return the L2 norm of everything kept. Reads one number from the device."""
        parts = [*self._loose.values(), *(one.residual.kept for one in self.present.values())]
        norms = [part.norm() for part in parts] or [torch.zeros(())]
        return float(torch.stack([norm.to(norms[0].device) for norm in norms]).norm())

    def averaged(self) -> dict[str, Tensor]:
        """Return the mean over ranks, on the CPU. All ranks must call it.

        The mean can be restored at any number of ranks, and the sum over ranks, which is what the
        model is still owed, stays the same.
        """
        owed = dict(self._loose)
        for bucket in self.present.values():
            owed.update(bucket.fold())
        mean = {}
        for name in sorted(owed):
            part = owed[name] / dist.get_world_size()
            dist.all_reduce(part)
            mean[name] = part.cpu()
        return mean

    def load(self, mean: Mapping[str, Tensor]) -> None:
        """Take over what :meth:`averaged` returned, in place of everything kept."""
        self.present.clear()
        self._loose = {name: part.clone() for name, part in mean.items()}
