"""Self-attention on torch's scaled dot-product attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from lightning_opt.core.arguments import check_at_least, check_fraction
from lightning_opt.kernels.attention.rotary_embedding import RotaryEmbedding


class SelfAttention(nn.Module):
    """Multi-head self-attention with torch's fused kernels.

    With a fused backend (see :class:`AttentionBackend`) the matrix of scores (heads times length
    squared) is never stored. A ``key_padding_mask`` excludes the flash backend on
    CUDA.

    A query without visible keys (in an all-padding sequence, or before the first key of a
    left-padded causal sequence) gets zeros, never NaN, and no gradient; the output projection then
    adds its bias.

    Args:
        dim: Number of features of the input and the output.
        heads: Number of query heads.
        kv_heads: Number of heads of keys and values, a divisor of ``heads``; several query heads
            share each key/value head. None: equal to ``heads``.
        head_dim: Features of a query and a key. None: ``dim / heads``.
        value_dim: Features of a value. None: ``head_dim``. Flash backends require equal sizes.
        causal: Whether a position attends only to itself and earlier ones.
        dropout: Share of the scores dropped in training. torch's fused backend for CPUs does not
            support dropout.
        bias: Whether queries, keys and values have a bias.
        out_bias: Whether the output projection has a bias.
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
        value_dim: int | None = None,
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        out_bias: bool = True,
        rotary: RotaryEmbedding | bool | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.heads = check_at_least("dim", dim, 1), check_at_least("heads", heads, 1)
        self.kv_heads = heads if kv_heads is None else check_at_least("kv_heads", kv_heads, 1)
        if heads % self.kv_heads:
            raise ValueError(f"heads ({heads}) must be divisible by kv_heads ({kv_heads}).")
        if head_dim is None and dim % heads:
            raise ValueError(f"dim ({dim}) must be divisible by heads ({heads}), or set head_dim.")
        self.head_dim = (
            dim // heads if head_dim is None else check_at_least("head_dim", head_dim, 1)
        )
        self.value_dim = (
            self.head_dim if value_dim is None else check_at_least("value_dim", value_dim, 1)
        )
        self.causal = causal
        self.dropout = check_fraction("dropout", dropout)
        self.sizes = [
            heads * self.head_dim,
            self.kv_heads * self.head_dim,
            self.kv_heads * self.value_dim,
        ]
        self.qkv = nn.Linear(dim, sum(self.sizes), bias=bias)
        self.out = nn.Linear(heads * self.value_dim, dim, bias=out_bias)
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
            part.unflatten(-1, (-1, size)).transpose(1, 2)
            for part, size in zip(
                self.qkv(x).split(self.sizes, dim=-1),
                (self.head_dim, self.head_dim, self.value_dim),
                strict=True,
            )
        )
        if self.rotary is not None:
            query, key = self.rotary(query, offset), self.rotary(key, offset)
        dropout = self.dropout if self.training else 0.0
        if key_padding_mask is None:
            attended = scaled_dot_product_attention(
                query,
                key,
                value,
                dropout_p=dropout,
                is_causal=self.causal,
                enable_gqa=self.kv_heads != self.heads,
            )
        else:
            group = self.heads // self.kv_heads
            if group > 1:  # with a mask, CUDA's fused backends do not support groups
                key, value = (part.repeat_interleave(group, dim=1) for part in (key, value))
            visible = visible_keys(key_padding_mask, self.causal)
            has_key = visible.any(-1, keepdim=True)
            # A query without visible keys attends to all of them, and its result is discarded.
            attended = scaled_dot_product_attention(
                query, key, value, attn_mask=visible | ~has_key, dropout_p=dropout
            ).masked_fill(~has_key, 0.0)
        return self.out(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"heads={self.heads}, kv_heads={self.kv_heads}, causal={self.causal}"


def visible_keys(key_padding_mask: Tensor, causal: bool) -> Tensor:
    """Return the mask of keys that each query attends to.

    Args:
        key_padding_mask: Shape ``(batch, length)``, True for padding.
        causal: Whether a position attends only to itself and earlier ones.

    Returns:
        A bool tensor of shape ``(batch, 1, length, length)``; if not causal,
        ``(batch, 1, 1, length)``.
    """
    visible = ~key_padding_mask[:, None, None, :]
    if not causal:
        return visible
    length = key_padding_mask.shape[-1]
    return visible & torch.ones(length, length, dtype=torch.bool, device=visible.device).tril()
