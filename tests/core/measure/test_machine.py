"""Control groups in a fake file system, and a missing NVML."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_opt.core.measure import machine
from lightning_opt.core.measure.machine import (
    available_cpus,
    find_cpu_quota,
    find_memory_groups,
)
from lightning_opt.core.measure.memory import MemoryLimits, Usage

GROUPS = "5:cpu,cpuacct:/job/step\n4:memory:/job/step\n0::/job/step\n"
"""A process in the same group of version 1 and of version 2."""


def write(root: Path, files: dict[str, str]) -> Path:
    files = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in (files | {"proc/self/cgroup": GROUPS}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"job/step/cpu.max": "150000 100000"}, 1.5),
        ({"job/step/cpu.max": "400000 100000", "job/cpu.max": "200000 100000"}, 2.0),
        ({"job/step/cpu.max": "max 100000"}, None),
        ({"cpu/job/cpu.cfs_quota_us": "50000", "cpu/job/cpu.cfs_period_us": "100000",
          "cpu/job/step/tasks": ""}, 0.5),
        ({"cpu/job/step/cpu.cfs_quota_us": "250000"}, 2.5),  # without a period
        ({"cpu/job/cpu.cfs_quota_us": "-1", "cpu/job/cpu.cfs_period_us": "100000"}, None),
    ],
)  # fmt: skip
def test_smallest_quota_of_all_levels_counts(files, expected, tmp_path):
    root = write(tmp_path, files)
    assert find_cpu_quota(root) == expected
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert available_cpus(root) == max(1, min(cpus, int(expected or cpus)))


STEP = {"job/step/memory.max": "max\n", "job/step/memory.current": "400\n"}
JOB = {
    "job/memory.max": "1000\n",
    "job/memory.current": "700\n",
    "job/memory.stat": "anon 500\nfile 200\ninactive_file 150\n",
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param(STEP | JOB, [(550, 1000)], id="parents count, cached files do not"),
        pytest.param(
            {"memory.max": "800", "memory.current": "80"}, [(80, 800)], id="the host's path"
        ),
        pytest.param(
            {"step/memory.max": "10", "step/memory.current": "4"}, [(4, 10)], id="a subtree"
        ),
        pytest.param(
            {
                "memory/job/memory.limit_in_bytes": "5000",
                "memory/job/memory.usage_in_bytes": "1000",
                "memory/job/memory.stat": "cache 300\ntotal_inactive_file 100\n",
                "memory/job/step/memory.limit_in_bytes": "9223372036854771712",
                "memory/job/step/memory.usage_in_bytes": "1000",
            },
            [(900, 5000)],
            id="version 1",
        ),
        pytest.param({}, [], id="no limit"),
    ],
)
def test_memory_limits_of_control_groups(files, expected, tmp_path):
    root = write(tmp_path, files)
    assert [group() for group in find_memory_groups(root)] == expected
    usages = [Usage("cgroup", *found) for found in expected]
    limits = MemoryLimits(torch.device("cpu"), root=root).read()
    assert [usage for usage in limits if usage.source == "cgroup"] == usages


def test_missing_driver_is_logged_once(monkeypatch, caplog):
    def init() -> None:
        raise OSError("Driver Not Loaded")

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(nvmlInit=init))
    machine.open_nvml.cache_clear()
    with caplog.at_level("INFO"):
        assert [machine.open_nvml() for _ in range(2)] == [None, None]
    machine.open_nvml.cache_clear()
    (record,) = [r for r in caplog.records if "NVML is not available" in r.getMessage()]
    assert "Driver Not Loaded" in record.getMessage()
