"""Fragments of the model: their pseudo-gradients and the outer optimizer step.

References:
    Douillard et al. (2023), *DiLoCo: Distributed Low-Communication Training of Language Models*.
    Douillard et al. (2025), *Streaming DiLoCo with overlapping communication*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class Fragment:
    """Parameters that are exchanged together.

    Args:
        parameters: Dense parameters on one device, by name.

    Attributes:
        outer: The weights that all replicas share, flat, float32 or wider.
        momentum: The momentum of the outer optimizer; like ``outer``.
        residual: The unsent rest of this replica's messages; like ``outer``.
        pseudo_gradient: ``outer`` minus this replica's weights when it last sent; None after the
            merge.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = parameters
        flat = torch.cat([parameter.detach().flatten() for parameter in parameters.values()])
        self.outer = flat.to(torch.promote_types(flat.dtype, torch.float32))
        self.momentum = torch.zeros_like(self.outer)
        self.residual = torch.zeros_like(self.outer)
        self.pseudo_gradient: Tensor | None = None

    def parts(self, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return each parameter with its part of a flat tensor, in the parameter's shape."""
        parameters = [parameter.detach() for parameter in self.parameters.values()]
        pieces = flat.split([parameter.numel() for parameter in parameters])
        return [(p, piece.view(p.shape)) for p, piece in zip(parameters, pieces, strict=True)]

    def set_outer(self) -> None:
        """Copy this replica's weights to the shared weights."""
        for parameter, part in self.parts(self.outer):
            part.copy_(parameter)

    def compute_pseudo_gradient(self) -> Tensor:
        """Return the shared weights minus this replica's."""
        self.pseudo_gradient = self.outer.clone()
        for parameter, part in self.parts(self.pseudo_gradient):
            # Rounded like the replica's weights, so that unchanged weights give 0.
            part.copy_(part.to(parameter.dtype)).sub_(parameter)
        return self.pseudo_gradient

    def step(self, mean: Tensor, lr: float, momentum: float) -> Tensor:
        """Apply the mean pseudo-gradient to ``outer`` by SGD with Nesterov momentum.

        Args:
            mean: Like ``outer``.
            lr: The outer learning rate.
            momentum: 0 for none; the momentum buffer then stays unchanged.

        Returns:
            The update that was subtracted from ``outer``.
        """
        update = mean
        if momentum:
            self.momentum.mul_(momentum).add_(mean)
            update = mean + self.momentum * momentum
        update = update * lr
        self.outer.sub_(update)
        return update

    def shift(self, shift: Tensor) -> None:
        """Add ``shift`` to this replica's weights, which keeps its steps since it sent."""
        for parameter, part in self.parts(shift):
            parameter.add_(part.to(parameter.dtype))

    def reset(self) -> None:
        """Overwrite this replica's weights with the shared weights."""
        self.pseudo_gradient = None
        for parameter, part in self.parts(self.outer):
            parameter.copy_(part)


def cut_into_fragments(parameters: Mapping[str, Tensor], count: int) -> list[Fragment]:
    """Return fragments of about equal size, each of whole parameters in their order."""
    total = sum(parameter.numel() for parameter in parameters.values())
    groups: dict[int, dict[str, Tensor]] = {}
    start = 0
    for name, parameter in parameters.items():
        middle = start + parameter.numel() / 2
        groups.setdefault(int(middle * count / total), {})[name] = parameter
        start += parameter.numel()
    return [Fragment(group) for group in groups.values()]


def due_at(step: int, sync_every: int, fragments: int) -> list[int]:
    """Return the fragments to send after ``step`` (the first is 1): each once per window."""
    return [
        number
        for number in range(fragments)
        if (step - (number + 1) * sync_every // fragments) % sync_every == 0
    ]


def default_outer(sync_every: int) -> tuple[float, float]:
    """Return the outer learning rate and momentum that were best for this window in benchmarks."""
    return (1.0, 0.0) if sync_every <= 16 else (0.7, 0.8)


def momentum_of(fragments: Sequence[Fragment]) -> dict[str, Tensor]:
    return {
        name: part
        for one in fragments
        for name, (_, part) in zip(one.parameters, one.parts(one.momentum), strict=True)
    }
