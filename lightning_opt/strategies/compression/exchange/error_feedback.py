"""Error feedback: what compression left out of one step is added to the gradient of the next.

References:
    Seide, Fu, Droppo, Li and Yu (2014), *1-Bit Stochastic Gradient Descent and its Application to
    Data-Parallel Distributed Training of Speech DNNs*. Karimireddy, Rebjock, Stich and Jaggi
    (2019), *Error Feedback Fixes SignSGD and other Gradient Compression Schemes*.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class Residuals:
    """One value for each element of each parameter, kept by the parameter's name.

    DDP hands out gradients in buckets and arranges them anew after the first steps, with other
    orders for other settings. A bucket gets one flat tensor of its own; what a parameter had in an
    earlier arrangement moves with it.
    """

    def __init__(self) -> None:
        self._parts: dict[str, Tensor] = {}

    def bind(self, names: Sequence[str], numels: Sequence[int], like: Tensor) -> Tensor:
        """Return the flat tensor of a bucket, with what its parameters have had up to now.

        Args:
            names: The bucket's parameters in order.
            numels: Their numbers of elements.
            like: The bucket's gradient: its device, and its dtype if that is wider than float32.
        """
        dtype = torch.promote_types(like.dtype, torch.float32)
        flat = torch.zeros(sum(numels), dtype=dtype, device=like.device)
        for name, part in zip(names, flat.split(list(numels)), strict=True):
            if name in self._parts:
                part.copy_(self._parts[name])
            self._parts[name] = part
        return flat

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def norm(self) -> float:
        """Return the L2 norm of everything kept. Reads one number from the device."""
        parts = list(self._parts.values())
        if not parts:
            return 0.0
        return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(parts))))

    def averaged(self, group: dist.ProcessGroup | None = None) -> dict[str, Tensor]:
        """Return the mean over ranks, on the CPU. All ranks must call it.

        The mean can be restored at any number of ranks, and the sum over ranks, which is what the
        model is still owed, stays the same.
        """
        world = dist.get_world_size(group)
        mean = {}
        for name in sorted(self._parts):
            part = self._parts[name] / world
            dist.all_reduce(part, group=group)
            mean[name] = part.cpu()
        return mean

    def load(self, mean: Mapping[str, Tensor]) -> None:
        """Take over what :meth:`averaged` returned."""
        self._parts = {name: part.clone() for name, part in mean.items()}
