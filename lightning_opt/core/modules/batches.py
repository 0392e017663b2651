"""Batches of any structure: their tensors, samples and tokens, and how to split them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_opt.core.arguments import check_at_least

ADVICE = (
    "Give MicroBatching(split=...), a function `split(batch, parts)` that returns a list of "
    "`(part, samples)`, with one entry for each of the `parts`."
)

Batch = TypeVar("Batch")


class UnsplittableBatchError(ValueError):
    """Raised for a batch that cannot be split into samples."""


def batch_length(batch: Any) -> int:
    """Return the number of samples. Raise if the tensors disagree, or if there are none."""
    lengths: dict[int, str] = {}
    for place, leaf in _leaves(batch, "batch"):
        if not _is_shared(leaf):
            lengths.setdefault(len(leaf), place)
    if not lengths:
        raise UnsplittableBatchError(f"There is no tensor in the batch to split. {ADVICE}")
    if len(lengths) > 1:
        found = ", ".join(f"{place} has {length}" for length, place in lengths.items())
        raise UnsplittableBatchError(
            f"The parts of the batch have different numbers of samples: {found}. {ADVICE}"
        )
    return next(iter(lengths))


def split_batch(batch: Batch, size: int) -> list[Batch]:
    """Split a batch into parts of at most ``size`` samples, as equal as possible.

    Tensors and arrays are cut along their first dimension, into views. Lists and tuples without
    tensors inside have one entry per sample. Numbers, strings, ``None`` and tensors without
    dimensions belong to every part. Mappings (including Hugging Face's), lists, tuples, named
    tuples and dataclasses are rebuilt around the parts.

    Args:
        batch: A batch as returned by the DataLoader.
        size: The largest number of samples in a part, at least 1.

    Raises:
        UnsplittableBatchError: See :func:`batch_length`.
        ValueError: For a ``size`` below 1.

    Example:
        >>> import torch
        >>> import lightning_opt as lo
        >>> batch = {"text": ["a", "b", "c"], "label": torch.arange(3), "scale": 0.5}
        >>> for part in lo.split_batch(batch, 2):
        ...     print(part)
        {'text': ['a'], 'label': tensor([0]), 'scale': 0.5}
        {'text': ['b', 'c'], 'label': tensor([1, 2]), 'scale': 0.5}
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}.")
    samples = batch_length(batch)
    return [part for part, _ in split_into(batch, max(1, -(-samples // size)))]


def micro_batches(batch: Batch, size: int) -> list[tuple[Batch, float]]:
    """Split a batch like :func:`split_batch`, and return each part with its share of the samples.

    For manual optimisation and plain loops: the gradients of ``loss * share`` add up to the
    gradient of the whole batch, if the loss is a mean over samples.

    Args:
        batch: A batch as returned by the DataLoader.
        size: The largest number of samples in a part, at least 1.

    Raises:
        UnsplittableBatchError: See :func:`batch_length`.
        ValueError: For a ``size`` below 1.

    Example:
        >>> import torch
        >>> import lightning_opt as lo
        >>> weight = torch.ones(1, requires_grad=True)
        >>> for part, share in lo.micro_batches(torch.tensor([1.0, 2.0, 6.0]), size=2):
        ...     loss = (weight * part).mean()
        ...     (loss * share).backward()  # self.manual_backward(loss * share) in a LightningModule
        >>> weight.grad
        tensor([3.])
    """
    parts = split_batch(batch, size)
    lengths = [batch_length(part) for part in parts]
    return [(part, length / sum(lengths)) for part, length in zip(parts, lengths, strict=True)]


def split_into(batch: Batch, parts: int) -> list[tuple[Batch, int]]:
    """Split a batch into ``parts`` parts, and return each with its number of samples."""
    samples = batch_length(batch)
    if parts == 1:
        return [(batch, samples)]
    ends = [samples * number // parts for number in range(parts + 1)]
    return [(_cut(batch, start, end), end - start) for start, end in pairwise(ends)]


def copy_containers(batch: Batch) -> Batch:
    """Return the same tensors in new containers; containers that cannot be rebuilt are kept."""
    if not _is_container(batch):
        return batch
    try:
        return _rebuild(batch, copy_containers)  # type: ignore[no-any-return]
    except (TypeError, UnsplittableBatchError):  # its constructor takes other arguments
        return batch


def shape_of(batch: Any) -> tuple[str, int]:
    """Return dtypes and shapes of one sample as text, and its number of elements."""
    shapes, elements = [], 0
    for tensor in tensors_of(batch):
        if tensor.ndim:
            shapes.append(f"{str(tensor.dtype)[6:]}{list(tensor.shape[1:])}".replace(" ", ""))
            elements += tensor[:1].numel()
    return " ".join(shapes), elements


def leaves_of(value: Any) -> Iterator[Any]:
    """Yield the leaves of any nested structure: a batch, arguments, a module's output.

    Unlike torch's pytrees it opens mappings of any kind (``BatchEncoding``) and dataclasses.
    """
    if not isinstance(value, Tensor) and (
        isinstance(value, (Mapping, list, tuple)) or _is_dataclass(value)
    ):
        for _, item in _entries(value):
            yield from leaves_of(item)
    else:
        yield value


def tensors_of(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor))


def samples_in(batch: Any) -> int:
    """Return the length of the first tensor of a batch that has dimensions, or 1."""
    first = batch
    while isinstance(first, (tuple, list)) and first:  # fast path for the usual batches
        first = first[0]
    if isinstance(first, Tensor) and first.ndim:
        return len(first)
    return next((len(tensor) for tensor in tensors_of(batch) if tensor.ndim), 1)


def check_tokens(tokens: int | str | None) -> int | str | None:
    if tokens is None or isinstance(tokens, str):
        return tokens
    return check_at_least("tokens", tokens, 1)


def tokens_in(batch: Any, tokens: int | str, owner: str) -> int:
    """Return the number of tokens in a batch.

    ``tokens`` is the number per sample, or the key of the tensor whose elements are counted. The
    error for a missing tensor names the class ``owner``.
    """
    if isinstance(tokens, int):
        return tokens * samples_in(batch)
    part = batch.get(tokens) if isinstance(batch, Mapping) else None
    if not isinstance(part, Tensor):
        has = f"has {list(batch)}" if isinstance(batch, Mapping) else f"is a {type(batch)}"
        raise ValueError(
            f"{owner}(tokens={tokens!r}) needs batches that are a dict with a tensor of that name, "
            f"but the batch {has}. Give the number of tokens in each sample instead."
        )
    return part.numel()


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_shared(leaf: Any) -> bool:
    """Return whether a leaf is the same in every part."""
    if isinstance(leaf, (Tensor, np.ndarray)):
        return leaf.ndim == 0
    return leaf is None or isinstance(leaf, (bool, int, float, complex, str, bytes, np.generic))


def _is_container(value: Any) -> bool:
    """Return whether the entries are cut one by one, instead of the container itself."""
    if isinstance(value, Tensor):  # fast path
        return False
    if isinstance(value, Mapping) or _is_dataclass(value) or _is_named_tuple(value):
        return not isinstance(value, PackedSequence)
    if isinstance(value, (list, tuple)):
        return any(isinstance(item, (Tensor, np.ndarray)) or _is_container(item) for item in value)
    return False


def _entries(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if _is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return list(enumerate(value))


def _leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves to cut or share, each with its place in the batch for errors."""
    if _is_container(value):
        for key, item in _entries(value):
            yield from _leaves(item, f"{place}[{key!r}]")
        return
    _check_leaf(value, place)
    yield place, value


def _check_leaf(value: Any, place: str) -> None:
    if isinstance(value, Tensor):
        if value.layout is torch.strided and not value.is_nested:
            return
        kind = "a nested tensor" if value.is_nested else f"a tensor of layout {value.layout}"
    elif isinstance(value, np.ndarray) or _is_shared(value) or type(value) in (list, tuple):
        return
    else:
        kind = f"of type {type(value).__module__}.{type(value).__qualname__}"
    raise UnsplittableBatchError(f"{place} is {kind}, which cannot be cut into samples. {ADVICE}")


def _cut(value: Any, start: int, end: int) -> Any:
    if _is_container(value):
        return _rebuild(value, lambda item: _cut(item, start, end))
    return value if _is_shared(value) else value[start:end]


def _rebuild(value: Any, change: Any) -> Any:
    entries = [(key, change(item)) for key, item in _entries(value)]
    items = [item for _, item in entries]
    if _is_named_tuple(value):
        return type(value)(*items)
    if isinstance(value, (list, tuple)):
        return items if type(value) is list else type(value)(items)
    rebuilt = copy.copy(value)
    if isinstance(value, Mapping):
        try:
            for key, item in entries:
                rebuilt[key] = item
        except (TypeError, RuntimeError) as error:
            raise UnsplittableBatchError(
                f"A {type(value).__qualname__} does not let its entries be replaced "
                f"({error}). {ADVICE}"
            ) from error
        return rebuilt
    for key, item in entries:
        object.__setattr__(rebuilt, key, item)  # frozen dataclasses too
    return rebuilt
