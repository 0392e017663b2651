"""Memory limits and CPU quotas of control groups, version 1 and 2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeAlias

NO_LIMIT = 1 << 60
"""Version 1 reports "no limit" as a number of about 9.2e18."""


MemoryGroup: TypeAlias = Callable[[], tuple[int, int] | None]
"""Reads bytes used and the limit of a control group, or None if it has no limit."""


def find_memory_groups(root: Path = Path("/")) -> list[MemoryGroup]:
    """Return the groups that limit this process: its own group and the group's parents."""
    groups = [partial(_read_memory, *folder) for folder in _folders(root, "memory")]
    return [group for group in groups if group() is not None]


def _read_memory(folder: Path, version: int) -> tuple[int, int] | None:
    limit, used = (_number(folder / name) for name in _NAMES[version][:2])
    if limit is None or used is None or limit >= NO_LIMIT:
        return None
    # The kernel drops inactive file caches before it kills a process, so they do not count.
    return max(0, used - _statistic(folder / "memory.stat", _NAMES[version][2])), limit


_NAMES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def find_cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the smallest CPU quota of this process's groups, in CPUs, or None without a quota."""
    quotas = (_quota(folder, version) for folder, version in _folders(root, "cpu"))
    return min((quota for quota in quotas if quota), default=None)


def _quota(folder: Path, version: int) -> float | None:
    if version == 2:
        quota, period = [*" ".join(_lines(folder / "cpu.max")).split(), "", ""][:2]
    else:
        quota, period = (
            "".join(_lines(folder / f"cpu.cfs_{name}_us")) for name in ("quota", "period")
        )
    if not quota.isdigit() or not period.isdigit() or not int(period):
        return None  # "max", or -1
    return int(quota) / int(period)


def _folders(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Yield folder and version of this process's groups, each followed by its parents."""
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        version = 2 if number == "0" else 1
        if version == 1 and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("" if version == 2 else controller)
        names = path.strip("/").split("/")
        # A container may see only a part of the host's path, or none of it.
        inside = (mount.joinpath(*names[start:]) for start in range(len(names)))
        folder = next((each for each in inside if each.is_dir() and ".." not in names), mount)
        yield folder, version
        while folder != mount:
            folder = folder.parent
            yield folder, version


def _statistic(file: Path, name: str) -> int:
    for line in _lines(file):
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return 0


def _number(file: Path) -> int | None:
    text = "".join(_lines(file)).strip()
    return int(text) if text.isdigit() else None  # "max" is no limit


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
