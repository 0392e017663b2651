"""A file with one line a trial, from which an interrupted search goes on."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Journal:
    """Appends records to a file of JSON lines, and reads those of the same search that are there.

    Args:
        path: Of the file; None keeps records in memory only.
        key: Machine, versions and settings: it has to be the same for a record to be taken over.

    Attributes:
        records: All records of this search, old ones first.
        note: A sentence about what became of an existing file; empty where there was none.
    """

    def __init__(self, path: str | Path | None, key: Mapping[str, Any]) -> None:
        self.records: list[dict[str, Any]] = []
        self.note = ""
        self._path = None if path is None else Path(path)
        self._key = json.loads(json.dumps(dict(key)))
        if self._path is None or not self._path.exists():
            return
        other: dict[str, Any] = {}
        for line in self._path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError, TypeError):  # cut by a kill
                record = json.loads(line)
                differing = [n for n in self._key if record["key"].get(n) != self._key[n]]
                if not differing:
                    self.records.append(record["record"])
                other = dict.fromkeys(differing)
        self.note = f"{self._path} has {len(self.records)} records; going on from there."
        if not self.records:
            why = f", since it differs in {', '.join(other)}" if other else ""
            self.note = f"This search begins anew{why}."

    def add(self, record: Mapping[str, Any]) -> None:
        """Append a record; it is on the disk when this returns."""
        self.records.append(dict(record))
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # One write of a whole line, on a new one, so that a kill cuts no other.
        with self._path.open("a", encoding="utf-8") as file:
            file.write("\n" + json.dumps({"key": self._key, "record": record}))
            file.flush()
            os.fsync(file.fileno())
