"""A copy of everything that training changes, in host memory, to go back to."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_opt.core.modules.sharding import CustomExchange, is_dtensor, local_part

if TYPE_CHECKING:
    import lightning.pytorch as pl


class Snapshot:
    """Model, optimizers, learning-rate schedulers and loss scaler as they were at one moment.

    It takes as much host memory as the model and its optimizers take on the device (on this rank:
    shards are copied as shards), pinned for CUDA. Random number generators are left alone, so that
    the steps after a restore draw anew.
    """

    def __init__(self) -> None:
        self._held: dict[str, Any] = {}

    def __bool__(self) -> bool:
        return bool(self._held)

    @torch.no_grad()
    def take(self, trainer: pl.Trainer, tensors: Mapping[str, Tensor]) -> None:
        """Copy the present state; ``tensors`` are the model's parameters and buffers by name."""
        live = {
            "tensors": dict(tensors),
            # An optimizer's state is keyed by the parameters themselves.
            "states": [dict(optimizer.state) for optimizer in trainer.optimizers],
            "groups": [_settings(optimizer) for optimizer in trainer.optimizers],
            "schedulers": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
            "precision": trainer.precision_plugin.state_dict(),
        }
        self._held = {}  # first, so that its memory is used again
        self._held = copy_to_host(live)
        _wait(tensors.values())

    @torch.no_grad()
    def restore(self, trainer: pl.Trainer, tensors: Mapping[str, Tensor]) -> None:
        """Put everything back as it was, in place where that can be, and drop all gradients."""
        for name, saved in self._held["tensors"].items():
            if name in tensors:
                tensors[name].grad = None
                copy_back(saved, tensors[name])
        for optimizer, states, groups in zip(
            trainer.optimizers, self._held["states"], self._held["groups"], strict=True
        ):
            for key in [key for key in optimizer.state if key not in states]:
                del optimizer.state[key]  # made after the snapshot
            for key, saved in states.items():
                like = key if isinstance(key, Tensor) else None
                optimizer.state[key] = copy_back(saved, optimizer.state.get(key), like)
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                for key, saved in settings.items():
                    group[key] = copy_back(saved, group.get(key))
        for config, saved in zip(
            trainer.lr_scheduler_configs, self._held["schedulers"], strict=True
        ):
            config.scheduler.load_state_dict(copy.deepcopy(saved))
        trainer.precision_plugin.load_state_dict(copy.deepcopy(self._held["precision"]))
        if isinstance(trainer.strategy, CustomExchange):
            trainer.strategy.reset_residuals()  # they belong to the later weights
        _wait(tensors.values())


def copy_to_host(value: Any) -> Any:
    """Return a copy of ``value`` on the host.

    Of a DTensor this rank's part is copied. Copies from CUDA are only started.
    """
    if isinstance(value, Tensor):
        local = local_part(value.detach())
        if local.ndim == 0:
            return local.clone()  # step counts are on the host or not, as the optimizer wants it
        copied = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda)
        return copied.copy_(local, non_blocking=True)
    if isinstance(value, dict):
        return {key: copy_to_host(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(copy_to_host, value))
    return copy.deepcopy(value)


def copy_back(saved: Any, live: Any, like: Tensor | None = None) -> Any:
    """Return what :func:`copy_to_host` copied, written into the tensors of ``live`` if they fit.

    Args:
        saved: The copy, which stays independent of what is returned.
        live: What is there now.
        like: A tensor whose device, and placement for a DTensor, a missing tensor gets.
    """
    if isinstance(saved, Tensor):
        if isinstance(live, Tensor):
            local = local_part(live.detach())
            if local.shape == saved.shape and local.dtype == saved.dtype:
                local.copy_(saved, non_blocking=True)
                return live
        return _rebuild(saved, like)
    if isinstance(saved, dict):
        now = live if isinstance(live, dict) else {}
        restored = {key: copy_back(item, now.get(key), like) for key, item in saved.items()}
        now.clear()  # the same dict, which others may hold
        now.update(restored)
        return now
    if type(saved) in (list, tuple):
        fits = isinstance(live, (list, tuple)) and len(live) == len(saved)
        pairs = zip(saved, live if fits else [None] * len(saved), strict=True)
        return type(saved)(copy_back(item, past, like) for item, past in pairs)
    return copy.deepcopy(saved)


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _rebuild(saved: Tensor, like: Tensor | None) -> Tensor:
    if like is None or saved.ndim == 0:
        return saved.clone()
    if not is_dtensor(like):
        return saved.to(like.device, copy=True)
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(saved.to(like.device), like.device_mesh, like.placements)  # type: ignore[attr-defined]


def _wait(tensors: Iterable[Tensor]) -> None:
    """Wait for copies between host and device, if there are any under way."""
    for device in {tensor.device for tensor in tensors}:
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
