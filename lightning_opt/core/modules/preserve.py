"""Snapshots of the state that a training step changes, to restore it after a trial or a failure."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_opt.core.modules.state_kinds import (
    MAX_ATTRIBUTE_BYTES,
    MAX_DEPTH,
    PLAIN,
    has_user_state,
    hidden_modules,
    searched_entries,
    state_attributes,
)

MAX_COPIED_ENTRIES = 1000
"""Containers with more entries are not copied; only their length is restored."""

ALWAYS_COPIED_BYTES = 64 * 2**10
"""Tensors up to this size are always copied, even if no step has written them."""

LENT = ("builtins", "itertools", "torch.utils.data.dataloader", __name__)
"""Modules of iterators that repeat the items of a trial. Others may have methods of their own."""

_TwisterMemory = ctypes.c_char * (625 * 4)
"""The state of NumPy's global generator: 624 words and a position."""

Undo = Callable[[], object]


class CannotUndoError(RuntimeError):
    """Raised if a failed step has changed a value that was not copied."""


class StepState:
    """The state that a training step may change, recorded before each batch.

    It covers random numbers (Python, NumPy, torch, and generators held by modules), buffers, tensor
    attributes, small arrays, metrics, and the counters, flags and collections of modules, also
    inside collections and objects of the user's own classes. Unregistered modules in attributes are
    covered too. It excludes gradients. Parameters are not copied, but a write to them is detected.
    Recording never waits for the device.

    The first batch shows which tensors a step writes. From then on a large tensor is copied only if
    it was written.

    Attributes:
        parameters_change: Whether a step is known to write parameters. Writes through ``.data``
            cannot be detected.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._device = device
        self._parameters = list(module.parameters())
        hidden = [part for _, found in hidden_modules(module) for part in found.modules()]
        modules = dict.fromkeys([*module.modules(), *hidden])
        self._buffers = [owner._buffers for owner in modules if owner._buffers]
        # Most modules are torch's own layers, which have no state in attributes.
        self._attributes = [vars(owner) for owner in modules if has_user_state(type(owner))]
        self._written: set[tuple[int, Any]] | None = None
        self.parameters_change = False
        self.clear()

    def clear(self) -> None:
        self._versions: list[int] = []
        self._undo: list[Undo] = []
        self._tensors: list[_SavedTensor] = []

    def take(self) -> None:
        self._versions = [parameter._version for parameter in self._parameters]
        self._undo, self._tensors = random_states([self._device]), []
        for buffers in self._buffers:
            if isinstance(buffers, dict):  # a scripted module cannot replace its buffers
                self._undo.append(functools.partial(buffers.update, buffers.copy()))
            for name, buffer in buffers.items():
                if buffer is not None and not is_lazy(buffer):
                    self._save_tensor(buffers, name, buffer, math.inf)
        visited: set[int] = set()
        for attributes in self._attributes:
            self._save_attributes(attributes, visited)

    def _save_tensor(
        self,
        place: Any,
        name: Any,
        tensor: Tensor,
        limit: float,
        limit_unwritten: float = ALWAYS_COPIED_BYTES,
    ) -> None:
        may_write = self._written is None or (id(place), name) in self._written
        bytes_ = tensor.numel() * tensor.element_size()  # `nbytes` fails for sparse tensors
        copied = bytes_ <= (limit if may_write else limit_unwritten) and not tensor.is_inference()
        copy = tensor.detach().clone() if copied else None
        self._tensors.append(_SavedTensor(place, name, tensor, version_of(tensor), copy))

    def _save_attributes(
        self, attributes: dict[str, Any], visited: set[int], depth: int = 0
    ) -> None:
        before: dict[str, Any] = {}
        for name, value, kind in state_attributes(attributes):
            if kind == "tensor" and value.grad_fn is None:
                self._save_tensor(attributes, name, value, MAX_ATTRIBUTE_BYTES)
            else:  # steps create tensors with a graph anew, and do not write them
                before[name] = value
                if kind not in ("plain", "tensor"):
                    self._save_contents(value, kind, visited, depth + 1)
        names = set(attributes)

        def undo() -> None:
            # New attributes are removed, except tensors (caches) and objects of other classes.
            for name in attributes.keys() - names:
                if isinstance(attributes[name], PLAIN):
                    del attributes[name]
            attributes.update(before)

        self._undo.append(undo)

    def _save_contents(self, value: Any, kind: str, visited: set[int], depth: int) -> None:
        if id(value) in visited or depth > MAX_DEPTH:
            return
        visited.add(id(value))
        if kind == "generator":
            self._undo.append(_generator_state(value))
        elif kind == "object":
            self._save_attributes(getattr(value, "__dict__", {}), visited, depth)
        elif kind == "array":
            if value.nbytes <= ALWAYS_COPIED_BYTES and value.flags.writeable:
                self._undo.append(functools.partial(np.copyto, value, value.copy()))
        else:
            if kind == "container":
                content = len(value) if len(value) > MAX_COPIED_ENTRIES else value.copy()
                self._undo.append(functools.partial(_refill, value, content))
            for name, entry, inner in searched_entries(value):
                if inner == "tensor" and entry.grad_fn is None:
                    self._save_tensor(value, name, entry, ALWAYS_COPIED_BYTES, limit_unwritten=0)
                elif inner not in ("", "plain", "tensor"):
                    self._save_contents(entry, inner, visited, depth + 1)

    def record_writes(self) -> None:
        """Record which tensors the step has written, after the first successful batch."""
        if self._written is None:
            self._written = {
                (id(saved.place), saved.name) for saved in self._tensors if saved.is_written()
            }

    @torch.no_grad()
    def restore(self, parameters: bool = True) -> None:
        """Restore the recorded state. It may be called several times.

        Raises:
            CannotUndoError: If a parameter was written (unless ``parameters`` is False), or if a
                large tensor was written that was not copied. Nothing is restored then.
        """
        changed = self._versions != [p._version for p in self._parameters]
        if parameters and (changed or self.parameters_change):
            raise CannotUndoError(
                "The step has changed parameters (such as those of a moving average) before it "
                "failed, so it cannot be rolled back and retried. Change them in "
                "on_train_batch_end."
            )
        uncopied = [saved.name for saved in self._tensors if saved.copy is None and saved.changed]
        if uncopied:
            raise CannotUndoError(
                f"The step has written to tensors that it had not written before ({uncopied}), "
                "so it cannot be rolled back and retried."
            )
        for saved in self._tensors:
            if isinstance(saved.place, dict):  # lists are restored as a whole by `_undo`
                saved.place[saved.name] = saved.tensor
            if saved.copy is not None:
                saved.tensor.data.copy_(saved.copy)  # `.data` hides the write from autograd
        for undo in self._undo:
            undo()


class _SavedTensor(NamedTuple):
    place: Any
    name: Any
    tensor: Tensor
    version: int
    copy: Tensor | None

    @property
    def changed(self) -> bool:
        return version_of(self.tensor) != self.version

    def is_written(self) -> bool:
        """Return whether the tensor has changed, even by ``.data``, which hides the write."""
        if self.copy is None or self.copy.layout is not torch.strided:
            return self.changed
        return self.changed or not torch.equal(self.copy, self.tensor)


def version_of(value: Any) -> int:
    """Return a tensor's version; 0 for other values, and for tensors of inference."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


@contextmanager
def isolated_random(device: torch.device) -> Iterator[None]:
    """Restore random states at the end: Python's, NumPy's, torch's on the CPU and on ``device``."""
    with ExitStack() as stack:
        for undo in random_states([device]):
            stack.callback(undo)
        yield


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Run forward and backward passes on ``model`` and restore its state at the end.

    Gradients are ``None`` inside the context. At the end, gradients, ``requires_grad``, training
    modes and everything that :class:`StepState` covers are restored. Iterators in attributes return
    the same items again. Parameters are not copied, so no optimizer may step.
    """
    parameters = [(p, p.grad, p.requires_grad) for p in model.parameters()]
    state = StepState(model, parameters[0][0].device if parameters else torch.device("cpu"))
    state.take()
    lent = [
        (vars(module), name, _Lent(value))
        for module in model.modules()
        if has_user_state(type(module))
        for name, value in list(vars(module).items())
        if isinstance(value, Iterator) and type(value).__module__ in LENT
    ]
    for attributes, name, iterator in lent:
        attributes[name] = iterator
    modes = [(module, module.training) for module in model.modules()]
    for parameter, _, _ in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter, gradient, requires_grad in parameters:
            parameter.requires_grad = requires_grad  # unlike the method, for lazy ones too
            parameter.grad = gradient
        for attributes, name, iterator in lent:
            attributes[name] = iterator.rest
        state.restore(parameters=False)  # last, because it may raise


def restorer_of(*objects: Any) -> Undo:
    """Return a function that restores counters, generators, collections and small tensors."""
    state = StepState(nn.Module(), torch.device("cpu"))
    for one in objects:
        state._save_attributes(getattr(one, "__dict__", {}), set())
    # Large tensors, such as a dataset's cache, stay as they are.
    state._tensors = [saved for saved in state._tensors if saved.copy is not None]
    return state.restore


class _Lent:
    """Takes the place of an iterator in a trial. A copy of the model shares it."""

    def __init__(self, original: Iterator[Any]) -> None:
        self._items, self._kept = itertools.tee(original)
        self.rest = original  # the iterator to put back, which returns all items again

    def __iter__(self) -> _Lent:
        return self

    def __next__(self) -> Any:
        item = next(self._items)
        self.rest = self._kept
        return item

    def __deepcopy__(self, memo: dict[int, Any]) -> _Lent:
        return self


def random_states(devices: Iterable[torch.device], generators: Iterable[Any] = ()) -> list[Undo]:
    """Return functions that restore the state of Python, NumPy, torch and ``generators``."""
    undo: list[Undo] = [
        functools.partial(random.setstate, random.getstate()),
        _NUMPY.save(),
        functools.partial(torch.set_rng_state, torch.get_rng_state()),
    ]
    for device in devices:
        if device.type == "cuda":
            state = torch.cuda.get_rng_state(device)
            undo.append(functools.partial(torch.cuda.set_rng_state, state, device))
        elif device.type == "mps":
            undo.append(functools.partial(torch.mps.set_rng_state, torch.mps.get_rng_state()))
    undo.extend(map(_generator_state, generators))
    return undo


class _NumPyGenerator:
    """Saves NumPy's global generator, and reads or writes its state only if that has changed.

    Comparing the memory of the Mersenne Twister takes 1 us, but reading its state takes 45 us.
    """

    def __init__(self) -> None:
        self._latest: tuple[bytes | None, Any] = (None, None)

    def save(self) -> Undo:
        memory = _twister_memory()
        if memory is None or memory != self._latest[0]:
            state = np.random.get_state(legacy=False)  # noqa: NPY002
            # NumPy draws normal numbers in pairs. The memory does not contain an unused second one.
            self._latest = (None if state["has_gauss"] else memory, state)
        return functools.partial(self._restore, *self._latest)

    def _restore(self, memory: bytes | None, state: Any) -> None:
        if memory is None or _twister_memory() != memory:
            np.random.set_state(state)  # noqa: NPY002
            self._latest = (memory, state)


def _twister_memory() -> bytes | None:
    bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(bits) is not np.random.MT19937:  # the user has set another one
        return None
    return _TwisterMemory.from_address(bits.ctypes.state_address).raw


_NUMPY = _NumPyGenerator()


def _generator_state(generator: Any) -> Undo:
    if isinstance(generator, torch.Generator):
        return functools.partial(generator.set_state, generator.get_state())
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return functools.partial(generator.set_state, generator.get_state(legacy=False))
    bits = generator.bit_generator
    return functools.partial(setattr, bits, "state", bits.state)


def _refill(container: Any, content: Any) -> None:
    if isinstance(content, int):  # only the length was recorded
        if isinstance(container, (list, deque)):
            while len(container) > content:
                container.pop()
        return
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(content)
    else:
        container.update(content)
