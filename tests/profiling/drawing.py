"""Draws the pictures of pages in this process: another one would import matplotlib each time."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_opt.profiling.run_report import page
from lightning_opt.profiling.run_report.pictures import Data, write_pictures


def draw_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], *, input: str, **_: Any) -> None:  # noqa: A002
        write_pictures(Data(*json.loads(input)), Path(command[2]), "images" in command)

    monkeypatch.setattr(page, "subprocess", SimpleNamespace(run=run))
