"""Run a fast part of the tests with other versions of torch and Lightning: ``make compat``.

Each pair gets an environment of its own below ``build/compat``, large where the registry has only
the torch with CUDA, and it is removed afterwards. Name pairs to run only those:
``python tests/compat.py 2.5.1:2.5.0``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAIRS = ("2.5.1:2.5.0", "2.5.1:2.6.6", "2.13.0:2.5.0", "2.14.1:2.6.6")
"""Versions of torch and of Lightning. What CI runs every time, 2.13.0:2.6.6, is not among them."""

TESTED = ("core", "gradients", "memory", "batching", "precision", "strategies", "test_package.py")
NEEDED = (
    *("cloudpickle", "lazy-loader", "torchmetrics", "nvidia-ml-py", "psutil", "wrapt"),
    *("pytest>=8", "pytest-timeout", "pytest-xdist", "hypothesis>=6.100", "numpy<2.4"),
    *("matplotlib>=3.8", "jsonargparse[signatures]>=4.35", "rich>=13", "scikit-learn>=1.4"),
)


def run(*command: str | Path, env: dict[str, str] | None = None) -> int:
    return subprocess.run(
        [str(part) for part in command], cwd=ROOT, env=env, check=False
    ).returncode


def check(pair: str) -> int:
    """Install a pair, run the tests, and return pytest's exit status."""
    torch, lightning = pair.split(":")
    folder = ROOT / "build" / "compat" / pair.replace(":", "_")
    python = folder / "bin" / "python"
    if run(sys.executable, "-m", "venv", folder) or run(
        python, "-m", "pip", "install", "-qq", f"torch=={torch}", f"lightning=={lightning}",
        *NEEDED,
    ):  # fmt: skip
        return 1
    print(f"\n=== torch {torch}, Lightning {lightning}", flush=True)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    tested = [f"tests/{name}" for name in TESTED]
    # Warnings of other versions are not ours to forbid.
    status = run(
        python, "-m", "pytest", "-q", "--quick", "-W", "default", "-p", "no:cacheprovider",
        "--no-header", "-n", "2", *tested, env=env,
    )  # fmt: skip
    shutil.rmtree(folder)
    return status


if __name__ == "__main__":
    found = {pair: check(pair) for pair in sys.argv[1:] or PAIRS}
    print({pair: "passed" if status == 0 else "failed" for pair, status in found.items()})
    sys.exit(any(found.values()))
