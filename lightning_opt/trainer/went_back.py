"""Weights that are put back to an earlier state within a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import lightning.pytorch as pl


def went_back(trainer: pl.Trainer) -> None:
    """Tell the strategy that all weights have been put back to those of an earlier step.

    What a strategy still owed to the later weights must then be dropped. Call it on all ranks.
    """
    forget = getattr(trainer.strategy, "forget_residuals", None)
    if forget is not None:
        forget()
