"""In which order the modules of a model run, seen once and then left alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_opt.core.modules.compiling import has_compiled_parts


class ForwardOrder:
    """Notes the order in which the modules that hold parameters first run.

    Each of its hooks goes when its module runs. A model that is compiled, in whole or in part,
    gets none, since a hook would change what is compiled; its order is that of registration.

    Attributes:
        ran: The names of the modules in the order in which they first ran.
    """

    def __init__(self) -> None:
        self._handles: dict[str, RemovableHandle] = {}
        self._names: list[str] = []
        self.ran: list[str] = []

    def watch(self, model: nn.Module, kind: type[nn.Module] = nn.Module) -> None:
        """Put hooks on the modules of that kind."""
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
                self._handles[name] = module.register_forward_pre_hook(partial(self._note, name))

    def _note(self, name: str, *_: Any) -> None:
        handle = self._handles.pop(name, None)
        if handle is not None:  # else it runs again, in a thread, before the hook has gone
            handle.remove()
            self.ran.append(name)

    def stop(self) -> None:
        """Take off the hooks of modules that have not run."""
        for handle in self._handles.values():
            handle.remove()
        self._handles = {}

    def places(self) -> dict[str, int]:
        """Return the place of each module by name.

        One that did not run by itself (its weights are used by another, as in
        ``nn.MultiheadAttention``) comes after the one registered before it.
        """
        last: tuple[int, ...] = (-1,)
        keys: dict[str, tuple[int, ...]] = {}
        ran = {name: place for place, name in enumerate(self.ran)}
        for registered, name in enumerate(self._names):
            last = (ran[name],) if name in ran else (last[0], registered + 1)
            keys[name] = last
        return {name: place for place, name in enumerate(sorted(keys, key=keys.__getitem__))}
