"""How much a batch holds: samples and tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_opt.core.arguments import at_least
from lightning_opt.core.modules.splitting import tensors_of


def samples_in(batch: Any) -> int:
    """Return the length of the first tensor of a batch that has one; 1 without any."""
    first = batch
    while isinstance(first, (tuple, list)) and first:  # the most frequent batches at once
        first = first[0]
    if isinstance(first, Tensor) and first.ndim:
        return len(first)
    return next((len(tensor) for tensor in tensors_of(batch) if tensor.ndim), 1)


def check_tokens(tokens: int | str | None) -> int | str | None:
    """Return what :func:`tokens_in` takes, or None.

    Raises:
        ValueError: For a number below 1.
    """
    return tokens if tokens is None or isinstance(tokens, str) else at_least("tokens", tokens, 1)


def tokens_in(batch: Any, tokens: int | str, who: str) -> int:
    """Return the tokens of a batch.

    Args:
        batch: As the DataLoader gave it.
        tokens: How many each sample has, or the key of the tensor whose elements are counted.
        who: Whose argument that is, for the error.

    Raises:
        ValueError: If the batch has no such tensor.
    """
    if isinstance(tokens, int):
        return tokens * samples_in(batch)
    part = batch.get(tokens) if isinstance(batch, Mapping) else None
    if not isinstance(part, Tensor):
        has = f"has {list(batch)}" if isinstance(batch, Mapping) else f"is a {type(batch)}"
        raise ValueError(
            f"{who}(tokens={tokens!r}) needs batches that are a dict with a tensor of that name, "
            f"but the batch {has}. Give the number of tokens in each sample instead."
        )
    return part.numel()
