"""Variants of this package's callbacks for presets, which remove themselves from unsupported runs.

``lightning_opt.presets._optional.MicroBatching`` is a subclass of ``lightning_opt.MicroBatching``
that warns and removes itself where its parent would raise at the start of a run. Presets write
these class paths to configurations. The module is private, so that LightningCLI finds only one
class for the short name ``MicroBatching``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_warn

import lightning_opt
from lightning_opt.trainer.lightning import BaseCallback
from lightning_opt.trainer.run_callback import RunCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl

START_HOOKS = (
    "setup", "on_fit_start", "on_sanity_check_start", "on_train_start",
    "on_validation_start", "on_test_start", "on_predict_start",
)  # fmt: skip
"""Hooks in which callbacks raise if they do not support a run."""


def __getattr__(name: str) -> Any:
    kind = getattr(lightning_opt, name, None)
    if not (isinstance(kind, type) and issubclass(kind, RunCallback)):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return as_optional(kind)  # type: ignore[arg-type]  # mypy: a type is not hashable


@cache
def as_optional(kind: type[RunCallback]) -> type[RunCallback]:
    """Return a subclass that warns and removes itself where ``kind`` raises at the start."""
    hooks = {name: _remove_on_error(getattr(kind, name)) for name in START_HOOKS}
    content = {"__module__": __name__, "__doc__": kind.__doc__, **hooks}
    return type(kind.__name__, (kind,), content)


def _remove_on_error(hook: Callable[..., None]) -> Callable[..., None]:
    @wraps(hook)
    def call(self: RunCallback, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        try:
            hook(self, trainer, *args, **kwargs)
        except ValueError as error:
            self.release(trainer)
            # Replace instead of remove, because Lightning is iterating over the list.
            trainer.callbacks[trainer.callbacks.index(self)] = BaseCallback()  # type: ignore[attr-defined]
            rank_zero_warn(f"The preset leaves out {type(self).__name__}: {error}")

    return call
