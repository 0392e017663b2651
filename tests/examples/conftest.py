"""Fixtures that import an example, and give the environment of a new process."""

import importlib
import io
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

Load = Callable[[str], ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Import a script by its name, with its folder on the path."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


def run_script(name: str, *arguments: str) -> str:
    """Run a script in this process, and return its output."""
    sys.argv = [name, *arguments]
    sys.path.insert(0, str(EXAMPLES))
    with redirect_stdout(io.StringIO()) as printed:
        importlib.import_module(name).main()
    return printed.getvalue()


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """Variables of a process that is not a rank and imports the package from the source tree."""
    removed = ("SLURM", "TORCHELASTIC", "MASTER_", "RANK", "LOCAL_", "WORLD_SIZE", "GROUP_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(removed)}
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
