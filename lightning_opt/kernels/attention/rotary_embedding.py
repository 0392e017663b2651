"""Rotary position embedding with cached cosines and sines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_opt.core.arguments import check_at_least, check_positive


def rotary_tables(
    positions: int,
    dim: int,
    base: float = 10_000.0,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of all angles, computed in float64 and rounded once.

    Args:
        positions: Number of positions, from 0 on.
        dim: Number of rotated features; even.
        base: The longest wavelength is about ``2 pi base`` positions.
        device: Device of the tables. The CPU computes them, so values are equal on every device.
        dtype: Dtype of the tables.

    Returns:
        Two tensors of shape ``(positions, dim / 2)``. The angle of element ``(p, i)`` is
        ``p * base ** (-2 i / dim)``.
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim
    indices = torch.arange(positions, dtype=torch.float64, device="cpu")
    angles = torch.outer(indices, base**-exponents)
    return angles.cos().to(device=device, dtype=dtype), angles.sin().to(device=device, dtype=dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate pairs of features of ``x`` by angles, given by their cosines and sines.

    Args:
        x: Shape ``(..., length, dim)``.
        cos: Shape ``(length, dim / 2)``.
        sin: Shape ``(length, dim / 2)``.
        interleaved: Pair feature ``2 i`` with ``2 i + 1``, else ``i`` with ``i + dim / 2``.

    Returns:
        A tensor like ``x``.
    """
    if interleaved:
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        first, second = x.chunk(2, dim=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys by their positions, with cached cosines and sines.

    The tables are buffers that follow the module from device to device and stay out of its
    ``state_dict``. They are computed in float64 and kept in float32, even in a half-precision
    module (float64 in a float64 one), and used in the dtype of the input. They grow to the next
    power of two for a longer sequence, outside of ``torch.compile`` graphs. Several layers may
    share one instance.

    Args:
        dim: Number of features of a head; even.
        base: The longest wavelength is about ``2 pi base`` positions. Often called theta.
        max_positions: Initial length of the tables.
        interleaved: Which features form a pair: ``i`` and ``i + dim / 2`` (half-split, as in
            GPT-NeoX and LLaMA), or with True ``2 i`` and ``2 i + 1`` (as in the paper and GPT-J).
            Weights trained with one layout do not work with the other.

    Raises:
        ValueError: For a ``dim`` that is odd, or arguments out of range.

    Example:
        >>> import torch
        >>> import lightning_opt as lo
        >>> rotary = lo.RotaryEmbedding(8)
        >>> query = torch.ones(2, 4, 16, 8)  # batch, heads, length, dim
        >>> rotary(query).shape
        torch.Size([2, 4, 16, 8])
        >>> torch.equal(rotary(query)[:, :, 15:], rotary(query[:, :, 15:], offset=15))
        True

    References:
        Jianlin Su and others, "RoFormer: Enhanced Transformer with Rotary Position Embedding",
        2021.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, dim: int, base: float = 10_000.0, max_positions: int = 2048, interleaved: bool = False
    ) -> None:
        super().__init__()
        if check_at_least("dim", dim, 2) % 2:
            raise ValueError(f"dim must be even, since features are rotated in pairs, got {dim}.")
        self.dim = dim
        self.base = check_positive("base", base)
        self.interleaved = interleaved
        cos, sin = rotary_tables(check_at_least("max_positions", max_positions, 1), dim, base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        """Rotate ``x`` of shape ``(..., length, dim)``.

        Args:
            x: Queries or keys.
            offset: Position of the first element, as in decoding with a cache of keys.
        """
        end = offset + x.shape[-2]
        if end > self.cos.shape[0]:
            self._grow(end)
        cos, sin = self.cos[offset:end], self.sin[offset:end]
        return rotate(x, cos.to(x.dtype), sin.to(x.dtype), self.interleaved)

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"{self.dim}, base={self.base:g}, interleaved={self.interleaved}"

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _grow(self, positions: int) -> None:
        self._fill(1 << (positions - 1).bit_length(), self.cos.dtype)

    def _fill(self, positions: int, dtype: torch.dtype) -> None:
        self.cos, self.sin = rotary_tables(
            positions, self.dim, self.base, device=self.cos.device, dtype=dtype
        )

    def _apply(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> RotaryEmbedding:
        """Move the tables with the module, but keep their precision."""
        super()._apply(fn, *args, **kwargs)  # type: ignore[no-untyped-call]
        # Compute the tables again: the moved tables may be rounded, or have no values (`to_empty`).
        dtype = torch.float64 if self.cos.dtype is torch.float64 else torch.float32
        self._fill(self.cos.shape[0], dtype)
        return self
