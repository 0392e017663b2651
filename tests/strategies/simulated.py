"""Simulated ranks, buckets and CUDA events, in one process."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_opt.strategies import own_exchange
from lightning_opt.strategies.compression import exchange


class Done:
    """A collective as NCCL returns it: the host sees it complete once launched."""

    def __init__(self, value: Tensor, device: torch.device | None) -> None:
        self._value, self._device = value, device

    def wait(self) -> bool:
        return True

    def get_future(self) -> Future[list[Tensor]]:
        devices = None if self._device is None else [self._device]
        future: Future[list[Tensor]] = Future(devices=devices)  # type: ignore[arg-type]
        future.set_result([self._value])
        return future


def simulate_ranks(
    monkeypatch: pytest.MonkeyPatch, world: int, device: torch.device | None = None
) -> list[str]:
    """Simulate the first of ``world`` ranks, all of which have the same gradients.

    ``device`` is a real GPU for the futures of collectives, or None. The names of the launched
    collectives are appended to the returned list.
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

    def start_all_to_all(rows: Tensor, out: Tensor, *_: Any) -> Callable[[], None]:
        all_to_all_single(out, rows)
        return lambda: None

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
    monkeypatch.setattr(exchange, "all_gather", all_gather)
    for module in (exchange, own_exchange):
        monkeypatch.setattr(module, "start_all_to_all", start_all_to_all)
    return launched


def simulated_bucket(index: int, parameters: list[Tensor], buffer: Tensor) -> Any:
    """Return a bucket as DDP passes it to a hook."""
    found = {"index": index, "parameters": parameters, "buffer": buffer}
    return SimpleNamespace(**{name: lambda value=value: value for name, value in found.items()})


class SimulatedEvent:
    """A CUDA event of a device whose clock is ``now``, in milliseconds."""

    now = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = SimulatedEvent.now

    def synchronize(self) -> None:
        """Return at once."""

    def elapsed_time(self, other: "SimulatedEvent") -> float:
        return other.at - self.at
