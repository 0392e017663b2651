"""A fragment of the model: how far a replica moved it, and the outer step with what all moved.

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
        parameters: Dense, on one device, by name.

    Attributes:
        outer: The weights that all replicas share, flat, float32 or wider.
        momentum: Of the outer steps; like ``outer``.
        owed: What this replica's messages failed to carry; like ``outer``.
        moved: How far this replica was from ``outer`` when it last sent; None after the merge.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = parameters
        flat = torch.cat([parameter.detach().flatten() for parameter in parameters.values()])
        self.outer = flat.to(torch.promote_types(flat.dtype, torch.float32))
        self.momentum = torch.zeros_like(self.outer)
        self.owed = torch.zeros_like(self.outer)
        self.moved: Tensor | None = None

    def parts(self, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return each parameter with its part of a flat tensor, in the parameter's shape."""
        parameters = [parameter.detach() for parameter in self.parameters.values()]
        pieces = flat.split([parameter.numel() for parameter in parameters])
        return [(p, piece.view(p.shape)) for p, piece in zip(parameters, pieces, strict=True)]

    def adopt(self) -> None:
        """Take this replica's weights for those that all share."""
        for parameter, part in self.parts(self.outer):
            part.copy_(parameter)

    def measure(self) -> Tensor:
        """Return the pseudo-gradient: the shared weights minus this replica's."""
        self.moved = self.outer.clone()
        for parameter, moved in self.parts(self.moved):
            # Rounded as the replica's weights were, so that what did not move is 0.
            moved.copy_(moved.to(parameter.dtype)).sub_(parameter)
        return self.moved

    def step(self, mean: Tensor, lr: float, momentum: float) -> Tensor:
        """Apply the mean of the pseudo-gradients by SGD with Nesterov momentum.

        Args:
            mean: Like ``outer``.
            lr: The outer learning rate.
            momentum: 0 for none; the buffer is then left alone.

        Returns:
            What was subtracted from ``outer``.
        """
        update = mean
        if momentum:
            self.momentum.mul_(momentum).add_(mean)
            update = mean + self.momentum * momentum
        update = update * lr
        self.outer.sub_(update)
        return update

    def carry(self, shift: Tensor) -> None:
        """Move this replica's weights by ``shift``; the steps that it took meanwhile stay."""
        for parameter, part in self.parts(shift):
            parameter.add_(part.to(parameter.dtype))

    def reset(self) -> None:
        """Give this replica the shared weights."""
        self.moved = None
        for parameter, part in self.parts(self.outer):
            parameter.copy_(part)


def cut_into_fragments(parameters: Mapping[str, Tensor], count: int) -> list[Fragment]:
    """Return fragments of about equal size, of whole parameters in their order.

    Args:
        parameters: By name.
        count: How many; fewer if there are not that many parameters.
    """
    total = sum(parameter.numel() for parameter in parameters.values())
    groups: dict[int, dict[str, Tensor]] = {}
    start = 0
    for name, parameter in parameters.items():
        middle = start + parameter.numel() / 2
        groups.setdefault(int(middle * count / total), {})[name] = parameter
        start += parameter.numel()
    return [Fragment(group) for group in groups.values()]


def due_at(step: int, sync_every: int, fragments: int) -> list[int]:
    """Return which fragments are sent after ``step`` (the first is 1): all once in a window."""
    return [
        number
        for number in range(fragments)
        if (step - (number + 1) * sync_every // fragments) % sync_every == 0
    ]


def default_outer(sync_every: int) -> tuple[float, float]:
    """Return the outer learning rate and momentum that did best for so many local steps."""
    return (1.0, 0.0) if sync_every <= 16 else (0.7, 0.8)


def momentum_of(fragments: Sequence[Fragment]) -> dict[str, Tensor]:
    """Return the outer momentum by the parameters' names; a view, which may be written."""
    return {
        name: part
        for one in fragments
        for name, (_, part) in zip(one.parameters, one.parts(one.momentum), strict=True)
    }
