"""``lightning-opt profile``: where the time of a step goes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jsonargparse.typing import PositiveInt
from lightning.pytorch.cli import LightningArgumentParser

from lightning_opt.cli.errors import OK
from lightning_opt.cli.parsing import add_preset, folder_of, make_parser, parse_job
from lightning_opt.cli.shortfit import fit_shortly

DESCRIPTION = """\
Trains some steps and says where their time went, phase by phase: waiting for data, transfer,
forward, backward, each callback, the optimizer, logging, Lightning's own loop."""

EXAMPLES = """\
  lightning-opt profile train.py
  lightning-opt profile my_project:Model --data my_project:Data --steps 200 --out profile
  lightning-opt profile config.yaml --preset advanced --trainer.devices 2
  lightning-opt profile train.py --trace 10 12 --out profile    (open in Perfetto)
"""


def parser() -> LightningArgumentParser:
    """Return the parser of the command."""
    made = make_parser("profile", DESCRIPTION, EXAMPLES)
    made.add_argument("--steps", type=PositiveInt, default=50, help="Optimizer steps to train.")
    add_preset(made, None)
    batches = "Batches, from 0, that torch's profiler records operator by operator."
    made.add_argument("--trace", type=int, nargs=2, metavar=("FIRST", "LAST"), help=batches)
    made.add_argument("--out", type=str | None, metavar="FOLDER", help="For table and trace.")
    return made


def run(words: Sequence[str]) -> int:
    """Run the command."""
    from lightning_opt.profiling.steps.step_profiler import StepProfiler

    job = parse_job(parser(), words)
    folder = folder_of(job.options.out) if job.options.out else None
    profiler = StepProfiler(
        dirpath=folder,
        filename=None if folder is None else "profile",
        log_every_n_steps=0,
        trace=job.options.trace,
        print_table=False,
    )
    trainer = fit_shortly(job, job.options.steps, profiler=profiler)
    if trainer.is_global_zero:
        profiler.report().print()
        if folder is not None:
            sys.stdout.write(f"Written to {folder}.\n")
    return OK
