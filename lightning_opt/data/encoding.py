"""Items as bytes and back: exactly counted, and never shared with whoever holds the item."""

from __future__ import annotations

import hashlib
import io
import pickle
from typing import Any

import torch
from torch import Tensor


def encode(item: Any) -> bytes:
    """Return ``item`` as bytes, of which :func:`decode` makes an equal one.

    Everything that pickle takes. A plain tensor of a CPU is written with its own elements only,
    not with the storage that it may be a small view of, and comes back contiguous.

    Raises:
        TypeError: For what cannot be pickled.
    """
    file = io.BytesIO()
    try:
        _Encoder(file, protocol=5).dump(item)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"An item of type {type(item).__qualname__} cannot be cached, because it cannot be "
            f"pickled: {error}"
        ) from error
    # A copy of its own size. The file's buffer has grown in steps and, cut to size, would leave
    # holes in the heap: half as much again as what is cached.
    return bytes(file.getbuffer())


def decode(data: bytes) -> Any:
    """Return a new item from what :func:`encode` has made; nobody else holds any part of it."""
    return pickle.loads(data)


def digest(*parts: Any) -> bytes:
    """Return 16 bytes that stand for ``parts``: equal for what encodes equally."""
    hashed = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = encode(part)
        hashed.update(len(data).to_bytes(8, "little"))
        hashed.update(data)
    return hashed.digest()


class _Encoder(pickle.Pickler):
    """torch's own way writes each tensor as an archive, which takes some 50 µs."""

    def reducer_override(self, value: Any) -> Any:
        if not is_plain(value) or value.requires_grad:
            return NotImplemented
        return _tensor, (pickle.PickleBuffer(raw(value)), value.dtype, tuple(value.shape))


def raw(tensor: Tensor) -> memoryview:
    """Return the elements of a tensor of the CPU, in order, as bytes."""
    elements = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return memoryview(elements.view(torch.uint8).numpy())  # type: ignore[arg-type]


def is_plain(value: Any) -> bool:
    """Return whether a value is a tensor of which :func:`raw` gives the elements."""
    return (
        type(value) is Tensor
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not value.is_quantized
    )


def _tensor(buffer: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not len(buffer):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype).reshape(shape)
