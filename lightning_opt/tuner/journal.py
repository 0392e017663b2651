"""The record of a search: a file to resume from, and progress lines for the terminal."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_opt.tuner.trial import Switches, Trial


class Journal:
    """Appends records to a file of JSON lines, and reads the earlier records of the same search.

    Args:
        path: The file; None keeps records in memory only.
        key: Machine, versions and settings; records with another key are ignored.

    Attributes:
        records: All records of this search, old ones first.
        note: A sentence on the use of an existing file; empty without one.
    """

    def __init__(self, path: str | Path | None, key: Mapping[str, Any]) -> None:
        self.records: list[dict[str, Any]] = []
        self.note = ""
        self._path = None if path is None else Path(path)
        self._key = json.loads(json.dumps(dict(key)))
        if self._path is None or not self._path.exists():
            return
        differing: list[str] = []
        for line in self._path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError, TypeError):  # a line cut by a kill
                record = json.loads(line)
                differing = [n for n in self._key if record["key"].get(n) != self._key[n]]
                if not differing:
                    self.records.append(record["record"])
        self.note = f"{self._path} has {len(self.records)} records; continuing from there."
        if not self.records:
            why = f", since it differs in {', '.join(differing)}" if differing else ""
            self.note = f"This search starts over{why}."

    def add(self, record: Mapping[str, Any]) -> None:
        """Append a record; it is on the disk when this returns."""
        self.records.append(dict(record))
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # One write that starts a new line, so that a kill damages no other record.
        with self._path.open("a", encoding="utf-8") as file:
            file.write("\n" + json.dumps({"key": self._key, "record": record}))
            file.flush()
            os.fsync(file.fileno())


class Progress:
    """Writes each trial and its result to standard error."""

    def __init__(self, budget: float, enabled: bool = True) -> None:
        self._enabled, self.deadline = enabled, time.monotonic() + budget

    def write(self, text: str) -> None:
        if self._enabled:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()

    def start_trial(self, switches: Switches, best: Trial) -> None:
        seconds_left, name = self.deadline - time.monotonic(), " + ".join(switches) or "baseline"
        time_left = f"{seconds_left:.0f} s left" if seconds_left > 0 else "the last"
        so_far = f"; best so far: {best.name}, {_ratios(best)}" if best.switches else ""
        self.write(f"trying {name} ({time_left}{so_far})")

    def end_trial(self, trial: Trial, from_journal: bool = False) -> None:
        parts = [trial.verdict, _ratios(trial), "from the journal" * from_journal]
        self.write(f"{trial.name}: {', '.join(filter(None, parts))}")


def _ratios(trial: Trial) -> str:
    shares = {"time": trial.ratio, "memory": trial.peak_ratio}
    return ", ".join(f"{share:.3f} of the {of}" for of, share in shares.items() if share)
