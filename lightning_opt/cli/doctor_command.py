"""``lightning-opt doctor``: a checklist, answered by a short run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from jsonargparse.typing import PositiveInt
from lightning.pytorch.cli import LightningArgumentParser

from lightning_opt.cli.errors import FAILED, OK
from lightning_opt.cli.parsing import Job, add_preset, make_parser, parse_job
from lightning_opt.cli.shortfit import fit_shortly
from lightning_opt.data.pipeline.data_monitor import DataMonitor
from lightning_opt.gradients.health.gradient_health import GradientHealth
from lightning_opt.memory.leaks.leak_detector import LeakDetector
from lightning_opt.memory.profiler.memory_profiler import MemoryProfiler
from lightning_opt.profiling.doctor.doctor import Diagnosis, doctor
from lightning_opt.profiling.monitor.performance_monitor import PerformanceMonitor
from lightning_opt.profiling.steps.step_profiler import StepProfiler

DESCRIPTION = """\
Trains a few steps under the preset 'basic' with data, memory and time measured, and answers a
checklist: does training wait for data, is there room in memory, are gradients healthy, does the
loss fall, can the run resume after a crash, ... with advice where there is something to do."""

EXAMPLES = """\
  lightning-opt doctor train.py
  lightning-opt doctor my_project:Model --data my_project:Data --steps 200
  lightning-opt doctor config.yaml --strict     (exit code 1 if anything needs a look)
"""


def parser() -> LightningArgumentParser:
    """Return the parser of the command."""
    made = make_parser("doctor", DESCRIPTION, EXAMPLES)
    made.add_argument("--steps", type=PositiveInt, default=100, help="Optimizer steps to train.")
    add_preset(made, "basic")
    made.add_argument("--strict", action="store_true", help="Exit with 1 if anything needs a look.")
    made.add_argument("--json", action="store_true", help="Write the answers as JSON.")
    return made


def run(words: Sequence[str]) -> int:
    """Run the command."""
    job = parse_job(parser(), words)
    steps = job.options.steps
    often = max(1, steps // 10)
    trainer = fit_shortly(
        job,
        steps,
        profiler=StepProfiler(log_every_n_steps=0, print_table=False),
        callbacks=[
            GradientHealth(every_n_steps=often, figure=None),
            PerformanceMonitor(every_n_steps=often),
            DataMonitor(every_n_steps=often),
            MemoryProfiler(every_n_steps=often, figure=None, file=None),
            LeakDetector(every_n_steps=max(1, steps // 20), warmup_steps=steps // 5),
        ],
    )
    if not trainer.is_global_zero:
        return OK
    diagnosis = _about_the_job(doctor(trainer), job)
    answers = diagnosis.to_json() if job.options.json else diagnosis.to_text()
    sys.stdout.write(answers + "\n")
    return FAILED if job.options.strict and diagnosis.topics("look") else OK


def _about_the_job(diagnosis: Diagnosis, job: Job) -> Diagnosis:
    """Leave out what is so because of this command: no logger, no checkpoints, its callbacks."""
    ours = {"monitoring": "logger", "checkpoints": "enable_checkpointing"}
    left_out = {topic for topic, argument in ours.items() if argument not in job.trainer}
    kept = [
        replace(verdict, finding=verdict.finding.removesuffix(verdict.callbacks))
        for verdict in diagnosis.verdicts
        if verdict.topic not in left_out
    ]
    names = " and ".join(sorted(left_out))
    note = f"Not asked: {names}, since this short run has none unless you give them."
    return Diagnosis(kept, [*diagnosis.notes, *([note] if left_out else [])])
