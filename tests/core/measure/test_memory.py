"""Memory readings, against the kernel, psutil and a simulated allocator."""

import gc
import sys
from mmap import PAGESIZE
from pathlib import Path

import psutil
import pytest
import torch

from lightning_opt.core.measure.memory import (
    MB,
    MemoryLimits,
    PeakMeter,
    live_bytes,
    malloc_info,
    malloc_trim,
    peak_memory,
    resident_memory,
)

CPU = torch.device("cpu")
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's /proc")


# --- the process and the machine ----------------------------------------------------------------


def test_resident_memory_agrees_with_psutil():
    assert resident_memory() == pytest.approx(psutil.Process().memory_info().rss, rel=0.01)


def test_current_memory_replaces_a_peak_that_the_kernel_does_not_record(monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda self: "VmRSS:\t100 kB\n")  # as under gVisor
    assert peak_memory(CPU) == pytest.approx(resident_memory(), rel=0.1)


@linux
def test_meters_that_run_together_keep_their_own_peaks():
    """Only a meter started before 256 MB were allocated and freed reports them."""
    malloc_trim()  # memory of earlier tests
    outer, before = PeakMeter(CPU), resident_memory()
    assert not outer.samples
    block = torch.ones(256 * MB, dtype=torch.uint8)
    inner = PeakMeter(CPU)
    del block
    malloc_trim()
    inner.start()
    later = PeakMeter(CPU)
    assert (outer.read() - before) / MB == pytest.approx(256, abs=24)
    assert (inner.read() - before) / MB == pytest.approx(0, abs=24)
    assert (later.read() - before) / MB == pytest.approx(0, abs=24)


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


# --- the heap -----------------------------------------------------------------------------------


@pytest.mark.skipif(malloc_info() is None, reason="needs the statistics of glibc's malloc")
@pytest.mark.parametrize("size", [3_000, 300_000, 30_000_000])
def test_heap_includes_tensors(size):
    gc.collect()
    count = max(1, 3_000_000 // size)
    before = malloc_info().used
    tensors = [torch.empty(size, dtype=torch.uint8) for _ in range(count)]
    grown = malloc_info().used - before
    # Each tensor adds about 600 bytes to its elements; large ones are rounded up to pages.
    rounding = PAGESIZE if size > 100_000 else 0
    assert count * size <= grown <= count * (size + 1500 + rounding) + 20_000
    assert live_bytes(CPU) == pytest.approx(malloc_info().used, abs=100_000)
    del tensors
    assert malloc_info().used - before < 100_000


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
    torch.cuda.set_per_process_memory_fraction(0.25)
    (share,) = MemoryLimits(device, host=False).read()
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert share.total == int(0.25 * usage.total)
    assert share.used == torch.cuda.memory_allocated(device)
