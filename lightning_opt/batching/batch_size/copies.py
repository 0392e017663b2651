"""Selects the callbacks that run in a trial, and copies the objects that a trial changes."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_opt.core.measure.exhaustion import is_out_of_memory
from lightning_opt.trainer.lightning import PACKAGES
from lightning_opt.trainer.run_callback import RunCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl

AVERAGING = tuple(  # new in Lightning 2.6
    package.callbacks.WeightAveraging
    for package in PACKAGES
    if hasattr(package.callbacks, "WeightAveraging")
)
"""Lightning's callbacks that hold a copy of the model from the first step on."""


def callbacks_to_try(callbacks: Iterable[pl.Callback]) -> list[pl.Callback]:
    tried, unknown = [], []
    for callback in callbacks:
        if isinstance(callback, AVERAGING):
            tried.append(callback)
        elif isinstance(callback, RunCallback):
            tried += [callback] * callback.runs_in_trials
        elif not any(_uses_no_memory(kind) for kind in type(callback).__mro__):
            unknown.append(type(callback).__qualname__)
    if unknown:
        rank_zero_warn(
            f"Trials of batch sizes run without {', '.join(unknown)}, because a callback might "
            "write files or logs. If it holds memory on the device, choose a lower target."
        )
    return tried


def _uses_no_memory(kind: type) -> bool:
    own = ("lightning.pytorch.callbacks.", "pytorch_lightning.callbacks.", "lightning_opt.")
    return kind.__module__.startswith(own) and kind.__name__ not in (
        "Callback",
        "StochasticWeightAveraging",
    )


def copy_or_share(value: Any, shared: list[Any]) -> Any:
    """Return a deep copy in which the objects in ``shared`` are not copied.

    Objects that cannot be copied are appended to ``shared``.
    """
    given = len(shared)
    while True:
        try:
            copied = copy.deepcopy(value, {id(item): item for item in shared})
        except Exception as error:
            calls = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
            calls = [frame for frame in calls if frame.f_code is copy.deepcopy.__code__]
            culprit = calls[-1].f_locals["x"] if calls else None  # of the innermost call
            whole = culprit is None or culprit is value or isinstance(culprit, nn.Module)
            if whole or is_out_of_memory(error):
                raise
            shared.append(culprit)
            continue
        names = ", ".join(type(item).__qualname__ for item in shared[given:])
        if names:
            rank_zero_warn(
                "Trials of batch sizes use these objects of the model or of a callback, which "
                f"cannot be copied, and may change them: {names}."
            )
        return copied
