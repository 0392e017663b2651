"""Run everything that wants a GPU inside one budget, and leave one bundle of results.

For a machine with a GPU and no network, where torch and Lightning are installed for the system's
Python; the package is read from the source tree. First run the tests marked ``gpu`` (from the files
that speak of a GPU: the others need not even be importable here), then the benchmarks of ``PARTS``,
what is worth most first, and then every other one that says ``GPU = True`` at module level and
takes ``--device`` and ``--out``. Each runs in a process of its own under a limit of its own, and
what one leaves unused the later ones may take. One failure does not stop the others, and what a
part has found is kept once it ends, however it ends. A CPU rehearses all of it with few rounds.

However many there are, three files come out, so that they are easily carried home: ``gpu.md`` (the
machine, what ran, every table), ``summary.json`` (the same with every number) and ``gpu.log``.
"""

import argparse
import ast
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

TESTS = 80
PARTS: tuple[tuple[str, float, tuple[str, ...]], ...] = (
    ("gradients.gpt_step", 40, ()),
    ("memory.gpt_checkpointing", 110, ()),
    ("batching.micro_batching", 60, ("--parts", "survival")),
    ("kernels.kernels", 110, ()),
    ("tuner.grid", 80, ("--models", "byte GPT", "--budget", "25")),
    ("strategies.codecs", 20, ()),
    ("strategies.nccl_pair", 40, ()),
)
"""Module below ``benchmarks``, seconds, and options; the rest of ``WHOLE`` is for the others."""
WHOLE = 570.0
REHEARSED = {
    "kernels.kernels": ("--models", "ConvNet", "--switches", "FusedOptimizer", "ChannelsLast"),
    "tuner.grid": ("--models", "tiny MLP", "--budget", "10"),
}
"""Options on a CPU, where compilers take minutes."""

# In a process of its own, so that this one holds no memory of the device while the others measure.
READ_MACHINE = """
import json, platform, sys
import lightning, torch
import pynvml
facts = {
    "device": "none",
    "python": platform.python_version(),
    "torch": torch.__version__,
    "lightning": lightning.__version__,
    "cuda": torch.version.cuda,
}
if torch.cuda.is_available():
    device = torch.cuda.get_device_properties(0)
    facts["device"] = device.name
    facts["memory_gib"] = round(device.total_memory / 2**30, 1)
    facts["compute_capability"] = f"{device.major}.{device.minor}"
    try:
        pynvml.nvmlInit()
        facts["driver"] = pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError as error:
        facts["driver"] = f"unknown: {error}"
json.dump(facts, sys.stdout)
"""


def declares_gpu(script: Path) -> bool:
    """Whether the script says ``GPU = True`` at module level, read without running it."""
    return any(
        isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == "GPU" for target in node.targets)
        and isinstance(node.value, ast.Constant)
        and node.value.value is True
        for node in ast.parse(script.read_text()).body
    )


def planned(scripts: list[Path]) -> list[tuple[str, float, tuple[str, ...]]]:
    """Return ``PARTS`` and, with equal shares of what they leave, the other scripts."""
    modules = [".".join(script.relative_to(ROOT).with_suffix("").parts[1:]) for script in scripts]
    others = [module for module in modules if module not in {name for name, *_ in PARTS}]
    left = WHOLE - TESTS - sum(seconds for _, seconds, _ in PARTS)
    return [*PARTS, *((module, left / len(others), ()) for module in others)]


def pytest_command(files: list[Path]) -> list[str]:
    """Pytest over the given files, under whatever versions this machine has."""
    return [
        *(sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-ra", "--durations=10"),
        # Another torch and Lightning warn about other things, and plugins may be missing.
        *("-W", "default", "-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider"),
        *map(str, files),
    ]


def run(command: list[str], log: Path, limit: float) -> tuple[str, float]:
    """Run a command with its output appended to ``log``.

    Returns:
        ``"passed"``, or what went wrong in a few words, and the seconds it took.
    """
    start = time.monotonic()
    with log.open("a") as sink:
        sink.write(f"\n$ {' '.join(command)}\n")
        sink.flush()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
            outcome = "passed" if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            outcome = f"stopped after {limit:.0f} s"
        finally:
            # Also what the command itself started, or it would hold the device for the next.
            end_group(process)
    return outcome, round(time.monotonic() - start, 1)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its descendants, as far as they are still there."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def read_results(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """What a benchmark wrote: its JSON files by name, and its tables."""
    results: dict[str, Any] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            results[path.name] = json.loads(path.read_text())
        except ValueError:  # it was stopped while it wrote
            results[path.name] = path.read_text()
    return results, [path.read_text().strip() for path in sorted(folder.glob("*.md"))]


class Bundle:
    """What has come out so far, rewritten after every job: whoever stops us keeps the rest."""

    def __init__(self, out: Path, machine: dict[str, Any]) -> None:
        self.out = out
        self.machine = machine
        self.jobs: list[dict[str, Any]] = []
        self.tables: list[str] = []

    @property
    def passed(self) -> bool:
        """Whether nothing has failed."""
        return all(job["outcome"].startswith(("passed", "not run")) for job in self.jobs)

    def add(
        self, name: str, outcome: str, seconds: float = 0.0, folder: Path | None = None
    ) -> None:
        """Record one job, with the results it left in ``folder``, and write everything."""
        results, tables = read_results(folder) if folder else ({}, [])
        self.jobs.append({"name": name, "outcome": outcome, "seconds": seconds, "results": results})
        self.tables += tables
        print(f"{name}: {outcome} ({seconds:.0f} s)", flush=True)
        if not outcome.startswith(("passed", "not run")):
            lines = (self.out / "gpu.log").read_text(errors="replace").splitlines()[-15:]
            print("\n".join("    " + line for line in lines), flush=True)

        summary = {"passed": self.passed, "machine": self.machine, "jobs": self.jobs}
        (self.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        rows = [f"| {job['name']} | {job['outcome']} | {job['seconds']:.0f} |" for job in self.jobs]
        sections = [
            "## On a GPU",
            "\n".join(f"- {key}: {value}" for key, value in self.machine.items()),
            "\n".join(["| what | outcome | seconds |", "|---|---|---:|", *rows]),
            *self.tables,
        ]
        (self.out / "gpu.md").write_text("\n\n".join(sections) + "\n")


def main() -> int:
    """Run all and return the exit status: 0 when everything passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--budget", type=float, default=570.0, help="seconds for everything")
    parser.add_argument("--device", default="cuda", help="'cpu' rehearses this on any machine")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.budget
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    log = out / "gpu.log"
    log.write_text("")

    probe = subprocess.run(
        [sys.executable, "-c", READ_MACHINE],
        capture_output=True,
        check=False,
        text=True,
        timeout=arguments.budget / 4,
    )
    if probe.returncode:
        print(f"{sys.executable} cannot describe its machine:\n{probe.stderr}", file=sys.stderr)
        return 2
    machine = json.loads(probe.stdout.splitlines()[-1])
    print(", ".join(f"{key} {value}" for key, value in machine.items()), flush=True)
    if arguments.device == "cuda" and machine["device"] == "none":
        print(f"torch of {sys.executable} sees no CUDA device", file=sys.stderr)
        return 2
    bundle = Bundle(out, machine)

    tests = sorted(
        path for path in (ROOT / "tests").rglob("test_*.py") if "gpu" in path.read_text()
    )
    if importlib.util.find_spec("pytest") is None:
        bundle.add("tests", "not run: pytest is not installed")
    elif not tests:
        bundle.add("tests", "not run: none speaks of a GPU")
    else:
        bundle.add("tests", *run(pytest_command(tests), log, arguments.budget * TESTS / WHOLE))

    scripts = sorted(path for path in (ROOT / "benchmarks").rglob("*.py") if declares_gpu(path))
    rest = planned(scripts)
    while rest:
        (name, own, options), *rest = rest
        # Its own seconds, and its share of what those before it have left.
        limit = (deadline - time.monotonic()) * own / (own + sum(seconds for _, seconds, _ in rest))
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", f"benchmarks.{name}", "--device", arguments.device]
            if arguments.device == "cpu":
                options = (*REHEARSED.get(name, options), "--quick")
            command += ["--out", folder, *options]
            bundle.add(f"benchmarks.{name}", *run(command, log, limit), Path(folder))

    print(f"{'all passed' if bundle.passed else 'NOT all passed'}: {out / 'gpu.md'}")
    return 0 if bundle.passed else 1


if __name__ == "__main__":
    sys.exit(main())
