"""Parts of a model that compute in float32 under autocast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.loss import _Loss
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm, nn.RMSNorm)


def is_norm(module: nn.Module) -> bool:
    """Return whether ``module`` is a normalisation layer of torch, or called one by its author."""
    return isinstance(module, NORMS) or (
        type(module).__name__.rstrip("123d").endswith("Norm") and not list(module.children())
    )


def keep_in_float32(model: nn.Module) -> list[RemovableHandle]:
    """Hand float32 to the normalisation layers and loss modules of ``model``.

    Autocast leaves them in the dtype that they are given, and their weights are in float32, so that
    they compute and return float32.
    """
    return [
        module.register_forward_pre_hook(_widen, with_kwargs=True)
        for module in model.modules()
        if isinstance(module, _Loss) or is_norm(module)
    ]


def _widen(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return tree_map(_as_float32, args), tree_map(_as_float32, kwargs)


def _as_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype is torch.float16 else value
