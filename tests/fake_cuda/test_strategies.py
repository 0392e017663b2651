"""Compressed reductions read and copy nothing."""

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from lightning_opt.strategies.compression import hook as hook_module
from lightning_opt.strategies.compression.compressed_ddp import CompressedDDPStrategy
from tests.helpers.fake_cuda import FIRST, Copies, FakeAccelerator
from tests.strategies.compression.test_no_reads import (
    SCHEMES,
    SIZES,
    reduction,
    run_steps,
    scaled,
)
from tests.strategies.simulated import SimulatedEvent, simulate_ranks


# Two ranks exchange quantized gradients in another way than three.
@pytest.mark.parametrize(
    ("scheme", "world"), [*((scheme, 3) for scheme in SCHEMES), ("int8", 2), ("int4", 2)]
)
def test_reduction_reads_and_copies_nothing(monkeypatch, scheme, world):
    monkeypatch.setattr(hook_module, "Event", SimulatedEvent)
    launched = simulate_ranks(monkeypatch, world)
    parameters = [torch.empty(size, device="cuda") for size in SIZES]
    hook = reduction(SCHEMES[scheme], parameters, **scaled("cuda"))
    launched.clear()
    with Copies() as copies:
        means = run_steps(hook, parameters, "cuda")
    assert all(mean.is_cuda for mean in means)
    assert not copies.to_host
    assert not copies.to_device
    assert "new_group" not in launched  # not inside a backward pass
    hook.close()


def test_loss_scale_is_not_read():
    strategy = CompressedDDPStrategy(
        "int8", accelerator=FakeAccelerator(), parallel_devices=[FIRST]
    )
    scaler = torch.amp.GradScaler("cuda")
    scaler.scale(torch.empty((), device="cuda"))
    strategy.precision_plugin = MixedPrecision("16-mixed", "cuda", scaler)
    assert strategy._loss_scale().device == FIRST
