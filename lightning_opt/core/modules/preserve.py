"""Putting a model's state back: after a trial that is to leave no trace, or a step that failed."""

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
"""Attributes of these types are put back: counters, flags, collected outputs."""

LONGEST_COPIED = 1000
"""Entries of a container that is copied; of longer ones only the length is kept."""

LONGEST_SEARCHED = 100
"""Entries of a container that is searched for containers, tensors and generators in turn."""

DEEPEST = 5
"""Containers and objects within each other that are looked into."""

SMALL = 64 * 2**10
"""Bytes of a tensor that is copied whether a step has been seen to write it or not."""

LARGE = 64 * 2**20
"""Bytes above which a tensor that is an attribute, such as a data set, is not copied to find out
whether it is written. Buffers of any size are."""

_CONTAINERS = (list, dict, set, deque)
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_STANDARD = sys.stdlib_module_names - {"__main__"}
_OWN = frozenset(("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"))

MERSENNE_TWISTER = 625 * 4
"""Bytes of what NumPy's global generator is in: 624 words and a place among them."""

Undo = Callable[[], object]


class CannotUndoError(RuntimeError):
    """A failed step has changed something of which there is no copy."""


class Before:
    """The state that a training step may change, as it is before each batch.

    Random numbers (Python's, NumPy's, torch's, and generators that modules hold), buffers, tensors
    and small arrays that are attributes, metrics, and counters, flags and collections of the
    modules, those within collections and within objects of the user's own classes too. Not
    gradients, and not parameters, of which it only sees that they were written. Taking it waits for
    no device.

    The first batch shows which tensors it writes; from then on large ones are copied if they are
    among these.

    Args:
        module: What runs, with all that is inside of it.
        device: Where it runs.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._device = device
        self._parameters = list(module.parameters())
        modules = list(module.modules())
        self._buffers = [owner._buffers for owner in modules if owner._buffers]
        # Layers of torch count nothing, and most modules are such layers.
        self._attributes = [vars(owner) for owner in modules if _is_users(type(owner))]
        self._written: set[tuple[int, Any]] | None = None
        self.forget()

    def forget(self) -> None:
        """Let go of the copies."""
        self._weights: list[int] = []
        self._undo: list[Undo] = []
        self._tensors: list[_Kept] = []

    def take(self) -> None:
        """Remember the state as it is."""
        self._weights = [parameter._version for parameter in self._parameters]
        self._undo, self._tensors = list(random_states([self._device])), []
        for buffers in self._buffers:
            self._undo.append(functools.partial(buffers.update, buffers.copy()))
            for name, buffer in buffers.items():
                if buffer is not None:
                    self._keep(buffers, name, buffer, math.inf)
        seen: set[int] = set()
        for attributes in self._attributes:
            self._remember(attributes, seen)

    def _keep(
        self, place: Any, name: Any, tensor: Tensor, most: float, unseen: float = SMALL
    ) -> None:
        seen = self._written is None or (id(place), name) in self._written
        bytes_ = tensor.numel() * tensor.element_size()  # `nbytes` fails for sparse ones
        copied = bytes_ <= (most if seen else unseen) and not tensor.is_inference()
        copy = tensor.detach().clone() if copied else None
        self._tensors.append(_Kept(place, name, tensor, _version(tensor), copy))

    def _remember(self, attributes: dict[str, Any], seen: set[int], depth: int = 0) -> None:
        """Remember attributes of plain types, what is in them, and generators."""
        before: dict[str, Any] = {}
        for name, value in attributes.items():  # of all modules of the user's, at each batch
            kind = _kind(type(value))  # type: ignore[arg-type]
            if not kind or name in _OWN or "_hooks" in name:
                continue
            if kind == "tensor":
                # One that belongs to a graph is made anew by each step, and would keep it alive.
                if value.grad_fn is None:
                    self._keep(attributes, name, value, LARGE)
            else:
                before[name] = value
                if kind != "plain":
                    self._look_into(value, kind, seen, depth + 1)
        names = set(attributes)

        def undo() -> None:
            # What appeared goes, unless it is a cache of tensors or an object of someone's.
            for name in [n for n, v in attributes.items() if n not in names]:
                if isinstance(attributes[name], PLAIN):
                    del attributes[name]
            attributes.update(before)

        self._undo.append(undo)

    def _look_into(self, value: Any, kind: str, seen: set[int], depth: int) -> None:
        """Remember what a value holds that is neither plain nor a tensor, once."""
        if id(value) in seen or depth > DEEPEST:
            return
        seen.add(id(value))
        if kind == "generator":
            self._undo.append(_generator_state(value))
        elif kind == "object":
            self._remember(getattr(value, "__dict__", {}), seen, depth)
        elif kind == "array":
            if value.nbytes <= SMALL and value.flags.writeable:
                self._undo.append(functools.partial(np.copyto, value, value.copy()))
        else:
            if kind == "container":
                content = len(value) if len(value) > LONGEST_COPIED else value.copy()
                self._undo.append(functools.partial(_refill, value, content))
            if len(value) <= LONGEST_SEARCHED:
                entries = value.items() if isinstance(value, dict) else enumerate(value)
                for name, entry in entries:
                    inner = _kind(type(entry))  # type: ignore[arg-type]
                    if inner == "tensor" and entry.grad_fn is None:
                        self._keep(value, name, entry, SMALL, unseen=0)
                    elif inner not in ("", "plain", "tensor"):
                        self._look_into(entry, inner, seen, depth + 1)

    def learn(self) -> None:
        """Note, after the first batch that succeeded, which tensors the step writes."""
        if self._written is None:
            self._written = {(id(kept.place), kept.name) for kept in self._tensors if kept.changed}

    @torch.no_grad()
    def restore(self, parameters: bool = True) -> None:
        """Put everything back, as often as needed.

        Args:
            parameters: Whether it is an error if parameters were written.

        Raises:
            CannotUndoError: If a parameter was written, or a large tensor that the first batch has
                not written. Nothing is put back then.
        """
        if parameters and self._weights != [p._version for p in self._parameters]:
            raise CannotUndoError(
                "The step has changed parameters (such as those of a moving average) before it "
                "failed, so it cannot be rolled back and retried. Change them in "
                "on_train_batch_end."
            )
        lost = [kept.name for kept in self._tensors if kept.copy is None and kept.changed]
        if lost:
            raise CannotUndoError(
                f"The step has written to tensors that it had not written before ({lost}), so it "
                "cannot be rolled back and retried."
            )
        for kept in self._tensors:
            if isinstance(kept.place, dict):  # entries of lists are put back with these
                kept.place[kept.name] = kept.tensor
            if kept.copy is not None:
                kept.tensor.data.copy_(kept.copy)  # `.data`: autograd need not know
        for undo in self._undo:
            undo()


class _Kept(NamedTuple):
    """A tensor as it was, and where it belongs."""

    place: Any
    name: Any
    tensor: Tensor
    version: int
    copy: Tensor | None

    @property
    def changed(self) -> bool:
        return _version(self.tensor) != self.version


def _version(tensor: Tensor) -> int:
    # What was made in inference mode, as in validation, cannot be written in training.
    return 0 if tensor.is_inference() else tensor._version


@contextmanager
def isolated_random(device: torch.device) -> Iterator[None]:
    """Put the random numbers back: Python's, NumPy's, torch's of the CPU and of ``device``."""
    with ExitStack() as stack:
        for undo in random_states([device]):
            stack.callback(undo)
        yield


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Let forward and backward passes run on ``model``, and leave it as it was.

    Put back are gradients, which are ``None`` inside, ``requires_grad``, and what :class:`Before`
    knows. Parameters are not copied: whoever runs the passes must not step an optimizer.
    """
    parameters = [(p, p.grad, p.requires_grad) for p in model.parameters()]
    before = Before(model, parameters[0][0].device if parameters else torch.device("cpu"))
    before.take()
    modes = [(module, module.training) for module in model.modules()]
    for parameter, _, _ in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        before.restore(parameters=False)
        for module, training in modes:
            module.training = training
        for parameter, gradient, requires_grad in parameters:
            parameter.requires_grad_(requires_grad)
            parameter.grad = gradient


def _is_users(kind: type) -> bool:
    return any(not base.__module__.startswith("torch.") for base in kind.__mro__[:-1])


def random_states(
    devices: Iterable[torch.device], generators: Iterable[Any] = ()
) -> Iterator[Undo]:
    """Yield what puts random numbers back: Python's, NumPy's, torch's, those of ``generators``.

    Args:
        devices: Whose generators, beside the CPU's.
        generators: Others.
    """
    yield functools.partial(random.setstate, random.getstate())
    yield _NumpyState.now().put_back
    yield functools.partial(torch.set_rng_state, torch.get_rng_state())
    for device in devices:
        if device.type == "cuda":
            state = torch.cuda.get_rng_state(device)
            yield functools.partial(torch.cuda.set_rng_state, state, device)
        elif device.type == "mps":
            yield functools.partial(torch.mps.set_rng_state, torch.mps.get_rng_state())
    yield from map(_generator_state, generators)


class _NumpyState(NamedTuple):
    """NumPy's random numbers, which take 0.1 ms to read and to write: done if they have moved."""

    raw: bytes
    state: dict[str, Any]

    @staticmethod
    def now() -> _NumpyState:
        bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
        twister = type(bits) is np.random.MT19937  # as long as nobody sets another
        raw = ctypes.string_at(bits.ctypes.state_address, MERSENNE_TWISTER) if twister else b""
        known = _LAST_NUMPY[-1] if twister and _LAST_NUMPY else None
        # A second normal number is drawn without a move.
        if known is None or known.raw != raw or known.state["has_gauss"]:
            known = _NumpyState(raw, np.random.get_state(legacy=False))  # noqa: NPY002
            _LAST_NUMPY[:] = [known]
        return known

    def put_back(self) -> None:
        if _NumpyState.now() is not self:
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
    return "object" if _is_own(kind) else ""


def _is_own(kind: type) -> bool:
    """Whether a class and its bases are the user's own: a meter, a state, a moving average."""
    names = {base.__module__.partition(".")[0] for base in kind.__mro__[:-1]}
    if names & {"torch", "lightning", "lightning_opt"} or kind.__module__ in _STANDARD:
        return False
    return "site-packages" not in str(getattr(sys.modules.get(kind.__module__), "__file__", ""))


def _is_refillable(kind: Any) -> bool:
    """Whether a container is changed as Python's own are; a frozen configuration is not."""
    own = [base for base in kind.__mro__ if base.__module__ in ("builtins", "collections")]
    return all(
        any(getattr(kind, name, None) is getattr(base, name, None) for base in own)
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
