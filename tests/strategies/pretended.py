"""Ranks, buckets and events of a device that are only pretended, in one process."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_opt.strategies.compression.exchange import channels, two_stage


class Done:
    """A collective as NCCL returns it: complete, for all that the host can see, once launched."""

    def __init__(self, value: Tensor, device: torch.device | None) -> None:
        self._value, self._device = value, device

    def wait(self) -> bool:
        return True

    def get_future(self) -> Future[list[Tensor]]:
        devices = None if self._device is None else [self._device]
        future: Future[list[Tensor]] = Future(devices=devices)  # type: ignore[arg-type]
        future.set_result([self._value])
        return future


def pretend_ranks(
    monkeypatch: pytest.MonkeyPatch, world: int, device: torch.device | None = None
) -> list[str]:
    """Pretend to be the first of ``world`` ranks, all of which have the same gradients.

    Args:
        monkeypatch: Takes it back.
        world: How many ranks.
        device: A real GPU, on which collectives are futures of its own.

    Returns:
        The collectives, as they are launched.
    """
    launched: list[str] = []

    def all_gather(out: Tensor, own: Tensor, **_: Any) -> Done:
        launched.append("all_gather")
        out.view(world, -1).copy_(own.expand(world, -1))
        return Done(out, device)

    def all_to_all_single(out: Tensor, own: Tensor, **_: Any) -> Done:
        launched.append("all_to_all")
        out.copy_(own[:1].expand_as(out))  # every rank's message for the first shard
        return Done(out, device)

    def all_reduce(own: Tensor, *_: Any, **__: Any) -> Done:
        launched.append("all_reduce")
        own.mul_(world)
        return Done(own, device)

    def new_group(*_: Any, **__: Any) -> str:
        launched.append("new_group")
        return "group"

    monkeypatch.setattr(dist, "get_world_size", lambda group=None: world)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "all_to_all_single", all_to_all_single)
    for module in (channels, two_stage):
        monkeypatch.setattr(module, "all_gather", all_gather)
    return launched


class PretendedBucket:
    """What DDP hands to a hook."""

    def __init__(self, index: int, parameters: Sequence[Tensor], buffer: Tensor) -> None:
        self._index, self._parameters, self._buffer = index, list(parameters), buffer

    def index(self) -> int:
        return self._index

    def buffer(self) -> Tensor:
        return self._buffer

    def parameters(self) -> list[Tensor]:
        return self._parameters


class PretendedEvent:
    """A CUDA event of a device whose clock is ``now``, in milliseconds."""

    now = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = PretendedEvent.now

    def synchronize(self) -> None:
        """There is nothing to wait for."""

    def elapsed_time(self, other: "PretendedEvent") -> float:
        return other.at - self.at
