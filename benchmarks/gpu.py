"""Run all GPU tests and GPU benchmarks within one time budget, and write one set of results.

Needs torch and Lightning in the running Python and no network; the package is imported from the
source tree. First run the tests marked ``gpu``, then the benchmarks of ``PARTS``, then every other
script that sets ``GPU`` at module level and takes ``--device`` and ``--out``. Each runs in its own
process under its own time limit; later ones get the time that earlier ones did not use. The imports
of a script take up to 15 seconds, so they run while the previous script measures on the GPU. A
failure does not stop the others, and the results of each are kept. ``--device cpu`` tests this
script itself, with few rounds.

The output is a record of each benchmark, ``<name>_cuda.json`` and ``.md``, ``gpu.md`` (the machine,
the runs and every table) and ``gpu.log``.
"""

import argparse
import ast
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

TESTS = 50
PARTS: tuple[tuple[str, float, tuple[str, ...]], ...] = (
    ("strategies.codecs", 15, ()),
    ("gradients.gpt_step", 60, ()),
    ("memory.gpt_checkpointing", 100, ("--sizes", "124M")),
    ("batching.micro_batching", 60, ("--parts", "survival")),
    ("kernels.kernels", 110, ("--models", "vision transformer")),
    ("memory.checkpointing", 35, ("--models", "transformer", "convnet", "mlp")),
    ("advice", 20, ()),
    ("gradients.clipping_cost", 15, ()),
    ("gradients.guard_cost", 25, ()),
    ("gradients.health_cost", 30, ()),
    ("profiling.monitor_cost", 25, ()),
    ("profiling.steps", 15, ()),
)
"""Module below ``benchmarks``, seconds, and options; the others share the rest of ``WHOLE``."""
WHOLE = 570.0
ON_CPU = {
    "kernels.kernels": ("--models", "ConvNet", "--switches", "FusedOptimizer", "ChannelsLast"),
    "memory.checkpointing": ("--models", "mlp"),
}
"""Options on a CPU, where compilers take minutes."""

# The script waits for a line on its input between the imports and the measurement.
START = """
import importlib, sys
main = importlib.import_module(sys.argv.pop(1)).main
if sys.stdin.readline():  # empty (end of file) if the parent has ended
    sys.exit(main())
"""

# Run in another process, so that this one holds no memory of the device.
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
    facts["gpus"] = torch.cuda.device_count()
    facts["memory_gib"] = round(device.total_memory / 2**30, 1)
    facts["compute_capability"] = f"{device.major}.{device.minor}"
    try:
        pynvml.nvmlInit()
        facts["driver"] = pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError as error:
        facts["driver"] = f"unknown: {error}"
json.dump(facts, sys.stdout)
"""


def gpus_needed(script: Path) -> int:
    """Return how many GPUs the script declares with ``GPU = ...``; 0 if none. Does not run it."""
    for node in ast.parse(script.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "GPU":
            return int(ast.literal_eval(node.value))
    return 0


def planned(modules: list[str]) -> list[tuple[str, float, tuple[str, ...]]]:
    """Return ``PARTS`` and the other scripts, with equal shares of the remaining time."""
    others = [module for module in modules if module not in {name for name, *_ in PARTS}]
    left = WHOLE - TESTS - sum(seconds for _, seconds, _ in PARTS)
    return [*PARTS, *((module, left / len(others), ()) for module in others)]


def pytest_command(files: list[Path]) -> list[str]:
    """Return a command that runs pytest on files with any versions of torch and Lightning."""
    return [
        *(sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-ra", "--durations=10"),
        # Other versions have other warnings, and plugins may be missing.
        *("-W", "default", "-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider"),
        *map(str, files),
    ]


class Job:
    """A running command; a benchmark waits for a line on stdin before it measures."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.log = log
        self.text = " ".join(command).replace(f"-c {START}", "-m")
        # Keep bytecode, or every process would compile all sources again.
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": ""}
        with log.open("a") as sink:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def finish(self, limit: float) -> tuple[str, float]:
        """Let the command start, and wait until it exits or reaches the limit.

        Returns:
            ``"passed"`` or a short description of the failure, and the seconds.
        """
        start = time.monotonic()
        with self.log.open("a") as sink:
            sink.write(f"\n$ {self.text}\n")
        try:
            self.process.communicate(b"\n", limit)
            code = self.process.returncode
            outcome = "passed" if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            outcome = f"stopped after {limit:.0f} s"
        finally:
            # Child processes of the command would keep the device.
            end_group(self.process)
        return outcome, round(time.monotonic() - start, 1)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its descendants that still run."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


class Bundle:
    """The results so far, written after every job."""

    def __init__(self, out: Path, machine: dict[str, Any]) -> None:
        self.out = out
        self.machine = machine
        self.jobs: list[dict[str, Any]] = []
        self.tables: list[str] = []

    @property
    def passed(self) -> bool:
        """Whether no job has failed."""
        return all(job["outcome"].startswith(("passed", "not run")) for job in self.jobs)

    def add(
        self, name: str, outcome: str, seconds: float = 0.0, folder: Path | None = None
    ) -> None:
        """Record one job with its results in ``folder``, and write all results."""
        self.jobs.append({"name": name, "outcome": outcome, "seconds": seconds})
        for path in sorted(folder.glob("*.*")) if folder else ():
            shutil.copy(path, self.out)
            if path.suffix == ".md":
                self.tables.append(path.read_text().strip())
        print(f"{name}: {outcome} ({seconds:.0f} s)", flush=True)
        if not outcome.startswith(("passed", "not run")):
            lines = (self.out / "gpu.log").read_text(errors="replace").splitlines()[-15:]
            print("\n".join("    " + line for line in lines), flush=True)

        rows = [f"| {job['name']} | {job['outcome']} | {job['seconds']:.0f} |" for job in self.jobs]
        sections = [
            "## On a GPU",
            "\n".join(f"- {key}: {value}" for key, value in self.machine.items()),
            "\n".join(["| job | outcome | seconds |", "|---|---|---:|", *rows]),
            *self.tables,
        ]
        (self.out / "gpu.md").write_text("\n\n".join(sections) + "\n")


def main() -> int:
    """Run all jobs and return the exit status: 0 if all passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--budget", type=float, default=570.0, help="seconds for everything")
    parser.add_argument("--device", default="cuda", help="'cpu' tests this script on any machine")
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
    scripts = {}
    for path in sorted((ROOT / "benchmarks").rglob("*.py")):
        needed = gpus_needed(path)
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts[1:])
        if arguments.device == "cuda" and needed > machine["gpus"]:
            bundle.add(f"benchmarks.{name}", f"not run: it needs {needed} GPUs")
        elif needed:
            scripts[name] = path
    rest = planned(list(scripts))
    with tempfile.TemporaryDirectory() as temporary:

        def start(name: str, options: tuple[str, ...]) -> Job:
            command = [sys.executable, "-c", START, f"benchmarks.{name}"]
            command += ["--device", arguments.device, "--out", f"{temporary}/{name}"]
            if arguments.device == "cpu":
                options = (*ON_CPU.get(name, options), "--quick")
            return Job([*command, *options], log)

        job = start(rest[0][0], rest[0][2])
        if importlib.util.find_spec("pytest") is None:
            bundle.add("tests", "not run: pytest is not installed")
        elif not tests:
            bundle.add("tests", "not run: no test mentions a GPU")
        else:
            limit = arguments.budget * TESTS / WHOLE
            bundle.add("tests", *Job(pytest_command(tests), log).finish(limit))
        while rest:
            (name, own, _), *rest = rest
            current, job = job, start(rest[0][0], rest[0][2]) if rest else job
            # Its seconds, and its share of the time that earlier parts did not use.
            share = own / (own + sum(seconds for _, seconds, _ in rest))
            outcome = current.finish((deadline - time.monotonic()) * share)
            bundle.add(f"benchmarks.{name}", *outcome, Path(temporary, name))

    print(f"{'all passed' if bundle.passed else 'NOT all passed'}: {out / 'gpu.md'}")
    return 0 if bundle.passed else 1


if __name__ == "__main__":
    sys.exit(main())
