"""Copies of training state: small buffers after each good step, and snapshots of everything."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lightning_opt.core.measure.timing import wait_for
from lightning_opt.core.modules.sharding import CustomExchange, is_dtensor, local_part
from lightning_opt.core.numerics.norms import by_kind
from lightning_opt.core.numerics.scalars import Condition

if TYPE_CHECKING:
    import lightning.pytorch as pl

MAX_ELEMENTS = 2**16
"""Maximum elements of a buffer that is copied at each step. BatchNorm statistics have fewer."""

_form = attrgetter("shape", "dtype", "device")


class BufferBackup:
    """A copy of the model's small buffers as they were before the step's first batch.

    A forward pass updates running statistics (BatchNorm, spectral norm) before the fault is
    detected, and one NaN in them makes every later evaluation NaN. Boolean, sparse and
    expanded buffers, and those with more than :data:`MAX_ELEMENTS` elements (attention masks,
    queues), are not copied.

    Args:
        module: The model. Its buffers are copied at once.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._save()

    @torch.no_grad()
    def _save(self) -> None:
        """Find the buffers and copy them."""
        # Store module and name, because a module may assign a new tensor at every step.
        found: dict[Tensor, tuple[nn.Module, str]] = {}
        self._has_lazy = any(map(is_lazy, self._module.buffers()))
        for module in self._module.modules():
            for name, buffer in module.named_buffers(recurse=False):
                is_small = not is_lazy(buffer) and 0 < buffer.numel() <= MAX_ELEMENTS
                is_plain = buffer.layout is torch.strided and buffer.dtype is not torch.bool
                if is_small and is_plain and not is_expanded(buffer):
                    found.setdefault(buffer, (module, name))
        self._places = list(found.values())
        live = self._live()
        # Copies of one dtype and device share one tensor, so that one `where` updates them all.
        self._kinds = [(places, _join(live, places)) for places in by_kind(live).values()]
        self._saved = list(live)
        for places, whole in self._kinds:
            parts = whole.split([live[place].numel() for place in places])
            for place, part in zip(places, parts, strict=True):
                self._saved[place] = part.view_as(live[place])

    @torch.no_grad()
    def restore_or_save(self, restore: Condition) -> None:
        """Restore the buffers if ``restore`` holds, else save their current values."""
        if not self._places and not self._has_lazy:
            return
        live = self._live()
        pairs = enumerate(zip(live, self._saved, strict=True))
        changed = [place for place, (now, saved) in pairs if _form(now) != _form(saved)]
        if self._has_lazy or (changed and not restore):
            self._save()  # the model's buffers have changed
            return
        for place in changed:
            live[place] = self._saved[place].clone()
            setattr(*self._places[place], live[place])
        if isinstance(restore, Tensor):
            restore = restore.bool()
            for places, whole in self._kinds:
                torch.where(restore.to(whole.device), whole, _join(live, places), out=whole)
            torch._foreach_copy_(live, self._saved)
        elif restore:
            torch._foreach_copy_(live, self._saved)
        else:
            torch._foreach_copy_(self._saved, live)

    def _live(self) -> list[Tensor]:
        found = [getattr(module, name, None) for module, name in self._places]
        # A buffer that has become None counts as one of another shape.
        return [local_part((torch.empty(0) if b is None else b).detach()) for b in found]


def is_expanded(tensor: Tensor) -> bool:
    """Return whether elements share memory, so that torch refuses to write to the tensor."""
    if tensor.layout is not torch.strided:
        return False
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    return any(stride == 0 and size > 1 for stride, size in strides)


def _join(tensors: list[Tensor], places: list[int]) -> Tensor:
    return torch.cat([tensors[place].reshape(-1) for place in places])


class Snapshot:
    """A copy of model, optimizers, learning-rate schedulers and loss scaler in host memory.

    Shards are copied as shards, so the copy is as large as model and optimizers on this rank's
    device. The memory is pinned for CUDA. Random number generators are not restored, so that the
    steps after a restore draw new numbers.
    """

    def __init__(self) -> None:
        self._held: dict[str, Any] = {}

    def __bool__(self) -> bool:
        return bool(self._held)

    @torch.no_grad()
    def take(self, trainer: pl.Trainer, tensors: Mapping[str, Tensor]) -> None:
        """Copy the current state; ``tensors`` are the model's parameters and buffers by name."""
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        live = {
            # Keys are not copied: parameters here, schedulers below.
            "states": [dict(optimizer.state) for optimizer in trainer.optimizers],
            "groups": [
                [{key: g[key] for key in g if key != "params"} for g in own.param_groups]
                for own in trainer.optimizers
            ],
            "schedulers": {scheduler: scheduler.state_dict() for scheduler in schedulers},
            "precision": trainer.precision_plugin.state_dict(),
        }
        self._held = {}  # free the old snapshot before the copy
        self._held = copy_to_host(live) | {"tensors": {}}
        for name, tensor in tensors.items():
            if is_expanded(tensor):
                continue
            try:
                self._held["tensors"][name] = copy_to_host(tensor)
            except NotImplementedError:
                if tensor.requires_grad:
                    raise
                # A frozen weight of a quantized subclass: training does not change it.
        _wait(tensors.values())

    @torch.no_grad()
    def restore(self, trainer: pl.Trainer, tensors: Mapping[str, Tensor]) -> None:
        """Restore everything, in place where possible, and remove all gradients.

        Learning rates stay as they are if their schedulers are newer than the snapshot, as that of
        StochasticWeightAveraging is.
        """
        schedulers = self._held["schedulers"]
        is_same_schedule = [*schedulers] == [c.scheduler for c in trainer.lr_scheduler_configs]
        for name, saved in self._held["tensors"].items():
            if name in tensors:
                tensors[name].grad = None
                copy_back(saved, tensors[name])
        for optimizer, states, groups in zip(
            trainer.optimizers, self._held["states"], self._held["groups"], strict=True
        ):
            for key in [key for key in optimizer.state if key not in states]:
                del optimizer.state[key]  # added after the snapshot
            for key, saved in states.items():
                like = key if isinstance(key, Tensor) else None
                optimizer.state[key] = copy_back(saved, optimizer.state.get(key), like)
            # Groups that were added after the snapshot keep their settings.
            for group, settings in zip(optimizer.param_groups, groups, strict=False):
                for key in settings if is_same_schedule else ():
                    group[key] = copy_back(settings[key], group.get(key))
        for scheduler, saved in schedulers.items():
            scheduler.load_state_dict(copy.deepcopy(saved))
        trainer.precision_plugin.load_state_dict(copy.deepcopy(self._held["precision"]))
        if isinstance(trainer.strategy, CustomExchange):
            trainer.strategy.reset_residuals()  # residuals belong to the replaced weights
        _wait(tensors.values())


def copy_to_host(value: Any) -> Any:
    """Return a copy of ``value`` on the host. Of a DTensor only this rank's part is copied.

    Copies from CUDA are asynchronous.
    """
    return tree_map(_leaf_to_host, value)


def _leaf_to_host(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return copy.deepcopy(leaf)
    local = local_part(leaf.detach())
    if local.ndim == 0:
        return local.clone()  # keep step counts on the optimizer's device
    can_pin = local.is_cuda and local.layout is torch.strided
    copied = torch.empty_like(local, device="cpu", pin_memory=can_pin)
    return copied.copy_(local, non_blocking=True)


def copy_back(saved: Any, live: Any, like: Tensor | None = None) -> Any:
    """Copy ``saved`` into the tensors of ``live`` if they match, and return the result.

    Args:
        saved: The result of :func:`copy_to_host`. It shares no memory with the returned value.
        live: The current value.
        like: Tensors that ``live`` lacks are created on the device of this tensor. If it is a
            DTensor, they get its placements.
    """
    leaves, structure = tree_flatten(saved)
    live_leaves, live_structure = tree_flatten(live)
    if live_structure != structure:
        live_leaves = [None] * len(leaves)
    pairs = zip(leaves, live_leaves, strict=True)
    return tree_unflatten([_leaf_back(leaf, now, like) for leaf, now in pairs], structure)


def _leaf_back(saved: Any, live: Any, like: Tensor | None) -> Any:
    if not isinstance(saved, Tensor):
        return copy.deepcopy(saved)
    if isinstance(live, Tensor):
        local = local_part(live.detach())
        if local.shape == saved.shape and local.dtype == saved.dtype:
            local.copy_(saved, non_blocking=True)
            return live
    if like is None or saved.ndim == 0:
        return saved.clone()
    if not is_dtensor(like):
        return saved.to(like.device, copy=True)
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(saved.to(like.device), like.device_mesh, like.placements)  # type: ignore[attr-defined]


def _wait(tensors: Iterable[Tensor]) -> None:
    """Wait for asynchronous copies between host and device."""
    for device in {tensor.device for tensor in tensors}:
        wait_for(device)
