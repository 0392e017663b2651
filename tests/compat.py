"""Run a part of the tests with other versions of torch and Lightning: ``make compat``.

Quick tests run first, then some that train. Each pair of versions gets a new environment below
``build/compat``, which is removed afterwards unless ``--keep`` is given. Arguments select pairs:
``python tests/compat.py 2.5.1:2.5.0``.

``make cuda-dry`` passes ``--cuda``: the tests on fake CUDA tensors run with the newest pair, whose
torch is built for CUDA. Only with that build backward passes and ``torch.compile`` run there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAIRS = ("2.5.1:2.5.0", "2.5.1:2.6.6", "2.13.0:2.5.0", "2.14.1:2.6.6")
"""Versions of torch and Lightning, without those of CI, 2.13.0:2.6.6."""

QUICK = ("core", "gradients", "memory", "batching", "kernels", "precision", "strategies", "data")
"""Folders of ``tests`` whose quick tests run."""

TRAINED = (
    *("test_package.py", "test_contracts.py", "gradients/clipping/test_adaptive_clipping.py"),
    *("gradients/guard/test_non_finite_guard.py", "gradients/health/test_gradient_health.py"),
    *("memory/checkpointing/test_activation_checkpointing.py", "precision"),
    "memory/checkpointing/test_exactness.py",
    "batching/accumulation/test_accumulation.py",
    "batching/batch_size/test_dynamic_batch_size.py",
    "batching/micro_batching/test_micro_batching.py",
    "kernels/fused_optimizer/test_fused_optimizer.py",
    "strategies/compression/test_compressed_ddp.py",
)
"""Tests that train: the contracts of every callback, and features that depend on versions."""

NEEDED = (
    *("cloudpickle", "lazy-loader", "torchmetrics", "nvidia-ml-py", "psutil"),
    *("pytest>=8.3", "pytest-timeout", "pytest-xdist", "hypothesis>=6.100", "numpy<2.4"),
    *("matplotlib>=3.8", "jsonargparse[signatures]>=4.35", "scikit-learn>=1.4"),
    *("zclip==1.0.0", "lmdb>=1.4", "tensorboard"),
    "transformers<5.1",  # newer ones need torch 2.6
)


def run(*command: str | Path, env: dict[str, str] | None = None) -> int:
    return subprocess.run(
        [str(part) for part in command], cwd=ROOT, env=env, check=False
    ).returncode


def check(pair: str, cuda: bool, keep: bool) -> int:
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
    runs = [
        ["--quick", "-n", "2", *(f"tests/{name}" for name in QUICK)],
        ["-m", "not slow", *(f"tests/{name}" for name in TRAINED)],
    ]
    if cuda:
        # Hide GPUs.
        env["CUDA_VISIBLE_DEVICES"] = ""
        runs = [["-ra", "tests/fake_cuda"]]
    built = "import sys, torch; sys.exit(not torch.backends.cuda.is_built())"
    if cuda and run(python, "-c", built):
        print(f"The registry gave a torch {torch} without CUDA.")
        return 1
    # Other versions have other warnings.
    quiet = ("-q", "-W", "default", "-p", "no:cacheprovider", "--no-header")
    status = max(run(python, "-m", "pytest", *quiet, *options, env=env) for options in runs)
    if not keep:
        shutil.rmtree(folder)
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pairs", nargs="*", help="torch:Lightning")
    parser.add_argument("--cuda", action="store_true", help="run the tests on fake CUDA tensors")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    given = parser.parse_args()
    pairs = given.pairs or (PAIRS[-1:] if given.cuda else PAIRS)
    found = {pair: check(pair, given.cuda, given.keep) for pair in pairs}
    print({pair: "passed" if status == 0 else "failed" for pair, status in found.items()})
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
