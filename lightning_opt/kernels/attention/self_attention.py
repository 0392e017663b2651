"""Self-attention on torch's scaled dot-product attention, and rotary position embedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from lightning_opt.core.arguments import check_at_least, check_fraction, check_positive


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

    The tables are buffers: they move with the module, but are not in its ``state_dict``. They are
    computed in float64, stored in float32 (in float64 if the module is float64, never in half
    precision), and cast to the dtype of the input. For a longer sequence they grow to the next
    power of two, outside of ``torch.compile`` graphs. Several layers may share one instance.

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

    @torch.inference_mode(False)  # the table may grow in validation, and training needs it
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


class SelfAttention(nn.Module):
    """Multi-head self-attention with torch's fused kernels.

    With a fused backend (see :class:`AttentionBackend`) the matrix of scores (heads times length
    squared) is never stored. A ``key_padding_mask`` excludes the flash backend on CUDA.

    A query without visible keys (in an all-padding sequence, or before the first key of a
    left-padded causal sequence) gets zeros, never NaN, and no gradient; the output projection then
    adds its bias.

    Args:
        dim: Number of features of the input and the output.
        heads: Number of query heads.
        kv_heads: Number of heads of keys and values, a divisor of ``heads``; several query heads
            share each key/value head. None: equal to ``heads``.
        head_dim: Features of a query, a key and a value. None: ``dim / heads``.
        causal: Whether a position attends only to itself and earlier ones.
        dropout: Share of the scores dropped in training. torch's fused backend for CPUs does not
            support dropout.
        bias: Whether both projections have a bias.
        rotary: A :class:`RotaryEmbedding` for queries and keys, which several layers may share;
            True creates one for this layer; None or False: no position encoding.

    Raises:
        ValueError: If ``heads`` is not divisible by ``kv_heads``, if ``dim`` is not divisible by
            ``heads`` and there is no ``head_dim``, or if the size of ``rotary`` is not
            ``head_dim``.

    Shape:
        Input and output: ``(batch, length, dim)``.

    Example:
        >>> import torch
        >>> import lightning_opt as lo
        >>> attention = lo.SelfAttention(32, heads=4, causal=True, rotary=True)
        >>> attention(torch.ones(2, 10, 32)).shape
        torch.Size([2, 10, 32])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        rotary: RotaryEmbedding | bool | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.heads = check_at_least("dim", dim, 1), check_at_least("heads", heads, 1)
        self.kv_heads = heads if kv_heads is None else check_at_least("kv_heads", kv_heads, 1)
        if heads % self.kv_heads:
            raise ValueError(f"heads ({heads}) must be divisible by kv_heads ({kv_heads}).")
        if head_dim is None and dim % heads:
            raise ValueError(f"dim ({dim}) must be divisible by heads ({heads}), or set head_dim.")
        head_dim = dim // heads if head_dim is None else head_dim
        self.head_dim = check_at_least("head_dim", head_dim, 1)
        self.causal = causal
        self.dropout = check_fraction("dropout", dropout)
        self.sizes = [part * self.head_dim for part in (heads, self.kv_heads, self.kv_heads)]
        self.qkv = nn.Linear(dim, sum(self.sizes), bias=bias)
        self.out = nn.Linear(heads * self.head_dim, dim, bias=bias)
        if isinstance(rotary, RotaryEmbedding):
            if rotary.dim != self.head_dim:
                raise ValueError(f"rotary must be for {self.head_dim} features, got {rotary.dim}.")
            self.rotary: RotaryEmbedding | None = rotary
        else:
            self.rotary = RotaryEmbedding(self.head_dim) if rotary else None

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None, offset: int = 0) -> Tensor:
        """Apply attention and the output projection.

        Args:
            x: Shape ``(batch, length, dim)``.
            key_padding_mask: Shape ``(batch, length)``, bool, True for padding, as in
                ``nn.MultiheadAttention``.
            offset: Position of the first element, for ``rotary``.
        """
        query, key, value = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in self.qkv(x).split(self.sizes, dim=-1)
        )
        if self.rotary is not None:
            query, key = self.rotary(query, offset), self.rotary(key, offset)
        dropout, group = self.dropout if self.training else 0.0, self.heads // self.kv_heads
        if key_padding_mask is None:
            attended = scaled_dot_product_attention(
                query, key, value, dropout_p=dropout, is_causal=self.causal, enable_gqa=group > 1
            )
        else:
            if group > 1:  # with a mask, CUDA's fused backends do not support groups
                key, value = (part.repeat_interleave(group, dim=1) for part in (key, value))
            visible = ~key_padding_mask[:, None, None, :]
            if self.causal:
                visible = visible & visible.new_ones(x.shape[1], x.shape[1]).tril()
            has_key = visible.any(-1, keepdim=True)
            # A query without visible keys attends to all keys, and its result becomes zero.
            attended = scaled_dot_product_attention(
                query, key, value, attn_mask=visible | ~has_key, dropout_p=dropout
            ).masked_fill(~has_key, 0.0)
        return self.out(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"heads={self.heads}, kv_heads={self.kv_heads}, causal={self.causal}"
