"""Selects the modules to compile and their modes, and sets torch's compiler configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from torchmetrics import Metric

from lightning_opt.core.modules.blocks import Signature, find_blocks, signature, unwrapped
from lightning_opt.core.modules.compiling import has_checkpointed_parts, is_compiled
from lightning_opt.kernels.compiling.regions import CompileOptions, Region
from lightning_opt.trainer.lightning import DDPStrategy, is_overridden

if TYPE_CHECKING:
    import lightning.pytorch as pl

# Prefixes of the attributes that torch.compile sets on parameters and buffers.
MARK_PREFIXES = ("_dynamo", "_has_dynamo")


def modes_for(mode: str, device: str) -> tuple[str, ...]:
    """Return the modes of ``torch.compile`` to try on a type of device, in order."""
    if mode in ("auto", "default"):
        return ("default",)
    if mode == "max-autotune" and device == "cuda":
        return ("max-autotune", "reduce-overhead", "default")
    return (mode, "default")


def find_regions(model: pl.LightningModule, scope: str, options: CompileOptions) -> list[Region]:
    """Return the regions of ``model``.

    With the scope ``"regions"``, all repeated blocks of the same structure form one region. Without
    such blocks, and with the scope ``"model"``, the model's ``forward`` and each module that
    ``training_step`` may call are regions.
    """
    if scope == "regions":
        regions = _block_regions(model, options)
        if regions:
            return regions
    own_forward = [("forward", model)] if is_overridden("forward", model) else []
    return [
        Region(name, [module], options)
        for name, module in (*own_forward, *_outermost_modules(model, ""))
    ]


def _outermost_modules(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        inner = unwrapped(child)
        if isinstance(inner, (nn.ModuleList, nn.ModuleDict)):
            yield from _outermost_modules(inner, f"{prefix}{name}.")
        elif inner is child and _can_compile(child):
            yield f"{prefix}{name}", child
        elif inner is not child and not is_compiled(child):
            yield f"{prefix}{name}", inner  # FSDP1's hooks stay outside


def _block_regions(model: nn.Module, options: CompileOptions) -> list[Region]:
    groups: dict[Signature, dict[nn.Module, str]] = {}
    for block in find_blocks(model):
        name, module = block.name, block.modules[0]
        if len(block.modules) > 1:
            # Repeated layers of a Sequential are compiled together: compile the Sequential.
            name = name.rpartition(".")[0]
            module = _submodule(model, name)
        if _can_compile(module):
            groups.setdefault(signature(module), {}).setdefault(module, name or "model")
    return [Region(next(iter(own.values())), list(own), options) for own in groups.values()]


def _submodule(model: nn.Module, name: str) -> nn.Module:
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


@contextmanager
def compile_settings(regions: Sequence[Region], scope: str, trainer: pl.Trainer) -> Iterator[None]:
    """Set torch's compiler configuration while a stage runs.

    Backward graphs are compiled in the forward pass, where each rank can still recover from a
    failure on its own. If the model may run a second backward pass through a graph, backward graphs
    must not overwrite saved tensors. DDP's graph splitting is disabled for blocks, which are small
    already, and for checkpointed modules, where it fails.
    """
    import torch._dynamo.config as dynamo_config
    import torch._functorch.config as functorch_config

    model = trainer.lightning_module
    settings = {"force_non_lazy_backward_lowering": True}
    if not model.automatic_optimization or is_overridden("backward", model):
        settings["donated_buffer"] = False
    with ExitStack() as stack:
        for name, value in settings.items():
            if hasattr(functorch_config, name):  # not in older versions
                stack.enter_context(functorch_config.patch(name, value))
        modules = [forward.module for region in regions for forward in region.forwards]
        if isinstance(trainer.strategy, DDPStrategy) and (
            scope == "regions" or any(map(has_checkpointed_parts, modules))
        ):
            stack.enter_context(dynamo_config.patch(optimize_ddp=False))
        yield


@contextmanager
def remove_marks(model: nn.Module) -> Iterator[None]:
    """On exit, remove the attributes that torch.compile has set on the model's tensors."""
    tensors = [*model.parameters(), *model.buffers()]
    before = {id(tensor): set(vars(tensor)) for tensor in tensors if vars(tensor)}
    try:
        yield
    finally:
        for tensor in (*model.parameters(), *model.buffers()):
            for name in [name for name in vars(tensor) if name.startswith(MARK_PREFIXES)]:
                if name not in before.get(id(tensor), ()):
                    delattr(tensor, name)
