"""A file with one line a trial, from which an interrupted search goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORMAT = 1


class Journal:
    """Appends records to a file of JSON lines, and reads those that are there.

    The first line says what the records are worth something for: machine, versions and settings.
    Where it says something else than ``key``, the file is moved aside and begun anew.

    Args:
        path: Of the file; None keeps records in memory only.
        key: What has to be the same for records to be taken over.

    Attributes:
        records: All records, old ones first.
        note: A sentence about what became of an existing file; empty where there was none.
    """

    def __init__(self, path: str | Path | None, key: Mapping[str, Any]) -> None:
        self.records: list[dict[str, Any]] = []
        self.note = ""
        self._path = None if path is None else Path(path)
        if self._path is None:
            return
        path = self._path
        header = {"lightning_opt_tuner": FORMAT, "key": json.loads(json.dumps(dict(key)))}
        if path.exists() and path.stat().st_size:
            self._read(path, header)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
        if not (path.exists() and path.stat().st_size):
            self._append(header)

    def _read(self, path: Path, header: Mapping[str, Any]) -> None:
        lines, whole = _lines(path)
        first = lines[0] if lines else {}
        if first == header:
            self.records = lines[1:]
            self.note = f"{path} has {len(self.records)} records; going on from there."
            if whole < path.stat().st_size:  # a line that was being written when the end came
                os.truncate(path, whole)
            return
        aside = path.with_name(f"{path.name}.old")
        path.replace(aside)
        said = first.get("key") or {}
        differing = [name for name in header["key"] if said.get(name) != header["key"][name]]
        self.note = (
            f"This search begins anew, since it differs in {', '.join(differing)}; the old journal "
            f"is now {aside.name}."
        )

    def add(self, record: Mapping[str, Any]) -> None:
        """Append a record; it is on the disk when this returns."""
        self.records.append(dict(record))
        if self._path is not None:
            self._append(record)

    def _append(self, record: Mapping[str, Any]) -> None:
        assert self._path is not None
        # One write of a whole line, so that a kill leaves it there or not, or cut at the end.
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the records of a file until the first that is broken, and the bytes that they take."""
    found: list[dict[str, Any]] = []
    whole = 0
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            record = json.loads(line)
        except ValueError:
            break
        if not line.endswith(b"\n") or not isinstance(record, dict):
            break
        found.append(record)
        whole += len(line)
    return found, whole
