"""The buffers and attributes that a block writes, such as running statistics and counters.

A recomputation reads the values that the first run read, and its writes are discarded, so running
statistics are updated once per step. It also uses the parameters and buffers of the first run,
because ``torch.func.functional_call`` restores the module's own before the backward pass.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_opt.core.modules.patching import takes_hooks
from lightning_opt.core.modules.preserve import ALWAYS_COPIED_BYTES, version_of
from lightning_opt.core.modules.state_kinds import INTERNALS, PLAIN, has_user_state

# The number of a submodule, and the name of its buffer or attribute.
Key = tuple[int, str]


class Entry(NamedTuple):
    """A buffer or attribute: the dictionary that holds it, its name there, and its value."""

    place: dict[str, Any]
    name: str
    value: Any
    key: Key

    def was_replaced(self) -> bool:
        """Return whether the user has replaced this parameter; FSDP replaces only DTensors."""
        now = self.place.get(self.name)
        return now is not self.value and type(self.value) is type(now) is nn.Parameter


class Saved(NamedTuple):
    """An entry before a run, its version if it is a tensor, and a copy of its value."""

    entry: Entry
    version: int
    copy: Any

    def is_written(self) -> bool:
        """Return whether the entry was replaced or visibly changed since."""
        place, name, value, _ = self.entry
        if place.get(name) is not value:
            return True
        if isinstance(value, Tensor):
            return version_of(value) != self.version
        return _items(value) != _items(self.copy)

    def differs_from_copy(self) -> bool:
        value = self.entry.value
        return _is_dense(value) and not torch.equal(value, self.copy)

    def earlier_value(self, module: str) -> Any:
        """Return the value before the run.

        Raises:
            RuntimeError: If a tensor that was not copied has changed.
        """
        if self.copy is not None:
            return self.copy
        if version_of(self.entry.value) != self.version:
            raise RuntimeError(
                f"{module} writes to its buffer {self.entry.name!r}, which it did not write in "
                "its first run, so it cannot be recomputed. Leave the block out of "
                "ActivationCheckpointing(modules=[...])."
            )
        return self.entry.value


class WrittenState:
    """Records the values that a forward pass overwrites, and restores them to recompute it.

    Buffers are watched in every run. In the first run, tensors, numbers and collections in
    attributes of user-defined modules are watched too. After it, only the attributes that it has
    written are watched.

    Attributes:
        written: The entries that the first run wrote; ``None`` before that run.
        read_only: Whether the first run wrote no buffer; ``None`` before that run. Always False for
            modules with running statistics, which are written in training mode only.
    """

    def __init__(self, module: nn.Module) -> None:
        self._name = type(module).__name__
        parts = list(enumerate(module.modules()))
        self._own = [
            Entry(place, name, value, (number, name))
            for number, part in parts
            if takes_hooks(part)  # the dictionaries of torch.jit are copies
            for place in (part._parameters, part._buffers)
            for name, value in place.items()
        ]
        self._with_buffers = [(number, part) for number, part in parts if part._buffers]
        self._with_attributes = [
            (number, part) for number, part in parts if has_user_state(type(part))
        ]
        self.written: set[Key] | None = None
        self._hidden: set[Key] = set()  # the subset whose version did not change
        self.read_only: bool | None = None if self._with_buffers else True
        if any(isinstance(part, _NormBase) and part.track_running_stats for _, part in parts):
            self.read_only = False

    def _entries(self) -> Iterator[Entry]:
        for number, part in self._with_buffers:
            for name, value in part._buffers.items():
                if value is not None:
                    yield Entry(part._buffers, name, value, (number, name))
        for number, part in self._with_attributes:
            for name, value in vars(part).items():
                key = number, name
                if _is_state(name, value) if self.written is None else key in self.written:
                    yield Entry(vars(part), name, value, key)

    def save(self) -> tuple[list[Saved], list[Entry]]:
        """Return the values before a run, and the tensors that are not the module's own.

        Large tensors that the first run has not written are not copied.
        """
        swapped = []
        for place, name, own, key in self._own:  # a comprehension costs a call in Python 3.11
            if (value := place.get(name)) is not own and value is not None:
                swapped.append(Entry(place, name, value, key))
        return [
            Saved(entry, version_of(entry.value), self._copy(entry)) for entry in self._entries()
        ], swapped

    def _copy(self, entry: Entry) -> Any:
        may_write = self.written is None or entry.key in self.written
        is_large = _is_dense(entry.value) and entry.value.nbytes > ALWAYS_COPIED_BYTES
        return None if is_large and not may_write else _copied(entry.value)

    def written_since(self, saved: list[Saved]) -> dict[Key, Any]:
        """Return the earlier values of the entries that were written after ``saved``.

        Raises:
            RuntimeError: If a large buffer was written that the first run did not write.
        """
        if self.written is None:
            self._inspect(saved)
        return {
            old.entry.key: old.earlier_value(self._name)
            for old in saved
            if old.entry.key in self._hidden or old.is_written()
        }

    def _inspect(self, saved: list[Saved]) -> None:
        """Compare all values after the first run."""
        visible = {old.entry.key for old in saved if old.is_written()}
        # Kernels of norm layers, and writes through `.data`, leave the version unchanged.
        self._hidden = {old.entry.key for old in saved if old.differs_from_copy()} - visible
        self.written = visible | self._hidden
        writing = {number for number, _ in self.written}
        self._with_attributes = [pair for pair in self._with_attributes if pair[0] in writing]
        if self.read_only is None:
            buffers = {(n, name) for n, part in self._with_buffers for name in part._buffers}
            self.read_only = buffers.isdisjoint(self.written)

    def replace(self, values: dict[Key, Any], swapped: list[Entry]) -> list[Entry]:
        """Insert the parameters of the first run; replace other entries by copies of their values.

        Copies are made of the value in ``values``, or else of the current value.

        Returns:
            The old entries, in the order in which to restore them.
        """
        old, known = [], {entry.key for entry in swapped}
        own = [entry for entry in self._own if entry.key not in known and entry.was_replaced()]
        for place, name, value, key in [*swapped, *own]:
            # FSDP inserts the parameters of the first run itself, or keeps them elsewhere.
            if name in place and place[name] is not value:
                old.append(Entry(place, name, place[name], key))
                place[name] = value
        if self.read_only and not values:
            return old
        entries = list(self._entries())
        for entry in entries:
            entry.place[entry.name] = _copied(values.get(entry.key, entry.value))
        return entries + old

    @staticmethod
    def restore(entries: list[Entry]) -> None:
        for entry in entries:
            entry.place[entry.name] = entry.value


def _is_state(name: str, value: Any) -> bool:
    if name in INTERNALS or "_hooks" in name:
        return False
    if isinstance(value, Tensor):
        return value.grad_fn is None  # each step creates tensors with a graph
    return isinstance(value, PLAIN)


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.copy(value)


def _items(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [(id(key), id(item)) for key, item in value.items()]
    return list(map(id, value)) if isinstance(value, (list, tuple, set, deque)) else []
