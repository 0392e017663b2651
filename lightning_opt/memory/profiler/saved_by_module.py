"""Which module's activations autograd keeps for the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


@dataclass
class SavedBytes:
    """What autograd has saved in one module.

    Attributes:
        module: Its name.
        kind: Its class.
        bytes: Of storages that were saved first within it and are neither parameters nor buffers.
        tensors: How many times a tensor was saved.
    """

    module: str
    kind: str
    bytes: int = 0
    tensors: int = 0


class SavedWatch:
    """Counts what is saved within :meth:`counting`, by the innermost module.

    Regions that are checkpointed save nothing of their own, and are not seen.
    """

    def __init__(self, model: nn.Module) -> None:
        self._entries = {
            module: SavedBytes(name, type(module).__name__)
            for name, module in model.named_modules()
        }
        self._own = {
            tensor.untyped_storage().data_ptr()
            for tensor in (*model.parameters(), *model.buffers())
        }
        self._outside = SavedBytes("(outside of modules)", "")
        self._stack: list[nn.Module] = []
        self._seen: set[int] = set()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what is saved inside."""
        with ExitStack() as stack:
            for module in self._entries:
                entering = module.register_forward_pre_hook(self._enter)
                leaving = module.register_forward_hook(self._leave, always_call=True)
                stack.callback(entering.remove)
                stack.callback(leaving.remove)
            stack.enter_context(saved_tensors_hooks(self._pack, lambda tensor: tensor))
            yield

    def found(self) -> list[SavedBytes]:
        """Return the modules that have saved something, the largest first."""
        entries = [entry for entry in (*self._entries.values(), self._outside) if entry.tensors]
        return sorted(entries, key=lambda entry: -entry.bytes)

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._stack.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        while self._stack and self._stack.pop() is not module:
            pass  # what an exception has left

    def _pack(self, tensor: Tensor) -> Tensor:
        entry = self._entries[self._stack[-1]] if self._stack else self._outside
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place not in self._own:
            entry.tensors += 1
            if place not in self._seen:
                self._seen.add(place)
                entry.bytes += storage.nbytes()
        return tensor
