"""The order in which the modules of a model first run."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_opt.core.modules.compiling import has_compiled_parts


class ForwardOrder:
    """Records the order in which the modules that hold parameters first run.

    Each hook is removed when its module runs. A model that is compiled, in whole or in part, gets
    no hooks, because a hook would change the compiled graph. The order of registration is used.

    Attributes:
        ran: Names of the modules in the order in which they first ran.
    """

    def __init__(self) -> None:
        self._handles: dict[str, RemovableHandle] = {}
        self._names: list[str] = []
        self.ran: list[str] = []

    def watch(self, model: nn.Module, kind: type[nn.Module] = nn.Module) -> None:
        """Add hooks to the modules of class ``kind`` that hold parameters."""
        self.stop()
        holders = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, kind) and next(module.parameters(recurse=False), None) is not None
        }
        self._names = list(holders)
        if has_compiled_parts(model):
            self.ran = self._names
            return
        self.ran = []
        for name, module in holders.items():
            if not isinstance(module, torch.jit.ScriptModule):
                self._handles[name] = module.register_forward_pre_hook(partial(self._record, name))

    def _record(self, name: str, *_: Any) -> None:
        handle = self._handles.pop(name, None)
        if handle is not None:  # None if a second thread ran the module before the removal
            handle.remove()
            self.ran.append(name)

    def stop(self) -> None:
        """Remove the hooks of modules that have not run."""
        for handle in self._handles.values():
            handle.remove()
        self._handles = {}

    def places(self) -> dict[str, int]:
        """Return the place of each module in the order, by name.

        A module may never run, because another one uses its weights (``nn.MultiheadAttention``).
        It is placed after the module that was registered before it.
        """
        last: tuple[int, ...] = (-1,)
        keys: dict[str, tuple[int, ...]] = {}
        ran = {name: place for place, name in enumerate(self.ran)}
        for registered, name in enumerate(self._names):
            last = (ran[name],) if name in ran else (last[0], registered + 1)
            keys[name] = last
        return {name: place for place, name in enumerate(sorted(keys, key=keys.__getitem__))}
