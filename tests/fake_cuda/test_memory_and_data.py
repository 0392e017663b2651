"""Memory meters, offloading, the prefetcher and micro-batches."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import lightning_opt as lo
from lightning_opt.batching.peaks import LimitMeter
from lightning_opt.batching.split_check import SplitCheck
from lightning_opt.core.measure.memory import MemoryLimits, PeakMeter, live_bytes
from lightning_opt.core.modules.preserve import StepState
from lightning_opt.memory.meters import StorageMeter, measuring, storage_bytes
from tests.helpers.fake_cuda import (
    FIRST,
    Copies,
    FakeAllocator,
    FakeNet,
    FakeStream,
    Model,
    fit_on_fake_cuda,
    needs_cuda_build,
    on_fake_cuda,
)
from tests.helpers.syncs import SyncCounter


def block(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda")


# --- memory -------------------------------------------------------------------------------------


def test_memory_meters_agree():
    with FakeAllocator(1000) as _:
        before = block(100)
        run = PeakMeter(FIRST)
        near = LimitMeter(FIRST, budget_mb=800 / 2**20)
        near.start()
        with measuring(FIRST) as meter, StorageMeter() as counted:
            one, two = block(300), block(200)
            views = one[:10], one.view(3, 100)
            del two
            assert meter.live() == counted.live() == 300
            assert meter.mark() == counted.mark() == 500
            assert meter.mark() == counted.mark() == 300
        assert storage_bytes([before, *views, torch.empty(7)], FIRST) == 400
        assert live_bytes(FIRST) == 400
        assert run.read() == 600
        (usage,) = MemoryLimits(FIRST, host=False).read()
        assert (usage.source, usage.used, usage.total) == ("cuda:0", 400, 1000)
        peak = near.read()
        assert (peak.current, peak.share) == (400 / 800, 600 / 800)


@needs_cuda_build
@pytest.mark.parametrize("policy", ["block", "custom", "selective", "none"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_checkpointed_blocks_are_recomputed_on_the_device_under_the_same_autocast(
    policy, precision
):
    seen: list[bool] = []

    class Noted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(5, 5), nn.GELU(), nn.Dropout(0.1))

        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.is_autocast_enabled("cuda"))
            y: Tensor = self.inner(x)
            return y

    net = FakeNet()
    net.net = nn.Sequential(nn.Linear(6, 5), Noted(), Noted(), nn.Linear(5, 1))
    modules = ["net.1", "net.2"] if policy == "custom" else None
    offload = policy != "selective"
    checkpointing = lo.ActivationCheckpointing(policy, modules=modules, offload=offload)
    fit_on_fake_cuda(checkpointing, net=net, precision=precision, steps=3)
    assert (len(seen) > 6) == (policy != "none")
    assert set(seen) == {precision == "bf16-mixed"}


# --- data ---------------------------------------------------------------------------------------


def test_prefetcher_copies_a_batch_on_a_separate_stream():
    prefetcher, module = lo.DevicePrefetcher(), Model(nn.Linear(3, 2))
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(root_device=FIRST), datamodule=None)
    prefetcher.on_fit_start(trainer, module)
    batch = {"x": torch.empty(4, 3), "y": [torch.empty(4), "name", 1.0]}
    current = FakeStream.current(FIRST)
    with Copies() as copies:
        moved = module.transfer_batch_to_device(batch, FIRST, 0)
    tensors = [own for own in tree_leaves(moved) if isinstance(own, Tensor)]
    assert [own.device for own in tensors] == [FIRST, FIRST]
    (side,) = {copy.stream for copy in copies.to_device}
    assert side is not current
    assert not any(copy.waited for copy in copies.to_device)
    assert current.waits == [side]
    assert current.tensors == tensors
    prefetcher.release(trainer)
    assert prefetcher.copies == 1
    prefetcher.on_fit_start(trainer, module)
    assert prefetcher.copies == 0
    prefetcher.release(trainer)


# --- micro-batches ------------------------------------------------------------------------------


def tokens(batch: Any) -> Tensor:
    return (batch[1] > 0).sum()


@pytest.mark.parametrize("count", [None, tokens])
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("size", ["auto", 2])
def test_micro_batches_read_nothing(size, window, count, monkeypatch):
    """Losses, token counts, logged values and outputs stay on the device, except in the check."""
    monkeypatch.setattr(SplitCheck, "check_batch", lambda *args: None)
    settings = {} if count is None else {"loss": "mean_over_tokens", "count": count}
    callback = lo.MicroBatching(size, **settings)
    net = FakeNet()
    found: list[Any] = []
    plain = net.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        loss = plain(batch, batch_idx)
        net.log("largest", loss, reduce_fx="max")
        found.append(batch[0].shape[0])
        return {"loss": loss, "rows": batch[1], "mean": loss.detach()}

    net.training_step = training_step  # type: ignore[method-assign]
    syncs = SyncCounter()
    fit_on_fake_cuda(callback, net=net, steps=3, syncs=syncs, accumulate_grad_batches=window)
    assert set(found) == ({4} if size == "auto" else {2})
    ours = [place for place in syncs.where if "lightning_opt" in place]
    assert not ours


def test_state_before_an_out_of_memory_batch_is_restored_on_the_device():
    model = on_fake_cuda(Model(nn.BatchNorm1d(4)))
    model.net.mask = torch.empty(3, device="cuda")
    before = StepState(model, FIRST)
    before.take()
    for buffer in model.buffers():
        buffer.add_(1)
    before.restore()
    assert {own.device for own in (*model.parameters(), *model.buffers())} == {FIRST}
