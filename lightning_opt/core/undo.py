"""What a step changes before its end, so that a failed one can be taken back."""

from __future__ import annotations

import ctypes
import functools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_opt.core.preserve import PLAIN

LONGEST_COPIED = 1000
"""Entries of a container that is copied at each batch; of longer lists only the length is kept."""

_OWN = frozenset(("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training"))
_CONTAINERS = (list, dict, set, deque)

Undo = Callable[[], None]


class CannotUndoError(RuntimeError):
    """A failed step has changed something of which there is no copy."""


class Before:
    """The state that a training step may change, as it is before each batch.

    Random numbers (Python's, NumPy's, torch's of the CPU and of the training device), buffers,
    metrics, and counters, flags and collections of the modules. Not gradients: see
    :class:`GradientsBefore`. Taking it waits for no device.

    Statistics of norms are copied at each batch; of the other buffers those that the first batch
    has been seen to write.

    Args:
        module: What runs, with all that is inside of it.
        device: Where it runs.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._device = device
        modules = list(module.modules())
        self._parameters = list(module.parameters())
        self._norms = [
            (owner, name)
            for owner in modules
            if isinstance(owner, _NormBase) and owner.track_running_stats
            for name in owner._buffers
        ]
        norms = set(self._norms)
        self._others = [
            (owner, name)
            for owner in modules
            for name in owner._buffers
            if (owner, name) not in norms
        ]
        self._written = list(self._others)
        # Layers of torch have no counters, and most modules are such layers.
        self._modules = [
            owner for owner in modules if not type(owner).__module__.startswith("torch.")
        ]
        self._seen = False
        self._numpy = _NumpyState()

    def take(self) -> None:
        """Remember the state as it is."""
        self._random = list(_random_states(self._device, self._numpy))
        self._weights = [parameter._version for parameter in self._parameters]
        copied = [*self._norms, *self._written]
        self._copies = [
            (owner, name, buffer, buffer.detach().clone())
            for owner, name in copied
            if (buffer := owner._buffers.get(name)) is not None
        ]
        self._versions = [
            (owner, name, buffer, 0 if buffer is None else buffer._version)
            for owner, name in self._others
            for buffer in (owner._buffers.get(name),)
        ]
        self._attributes = [_remember(vars(owner)) for owner in self._modules]

    def learn(self) -> None:
        """Note, after the first batch that succeeded, which buffers the step writes."""
        if not self._seen:
            self._seen, self._written = True, self._changed()

    def _changed(self) -> list[tuple[nn.Module, str]]:
        return [
            (owner, name)
            for owner, name, buffer, version in self._versions
            if (now := owner._buffers.get(name)) is not buffer
            or (now is not None and now._version != version)
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back, as often as needed.

        Raises:
            CannotUndoError: If a parameter was written, or a buffer that the first batch has not
                written.
        """
        if self._weights != [parameter._version for parameter in self._parameters]:
            raise CannotUndoError(
                "The step has changed parameters (such as those of a moving average) before it "
                "failed, so it cannot be taken back and tried again. Change them in "
                "on_train_batch_end."
            )
        copied = {(owner, name) for owner, name, _, _ in self._copies}
        lost = [name for owner, name in self._changed() if (owner, name) not in copied]
        if lost:
            raise CannotUndoError(
                f"The step has written to buffers that it had not written before ({lost}), so it "
                "cannot be taken back and tried again."
            )
        for owner, name, buffer, copy in self._copies:
            buffer.data.copy_(copy)
            owner._buffers[name] = buffer
        for undo in (*self._random, *self._attributes):
            undo()

    def forget(self) -> None:
        """Let go of the copies."""
        self._weights = []
        self._random, self._copies, self._versions, self._attributes = [], [], [], []


class _NumpyState:
    """The state of NumPy's global generator, which takes 50 us to read and seldom changes.

    So it is read again only if the generator's memory, of which a copy takes 1 us, is another. What
    is not in there is the second of two normal numbers that are drawn at once; while there is one,
    the state is read each time.
    """

    def __init__(self) -> None:
        self._memory: tuple[Any, bytes] | None = None
        self._state: Any = None

    def read(self) -> Undo:
        """Return what puts back the state as it is."""
        import numpy as np

        memory = self._look()
        if memory is None or memory != self._memory or self._state[3]:
            self._memory, self._state = memory, np.random.get_state()  # noqa: NPY002 - the user's
        state = self._state
        return lambda: np.random.set_state(state)  # noqa: NPY002

    @staticmethod
    def _look() -> tuple[Any, bytes] | None:
        import numpy as np

        generator = getattr(getattr(np.random.mtrand, "_rand", None), "_bit_generator", None)
        if type(generator) is not np.random.MT19937:
            return None  # of another kind, of which the size is not known
        address = generator.ctypes.state_address
        return generator, ctypes.string_at(address, _MT19937_BYTES)


_MT19937_BYTES = 625 * 4
"""624 words and the position."""


def _random_states(device: torch.device, numpy: _NumpyState) -> Iterator[Undo]:
    python = random.getstate()
    yield lambda: random.setstate(python)
    if "numpy" in sys.modules:
        yield numpy.read()
    cpu = torch.get_rng_state()
    yield lambda: torch.set_rng_state(cpu)
    if device.type == "cuda":
        cuda = torch.cuda.get_rng_state(device)
        yield lambda: torch.cuda.set_rng_state(cuda, device)


def _remember(attributes: dict[str, Any]) -> Undo:
    """Return what puts back attributes of plain types and the states of a torchmetrics metric."""
    states = attributes.get("_defaults", ())
    # This runs for each batch: a tensor that is not a metric's is not kept alive, and what can wait
    # for `undo` does.
    before = {name: value for name, value in attributes.items() if _is_plain(type(value))}
    contents = [
        (value, _content(value))
        for name, value in before.items()
        if _is_container(type(value)) and not _is_own(name)
    ]
    if states:  # a metric's; its updates may be in place
        for name, value in attributes.items():
            if isinstance(value, Tensor):
                before[name] = value
                if name in states:
                    contents.append((value, value.detach().clone()))
    names = set(attributes)

    def undo() -> None:
        for name in [n for n, v in attributes.items() if n not in names and isinstance(v, PLAIN)]:
            del attributes[name]
        attributes.update((name, value) for name, value in before.items() if not _is_own(name))
        for container, content in contents:
            _put_back(container, content)

    return undo


_is_plain: Callable[[type], bool] = functools.cache(lambda kind: issubclass(kind, PLAIN))
_is_container: Callable[[type], bool] = functools.cache(lambda kind: issubclass(kind, _CONTAINERS))


def _is_own(name: str) -> bool:
    return name in _OWN or name.endswith("hooks")


def _content(container: Any) -> Any:
    return len(container) if len(container) > LONGEST_COPIED else container.copy()


def _put_back(container: Any, content: Any) -> None:
    if isinstance(container, Tensor):
        container.data.copy_(content)
    elif isinstance(content, int):
        if isinstance(container, (list, deque)):
            while len(container) > content:
                container.pop()
    elif isinstance(container, (list, deque)):
        container.clear()
        container.extend(content)
    else:
        container.clear()
        container.update(content)


class GradientsBefore:
    """Gradients of earlier batches of an accumulation window, held aside while a batch runs.

    So a failed attempt has nothing to spoil. They are added up at the end of the last backward
    pass, which is the work that autograd would have had; the memory is that of a second gradient.
    At the first batch of a window there are none.

    Args:
        parameters: All of them.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._held = [(p, p.grad) for p in self._parameters if p.grad is not None]
        if self._held:
            self.drop()

    def __bool__(self) -> bool:
        return bool(self._held)

    def drop(self) -> None:
        """Forget the gradients of the batch."""
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def add_up(self) -> None:
        """Have each parameter's gradient be what was held aside and that of the batch."""
        olds, news = [], []
        for parameter, old in self._held:
            new = parameter.grad
            if new is not None and (old.is_sparse or new.is_sparse):
                parameter.grad = old + new
                continue
            if new is not None:
                olds.append(old)
                news.append(new)
            parameter.grad = old
        if olds:
            torch._foreach_add_(olds, news)
        self._held = []

    def put_back(self) -> None:
        """Have the gradients as they were, if they have not been added up."""
        for parameter, old in self._held:
            parameter.grad = old
        self._held = []


@contextmanager
def named_hook(module: Any, name: str) -> Iterator[None]:
    """Have ``self.log`` take what is logged for that of the hook ``name``."""
    before, module._current_fx_name = module._current_fx_name, name
    try:
        yield
    finally:
        module._current_fx_name = before
