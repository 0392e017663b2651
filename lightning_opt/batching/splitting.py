"""Splits batches into parts, weights their losses, and finds state to reset between parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

from lightning_opt.core.modules.batches import (
    ADVICE,
    Reading,
    UnsplittableBatchError,
    read_batch,
    split_into,
)

Pieces: TypeAlias = Sequence[tuple[Any, int]]
"""Parts of a batch, each with its number of samples."""


class Splitter:
    """Splits batches and weights the losses of the parts.

    Args:
        split: The user's function, or None.
        count: The user's function that counts tokens, for a mean over tokens; else None.
        is_sum: Whether the loss is a sum over samples.

    Attributes:
        is_sum: As given.
        several_loaders: Whether a batch has one entry per loader.
    """

    def __init__(
        self,
        split: Callable[[Any, int], Pieces] | None,
        count: Callable[[Any], Any] | None,
        is_sum: bool = False,
    ) -> None:
        self._split, self._count, self.is_sum = split, count, is_sum
        self.several_loaders = False

    def split(self, batch: Any, parts: int) -> Pieces:
        if self._split is None:
            return split_into(batch, parts, self._read(batch))
        pieces = list(self._split(batch, parts))
        if len(pieces) != parts or any(len(piece) != 2 or piece[1] < 1 for piece in pieces):
            raise ValueError(
                f"split(batch, {parts}) must return {parts} pairs `(part, samples)` with at least "
                f"one sample each, got {len(pieces)}: {[str(piece)[:60] for piece in pieces]}."
            )
        return pieces

    def count_samples(self, batch: Any) -> int:
        if self._split is None:
            return self._read(batch).samples
        [(_, samples)] = self.split(batch, 1)
        return samples

    def entries(self, batch: Any) -> list[Any]:
        """Return the batch of each loader that is not exhausted."""
        if not self.several_loaders:
            return [batch]
        entries = batch.values() if isinstance(batch, Mapping) else batch
        return [entry for entry in entries if entry is not None]

    def _read(self, batch: Any) -> Reading:
        readings = [read_batch(entry) for entry in self.entries(batch)]
        if len({reading.samples for reading in readings}) > 1:
            raise UnsplittableBatchError(
                f"The loaders have different numbers of samples in a batch. {ADVICE}"
            )
        lists = frozenset[int]().union(*(reading.lists for reading in readings))
        return Reading(readings[0].samples, lists)

    def shares(self, pieces: Pieces) -> list[Any]:
        """Return each part's share of the batch: a number, or a tensor on its own device."""
        if len(pieces) == 1:
            return [1.0]
        weights: list[Any] = [samples for _, samples in pieces]
        if self._count is not None:
            weights = [self._count(piece) for piece, _ in pieces]
            weights = [w.detach() if isinstance(w, Tensor) else w for w in weights]
        total = sum(weights[1:], weights[0])
        if not isinstance(total, Tensor) and total == 0:
            return [0.0] * len(pieces)
        return [weight / total for weight in weights]


def spectral_norm_vectors(module: nn.Module) -> list[Tensor]:
    """Return the vectors that spectral norms update in each forward pass, whatever its samples.

    If all parts of a batch begin with the same vectors, the batch updates them once.
    """
    vectors: list[Tensor] = []
    for owner in module.modules():
        parameters = dict(owner.named_parameters(recurse=False))
        for name, buffer in owner.named_buffers(recurse=False):
            # `parametrizations.spectral_norm` is a module; the older one has weight_u, weight_orig.
            is_module = hasattr(owner, "n_power_iterations") and name in ("_u", "_v")
            if is_module or f"{name[:-2]}_orig" in parameters:
                vectors.append(buffer)
    return vectors
