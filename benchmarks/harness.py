"""The options and the output of every benchmark: a table, a JSON file and a Markdown file.

Each benchmark is a script. Its docstring names the claim that it supports. It times candidates with
`time_in_turns`, the same code that `lightning_opt.benchmark` runs, and publishes median ratios with
the machine, versions, date and commit. ``GPU = True`` at module level marks scripts that
`make gpu` runs with ``--device cuda``, and ``GPU = 2`` one that needs two GPUs.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import socket
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import lightning
import torch

import lightning_opt
from benchmarks.records import RESULTS, code_of, files_of, script_of
from lightning_opt import Report

STARTED = time.time()


def parse_arguments(description: str, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run at all?")
    arguments = parser.parse_args(argv)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # no tips at each fit
    if arguments.device == "cpu":
        torch.set_num_threads(1)  # two busy threads on a shared machine measure the neighbours
    return arguments


def describe_machine(device: str) -> dict[str, Any]:
    """Return what a reader needs to place the numbers."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [
            line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        name = f"{models[0].split(':')[1].strip()} ({len(models)} CPUs)" if models else name
    return {
        "cpu": name,
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "lightning_opt": lightning_opt.__version__,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": commit_of(Path(__file__).parent),
    }


def commit_of(folder: Path) -> str:
    """Return the commit that a folder stands at, with a plus sign where files differ from it."""
    git = ("git", "-C", str(folder))
    try:
        found = subprocess.run(
            [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
        )
        package = str(folder.parent / "lightning_opt")
        same = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", package], check=False)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip() + ("+" if same.returncode else "")


@contextmanager
def recorded_waits(device: str, waits: list[str]) -> Iterator[None]:
    """Add a message to ``waits`` for each time the host waits for a CUDA device."""
    if not device.startswith("cuda"):
        yield
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
            # Torch also warns that this mode is a prototype.
            texts = [str(one.message) for one in caught]
            waits += [text for text in texts if text.startswith("called a synchronizing")]


def median_ratio(seconds: Sequence[float], reference: Sequence[float]) -> float:
    """Return the median over rounds of ``seconds / reference``."""
    return statistics.median(a / b for a, b in zip(seconds, reference, strict=True))


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def continued(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the record of an earlier call, if it measured the present code; else nothing."""
    file = arguments.out / f"{name}.json"
    record = json.loads(file.read_text()) if file.exists() and not arguments.quick else {}
    return record if record.get("code") == code_of(script_of(name)) else {}


def publish(
    name: str,
    report: Report,
    arguments: argparse.Namespace,
    *,
    complete: bool = True,
    **details: Any,
) -> None:
    """Write the report as ``<name>`` or ``<name>_cuda``, ``.json`` and ``.md``.

    A complete report is also printed. An incomplete one is only written, so that finished rows
    survive if the script is stopped.
    """
    machine = describe_machine(arguments.device)
    report.notes.append("Machine: " + ", ".join(f"{key} {value}" for key, value in machine.items()))
    if complete:
        report.print()
    if arguments.quick and arguments.out == RESULTS:
        return  # too few rounds to keep
    arguments.out.mkdir(parents=True, exist_ok=True)
    stem = name if arguments.device == "cpu" else f"{name}_{arguments.device}"
    content = {**json.loads(report.to_json()), "machine": machine, **details}
    code = code_of(script_of(name))
    if any(file.stat().st_mtime > STARTED for file in files_of(code)):
        print("The code changed during the measurement, so the record is outdated: measure again.")
        code = {}
    content |= {"arguments": sys.argv[1:], "code": code}
    (arguments.out / f"{stem}.json").write_text(json.dumps(content, indent=2) + "\n")
    (arguments.out / f"{stem}.md").write_text(report.to_markdown() + "\n")
