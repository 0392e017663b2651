"""Memory readings, against the kernel, psutil and a simulated allocator."""

import sys
from pathlib import Path

import pytest
import torch

from lightning_opt.core.measure.memory import (
    MB,
    MemoryLimits,
    PeakMeter,
    live_bytes,
    malloc_trim,
    peak_memory,
    resident_memory,
)

CPU = torch.device("cpu")


def test_current_memory_replaces_a_peak_that_the_kernel_does_not_record(monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda self: "VmRSS:\t100 kB\n")  # as under gVisor
    assert peak_memory(CPU) == pytest.approx(resident_memory(), rel=0.1)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's /proc")
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
