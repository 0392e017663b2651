"""The sources of memory figures, against the kernel, a fake file system and a fake driver."""

import gc
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from lightning_opt.core.measure import nvml
from lightning_opt.core.measure.cgroups import find_memory_groups
from lightning_opt.core.measure.malloc import malloc_info, malloc_trim
from lightning_opt.core.measure.memory import (
    MB,
    MemoryLimits,
    PeakMeter,
    Usage,
    address_space,
    growth_figures,
    live_bytes,
    resident_memory,
    system_memory,
)
from tests.helpers.processes import launch

CPU = torch.device("cpu")
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's /proc")


# --- the process and the machine ----------------------------------------------------------------


def test_resident_memory_is_that_of_the_kernel():
    assert resident_memory() == pytest.approx(psutil.Process().memory_info().rss, rel=0.01)


@linux
def test_peak_outlives_what_made_it():
    before, meter = resident_memory(), PeakMeter(CPU)
    block = torch.ones(64 * MB, dtype=torch.uint8)
    after = resident_memory()
    del block
    assert after - before >= 60 * MB
    assert meter.read() >= after - MB


@linux
def test_meters_that_run_at_once_do_not_erase_each_others_peak():
    """Of 64 MB that are there in the middle only, whoever started before knows, and nobody else."""
    malloc_trim()  # what other tests have left in the heap
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


def test_on_a_device_a_mark_begins_anew_for_one_meter_alone(monkeypatch):
    """CUDA's allocator has one peak for the process: pretended, so that no device is needed."""
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


@linux
def test_growth_figures_see_what_is_touched_and_what_is_reserved():
    before = growth_figures(CPU)
    reserved = torch.empty(64 * MB, dtype=torch.uint8)
    between = growth_figures(CPU)
    reserved.fill_(1)
    after = growth_figures(CPU)
    # To some MB: the kernel counts by thread and adds up now and then.
    assert [(b - a) / MB for a, b in zip(before, between, strict=True)] == pytest.approx(
        [0, 64], abs=4
    )
    assert [(b - a) / MB for a, b in zip(between, after, strict=True)] == pytest.approx(
        [64, 0], abs=4
    )


def test_system_memory():
    usage, reference = system_memory(), psutil.virtual_memory()
    assert usage.total == reference.total
    assert usage.used == pytest.approx(reference.total - reference.available, rel=0.2)
    assert 0 < usage.fraction < 1


def test_usage_is_a_fraction():
    assert Usage("system", 3, 4).fraction == 0.75


def test_a_cpu_is_no_cuda_device():
    assert MemoryLimits(CPU, host=False).read() == []


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
def test_address_space_is_read_only_where_it_is_limited():
    (found,) = launch(limited_process, processes=1)
    # A heap that the C library begins for another thread meanwhile is 64 MB of address space.
    assert found["grown"] == pytest.approx(64 * round(found["grown"] / 64), abs=3)
    assert found["grown"] >= 253
    assert found["freed"] == pytest.approx(76, abs=3)  # still mapped, but the next tensor's
    assert found["seen"]


# --- the heap -----------------------------------------------------------------------------------


@pytest.mark.skipif(malloc_info() is None, reason="needs the statistics of glibc's malloc")
@pytest.mark.parametrize("size", [3_000, 300_000, 30_000_000])
def test_heap_counts_tensors(size):
    gc.collect()
    count = max(1, 3_000_000 // size)
    before = malloc_info().used
    tensors = [torch.empty(size, dtype=torch.uint8) for _ in range(count)]
    grown = malloc_info().used - before
    # A tensor takes some 600 bytes beside its elements, alignment included.
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
def test_trim_gives_freed_memory_back():
    ((at_once, trimmed),) = launch(trim_a_full_heap, processes=1)
    assert at_once < 10
    assert trimmed > 80


# --- control groups, in a file system of our own ------------------------------------------------


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V2 = {
    "proc/self/mountinfo": "31 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n",
    "proc/self/cgroup": "0::/job/step\n",
}


def test_cgroup_v2_counts_every_level_and_no_cached_files(tmp_path):
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


def test_cgroup_v2_in_a_container_where_the_path_is_the_hosts(tmp_path):
    root = write(
        tmp_path,
        V2 | {"sys/fs/cgroup/memory.max": "800", "sys/fs/cgroup/memory.current": "80"},
    )
    assert [group() for group in find_memory_groups(root)] == [(80, 800)]


@pytest.mark.parametrize(
    ("limit", "expected"), [("9223372036854771712", []), ("5000", [(900, 5000)])]
)
def test_cgroup_v1(tmp_path, limit, expected):
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


def test_container_that_mounts_its_own_subtree(tmp_path):
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


def test_no_control_groups_at_all(tmp_path):
    assert find_memory_groups(tmp_path) == []


# --- NVML, with a driver of our own -------------------------------------------------------------

DRIVER = r"""
#include <string.h>
#include <stdio.h>
typedef struct { unsigned long long total, free, used; } memory_v1;
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } memory_v2;
static int whole, slice;
int nvmlInitWithFlags(unsigned int flags) { printf("init\n"); fflush(stdout); return INIT; }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
const char *nvmlErrorString(int code) { return code == 9 ? "Driver Not Loaded" : "some error"; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    if (!strcmp(uuid, "GPU-aaaa")) { *handle = &whole; return 0; }
    if (!strcmp(uuid, "MIG-bbbb")) { *handle = &slice; return 0; }
    return 6;
}
int nvmlDeviceGetMemoryInfo(void *handle, memory_v1 *memory) {
    memory->total = 80000; memory->used = 7000; memory->free = 73000;
    return handle == &whole ? 0 : 2;
}
#ifdef NEW
int nvmlDeviceGetMemoryInfo_v2(void *handle, memory_v2 *memory) {
    if (memory->version != (sizeof(memory_v2) | 2 << 24)) return 25;
    memory->total = handle == &slice ? 10000 : 80000;
    memory->reserved = 600; memory->used = 6400; memory->free = memory->total - 7000;
    return 0;
}
#endif
"""

# The module needs nothing of the package, so that it can be loaded without importing torch.
ASK = """
import importlib.util, logging, sys
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
spec = importlib.util.spec_from_file_location("nvml", sys.argv[1])
module = sys.modules["nvml"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
for uuid in ("aaaa", "GPU-aaaa", "bbbb", "cccc"):
    library = module.open_nvml()
    handle = library and module.find_handle(library, uuid)
    print(handle and module.used_memory(library, handle), flush=True)
"""


def ask_driver(folder: Path, *flags: str) -> list[str]:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler for the fake driver")
    source = folder / "driver.c"
    source.write_text(DRIVER)
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", *flags, "-o", str(library), str(source)], check=True
    )
    done = subprocess.run(
        [sys.executable, "-c", ASK, nvml.__file__],
        env={**os.environ, "LD_LIBRARY_PATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@linux
def test_nvml_finds_devices_and_slices_by_uuid(tmp_path):
    assert ask_driver(tmp_path, "-DINIT=0", "-DNEW") == [
        "init",
        "6400",
        "6400",
        "6400",
        "None",
    ]


@linux
def test_an_old_driver_counts_its_own_share_as_used(tmp_path):
    lines = ask_driver(tmp_path, "-DINIT=0")
    assert lines[1:] == ["7000"] * 2 + ["None", "None"]


@linux
def test_without_nvml_there_is_one_notice(tmp_path):
    lines = ask_driver(tmp_path, "-DINIT=9")
    notices = [line for line in lines if "NVML is not available" in line]
    assert len(notices) == 1
    assert "Driver Not Loaded" in notices[0]
    assert lines.count("None") == 4
    assert lines.count("init") == 1


def test_nothing_here_raises_without_a_gpu_or_a_limit():
    assert all(usage.total > 0 for usage in MemoryLimits(CPU).read())
    assert address_space() is None or address_space().total > 0


@pytest.mark.gpu
def test_cuda_memory():
    device = torch.device("cuda", 0)
    block = torch.empty(64 * MB, dtype=torch.uint8, device=device)
    (usage,) = MemoryLimits(device, host=False).read()
    assert live_bytes(device) == torch.cuda.memory_allocated(device) >= 64 * MB
    assert usage.total == torch.cuda.mem_get_info(device)[1]
    del block
    after = MemoryLimits(device, host=False).read()[0]
    assert usage.used - after.used == pytest.approx(64 * MB, abs=MB)  # cached is not used
