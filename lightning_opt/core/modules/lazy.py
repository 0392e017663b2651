"""Lazy layers, whose parameters get their shapes in the first forward pass."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy


def raise_if_lazy(name: str, module: nn.Module) -> None:
    """Raise if a parameter or buffer of ``module`` has no shape yet.

    Args:
        name: The feature that needs the shapes.
        module: The module.

    Raises:
        ValueError: If a lazy layer has not run.
    """
    for key, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(
                f"{name} needs the shapes of all parameters, and {key!r} of a lazy layer has none "
                "yet. Run the model once on an example batch before fit."
            )
