"""Which modes are tried where, torch's own settings while they are, and what cannot go along."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_opt.kernels.compiling.regions import Region

if TYPE_CHECKING:
    import lightning.pytorch as pl

MARKS = ("_dynamo", "_has_dynamo")
"""How the names of attributes begin that torch.compile sets on parameters and buffers."""

AHEAD = "force_non_lazy_backward_lowering"


def lowers_ahead() -> bool:
    """Return whether this torch can compile backward graphs together with the forward ones."""
    import torch._functorch.config as functorch_config

    return hasattr(functorch_config, AHEAD)


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

    splits = scope == "model" and not any(_is_checkpointed(region) for region in regions)
    with (
        _set(functorch_config, AHEAD, True, lowers_ahead()),
        _set(dynamo_config, "optimize_ddp", False, is_ddp and not splits),
    ):
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


@contextmanager
def _set(config: Any, name: str, value: Any, wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    before = getattr(config, name)
    setattr(config, name, value)
    try:
        yield
    finally:
        setattr(config, name, before)


def _is_checkpointed(region: Region) -> bool:
    return any(
        type(part).__name__ == "CheckpointWrapper"
        or type(part.__dict__.get("forward")).__name__ == "CheckpointedForward"
        for forward in region.forwards
        for part in forward.module.modules()
    ) or any(type(f.shadowed).__name__ == "CheckpointedForward" for f in region.forwards)


def refuse_neighbours(callback: Any, trainer: pl.Trainer, model: pl.LightningModule) -> None:
    """Raise where something else compiles the model, or must see its single operators.

    Raises:
        ValueError: For a second callback of this kind, a model that is compiled already, and a
            plan of ``ActivationCheckpointing`` that is measured operator by operator.
    """
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    if sum(isinstance(other, type(callback)) for other in callbacks) > 1:
        raise ValueError("There is more than one CompileModel in Trainer(callbacks=[...]).")
    if getattr(model, "_compiler_ctx", None) is not None:
        raise ValueError(
            "The model was passed through torch.compile before, and CompileModel would compile it "
            "twice. Pass the model itself to the Trainer, or leave CompileModel out."
        )
    for other in callbacks:
        if type(other).__name__ != "ActivationCheckpointing":  # features do not import each other
            continue
        policy, offload = getattr(other, "policy", ""), getattr(other, "offload", False)
        if policy in ("auto", "selective") or offload:
            what = "offload=True" if offload else repr(policy)
            raise ValueError(
                f"ActivationCheckpointing({what}) looks at single operators, "
                "and CompileModel makes one of many. Use policy 'every_layer', 'sqrt', 'block', "
                "'every_nth' or 'custom' with CompileModel, and no offload."
            )
