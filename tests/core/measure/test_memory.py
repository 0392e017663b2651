"""Memory readings, against the kernel, psutil and a simulated allocator."""

import gc
import sys

import psutil
import pytest
import torch

from lightning_opt.core.measure.memory import (
    MB,
    MemoryLimits,
    PeakMeter,
    address_space,
    live_bytes,
    malloc_info,
    malloc_trim,
    resident_memory,
    system_memory,
)
from tests.helpers.processes import launch

CPU = torch.device("cpu")
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's /proc")


# --- the process and the machine ----------------------------------------------------------------


def test_resident_memory_agrees_with_psutil():
    assert resident_memory() == pytest.approx(psutil.Process().memory_info().rss, rel=0.01)


@linux
def test_peak_is_kept_after_memory_is_freed():
    before, meter = resident_memory(), PeakMeter(CPU)
    block = torch.ones(64 * MB, dtype=torch.uint8)
    after = resident_memory()
    del block
    assert after - before >= 60 * MB
    assert meter.read() >= after - MB


@linux
def test_meters_that_run_together_keep_their_own_peaks():
    """Only a meter started before 64 MB were allocated and freed reports them."""
    malloc_trim()  # memory of earlier tests
    outer, before = PeakMeter(CPU), resident_memory()
    assert not outer.samples
    block = torch.ones(64 * MB, dtype=torch.uint8)
    inner = PeakMeter(CPU)
    del block
    malloc_trim()
    inner.start()
    later = PeakMeter(CPU)
    assert (outer.read() - before) / MB == pytest.approx(64, abs=6)
    assert (inner.read() - before) / MB == pytest.approx(0, abs=6)
    assert (later.read() - before) / MB == pytest.approx(0, abs=6)


def test_mark_resets_one_meter_only_on_cuda(monkeypatch):
    """CUDA's allocator has one peak per process, which this test simulates."""
    held = peak = 0

    def hold(amount: int) -> None:
        nonlocal held, peak
        held, peak = amount, max(peak, amount)

    def reset(device: torch.device) -> None:
        nonlocal peak
        peak = held

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    run, step = PeakMeter(torch.device("cuda")), PeakMeter(torch.device("cuda", 0))
    other_device = PeakMeter(torch.device("cuda", 1))
    other_device.start()
    hold(9)
    hold(2)
    assert step.mark() == 9
    hold(5)
    hold(1)
    assert step.mark() == 5
    assert step.read() == 1
    assert run.read() == 9
    run.start()
    assert run.read() == 1


def test_system_memory_agrees_with_psutil():
    usage, reference = system_memory(), psutil.virtual_memory()
    assert usage.total == reference.total
    assert usage.used == pytest.approx(reference.total - reference.available, rel=0.2)
    assert 0 < usage.fraction < 1


def limited_process() -> dict[str, float]:
    import resource

    assert address_space() is None
    resource.setrlimit(resource.RLIMIT_AS, (1 << 36, resource.RLIM_INFINITY))
    before = address_space()
    block = torch.empty(256 * MB, dtype=torch.uint8)
    after = address_space()
    assert before.total == after.total == 1 << 36
    pieces = [torch.empty(20_000, dtype=torch.uint8) for _ in range(4000)]  # 76 MB in the heap
    last = torch.empty(20_000, dtype=torch.uint8)  # keeps the heap from shrinking
    full = address_space()
    del pieces
    freed = full.used - address_space().used
    del block, last
    return {
        "grown": (after.used - before.used) / MB,
        "freed": freed / MB,
        "seen": "address space" in [usage.source for usage in MemoryLimits(CPU).read()],
    }


@pytest.mark.distributed
@pytest.mark.skipif(malloc_info() is None, reason="needs the statistics of glibc's malloc")
def test_address_space_is_read_if_it_is_limited():
    (found,) = launch(limited_process, processes=1)
    # The C library may meanwhile create a heap of 64 MB for another thread.
    assert found["grown"] == pytest.approx(64 * round(found["grown"] / 64), abs=3)
    assert found["grown"] >= 253
    assert found["freed"] == pytest.approx(76, abs=3)  # still mapped, but free
    assert found["seen"]


# --- the heap -----------------------------------------------------------------------------------


@pytest.mark.skipif(malloc_info() is None, reason="needs the statistics of glibc's malloc")
@pytest.mark.parametrize("size", [3_000, 300_000, 30_000_000])
def test_heap_includes_tensors(size):
    gc.collect()
    count = max(1, 3_000_000 // size)
    before = malloc_info().used
    tensors = [torch.empty(size, dtype=torch.uint8) for _ in range(count)]
    grown = malloc_info().used - before
    # Each tensor adds about 600 bytes to its elements.
    assert count * size <= grown <= count * (size + 1500) + 20_000
    assert live_bytes(CPU) == pytest.approx(malloc_info().used, abs=100_000)
    del tensors
    assert malloc_info().used - before < 100_000


def trim_a_full_heap() -> tuple[float, float]:
    pieces = [torch.ones(20_000, dtype=torch.uint8) for _ in range(5000)]
    last = torch.ones(20_000, dtype=torch.uint8)
    full = resident_memory()
    del pieces
    freed = resident_memory()
    malloc_trim()
    del last
    return (full - freed) / MB, (freed - resident_memory()) / MB


@pytest.mark.distributed
@pytest.mark.skipif(malloc_trim() is None, reason="this C library has no malloc_trim")
def test_trim_returns_freed_memory_to_the_system():
    ((at_once, trimmed),) = launch(trim_a_full_heap, processes=1)
    assert at_once < 10
    assert trimmed > 80


@pytest.mark.gpu
def test_cuda_memory_agrees_with_torch():
    device = torch.device("cuda", 0)
    block = torch.empty(64 * MB, dtype=torch.uint8, device=device)
    (usage,) = MemoryLimits(device, host=False).read()
    assert live_bytes(device) == torch.cuda.memory_allocated(device) >= 64 * MB
    assert usage.total == torch.cuda.mem_get_info(device)[1]
    del block
    after = MemoryLimits(device, host=False).read()[0]
    assert usage.used - after.used == pytest.approx(64 * MB, abs=MB)  # cached is not used
