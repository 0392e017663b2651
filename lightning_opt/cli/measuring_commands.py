"""``tune`` and ``bench``, which start processes; ``profile`` and ``doctor``, which do not."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse.typing import PositiveInt

from lightning_opt.cli.main import FAILED, OK, UsageError
from lightning_opt.cli.parsing import (
    PRESETS,
    Job,
    add_options,
    add_preset,
    chosen_preset,
    given_arguments,
    make_parser,
    parse_job,
    preset_of,
    split_names,
)
from lightning_opt.data.pipeline.data_monitor import DataMonitor
from lightning_opt.gradients.health.gradient_health import GradientHealth
from lightning_opt.memory.leaks.leak_detector import LeakDetector
from lightning_opt.memory.profiler.memory_profiler import MemoryProfiler
from lightning_opt.presets.preset import Preset
from lightning_opt.profiling.comparing.compare import compare
from lightning_opt.profiling.doctor.doctor import Diagnosis, doctor
from lightning_opt.profiling.monitor.performance_monitor import PerformanceMonitor
from lightning_opt.profiling.run_report.run_report import RunReport
from lightning_opt.profiling.steps.step_profiler import StepProfiler
from lightning_opt.trainer.lightning import package_of, seed_everything
from lightning_opt.tuner.autotune import autotune
from lightning_opt.worker.gate import RUN_DEFAULTS, take_callbacks
from lightning_opt.worker.recipes import Settings, instantiate

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.cli import LightningArgumentParser

TUNE = """\
Tries optimisations on your model and data, each in its own process, alternating with your
unmodified baseline. Combines those that help without changing what the model learns, and writes
the result, with a table of every trial. The result may be to change nothing."""

TUNE_EXAMPLES = """\
  lightning-opt tune my_project:Model --data my_project:Data --objective memory --out tuned
  lightning-opt fit config.yaml --config tuned/trainer.yaml
"""

BENCH = """\
Trains your model under presets and configurations, in alternating processes, and compares time,
memory and loss with plain Lightning, which uses your --trainer arguments only."""

BENCH_EXAMPLES = """\
  lightning-opt bench my_project:Model --data my_project:Data --preset basic,advanced,ultra
  lightning-opt bench config.yaml --against tuned/trainer.yaml,other.yaml --out bench
"""


def run_tune(argv: Sequence[str]) -> int:
    parser, targets = make_parser(argv, "tune", TUNE, TUNE_EXAMPLES)
    add_options(
        parser,
        ("--objective", str, "throughput", "NAME",
         "What to improve: throughput (steps per second) or memory (the peak)."),
        ("--budget", str | float, "10m", "", "Time for the search: 90s, 10m, 1h."),
        ("--out", str, "tuned", "FOLDER", "Where to write the result."),
        ("--candidates", str | None, None, "NAMES",
         "Comma-separated optimisations to try. Default: all that may help."),
        ("--timeout", float | None, None, "", "Seconds a trial may take to start or to respond."),
    )  # fmt: skip
    add_preset(parser, None)
    parser.add_argument("--quiet", action="store_true", help="Print no progress.")
    job = parse_job(parser, targets)
    options = job.options
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)  # fails before the search, not after it
    base, preset = job.trainer, chosen_preset(options.preset, options.without)
    if preset is not None:  # like `RUN_DEFAULTS`, without a logger unless one is given
        base = preset.to_dict(**{"logger": False, **base})
    try:
        result = autotune(
            job.model,
            job.data,
            objective=options.objective,
            budget=options.budget,
            candidates=split_names(options.candidates) or None,
            base=base,
            timeout=options.timeout,
            progress=not options.quiet,
        )
    except ValueError as error:  # wrong arguments; failed trials raise other errors
        raise UsageError(str(error)) from error
    result.table.print()
    sys.stdout.write(f"\n{result.explain()}\n\n")
    for path in result.save(folder):
        sys.stdout.write(f"{path}\n")
    return OK


def run_bench(argv: Sequence[str]) -> int:
    parser, targets = make_parser(argv, "bench", BENCH, BENCH_EXAMPLES)
    add_options(
        parser,
        ("--preset", str | None, None, "NAMES",
         f"Comma-separated: {PRESETS}. Default: 'basic,advanced', if no --against."),
        ("--without", str | None, None, "NAMES",
         "Comma-separated parts to exclude from the presets that have them."),
        ("--against", str | None, None, "FILES",
         "Comma-separated LightningCLI configurations whose trainer section is measured too."),
        ("--seconds", float | None, 120.0, "", "Total time, including startup."),
        ("--steps", PositiveInt | None, None, "", "Timed steps per configuration; default: auto."),
        ("--rounds", PositiveInt, 12, "", "Turns per configuration."),
        ("--starts", PositiveInt, 3, "", "Process starts per configuration."),
        ("--out", str | None, None, "FOLDER", "Where to write the table and JSON."),
    )  # fmt: skip
    job = parse_job(parser, targets)
    options = job.options
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
    if options.out:
        (folder := Path(options.out)).mkdir(parents=True, exist_ok=True)
        (folder / "bench.json").write_text(result.to_json() + "\n", encoding="utf-8")
        (folder / "bench.md").write_text(result.report.to_markdown() + "\n", encoding="utf-8")
        sys.stdout.write(f"Written to {folder}.\n")
    return FAILED if result.runs["plain"].failure is not None else OK


def _configurations(parser: LightningArgumentParser, job: Job) -> dict[str, Settings]:
    """Return the Trainer arguments to compare, by name: plain Lightning, presets, files."""
    options = job.options
    configurations: dict[str, Settings] = {"plain": dict(job.trainer)}
    names = split_names(options.preset or (None if options.against else "basic,advanced"))
    presets = {name: preset_of(name) for name in names}
    excluded = set(split_names(options.without))
    parts = {name: {part.name for part in preset.parts} for name, preset in presets.items()}
    if unknown := excluded.difference(*parts.values()):
        raise UsageError(f"--without: no preset has {', '.join(sorted(unknown))}.")
    for name, preset in presets.items():
        chosen = preset.override(**dict.fromkeys(excluded & parts[name]))
        # Called in the run's process, which therefore decides which parts are unsuitable.
        configurations[name] = partial(preset_arguments, chosen, job.trainer)
    for path in split_names(options.against):
        if not Path(path).is_file():
            raise UsageError(f"There is no file {path} (--against).")
        config = parser.parse_path(path)
        configurations[path] = {**job.trainer, **given_arguments(config.trainer)}
    return configurations


def preset_arguments(preset: Preset, trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a preset's Trainer arguments, merged with the given ones."""
    return preset.trainer_kwargs(**{"logger": False, **instantiate(trainer)})


PROFILE = """\
Trains some steps and reports where their time went, phase by phase: waiting for data, transfer,
forward, backward, each callback, the optimizer, logging, Lightning's own loop."""

PROFILE_EXAMPLES = """\
  lightning-opt profile my_project:Model --data my_project:Data --steps 200 --out profile
  lightning-opt profile config.yaml --preset advanced --trainer.devices 2
"""

DOCTOR = """\
Trains a few steps under the preset 'basic', measures data, memory and time, and answers a checklist
with advice: does training wait for data, are gradients healthy, can it resume after a crash, ..."""

DOCTOR_EXAMPLES = """\
  lightning-opt doctor my_project:Model --data my_project:Data --steps 200
  lightning-opt doctor config.yaml --strict     (exit code 1 if there is a problem)
"""


def run_profile(argv: Sequence[str]) -> int:
    parser, targets = make_parser(argv, "profile", PROFILE, PROFILE_EXAMPLES)
    parser.add_argument("--steps", type=PositiveInt, default=50, help="Optimizer steps to train.")
    add_preset(parser, None)
    parser.add_argument("--out", type=str | None, metavar="FOLDER", help="Where to write the page.")
    job = parse_job(parser, targets)
    profiler = StepProfiler(log_every_n_steps=max(1, job.options.steps // 20), print_table=False)
    trainer = _fit(job, profiler)
    if trainer.is_global_zero:
        profiler.report().print()
        sys.stdout.write(f"The page report.html is in {job.options.out or 'this folder'}.\n")
    return OK


def run_doctor(argv: Sequence[str]) -> int:
    parser, targets = make_parser(argv, "doctor", DOCTOR, DOCTOR_EXAMPLES)
    parser.add_argument("--steps", type=PositiveInt, default=100, help="Optimizer steps to train.")
    add_preset(parser, "basic")
    parser.add_argument("--strict", action="store_true", help="Exit with 1 if there is a problem.")
    parser.add_argument("--json", action="store_true", help="Write the answers as JSON.")
    job = parse_job(parser, targets)
    steps = job.options.steps
    every = max(1, steps // 10)
    trainer = _fit(
        job,
        StepProfiler(log_every_n_steps=every, print_table=False),
        [
            GradientHealth(every_n_steps=every),
            PerformanceMonitor(every_n_steps=every),
            DataMonitor(every_n_steps=every),
            MemoryProfiler(every_n_steps=every),
            LeakDetector(every_n_steps=max(1, steps // 20), warmup_steps=steps // 5),
        ],
    )
    if not trainer.is_global_zero:
        return OK
    diagnosis = _drop_expected_findings(doctor(trainer), job)
    page = "Charts and reports of this run are in report.html."
    answers = diagnosis.to_json() if job.options.json else f"{diagnosis.to_text()}\n{page}"
    sys.stdout.write(answers + "\n")
    return FAILED if job.options.strict and diagnosis.topics("look") else OK


def _fit(job: Job, profiler: StepProfiler, callbacks: Sequence[pl.Callback] = ()) -> pl.Trainer:
    """Train ``job.options.steps`` optimizer steps.

    Args:
        job: The model, the data and the Trainer's arguments.
        profiler: The Trainer's profiler.
        callbacks: Callbacks to add, unless the job has one; they replace the preset's.

    Raises:
        UsageError: If the job sets an argument that only the command may set.
    """
    for name in {"profiler", "max_steps"} & job.trainer.keys():
        raise UsageError(f"This command sets --trainer.{name}; --steps sets the number of steps.")
    seed_everything(job.seed, workers=True, verbose=False)
    model, data = job.model(), job.data()
    package = package_of(model)
    given = instantiate(job.trainer, package)
    all_callbacks = take_callbacks(given)
    classes = {type(callback) for callback in all_callbacks}
    all_callbacks += [one for one in (RunReport(), *callbacks) if type(one) not in classes]
    fixed = {"max_steps": job.options.steps, "profiler": profiler, "callbacks": all_callbacks}
    folder = {"default_root_dir": job.options.out} if getattr(job.options, "out", None) else {}
    arguments = {**RUN_DEFAULTS, **folder, **given, **fixed}
    preset = chosen_preset(job.options.preset, job.options.without)
    if preset is not None:
        arguments = preset.trainer_kwargs(**arguments)
    trainer: pl.Trainer = package.Trainer(**arguments)
    trainer.fit(model, data)  # `data` may be a LightningDataModule
    return trainer


def _drop_expected_findings(diagnosis: Diagnosis, job: Job) -> Diagnosis:
    """Drop findings about the logger and checkpoints, which this command disables."""
    arguments = {"monitoring": "logger", "checkpoints": "enable_checkpointing"}
    dropped = {topic for topic, argument in arguments.items() if argument not in job.trainer}
    kept = [verdict for verdict in diagnosis.verdicts if verdict.topic not in dropped]
    names = " and ".join(sorted(dropped))
    note = f"Not checked: {names}, off in this short run unless you pass them."
    return Diagnosis(kept, [*diagnosis.notes, *([note] if dropped else [])])
