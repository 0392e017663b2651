"""The number of CPUs: affinity and quotas of control groups, version 1 and 2."""

import os

import pytest

from lightning_opt.core.measure import machine
from lightning_opt.core.measure.machine import available_cpus, find_cpu_quota


def group(root, version, path, quotas):
    """Write the kernel's files for a process in the group ``path``, with quotas by folder."""
    kind = ("cgroup2", "cgroup2 rw") if version == 2 else ("cgroup", "cgroup rw,cpu,cpuacct")
    mount = "sys/fs/cgroup" if version == 2 else "sys/fs/cgroup/cpu"
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text(f"32 31 0:29 / /{mount} rw - {kind[0]} {kind[1]}\n")
    (root / "proc/self/cgroup").write_text(
        f"0::{path}\n" if version == 2 else f"4:memory:/x\n2:cpu,cpuacct:{path}\n"
    )
    (root / mount / path.strip("/")).mkdir(parents=True, exist_ok=True)
    for folder, quota in quotas.items():
        place = root / mount / folder
        if version == 2:
            (place / "cpu.max").write_text(quota)
        else:
            given, period = quota.split()
            (place / "cpu.cfs_quota_us").write_text(given)
            (place / "cpu.cfs_period_us").write_text(period)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("quotas", "expected"),
    [
        ({"a/b": "150000 100000"}, 1.5),
        ({"a/b": "400000 100000", "a": "200000 100000"}, 2.0),
        ({"a/b": "max 100000"}, None),
        ({}, None),
    ],
)
def test_smallest_quota_of_all_levels_counts(version, quotas, expected, tmp_path):
    if version == 1:
        quotas = {folder: quota.replace("max", "-1") for folder, quota in quotas.items()}
    group(tmp_path, version, "/a/b", quotas)
    assert find_cpu_quota(tmp_path) == expected


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no CPU affinity on this system")
def test_smaller_of_affinity_and_quota_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 64)
    assert available_cpus(tmp_path) == 6
    group(tmp_path, 2, "/", {".": "250000 100000"})
    assert available_cpus(tmp_path) == 2
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("50000 100000")
    assert available_cpus(tmp_path) == 1
