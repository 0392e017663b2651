"""Limits of control groups, of both versions: what a container may take before it is killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TypeAlias

NO_LIMIT = 1 << 60
"""Version 1 says "no limit" as the largest page-aligned number, about 9.2e18."""


MemoryGroup: TypeAlias = Callable[[], tuple[int, int] | None]
"""Reads a control group: bytes used and the limit, or None where there is none (any more)."""


def find_memory_groups(root: Path = Path("/")) -> list[MemoryGroup]:
    """Return the groups that limit this process: its own and, since they count too, its parents.

    Inside a container the path in ``/proc/self/cgroup`` is often that of the host and not there;
    what is mounted is then the container's own group.

    Args:
        root: Where ``proc`` and ``sys`` are found.
    """
    groups = [partial(_read_memory, *found) for found in _folders(root, "memory")]
    return [group for group in groups if group() is not None]


def _read_memory(folder: Path, version: int) -> tuple[int, int] | None:
    limit, used = (_number(folder / name) for name in _NAMES[version][:2])
    if limit is None or used is None or limit >= NO_LIMIT:
        return None
    # Files that are cached but not in active use do not count: the kernel gives them up before it
    # kills.
    return max(0, used - _statistic(folder / "memory.stat", _NAMES[version][2])), limit


_NAMES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def find_cpu_quota(root: Path = Path("/")) -> float | None:
    """Return how many CPUs' time this process may take, or None where nothing limits it.

    The smallest quota of its own control group and of its parents.

    Args:
        root: Where ``proc`` and ``sys`` are found.
    """
    quotas = (_quota(folder, version) for folder, version in _folders(root, "cpu"))
    return min((quota for quota in quotas if quota), default=None)


def _quota(folder: Path, version: int) -> float | None:
    if version == 2:
        given, period = [*" ".join(_lines(folder / "cpu.max")).split(), "", ""][:2]
    else:
        given, period = ("".join(_lines(folder / f"cpu.cfs_{name}_us")) for name in _CFS)
    if not given.isdigit() or not period.isdigit() or not int(period):
        return None  # "max", or -1
    return int(given) / int(period)


_CFS = ("quota", "period")


def _folders(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Yield folder and version of this process's own groups, each followed by its parents."""
    for version, mount, inside in _mounts(root, controller):
        own = _own_path(root, version, controller)
        folder = mount
        if own is not None and own.is_relative_to(inside):
            relative = own.relative_to(inside)
            if ".." not in relative.parts and (mount / relative).is_dir():
                folder = mount / relative
        yield folder, version
        while folder != mount:
            folder = folder.parent
            yield folder, version


def _mounts(root: Path, controller: str) -> Iterator[tuple[int, Path, PurePosixPath]]:
    """Yield version, folder and the group that is mounted there, for each of its hierarchies."""
    for line in _lines(root / "proc/self/mountinfo"):
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or not kind:
            continue
        folder = root / fields[4].replace("\\040", " ").lstrip("/")
        inside = PurePosixPath(fields[3])
        if kind[0] == "cgroup2":
            yield 2, folder, inside
        elif kind[0] == "cgroup" and controller in kind[-1].split(","):
            yield 1, folder, inside


def _own_path(root: Path, version: int, controller: str) -> PurePosixPath | None:
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if (version == 2 and number == "0" and not controllers) or (
            version == 1 and controller in controllers.split(",")
        ):
            return PurePosixPath(path)
    return None


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
