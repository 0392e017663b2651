"""``lightning-opt bench``: measure presets and configurations against plain Lightning."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse.typing import PositiveInt
from lightning.pytorch.cli import LightningArgumentParser

from lightning_opt.cli.main import FAILED, OK, UsageError
from lightning_opt.cli.parsing import (
    Job,
    add_options,
    folder_of,
    given_arguments,
    list_of_presets,
    make_parser,
    names_of,
    parse_job,
    settings_of,
)
from lightning_opt.profiling.comparing.compare import compare

DESCRIPTION = """\
Trains your model under several presets and configurations, each in a process of its own,
alternating every few steps, and reports differences in time, memory and loss, with confidence
intervals. The first is plain Lightning with your --trainer arguments."""

EXAMPLES = """\
  lightning-opt bench train.py
  lightning-opt bench my_project:Model --data my_project:Data --preset basic,advanced,ultra
  lightning-opt bench train.py --preset advanced --without CompileModel --seconds 60
  lightning-opt bench config.yaml --against tuned/trainer.yaml,other.yaml --out bench
"""


def parser() -> LightningArgumentParser:
    """Return the parser of the command."""
    made = make_parser("bench", DESCRIPTION, EXAMPLES)
    add_options(
        made,
        ("--preset", str | None, None, "NAMES",
         f"With commas, of {list_of_presets()}; 'basic,advanced' if there is no --against."),
        ("--without", str | None, None, "NAMES", "Parts to leave out of all presets."),
        ("--against", str | None, None, "FILES",
         "Configurations of LightningCLI, with commas, whose trainer section is measured too."),
        ("--seconds", float | None, 120.0, "", "Total time, including startup."),
        ("--steps", PositiveInt | None, None, "", "Timed steps of each run, instead of --rounds."),
        ("--rounds", PositiveInt, 12, "", "Turns of each run."),
        ("--starts", PositiveInt, 3, "", "Process starts of each run."),
        ("--out", str | None, None, "FOLDER", "Where to write the table and JSON."),
    )  # fmt: skip
    return made


def run_bench(words: Sequence[str]) -> int:
    """Run ``lightning-opt bench``."""
    made = parser()
    job = parse_job(made, words)
    options = job.options
    folder = folder_of(options.out) if options.out else None
    result = compare(
        job.model,
        job.data,
        configurations(made, job),
        steps=options.steps,
        rounds=options.rounds,
        starts=options.starts,
        seed=job.seed,
        seconds=options.seconds,
    )
    result.report.print()
    if folder is not None:
        (folder / "bench.json").write_text(result.to_json() + "\n", encoding="utf-8")
        (folder / "bench.md").write_text(result.report.to_markdown() + "\n", encoding="utf-8")
        sys.stdout.write(f"Written to {folder}.\n")
    return FAILED if result.runs["plain"].failure is not None else OK


def configurations(parser: LightningArgumentParser, job: Job) -> dict[str, dict[str, Any]]:
    """Return the Trainer arguments to compare, by name: plain Lightning, presets, files.

    Raises:
        UsageError: For an unknown preset or file.
    """
    options = job.options
    found = {"plain": dict(job.trainer)}
    for name in names_of(options.preset or (None if options.against else "basic,advanced")):
        found[name] = settings_of(job, name, options.without)
    for path in names_of(options.against):
        if not Path(path).is_file():
            raise UsageError(f"There is no file {path}, which --against names.")
        config = parser.parse_path(path)
        found[path] = {**job.trainer, **given_arguments(config.trainer)}
    return found
