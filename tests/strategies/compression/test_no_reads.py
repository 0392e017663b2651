"""On a device the hook reads nothing, so that the backward pass goes on while buckets travel."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_opt.strategies.compression import hook as hook_module
from lightning_opt.strategies.compression.buckets import clip_locally
from lightning_opt.strategies.compression.hook import CompressedReduction, Traffic
from lightning_opt.strategies.compressors import Compressor, Quantize, Threshold, TopK
from tests.helpers.syncs import SyncCounter, take_device_path
from tests.strategies.simulated import simulate_ranks, simulated_bucket

SCHEMES = {
    "uncompressed": None,
    "bf16": torch.bfloat16,
    "int8": Quantize(8, block=34),
    "int4": Quantize(4, block=34),
    "topk": TopK(0.1),
    "threshold": Threshold(0.5, max_ratio=0.2),
    "auto threshold": Threshold("auto", max_ratio=0.05),
}

RUNS = [(name, 2) for name in SCHEMES] + [("int8", 3), ("int4", 3)]
"""Names of schemes, and numbers of ranks. From three on, quantized messages take two stages."""

SIZES = (700, 3, 1500)


def reduction(scheme: Any, parameters: list[Tensor], **settings: Any) -> CompressedReduction:
    settings = {"loss_scale": lambda: torch.ones(()), "clip": lambda *_: None, **settings}
    names = {parameter: f"p{place}" for place, parameter in enumerate(parameters)}
    return CompressedReduction(names, [scheme], lambda step: scheme, **settings)


def gradients(step: int, device: str = "cpu") -> list[Tensor]:
    """Two buckets: the first parameter, and the others."""
    if device != "cpu":
        return [torch.empty(SIZES[0], device=device), torch.empty(sum(SIZES[1:]), device=device)]
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(size, generator=generator) for size in (SIZES[0], sum(SIZES[1:]))]


def run_steps(hook: CompressedReduction, parameters: list[Tensor], device: str) -> list[Tensor]:
    """Run five steps: one not finite, one that a fused optimizer skips on a device."""
    means = []
    for step in range(5):
        buckets = gradients(step, device)
        if step == 2 and device == "cpu":
            buckets[1][-1] = -math.inf
        for index, buffer in enumerate(buckets):
            own = parameters[:1] if index == 0 else parameters[1:]
            bucket = simulated_bucket(index, own, buffer)
            means.append(hook.reduce(bucket).wait())
        found = torch.full((), float(step == 3), device=device)
        hook.skip(parameters[:2], found)  # all of the first bucket, and part of the second
    hook.commit()
    return means


def scaled(device: str) -> dict[str, Any]:
    """Return settings of fp16: a loss scale on the device, and clipping."""
    return {
        "loss_scale": lambda: torch.full((), 4.0, device=device),
        "clip": lambda gradient, scale: clip_locally(gradient, 5.0 * scale, "norm", 2),
    }


@pytest.mark.parametrize("settings", [dict, lambda: scaled("cpu")], ids=["plain", "fp16"])
@pytest.mark.parametrize(("scheme", "world"), RUNS)
def test_device_path_reads_nothing_and_equals_the_cpu_path(monkeypatch, scheme, world, settings):
    scheme = SCHEMES[scheme]
    launched = simulate_ranks(monkeypatch, world)
    parameters = [torch.zeros(size) for size in SIZES]
    found = []
    for path in ("host", "device"):
        with monkeypatch.context() as patch, SyncCounter() as syncs:
            if path == "device":
                take_device_path(patch)
            hook = reduction(scheme, parameters, **settings())
            launched.clear()
            means = run_steps(hook, parameters, "cpu")
            assert path == "host" or not syncs.where
            assert "new_group" not in launched  # groups are made before the first step
            found.append((means, [bucket.committed for bucket in hook.buckets.current.values()]))
            hook.close()
    (means, kept), (device_means, device_kept) = found
    if not isinstance(scheme, TopK | Threshold):
        torch.testing.assert_close(means, device_means, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(kept, device_kept, rtol=0, atol=0)
    assert means[5].isnan().all() or not isinstance(scheme, Compressor)
    for own, other in zip(means, device_means, strict=True):
        assert torch.equal(own.isnan(), other.isnan())
    assert not means[7].isnan().any()
    assert all(rest.isfinite().all() for rest in device_kept)


def test_bound_that_is_not_finite_is_not_saved(monkeypatch):
    simulate_ranks(monkeypatch, 2)
    take_device_path(monkeypatch)
    parameters = [torch.zeros(size) for size in SIZES]
    hook = reduction(SCHEMES["auto threshold"], parameters)
    first, second = gradients(0)
    second.fill_(math.nan)
    hook.reduce(simulated_bucket(0, parameters[:1], first)).wait()
    hook.reduce(simulated_bucket(1, parameters[1:], second)).wait()
    assert list(hook.state_dict()["bounds"]) == ["p0"]
    hook.close()


def test_seconds_count_overlapping_buckets_once(monkeypatch):
    now = iter([1.0, 4.0, 2.0, 3.0, 3.0, 6.0, 8.0, 9.0])  # launch and arrival of four buckets
    monkeypatch.setattr(hook_module, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    traffic, future = Traffic(), torch.futures.Future()
    future.set_result(None)
    for _ in range(4):
        traffic.record_launch(1, 4, torch.device("cpu"))(future)
    assert traffic.seconds() == pytest.approx(6.0)
    assert traffic.sent_bytes == 4


@pytest.mark.gpu
@pytest.mark.parametrize(("scheme", "world"), RUNS)
def test_exchange_does_not_synchronize_on_gpu(monkeypatch, scheme, world):
    simulate_ranks(monkeypatch, world, torch.device("cuda", 0))
    parameters = [torch.zeros(size, device="cuda") for size in SIZES]
    hook = reduction(SCHEMES[scheme], parameters, **scaled("cuda"))
    run_steps(hook, parameters, "cuda")  # the first step of a bucket makes its buffers
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_steps(hook, parameters, "cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
        hook.close()
