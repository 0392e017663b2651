"""CUDA tensors without a GPU: waiting for a value and mixing devices raise; launches are counted.

A fake tensor has shape, dtype and device, and no values. On torch's CPU build two of its functions
ask for a CUDA device before they get to the dispatcher, so they go another way for the time.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

NONE = {aten.promote_types, aten.lift_fresh, aten.detach}
"""What the dispatcher sees although it has nothing to compute."""


@contextmanager
def fake_cuda() -> Iterator[FakeTensorMode]:
    """Let ``device="cuda"`` give fake tensors; to read one, or to mix devices, is an error."""
    with (
        FakeTensorMode() as mode,
        mock.patch("torch.cuda.Event", FakeEvent),
        mock.patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False),
        mock.patch("torch.cuda.current_stream", lambda device=None: FakeStream(device)),
        ExitStack() as patches,
    ):
        if not torch.backends.cuda.is_built():
            invert = mock.patch.object(Tensor, "__invert__", lambda own: torch.bitwise_not(own))
            patches.enter_context(mock.patch.object(Tensor, "__getitem__", _getitem))
            patches.enter_context(invert)
        yield mode


class FakeStream:
    """The stream of a device that is not there."""

    def __init__(self, device: torch.device | None) -> None:
        self.device = device


class FakeEvent:
    """An event, with the streams on which it was recorded."""

    def __init__(self, **_: Any) -> None:
        self.recorded: list[FakeStream | None] = []

    def record(self, stream: FakeStream | None = None) -> None:
        self.recorded.append(stream)

    def synchronize(self) -> None:
        raise AssertionError("The host waits for the device.")


def _getitem(tensor: Tensor, key: Any) -> Tensor:
    """Index as Python does, without the guard of a CUDA device that the CPU build has not got."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if ... in (parts := [part if part is Ellipsis else None for part in keys]):
        place = parts.index(...)
        given = sum(part is not None and part is not Ellipsis for part in keys)
        keys[place : place + 1] = [slice(None)] * (tensor.ndim - given)
    dim, indices = 0, dict[int, Tensor]()
    for part in keys:
        if isinstance(part, Tensor) and part.ndim == 0:
            part = part.item()  # as Python does for such an index, which waits for the device
        if part is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(part, int):
            tensor = tensor.select(dim, part)
            continue
        elif isinstance(part, slice):
            tensor = aten.slice(tensor, dim, part.start, part.stop, part.step or 1)
        else:
            indices[dim] = part
        dim += 1
    if not indices:
        return tensor
    result: Tensor = aten.index(tensor, [indices.get(place) for place in range(dim)])
    return result


class Launches(TorchDispatchMode):
    """Counts the operators within its ``with`` block, but for views, which launch nothing.

    Attributes:
        names: How often each one came.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self.names.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten" and not func.is_view and func.overloadpacket not in NONE:
            self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def count_launches(call: Callable[[], object]) -> int:
    """Return how many operators a call dispatches."""
    with Launches() as launches:
        call()
    return launches.total


class Transformer(nn.Module):
    """98 parameters: eight blocks of a transformer with a head."""

    def __init__(self, width: int = 64, blocks: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True) for _ in range(blocks)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result


def on_fake_cuda(module: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return ``module`` with its parameters and buffers on the fake device; call it within."""
    for child in module.modules():
        for name, own in [*child.named_parameters(recurse=False)]:
            fake = torch.empty(own.shape, dtype=own.dtype, device="cuda")
            child.register_parameter(name, nn.Parameter(fake, own.requires_grad))
        for name, own in [*child.named_buffers(recurse=False)]:
            fake = torch.empty(own.shape, dtype=own.dtype, device="cuda")
            child.register_buffer(name, fake, name not in child._non_persistent_buffers_set)
    return module


def fake_gradients(module: nn.Module, but: Sequence[str] = ()) -> None:
    """Give every parameter a gradient, but for those named."""
    for name, parameter in module.named_parameters():
        parameter.grad = None if name in but else torch.empty_like(parameter)
