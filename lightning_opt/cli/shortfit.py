"""A run of some steps in this process, for what looks at it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import seed_everything

from lightning_opt.cli.errors import UsageError
from lightning_opt.cli.parsing import Job, preset_of
from lightning_opt.worker.gate import QUIET, short_run
from lightning_opt.worker.recipes import instantiate


def fit_shortly(job: Job, steps: int, **settings: Any) -> pl.Trainer:
    """Train for some optimizer steps and return the Trainer.

    Args:
        job: What to train; its arguments of the Trainer win over ``settings``.
        steps: How many.
        settings: Of the Trainer; ``callbacks`` are added to those of the job and of the preset.

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
    own = settings.pop("callbacks", [])
    callbacks = short_run(given)
    kinds = {type(callback) for callback in callbacks}
    callbacks += [callback for callback in own if type(callback) not in kinds]
    arguments = {**QUIET, "max_steps": steps, **settings, **given}
    name = job.options.get("preset")
    if name:
        preset = preset_of(name, job.options.get("without")).for_model(model)
        arguments = preset.trainer_kwargs(**arguments, callbacks=callbacks)
    else:
        arguments["callbacks"] = callbacks
    trainer = pl.Trainer(**arguments)
    if isinstance(data, pl.LightningDataModule):
        trainer.fit(model, datamodule=data)
    else:
        trainer.fit(model, data)
    return trainer
