"""``lightning-opt tune``: which optimisations pay, tried and written down."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Literal

from lightning.pytorch.cli import LightningArgumentParser

from lightning_opt.cli.errors import OK, UsageError
from lightning_opt.cli.parsing import (
    add_preset,
    add_targets,
    folder_of,
    make_parser,
    names_of,
    parse_job,
)
from lightning_opt.cli.settings import settings_of

DESCRIPTION = """\
Tries optimisations on your model and data, each in a process of its own, in turn with a training
without them; puts together what pays; rejects what changes what the model learns; and writes the
answer down as Python, YAML and JSON, with a table of every trial. It may well be "leave it as it
is". Interrupted, it goes on where it was when the same command is given again."""

EXAMPLES = """\
  lightning-opt tune train.py --budget 2m
  lightning-opt tune my_project:Model --data my_project:Data --objective memory --out tuned
  lightning-opt tune config.yaml --preset basic --candidates bf16,compile
  lightning-opt fit config.yaml --config tuned/trainer.yaml
"""


def parser() -> LightningArgumentParser:
    """Return the parser of the command."""
    made = make_parser("tune", DESCRIPTION, EXAMPLES)
    made.add_argument(
        "--objective",
        type=Literal["throughput", "memory"],
        default="throughput",
        help="What to make better.",
    )
    made.add_argument(
        "--budget", type=str | float, default="10m", help="Time for the search: 90s, 10m, 1h."
    )
    made.add_argument(
        "--out", type=str, default="tuned", metavar="FOLDER", help="Where to write the answer."
    )
    made.add_argument(
        "--candidates",
        type=str | None,
        metavar="NAMES",
        help="What to try, with commas, instead of all that may pay.",
    )
    add_preset(made, None)
    made.add_argument(
        "--max_slowdown", type=float, default=1.5, help="With --objective memory: of a step."
    )
    made.add_argument(
        "--timeout", type=float | None, help="Seconds that a trial may take to start, or to answer."
    )
    made.add_argument("--quiet", action="store_true", help="No progress.")
    add_targets(made)
    return made


def run(words: Sequence[str]) -> int:
    """Run the command."""
    from lightning_opt.tuner.autotune import autotune, parse_budget
    from lightning_opt.tuner.search.space import check_candidates

    job = parse_job(parser(), words)
    options = job.options
    try:
        parse_budget(options.budget)
        check_candidates(names_of(options.candidates) or None)
    except ValueError as error:
        raise UsageError(str(error)) from error
    folder = folder_of(options.out)
    assert folder is not None
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
    result.table.print()
    sys.stdout.write(f"\n{result.explain()}\n\n")
    for path in result.save(folder):
        sys.stdout.write(f"{path}\n")
    return OK
