"""Which modules of a model are compiled, each as a region or together as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import lightning.pytorch as pl
import torch
from torch import nn
from torchmetrics import Metric

from lightning_opt.core.modules.blocks import Signature, find_blocks, signature, unwrapped
from lightning_opt.core.modules.compiling import is_compiled
from lightning_opt.kernels.compiling.regions import Region, Shared


def find_regions(
    model: pl.LightningModule, scope: str, modes: Sequence[str], shared: Shared
) -> list[Region]:
    """Return the regions of ``model``.

    By blocks if ``scope`` is ``"regions"`` and there are any, with one region for all of one
    structure. Else the model's own ``forward`` and the modules that ``training_step`` may call
    directly; those that run within a compiled ``forward`` are a part of that.
    """
    if scope == "regions":
        regions = _by_block(model, modes, shared)
        if regions:
            return regions
    found = [] if type(model).forward is pl.LightningModule.forward else [("forward", model)]
    return [
        Region(name, [module], modes, shared) for name, module in (*found, *_entrances(model, ""))
    ]


def _entrances(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules below ``module`` that compute something with parameters."""
    for name, child in module.named_children():
        inner = unwrapped(child)
        if isinstance(inner, (nn.ModuleList, nn.ModuleDict)):
            yield from _entrances(inner, f"{prefix}{name}.")
        elif inner is child and _can_compile(child):
            yield f"{prefix}{name}", child
        elif inner is not child and not is_compiled(child):
            yield f"{prefix}{name}", inner  # FSDP1's hooks stay outside


def _by_block(model: nn.Module, modes: Sequence[str], shared: Shared) -> list[Region]:
    names: dict[Signature, str] = {}
    groups: dict[Signature, dict[nn.Module, None]] = {}
    for block in find_blocks(model):
        name, module = block.name, block.modules[0]
        if len(block.modules) > 1:
            # Layers of a Sequential that repeat have no module of their own: all in one.
            name = name.rpartition(".")[0]
            module = _at(model, name)
        if _can_compile(module):
            kind = signature(module)
            names.setdefault(kind, name or "model")
            groups.setdefault(kind, {})[module] = None
    return [Region(names[kind], list(group), modes, shared) for kind, group in groups.items()]


def _at(model: nn.Module, name: str) -> nn.Module:
    module = unwrapped(model)
    for part in name.split(".") if name else ():
        module = unwrapped(module._modules[part])  # type: ignore[arg-type]
    return module


def _can_compile(module: nn.Module) -> bool:
    return (
        not isinstance(module, (Metric, torch.jit.ScriptModule))
        and not is_compiled(module)
        and any(True for _ in module.parameters())
    )
