"""Counts the operations that make the host wait for a device, and where they are called.

On a CPU nothing waits, but the same operations run, so they can be counted without a GPU.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

READS = {
    aten._local_scalar_dense,  # item(), float(), int(), bool()
    aten.equal,
    aten.is_nonzero,
}
"""Operations that return a Python value."""

DATA_DEPENDENT = {aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim}
"""Operations whose output shape depends on values."""

COPIES = {aten._to_copy, aten.copy_}
HOST_READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.cpu}
"""Reads of a CPU tensor that bypass the dispatcher."""

TORCH = str(Path(torch.__file__).parent)
HELPERS = str(Path(__file__).parent)


class SyncCounter:
    """Counts the operations within its ``with`` block that would stop the host.

    Attributes:
        where: Counts by ``"operation file:line"`` of the innermost frame outside torch and these
            helpers.

    Example:
        >>> with SyncCounter() as syncs:
        ...     _ = float(torch.ones(()).add(1))
        >>> syncs.total
        1
    """

    def __init__(self) -> None:
        self.where: Counter[str] = Counter()
        self._modes = ExitStack()

    @property
    def total(self) -> int:
        return self.where.total()

    def clear(self) -> None:
        self.where.clear()

    def note(self, operation: str) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame and frame.f_code.co_filename.startswith((TORCH, HELPERS)):
            frame = frame.f_back
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "?"
        self.where[f"{operation} {place}"] += 1

    def __enter__(self) -> "SyncCounter":
        self._modes.enter_context(_Functions(self))
        self._modes.enter_context(_Operations(self))
        return self

    def __exit__(self, *exception: Any) -> None:
        self._modes.__exit__(*exception)


class _Operations(TorchDispatchMode):
    def __init__(self, counter: SyncCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operation = func.overloadpacket
        if (
            operation in READS
            or operation in DATA_DEPENDENT
            or (operation in COPIES and _copies_to_host(operation, args, result))
            or (operation is aten.index and _has_mask(args[1]))
        ):
            self._counter.note(str(operation))
        return result


class _Functions(TorchFunctionMode):
    def __init__(self, counter: SyncCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A copy from a device is counted as an operation.
        if func in HOST_READS and args[0].device.type == "cpu":
            self._counter.note(func.__name__)
        return func(*args, **(kwargs or {}))


def _copies_to_host(operation: Any, args: Any, result: Tensor) -> bool:
    source = args[1] if operation is aten.copy_ else args[0]
    return result.device.type == "cpu" and source.device.type != "cpu"


def _has_mask(indices: Any) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def take_device_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``lightning_opt`` use the device path for CPU tensors."""
    _set_choice(monkeypatch, lambda device: False)


def each_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield ``"host"``, then ``"device"`` if the code had to choose between the two paths."""
    asked: list[torch.device] = []

    def note(device: torch.device) -> bool:
        asked.append(device)
        return True

    with monkeypatch.context() as patch:
        _set_choice(patch, note)
        yield "host"
    if asked:
        with monkeypatch.context() as patch:
            take_device_path(patch)
            yield "device"


def _set_choice(monkeypatch: pytest.MonkeyPatch, answer: Callable[[torch.device], bool]) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("lightning_opt.") and hasattr(module, "reads_are_free"):
            monkeypatch.setattr(module, "reads_are_free", answer)
