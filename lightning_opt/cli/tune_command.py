"""``lightning-opt tune``: try optimisations and save the ones that pay."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lightning.pytorch.cli import LightningArgumentParser

from lightning_opt.cli.main import OK, UsageError
from lightning_opt.cli.parsing import (
    add_options,
    add_preset,
    folder_of,
    make_parser,
    names_of,
    parse_job,
    settings_of,
)

DESCRIPTION = """\
Tries optimisations on your model and data, each in a process of its own, alternating with your
unmodified baseline. Combines those that pay, rejects those that change what the model learns, and
writes the result as Python, YAML and JSON, with a table of every trial. The result may be to change
nothing. After an interruption, the same command continues where it stopped."""

EXAMPLES = """\
  lightning-opt tune train.py --budget 2m
  lightning-opt tune my_project:Model --data my_project:Data --objective memory --out tuned
  lightning-opt tune config.yaml --preset basic --candidates bf16,compile
  lightning-opt fit config.yaml --config tuned/trainer.yaml
"""


def parser() -> LightningArgumentParser:
    """Return the parser of the command."""
    made = make_parser("tune", DESCRIPTION, EXAMPLES)
    add_options(
        made,
        ("--objective", str, "throughput", "NAME",
         "What to improve: throughput (steps a second), memory (its peak) or batch (the largest)."),
        ("--budget", str | float, "10m", "", "Time for the search: 90s, 10m, 1h."),
        ("--out", str, "tuned", "FOLDER", "Where to write the result."),
        ("--candidates", str | None, None, "NAMES",
         "Optimisations to try, with commas, instead of all that may pay."),
        ("--max_slowdown", float, 1.5, "", "Largest slowdown of a step for the other objectives."),
        ("--timeout", float | None, None, "", "Seconds a trial may take to start or to respond."),
    )  # fmt: skip
    add_preset(made, None)
    made.add_argument("--quiet", action="store_true", help="No progress.")
    return made


def run_tune(words: Sequence[str]) -> int:
    """Run ``lightning-opt tune``."""
    from lightning_opt.tuner.autotune import autotune

    job = parse_job(parser(), words)
    options = job.options
    folder = folder_of(options.out)
    try:
        result = autotune(
            job.model,
            job.data,
            objective=options.objective,
            budget=options.budget,
            candidates=names_of(options.candidates) or None,
            base=settings_of(job, options.preset, options.without),
            journal=folder / "journal.jsonl",
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
