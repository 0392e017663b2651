"""Which modes are tried where, torch's own settings while they are, and what cannot go along."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from torch import nn

from lightning_opt.core.modules.compiling import has_checkpointed_parts
from lightning_opt.kernels.compiling.regions import Region
from lightning_opt.trainer.run_callback import RunCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl

MARKS = ("_dynamo", "_has_dynamo")
"""How the names of attributes begin that torch.compile sets on parameters and buffers."""


def ladder(mode: str, device: str) -> tuple[str, ...]:
    """Return the modes of ``torch.compile`` to try on a type of device, without the last resort."""
    if mode in ("auto", "default"):
        return ("default",)
    if mode == "max-autotune" and device == "cuda":
        return ("max-autotune", "reduce-overhead", "default")
    return (mode, "default")


@contextmanager
def compile_settings(regions: Sequence[Region], scope: str, is_ddp: bool) -> Iterator[None]:
    """Set what torch.compile needs while a stage runs.

    Backward graphs are compiled in the forward pass, where a failure can still be taken back, by
    each rank alone. And DDP's own splitting of graphs into buckets is for whole models: blocks are
    small enough, and it refuses graphs with checkpointing in them.
    """
    import torch._dynamo.config as dynamo_config
    import torch._functorch.config as functorch_config

    ahead = "force_non_lazy_backward_lowering"  # older versions have none
    with ExitStack() as stack:
        if hasattr(functorch_config, ahead):
            stack.enter_context(functorch_config.patch(ahead, True))
        if is_ddp and (scope == "regions" or any(map(_has_checkpointing, regions))):
            stack.enter_context(dynamo_config.patch(optimize_ddp=False))
        yield


@contextmanager
def unmarked(model: nn.Module) -> Iterator[None]:
    """Take the marks off again that torch.compile puts on the tensors that it has seen."""
    tensors = [*model.parameters(), *model.buffers()]
    before = {id(tensor): set(vars(tensor)) for tensor in tensors if vars(tensor)}
    try:
        yield
    finally:
        for tensor in (*model.parameters(), *model.buffers()):
            for name in [name for name in vars(tensor) if name.startswith(MARKS)]:
                if name not in before.get(id(tensor), ()):
                    delattr(tensor, name)


def _has_checkpointing(region: Region) -> bool:
    return any(has_checkpointed_parts(forward.module) for forward in region.forwards)


def refuse_neighbours(trainer: pl.Trainer, model: pl.LightningModule) -> None:
    """Raise where something else compiles the model, or must see its single operators.

    Raises:
        ValueError: For a model that is compiled already, and a plan of ``ActivationCheckpointing``
            that is measured operator by operator.
    """
    if getattr(model, "_compiler_ctx", None) is not None:
        raise ValueError(
            "The model was passed through torch.compile before, and CompileModel would compile it "
            "twice. Pass the model itself to the Trainer, or leave CompileModel out."
        )
    for other in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(other, RunCallback) and other.needs_operators:
            raise ValueError(
                f"{type(other).__name__}({other.needs_operators}) needs to see individual "
                "operators, and CompileModel fuses them. Use policy 'every_layer', 'sqrt', "
                "'block', 'every_nth' or 'custom' with CompileModel, and no offload."
            )
