"""Memory readings, against the kernel, a fake file system and a fake driver."""

import gc
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from lightning_opt.core.measure import machine
from lightning_opt.core.measure.machine import find_memory_groups
from lightning_opt.core.measure.memory import (
    MB,
    MemoryLimits,
    PeakMeter,
    Usage,
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


# --- control groups, in a fake file system ------------------------------------------------------


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V2 = {
    "proc/self/mountinfo": "31 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n",
    "proc/self/cgroup": "0::/job/step\n",
}


def test_cgroup_v2_includes_parents_and_excludes_cached_files(tmp_path):
    root = write(
        tmp_path,
        V2
        | {
            "sys/fs/cgroup/job/step/memory.max": "max\n",
            "sys/fs/cgroup/job/step/memory.current": "400\n",
            "sys/fs/cgroup/job/memory.max": "1000\n",
            "sys/fs/cgroup/job/memory.current": "700\n",
            "sys/fs/cgroup/job/memory.stat": "anon 500\nfile 200\ninactive_file 150\n",
        },
    )
    (group,) = find_memory_groups(root)
    assert group() == (550, 1000)
    assert Usage("cgroup", 550, 1000) in MemoryLimits(CPU, root=root).read()


def test_cgroup_v2_in_a_container_with_the_hosts_path(tmp_path):
    root = write(
        tmp_path,
        V2 | {"sys/fs/cgroup/memory.max": "800", "sys/fs/cgroup/memory.current": "80"},
    )
    assert [group() for group in find_memory_groups(root)] == [(80, 800)]


@pytest.mark.parametrize(
    ("limit", "expected"), [("9223372036854771712", []), ("5000", [(900, 5000)])]
)
def test_cgroup_v1_limit(tmp_path, limit, expected):
    folder = "sys/fs/cgroup/memory/docker/abc/"
    root = write(
        tmp_path,
        {
            "proc/self/mountinfo": "40 31 0:35 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
            "\n41 31 0:36 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n",
            "proc/self/cgroup": "5:cpu:/docker/abc\n4:memory:/docker/abc\n",
            folder + "memory.limit_in_bytes": limit,
            folder + "memory.usage_in_bytes": "1000",
            folder + "memory.stat": "cache 300\ntotal_inactive_file 100\n",
        },
    )
    assert [group() for group in find_memory_groups(root)] == expected


def test_cgroup_of_a_container_that_mounts_a_subtree(tmp_path):
    root = write(
        tmp_path,
        {
            "proc/self/mountinfo": "31 23 0:26 /job /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            "proc/self/cgroup": "0::/job/inner\n",
            "sys/fs/cgroup/inner/memory.max": "10",
            "sys/fs/cgroup/inner/memory.current": "4",
        },
    )
    assert [group() for group in find_memory_groups(root)] == [(4, 10)]


def test_system_without_control_groups(tmp_path):
    assert find_memory_groups(tmp_path) == []


# --- NVML ---------------------------------------------------------------------------------------


class DriverError(Exception):
    pass


def fake_nvml(works: bool = True) -> Any:
    """One GPU and one MIG slice."""

    def init() -> None:
        library.starts += 1
        if not works:
            raise DriverError("Driver Not Loaded")

    def handle_by_uuid(name: str) -> str:
        if name not in ("GPU-aaaa", "MIG-bbbb"):
            raise DriverError("not found")
        return name

    def memory_info(handle: str, version: int) -> SimpleNamespace:
        if handle == "MIG-bbbb":
            raise DriverError("not supported")
        return SimpleNamespace(used=6400)

    library: Any = SimpleNamespace(
        starts=0,
        NVMLError=DriverError,
        nvmlMemory_v2=2,
        nvmlInit=init,
        nvmlDeviceGetHandleByUUID=handle_by_uuid,
        nvmlDeviceGetMemoryInfo=memory_info,
    )
    return library


def used_by_uuid(monkeypatch: pytest.MonkeyPatch, library: Any) -> list[int | None]:
    monkeypatch.setitem(sys.modules, "pynvml", library)
    machine.open_nvml.cache_clear()
    found = []
    for uuid in ("aaaa", "GPU-aaaa", "bbbb", "cccc"):
        opened = machine.open_nvml()
        handle = opened and machine.find_handle(opened, uuid)
        found.append(handle and machine.used_memory(opened, handle))
    machine.open_nvml.cache_clear()
    assert library.starts == 1
    return found


def test_nvml_finds_devices_by_uuid(monkeypatch):
    assert used_by_uuid(monkeypatch, fake_nvml()) == [6400, 6400, None, None]


def test_missing_driver_is_logged_once(monkeypatch, caplog):
    with caplog.at_level("INFO"):
        assert used_by_uuid(monkeypatch, fake_nvml(works=False)) == [None] * 4
    (record,) = [r for r in caplog.records if "NVML is not available" in r.getMessage()]
    assert "Driver Not Loaded" in record.getMessage()


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
