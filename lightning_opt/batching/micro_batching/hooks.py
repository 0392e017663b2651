"""The hooks of a batch that is run in parts, or again: each callback is told of it once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule

from lightning_opt.core.modules.patching import replaced

if TYPE_CHECKING:
    import lightning.pytorch as pl

HOOKS = ("on_before_zero_grad", "on_before_backward", "on_after_backward")
"""What is called between ``training_step`` and the optimizer's update."""


class HookGuard:
    """Keeps callbacks from being told of a batch more than once.

    A batch that is taken back in the midst of a hook goes on with the callbacks that have not had
    it. The module has its hooks called again, since what they did to it was undone.

    Args:
        trainer: The Trainer, as its training starts.
        module: Its module.
        stack: Takes the hooks off when it is closed.

    Attributes:
        muted: Hooks that nobody is told of now, since another part of the batch calls them.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule, stack: ExitStack) -> None:
        self.muted: tuple[str, ...] = ()
        self._told: set[tuple[int, str]] = set()
        owners = [(callback, Callback) for callback in trainer.callbacks]  # type: ignore[attr-defined]
        for owner, base in (*owners, (module, LightningModule)):
            for name in HOOKS:
                hook = getattr(owner, name)
                if getattr(hook, "__func__", None) is not getattr(base, name):
                    guarded = self._guarded(hook, (id(owner), name), owner is not module)
                    stack.enter_context(replaced(owner, **{name: guarded}))

    def begin(self) -> None:
        """Begin a batch, of which nobody knows."""
        self._told.clear()

    def _guarded(
        self, hook: Callable[..., Any], key: tuple[int, str], once: bool
    ) -> Callable[..., None]:
        def guarded(*args: Any, **kwargs: Any) -> None:
            if key[1] not in self.muted and not (once and key in self._told):
                hook(*args, **kwargs)
                self._told.add(key)

        return guarded
