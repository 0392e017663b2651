"""Fixtures that import an example, and run one in a new process."""

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import a script by its name, with its folder on the path."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """Variables of a process that is not a rank and imports the package from the source tree."""
    removed = ("SLURM", "TORCHELASTIC", "MASTER_", "RANK", "LOCAL_", "WORLD_SIZE", "GROUP_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(removed)}
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def run_script(tmp_path: Path, environment: dict[str, str]) -> Callable[..., str]:
    """Run a script in a temporary folder, and return its output."""

    def run(name: str, *arguments: str) -> str:
        command: list[Any] = [sys.executable, EXAMPLES / name, *arguments]
        settings: dict[str, Any] = {"cwd": tmp_path, "env": environment, "text": True}
        process = subprocess.run(command, capture_output=True, check=False, **settings)
        assert process.returncode == 0, process.stderr
        return str(process.stdout)

    return run
