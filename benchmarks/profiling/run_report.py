"""Three pages of RunReport and their pictures: a bad batch, a run out of memory, a slow link.

Supports: what a page shows, in the README and in docs/profiling/run_report.md. The runs are from
`examples/demo.py`: act 1, act 2 without help, and plain DDP between two processes at 100 Mbit/s.
Chromium takes the pictures, where it is installed: light and dark.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch
from PIL import Image
from torch.utils.data import DataLoader

import lightning_opt as lo
from benchmarks.records import ROOT
from benchmarks.strategies import compression

NAMES = ("bad_batch", "out_of_memory", "slow_link")
SCALE = 1.5
"""Pixels of a picture for one of the page."""

PICTURES = ROOT / "docs" / "_static"

sys.path.insert(0, str(ROOT / "examples"))


def train(model: L.LightningModule, data: Any, folder: Path, steps: int, **settings: Any) -> None:
    """Train with everything that measures."""
    every = max(1, steps // 40)
    callbacks = [
        lo.RunReport(),
        lo.GradientHealth(every_n_steps=every),
        lo.DataMonitor(every_n_steps=every),
        lo.MemoryProfiler(every_n_steps=every),
        *settings.pop("callbacks", []),
    ]
    L.Trainer(
        accelerator="cpu", callbacks=callbacks, max_steps=steps, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, default_root_dir=folder, log_every_n_steps=every,
        profiler=lo.StepProfiler(log_every_n_steps=every, flops=False, print_table=False),
        **settings,
    ).fit(model, *data)  # fmt: skip


def bad_batch(folder: Path, quick: bool) -> None:
    acts = importlib.import_module("demo_acts")
    steps = 20 if quick else 240
    guard = [lo.NonFiniteGuard(spike=6), lo.AdaptiveClipping(every_n_steps=max(1, steps // 40))]
    model = acts.Unlucky(width=96, depth=3, lr=3e-3)
    data = acts.batches(steps, 8, 64), acts.batches(4, 32, 64)
    train(model, data, folder, steps, callbacks=guard, val_check_interval=max(5, steps // 12))


def out_of_memory(folder: Path, quick: bool) -> None:
    acts = importlib.import_module("demo_acts")
    # The number of windows grows until a batch does not fit.
    sizes = range(2, 32, 8 if quick else 1)
    windows = [next(iter(acts.batches(1, size, 128))) for size in sizes]
    data = (DataLoader(windows, batch_size=None),)
    curve = acts.MemoryCurve(acts.ROOM)
    with suppress(RuntimeError, MemoryError):
        train(acts.ByteGPT(width=192, depth=4, heads=6, window=128), data, folder, 30,
              callbacks=[curve])  # fmt: skip


def slow_link(folder: Path, quick: bool) -> None:
    acts = importlib.import_module("demo_acts")
    steps = 6 if quick else 120
    data = (acts.batches(steps, 8, 64),)
    settings = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
    train(acts.ByteGPT(width=96, depth=3), data, folder, steps, **settings)


def run(name: str, folder: Path, quick: bool) -> None:
    """Make one page, in other processes."""
    module, options = "benchmarks.profiling.run_report", ["--run", name, "--out", folder]
    options += ["--quick"] if quick else []
    if name != "slow_link":
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", "-m", module, *map(str, options)]
        subprocess.run(command, env=environment, cwd=ROOT, check=True)
        return
    reason = compression.why_not()
    if reason is not None:
        print(f"no slow link can be made here ({reason})")
        return
    compression.measure(module, 2, "100 Mbit/s", options, timeout=300)


def photograph(page: Path, picture: Path, dark: bool = False) -> None:
    """Take a picture of a page with headless Chromium."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("no Chromium, so no pictures")
        return
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             f"--force-device-scale-factor={SCALE}", "--window-size=1200,1050",
             f"--blink-settings=preferredColorScheme={0 if dark else 1}",
             f"--user-data-dir={folder}", f"--screenshot={picture}", page.as_uri()],
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip
    with Image.open(picture) as taken:
        shown = taken.convert("RGB")
    shown.quantize(256).save(picture, optimize=True)


def main() -> None:
    """Make the pages, and their pictures below ``docs``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", choices=NAMES, help="make this page only, in this process")
    parser.add_argument("--out", type=Path, default=Path("pages"), help="folder for the pages")
    parser.add_argument("--quick", action="store_true", help="few steps, and no pictures in docs")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)  # rank 0 has ended
    own = parser.parse_args()
    out = own.out.resolve()
    if own.run:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        L.seed_everything(0, verbose=False)
        globals()[own.run](out / own.run, own.quick)
        if own.result is not None and os.environ.get("RANK") == "0":
            own.result.write_text(json.dumps({}))
        return
    for name in NAMES:
        run(name, out, own.quick)
        page = out / name / "report.html"
        if page.exists():
            print(page)
            folder = out if own.quick else PICTURES
            photograph(page, folder / f"report_{name}.png")
            photograph(page, folder / f"report_{name}_dark.png", dark=True)


if __name__ == "__main__":
    main()
