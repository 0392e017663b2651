"""Trainer arguments of a preset for runs in other processes, as plain values."""

from __future__ import annotations

import logging
from typing import Any

import torch
from lightning.pytorch import LightningModule

from lightning_opt.cli.parsing import Job, preset_of
from lightning_opt.cli.targets import Recipe

log = logging.getLogger(__name__)


def settings_of(job: Job, name: str | None, without: str | None = None) -> dict[str, Any]:
    """Return the job's arguments of the Trainer with those of a preset, if there is one."""
    if name is None:
        return dict(job.trainer)
    preset = preset_of(name, without)
    model = outline(job.model)
    if model is not None:
        preset = preset.for_model(model)
    # Runs that are measured have no logger unless it is asked for.
    return preset.to_dict(**{"logger": False, **job.trainer})


def outline(recipe: Recipe) -> LightningModule | None:
    """Return the model without its numbers, so that it takes no memory; None if it cannot be."""
    try:
        with torch.device("meta"):
            made = recipe()
    except Exception as error:  # noqa: BLE001 - whatever a model does that wants numbers
        log.info("The model is not looked at before it is trained: %s", error)
        return None
    return made if isinstance(made, LightningModule) else None
