"""A run of some steps in this process, for what looks at it."""

from __future__ import annotations

from collections.abc import Sequence

import lightning.pytorch as pl
from lightning.pytorch import seed_everything
from lightning.pytorch.profilers import Profiler

from lightning_opt.cli.errors import UsageError
from lightning_opt.cli.parsing import Job, preset_of
from lightning_opt.worker.gate import RUN_DEFAULTS, take_callbacks
from lightning_opt.worker.recipes import instantiate


def fit_shortly(
    job: Job, steps: int, profiler: Profiler, callbacks: Sequence[pl.Callback] = ()
) -> pl.Trainer:
    """Train for some optimizer steps and return the Trainer.

    Args:
        job: What to train.
        steps: How many.
        profiler: Of the Trainer.
        callbacks: Added to those of the job and of the preset, but for classes that the job has.

    Raises:
        UsageError: If the job says what is the command's to say.
    """
    taken = [name for name in ("profiler", "max_steps") if name in job.trainer]
    if taken:
        raise UsageError(
            f"--trainer.{taken[0]} is set by this command; --steps says how many steps there are."
        )
    seed_everything(job.seed, workers=True, verbose=False)
    model, data = job.model(), job.data()
    given = {name: instantiate(value) for name, value in job.trainer.items()}
    found = take_callbacks(given)
    kinds = {type(callback) for callback in found}
    found += [callback for callback in callbacks if type(callback) not in kinds]
    arguments = {
        **RUN_DEFAULTS,
        **given,
        "max_steps": steps,
        "profiler": profiler,
        "callbacks": found,
    }
    if job.options.preset:
        preset = preset_of(job.options.preset, job.options.without).for_model(model)
        arguments = preset.trainer_kwargs(**arguments)
    trainer = pl.Trainer(**arguments)
    trainer.fit(model, data)  # which may be a LightningDataModule here, too
    return trainer
