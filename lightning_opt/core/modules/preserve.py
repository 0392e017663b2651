"""Snapshots of the state that a training step changes, to restore it after a trial or a failure."""

from __future__ import annotations

import ctypes
import functools
import math
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

PLAIN = (bool, int, float, complex, str, bytes, type(None), list, dict, set, tuple, deque)
"""Types of attributes that are restored: counters, flags, collected outputs."""

MAX_COPIED_ENTRIES = 1000
"""Containers with more entries are not copied; only their length is restored."""

MAX_SEARCHED_ENTRIES = 100
"""Containers with more entries are not searched for inner containers, tensors and generators."""

MAX_DEPTH = 5
"""Maximum depth at which nested containers and objects are searched."""

ALWAYS_COPIED_BYTES = 64 * 2**10
"""Tensors up to this size are always copied, even if no step has written them."""

MAX_ATTRIBUTE_BYTES = 64 * 2**20
"""On the first batch larger tensor attributes, such as data sets, are not copied. Buffers of any
size are copied."""

_CONTAINERS = (list, dict, set, deque)
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_STANDARD = sys.stdlib_module_names - {"__main__"}
_INTERNALS = frozenset(("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"))

MERSENNE_TWISTER = 625 * 4
"""Bytes of the state of NumPy's global generator: 624 words and a position."""

Undo = Callable[[], object]


class CannotUndoError(RuntimeError):
    """A failed step has changed something that was not copied."""


class StepState:
    """The state that a training step may change, recorded before each batch.

    It covers random numbers (Python, NumPy, torch, and generators held by modules), buffers, tensor
    attributes, small arrays, metrics, and the counters, flags and collections of modules, also
    inside collections and objects of the user's own classes. It excludes gradients. Parameters are
    not copied, but a write to them is detected. Recording never waits for the device.

    The first batch shows which tensors a step writes. From then on a large tensor is copied only if
    it was written.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._device = device
        self._parameters = list(module.parameters())
        modules = list(module.modules())
        self._buffers = [owner._buffers for owner in modules if owner._buffers]
        # torch's own layers, which most modules are, have no state in attributes.
        self._attributes = [vars(owner) for owner in modules if _has_user_state(type(owner))]
        self._written: set[tuple[int, Any]] | None = None
        self.clear()

    def clear(self) -> None:
        self._versions: list[int] = []
        self._undo: list[Undo] = []
        self._tensors: list[_SavedTensor] = []

    def take(self) -> None:
        self._versions = [parameter._version for parameter in self._parameters]
        self._undo, self._tensors = list(random_states([self._device])), []
        for buffers in self._buffers:
            self._undo.append(functools.partial(buffers.update, buffers.copy()))
            for name, buffer in buffers.items():
                if buffer is not None:
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
        self._tensors.append(_SavedTensor(place, name, tensor, _version(tensor), copy))

    def _save_attributes(
        self, attributes: dict[str, Any], visited: set[int], depth: int = 0
    ) -> None:
        before: dict[str, Any] = {}
        for name, value in attributes.items():
            kind = _kind(type(value))  # type: ignore[arg-type]
            if not kind or name in _INTERNALS or "_hooks" in name:
                continue
            if kind == "tensor":
                # A tensor with a graph is created by each step; a copy would keep its graph alive.
                if value.grad_fn is None:
                    self._save_tensor(attributes, name, value, MAX_ATTRIBUTE_BYTES)
            else:
                before[name] = value
                if kind != "plain":
                    self._save_contents(value, kind, visited, depth + 1)
        names = set(attributes)

        def undo() -> None:
            # New attributes are removed, except tensors (caches) and objects of other classes.
            for name in [n for n, v in attributes.items() if n not in names]:
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
            if len(value) <= MAX_SEARCHED_ENTRIES:
                entries = value.items() if isinstance(value, dict) else enumerate(value)
                for name, entry in entries:
                    inner = _kind(type(entry))  # type: ignore[arg-type]
                    if inner == "tensor" and entry.grad_fn is None:
                        self._save_tensor(
                            value, name, entry, ALWAYS_COPIED_BYTES, limit_unwritten=0
                        )
                    elif inner not in ("", "plain", "tensor"):
                        self._save_contents(entry, inner, visited, depth + 1)

    def record_writes(self) -> None:
        """After the first batch that succeeds, record which tensors the step writes."""
        if self._written is None:
            self._written = {
                (id(saved.place), saved.name) for saved in self._tensors if saved.changed
            }

    @torch.no_grad()
    def restore(self, parameters: bool = True) -> None:
        """Restore the recorded state. It may be called several times.

        Raises:
            CannotUndoError: If a parameter was written (unless ``parameters`` is False), or a large
                tensor that the first batch did not write. Nothing is restored then.
        """
        if parameters and self._versions != [p._version for p in self._parameters]:
            raise CannotUndoError(
                "The step has changed parameters (such as those of a moving average) before it "
                "failed, so it cannot be rolled back and retried. Change them in "
                "on_train_batch_end."
            )
        lost = [saved.name for saved in self._tensors if saved.copy is None and saved.changed]
        if lost:
            raise CannotUndoError(
                f"The step has written to tensors that it had not written before ({lost}), so it "
                "cannot be rolled back and retried."
            )
        for saved in self._tensors:
            if isinstance(saved.place, dict):  # entries of lists are restored with their list
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
        return _version(self.tensor) != self.version


def _version(tensor: Tensor) -> int:
    # Inference tensors, such as those of validation, have no version; training cannot write them.
    return 0 if tensor.is_inference() else tensor._version


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
    modes and everything that :class:`StepState` covers are restored. Parameters are not copied, so
    no optimizer may step.
    """
    parameters = [(p, p.grad, p.requires_grad) for p in model.parameters()]
    state = StepState(model, parameters[0][0].device if parameters else torch.device("cpu"))
    state.take()
    modes = [(module, module.training) for module in model.modules()]
    for parameter, _, _ in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        state.restore(parameters=False)
        for module, training in modes:
            module.training = training
        for parameter, gradient, requires_grad in parameters:
            parameter.requires_grad_(requires_grad)
            parameter.grad = gradient


def _has_user_state(kind: type) -> bool:
    return any(not base.__module__.startswith("torch.") for base in kind.__mro__[:-1])


def random_states(
    devices: Iterable[torch.device], generators: Iterable[Any] = ()
) -> Iterator[Undo]:
    """Yield functions that restore the random states of Python, NumPy, torch and ``generators``."""
    yield functools.partial(random.setstate, random.getstate())
    yield _NumpyState.current().restore
    yield functools.partial(torch.set_rng_state, torch.get_rng_state())
    for device in devices:
        if device.type == "cuda":
            state = torch.cuda.get_rng_state(device)
            yield functools.partial(torch.cuda.set_rng_state, state, device)
        elif device.type == "mps":
            yield functools.partial(torch.mps.set_rng_state, torch.mps.get_rng_state())
    yield from map(_generator_state, generators)


class _NumpyState(NamedTuple):
    """NumPy's global random state, read and written (0.05 ms each) only if it has changed."""

    raw: bytes
    state: dict[str, Any]

    @staticmethod
    def current() -> _NumpyState:
        bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
        twister = type(bits) is np.random.MT19937  # the default, unless another one was set
        raw = ctypes.string_at(bits.ctypes.state_address, MERSENNE_TWISTER) if twister else b""
        known = _LAST_NUMPY[-1] if twister and _LAST_NUMPY else None
        # `raw` does not show a cached second normal number (`has_gauss`).
        if known is None or known.raw != raw or known.state["has_gauss"]:
            known = _NumpyState(raw, np.random.get_state(legacy=False))  # noqa: NPY002
            _LAST_NUMPY[:] = [known]
        return known

    def restore(self) -> None:
        if _NumpyState.current() is not self:
            np.random.set_state(self.state)  # noqa: NPY002


_LAST_NUMPY: list[_NumpyState] = []


def _generator_state(generator: Any) -> Undo:
    if isinstance(generator, torch.Generator):
        return functools.partial(generator.set_state, generator.get_state())
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return functools.partial(generator.set_state, generator.get_state(legacy=False))
    bits = generator.bit_generator
    return functools.partial(setattr, bits, "state", bits.state)


@functools.cache
def _kind(kind: Any) -> str:
    if issubclass(kind, GENERATORS):
        return "generator"
    if issubclass(kind, Tensor):
        return "tensor"
    if issubclass(kind, np.ndarray):
        return "array"
    if issubclass(kind, _CONTAINERS) and _is_refillable(kind):
        return "container"
    if issubclass(kind, PLAIN):
        return "tuple" if issubclass(kind, tuple) else "plain"
    return "object" if _is_user_class(kind) else ""


def _is_user_class(kind: type) -> bool:
    """Return whether a class and its bases are user-defined, such as a moving average."""
    names = {base.__module__.partition(".")[0] for base in kind.__mro__[:-1]}
    if names & {"torch", "lightning", "lightning_opt"} or kind.__module__ in _STANDARD:
        return False
    return "site-packages" not in str(getattr(sys.modules.get(kind.__module__), "__file__", ""))


def _is_refillable(kind: Any) -> bool:
    """Return whether a container has Python's own methods; a frozen configuration does not."""
    builtin_bases = [
        base for base in kind.__mro__ if base.__module__ in ("builtins", "collections")
    ]
    return all(
        any(getattr(kind, name, None) is getattr(base, name, None) for base in builtin_bases)
        for name in ("__setitem__", "clear", "extend", "update")
    )


def _refill(container: Any, content: Any) -> None:
    if isinstance(content, int):
        if isinstance(container, (list, deque)):
            while len(container) > content:
                container.pop()
        return
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(content)
    else:
        container.update(content)
