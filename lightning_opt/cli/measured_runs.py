"""``lightning-opt tune`` and ``lightning-opt bench``: runs in other processes, timed in turns."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse.typing import PositiveInt

from lightning_opt.cli.main import FAILED, OK, UsageError
from lightning_opt.cli.parsing import (
    Job,
    add_options,
    add_preset,
    given_arguments,
    list_of_presets,
    make_parser,
    names_of,
    parse_job,
    settings_of,
)
from lightning_opt.cli.targets import Targets
from lightning_opt.profiling.comparing.compare import compare

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningArgumentParser

TUNE = """\
Tries optimisations on your model and data, each in a process of its own, alternating with your
unmodified baseline. Combines those that pay, rejects those that change what the model learns, and
writes the result as Python, YAML and JSON, with a table of every trial. The result may be to change
nothing."""

TUNE_EXAMPLES = """\
  lightning-opt tune my_project:Model --data my_project:Data --objective memory --out tuned
  lightning-opt tune config.yaml --preset basic --candidates bf16,compile
  lightning-opt fit config.yaml --config tuned/trainer.yaml
"""

BENCH = """\
Trains your model under several presets and configurations, each in a process of its own,
alternating every few steps, and reports differences in time, memory and loss, with confidence
intervals. The first is plain Lightning with your --trainer arguments."""

BENCH_EXAMPLES = """\
  lightning-opt bench my_project:Model --data my_project:Data --preset basic,advanced,ultra
  lightning-opt bench config.yaml --preset advanced --without CompileModel --seconds 60
  lightning-opt bench config.yaml --against tuned/trainer.yaml,other.yaml --out bench
"""


def run_tune(argv: Sequence[str]) -> int:
    from lightning_opt.tuner.autotune import autotune

    targets = Targets(argv)
    parser = make_parser("tune", TUNE, TUNE_EXAMPLES, targets.package)
    add_options(
        parser,
        ("--objective", str, "throughput", "NAME",
         "What to improve: throughput (steps a second), memory (its peak) or batch (the largest)."),
        ("--budget", str | float, "10m", "", "Time for the search: 90s, 10m, 1h."),
        ("--out", str, "tuned", "FOLDER", "Where to write the result."),
        ("--candidates", str | None, None, "NAMES",
         "Comma-separated optimisations to try, instead of all that may pay."),
        ("--max_slowdown", float, 1.5, "", "Largest slowdown of a step for the other objectives."),
        ("--timeout", float | None, None, "", "Seconds a trial may take to start or to respond."),
    )  # fmt: skip
    add_preset(parser, None)
    parser.add_argument("--quiet", action="store_true", help="Print no progress.")
    job = parse_job(parser, targets)
    options = job.options
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)  # fails before the search, not after it
    try:
        result = autotune(
            job.model,
            job.data,
            objective=options.objective,
            budget=options.budget,
            candidates=names_of(options.candidates) or None,
            base=settings_of(job, options.preset, options.without),
            max_slowdown=options.max_slowdown,
            timeout=options.timeout,
            progress=not options.quiet,
        )
    except ValueError as error:  # wrong arguments; failed trials raise other errors
        raise UsageError(str(error)) from error
    result.table.print()
    sys.stdout.write(f"\n{result.explain()}\n\n")
    paths = result.save(folder)
    if result.improved:
        sys.stdout.write(f"{result.diff()}\n")
    for path in paths:
        sys.stdout.write(f"{path}\n")
    return OK


def run_bench(argv: Sequence[str]) -> int:
    targets = Targets(argv)
    parser = make_parser("bench", BENCH, BENCH_EXAMPLES, targets.package)
    add_options(
        parser,
        ("--preset", str | None, None, "NAMES",
         f"Comma-separated: {list_of_presets()}. Default: 'basic,advanced', if no --against."),
        ("--without", str | None, None, "NAMES",
         "Comma-separated parts to leave out of all presets."),
        ("--against", str | None, None, "FILES",
         "Comma-separated LightningCLI configurations whose trainer section is measured too."),
        ("--seconds", float | None, 120.0, "", "Total time, including startup."),
        ("--steps", PositiveInt | None, None, "", "Timed steps of each run; by default measured."),
        ("--rounds", PositiveInt, 12, "", "Number of turns of each run."),
        ("--starts", PositiveInt, 3, "", "Number of process starts of each run."),
        ("--out", str | None, None, "FOLDER", "Where to write the table and JSON."),
    )  # fmt: skip
    job = parse_job(parser, targets)
    options = job.options
    folder = Path(options.out) if options.out else None
    result = compare(
        job.model,
        job.data,
        _configurations(parser, job),
        steps=options.steps,
        rounds=options.rounds,
        starts=options.starts,
        seed=job.seed,
        seconds=options.seconds,
    )
    result.report.print()
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "bench.json").write_text(result.to_json() + "\n", encoding="utf-8")
        (folder / "bench.md").write_text(result.report.to_markdown() + "\n", encoding="utf-8")
        sys.stdout.write(f"Written to {folder}.\n")
    return FAILED if result.runs["plain"].failure is not None else OK


def _configurations(parser: LightningArgumentParser, job: Job) -> dict[str, dict[str, Any]]:
    """Return the Trainer arguments to compare, by name: plain Lightning, presets, files."""
    options = job.options
    configurations = {"plain": dict(job.trainer)}
    for name in names_of(options.preset or (None if options.against else "basic,advanced")):
        configurations[name] = settings_of(job, name, options.without)
    for path in names_of(options.against):
        if not Path(path).is_file():
            raise UsageError(f"There is no file {path}, which --against names.")
        config = parser.parse_path(path)
        configurations[path] = {**job.trainer, **given_arguments(config.trainer)}
    return configurations
