"""On a device the hook reads nothing, so that the backward pass goes on while buckets travel."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_opt.strategies.compression import hook as hook_module
from lightning_opt.strategies.compression.buckets import Bucket, clip_locally
from lightning_opt.strategies.compression.hook import CompressedReduction, Traffic
from lightning_opt.strategies.compressors import Compressor, Quantize, Threshold, TopK
from tests.helpers.syncs import SyncCounter, take_device_path
from tests.strategies.simulated import SimulatedBucket, simulate_ranks

SCHEMES = {
    "uncompressed": None,
    "bf16": torch.bfloat16,
    "int8": Quantize(8, block=34),
    "int4": Quantize(4, block=34),
    "topk": TopK(0.1),
    "threshold": Threshold(0.5, max_ratio=0.2),
    "auto threshold": Threshold("auto", max_ratio=0.05),
}

SIZES = (700, 3, 1500)


def reduction(scheme: Any, parameters: list[Tensor], **settings: Any) -> CompressedReduction:
    """Return a hook that sends every step as ``scheme``."""
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
            buckets[1][-1] = math.inf
        for index, buffer in enumerate(buckets):
            own = parameters[:1] if index == 0 else parameters[1:]
            bucket = SimulatedBucket(index, own, buffer)
            means.append(hook.reduce(bucket).wait())  # type: ignore[arg-type]
        found = torch.full((), float(step == 3), device=device)
        hook.skip(parameters, found)
        hook.skip(parameters[1:2], found)
    hook.commit()
    return means


def scaled(device: str) -> dict[str, Any]:
    """Return settings of fp16: a loss scale on the device, and clipping."""
    return {
        "loss_scale": lambda: torch.full((), 4.0, device=device),
        "clip": lambda gradient, scale: clip_locally(gradient, 5.0 * scale, "norm", 2),
    }


@pytest.mark.parametrize("settings", [dict, lambda: scaled("cpu")], ids=["plain", "fp16"])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_device_path_reads_nothing_and_equals_the_cpu_path(monkeypatch, scheme, world, settings):
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
            kept = {}
            for bucket in hook.buckets.current.values():
                kept |= {name: bucket.committed[part] for name, part in bucket.parts.items()}
            if path == "device":
                assert not syncs.where
            found.append((means, kept))
            assert "new_group" not in launched  # groups are made before the first step
            hook.close()
    (means, kept), (device_means, device_kept) = found
    exact = not isinstance(scheme, TopK | Threshold)
    for mean, device_mean in zip(means, device_means, strict=True):
        assert torch.equal(mean.isnan(), device_mean.isnan())
        if exact:
            assert torch.equal(mean.nan_to_num(), device_mean.nan_to_num())
    if isinstance(scheme, Compressor):
        assert means[5].isnan().all()
    assert not means[7].isnan().any()
    for name in kept:
        assert device_kept[name].isfinite().all()
        if exact:
            assert torch.equal(kept[name], device_kept[name]), name


def test_partly_skipped_bucket_on_a_device_equals_the_cpu(monkeypatch):
    simulate_ranks(monkeypatch, 2)
    parts = {"a": slice(0, 3), "b": slice(3, 5), "c": slice(5, 9)}
    conditions = [("a", 0.0), ("b", 1.0), ("b", 0.0), ("c", 0.0), ("c", None)]
    kept = []
    for path in ("host", "device"):
        with monkeypatch.context() as patch, SyncCounter() as syncs:
            if path == "device":
                take_device_path(patch)
            residual = Bucket(torch.arange(9.0), parts)
            residual.add(torch.full((9,), 10.0), torch.full((), 2.0))
            for name, found in conditions:
                residual.skip([name, "elsewhere"], None if found is None else torch.tensor(found))
            residual.commit_step()
            assert path == "host" or not syncs.where
            kept.append(residual.committed)
    assert kept[0].tolist() == [5.0, 6.0, 7.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert torch.equal(*kept)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_local_clipping_reads_nothing(algorithm, dtype):
    gradient = torch.tensor([3.0, -4.0, 0.5], dtype=dtype)
    small, bad = gradient / 100, torch.tensor([1.0, -math.inf, 9.0], dtype=dtype)
    clipped, unclipped = gradient.clone(), small.clone()
    with SyncCounter() as syncs:
        for one in (clipped, unclipped, bad):
            clip_locally(one, torch.tensor(2.0), algorithm, 4)
    assert not syncs.where
    exact = gradient / gradient.norm() if algorithm == "norm" else gradient.clamp(-2, 2)
    torch.testing.assert_close(clipped, exact)
    assert torch.equal(unclipped, small)
    assert not bad.isfinite().all()


def test_seconds_count_overlapping_buckets_once(monkeypatch):
    now = iter([1.0, 4.0, 2.0, 3.0, 3.0, 6.0, 8.0, 9.0])  # launch and arrival of four buckets
    monkeypatch.setattr(hook_module, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    traffic, future = Traffic(), torch.futures.Future()
    future.set_result(None)
    for _ in range(4):
        traffic.launch(1, 4, torch.device("cpu"))(future)
    assert traffic.seconds() == pytest.approx(6.0)
    assert traffic.sent_bytes == 4


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_exchange_does_not_synchronize_on_gpu(monkeypatch, scheme, world):
    simulate_ranks(monkeypatch, world, torch.device("cuda", 0))
    parameters = [torch.zeros(size, device="cuda") for size in SIZES]
    hook = reduction(scheme, parameters, **scaled("cuda"))
    run_steps(hook, parameters, "cuda")  # the first step of a bucket makes its buffers
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_steps(hook, parameters, "cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
        hook.close()
