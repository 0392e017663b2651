"""Batches of any structure: their tensors, samples and tokens, and how to split them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_opt.core.arguments import check_at_least

ADVICE = (
    "Give MicroBatching(split=...), a function `split(batch, parts)` that returns a list of "
    "`(part, samples)`, with one entry for each of the `parts`."
)

SHARED_TYPES = (bool, int, float, complex, str, bytes, np.generic, torch.device, torch.dtype)

Batch = TypeVar("Batch")


class UnsplittableBatchError(ValueError):
    """Raised for a batch that cannot be counted or split into samples."""


class Reading(NamedTuple):
    """The number of samples of a batch, and which of its lists hold samples.

    Attributes:
        samples: The number of samples.
        lists: Ids of the lists that have one entry per sample, rather than one per field.
    """

    samples: int
    lists: frozenset[int]


def read_batch(batch: Any) -> Reading:
    """Count the samples of a batch, and find the lists that hold samples.

    A list such as ``[x, y]`` holds fields with one row per sample. A list of similar entries, such
    as ``[(image, 3), (image, 5)]``, holds samples if each entry contains a scalar, if the entries
    differ in length, or if all have the same shapes and these differ in their first dimension.

    Raises:
        UnsplittableBatchError: If the parts of the batch have different numbers of samples, or if
            the samples of no part can be counted.
    """
    counts = _counts(batch, is_top=True)
    if not counts:
        raise UnsplittableBatchError(_explain(batch))
    lists = dict(_lists(batch, counts[0], is_top=True))
    # If one list must hold samples, assume the same of the other lists of that length.
    return Reading(counts[0], frozenset(lists if any(lists.values()) else ()))


def samples_in(batch: Any, default: int) -> int:
    """Return the number of samples, for reports.

    If the parts of the batch have different numbers, the first one is returned. If no part can be
    counted, ``default`` is returned. A batch that is None has no samples.
    """
    if batch is None:
        return 0
    try:
        return read_batch(batch).samples
    except UnsplittableBatchError:
        lengths = (length for _, leaf in _leaves(batch, "batch") for length in _length(leaf))
        return next(lengths, default)


def split_batch(batch: Batch, size: int) -> list[Batch]:
    """Split a batch into parts of at most ``size`` samples, as equal as possible.

    Tensors, arrays and TensorDicts are cut along their first dimension, into views. Batches of
    PyTorch Geometric are split into graphs. Lists and tuples are cut if they have one entry per
    sample; otherwise each of their entries is cut. Numbers, strings, ``None`` and tensors without
    dimensions belong to every part. Mappings (including Hugging Face's), named tuples and
    dataclasses are rebuilt around the parts.

    Args:
        batch: A batch as returned by the DataLoader.
        size: The largest number of samples in a part, at least 1.

    Raises:
        UnsplittableBatchError: If the parts of the batch have different numbers of samples, or if
            one of them cannot be cut.
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
    return [part for part, _ in micro_batches(batch, size)]


def micro_batches(batch: Batch, size: int) -> list[tuple[Batch, float]]:
    """Split a batch like :func:`split_batch`, and return each part with its share of the samples.

    For manual optimisation and plain loops: the gradients of ``loss * share`` add up to the
    gradient of the whole batch, if the loss is a mean over samples.

    Args:
        batch: A batch as returned by the DataLoader.
        size: The largest number of samples in a part, at least 1.

    Raises:
        UnsplittableBatchError: See :func:`split_batch`.
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
    check_at_least("size", size, 1)
    reading = read_batch(batch)
    if reading.samples == 0:
        return [(batch, 1.0)]
    parts = split_into(batch, -(-reading.samples // size), reading)
    return [(part, samples / reading.samples) for part, samples in parts]


def split_into(batch: Batch, parts: int, reading: Reading) -> list[tuple[Batch, int]]:
    """Split a batch into ``parts`` parts, and return each with its number of samples."""
    if parts == 1:
        return [(batch, reading.samples)]
    ends = [reading.samples * number // parts for number in range(parts + 1)]
    return [(cut(batch, start, end, reading.lists), end - start) for start, end in pairwise(ends)]


def copy_containers(batch: Batch) -> Batch:
    """Return the same tensors in new containers; containers that cannot be rebuilt are kept."""
    if _is_graphs(batch):
        return copy.copy(batch)
    try:
        return _rebuild(batch, copy_containers) if _is_container(batch) else batch
    except (TypeError, UnsplittableBatchError):  # its constructor takes other arguments
        return batch


def leaves_of(value: Any) -> Iterator[Any]:
    """Yield the leaves of any nested structure: a batch, arguments, a module's output.

    Unlike torch's pytrees it also iterates over any mapping (``BatchEncoding``) and dataclass.
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


def check_tokens(tokens: int | str | None) -> int | str | None:
    return tokens if isinstance(tokens, str | None) else check_at_least("tokens", tokens, 1)


def tokens_in(batch: Any, tokens: int | str, owner: str) -> int:
    """Return the number of tokens in a batch.

    ``tokens`` is the number per sample, or the key of the tensor whose elements are counted. The
    error for a missing tensor names the class ``owner``.
    """
    if batch is None:  # Lightning skips it
        return 0
    if isinstance(tokens, int):
        return tokens * samples_in(batch, default=1)
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


def _is_graphs(value: Any) -> bool:
    """Return whether a value is a PyTorch Geometric batch of graphs."""
    return hasattr(value, "to_data_list") and hasattr(type(value), "from_data_list")


def _has_rows(value: Any) -> bool:
    """Return whether a value is a TensorDict or a tensorclass, which are sliced like tensors."""
    return isinstance(getattr(value, "batch_size", None), torch.Size) and bool(value.batch_size)


def _is_shared(leaf: Any) -> bool:
    """Return whether a leaf is the same in every part."""
    if isinstance(leaf, (Tensor, np.ndarray)):
        return leaf.ndim == 0
    return leaf is None or isinstance(leaf, SHARED_TYPES)


def _is_container(value: Any) -> bool:
    """Return whether the entries of a value are split one by one, instead of the value itself."""
    if isinstance(value, Tensor):  # not needed, but fast
        return False
    if isinstance(value, Mapping) or _is_dataclass(value) or _is_named_tuple(value):
        return not isinstance(value, PackedSequence) and not _has_rows(value)
    if isinstance(value, (list, tuple)):
        # A list of TensorDicts may hold one sample in each.
        with_rows = isinstance(value, tuple) or len(set(map(type, value))) > 1
        return any(
            isinstance(item, (Tensor, np.ndarray, PackedSequence))
            or _is_graphs(item)
            or _is_container(item)
            or (with_rows and _has_rows(item))
            for item in value
        )
    return False


def _is_list(value: Any) -> bool:
    """Return whether a container may have one entry per sample."""
    return isinstance(value, (list, tuple)) and not _is_named_tuple(value)


def _may_hold_samples(value: Any, is_top: bool = False) -> bool:
    """Return whether a container is a list of similar entries, judged by three of them."""
    # A batch such as (source, target) holds two fields, not two samples.
    if not _is_list(value) or (is_top and not _is_container(value[0])):
        return False
    kinds = {
        tuple(key for key, _ in _entries(item))
        if _is_container(item)
        else (getattr(item, "dtype", 0), getattr(item, "ndim", 0))
        for item in (*value[:2], value[-1])
    }
    return len(kinds) == 1


def _has_shapes_of_samples(value: Any) -> bool:
    """Return whether entries have the same shapes, without a common first dimension."""
    shapes = [[tuple(leaf.shape) for leaf in tensors_of(item) if leaf.ndim] for item in value[:2]]
    return shapes[0] == shapes[-1] and len({shape[0] for shape in shapes[0]}) > 1


def _has_scalar(item: Any) -> bool:
    leaves = leaves_of(item) if _is_container(item) else ()
    return any(_is_shared(leaf) and leaf is not None for leaf in leaves)


def _entries(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if _is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return list(enumerate(value))


def _counts(value: Any, is_top: bool = False) -> tuple[int, ...] | None:
    """Return the possible numbers of samples, the likeliest first; None if all are possible."""
    if not _is_container(value):
        return None if _is_shared(value) else _length(value)
    fields = _field_counts(value)
    if not _may_hold_samples(value, is_top):
        return fields
    first = [len(value)] if _has_shapes_of_samples(value) else []
    return tuple(dict.fromkeys([*first, *(fields or ()), len(value)]))


def _field_counts(value: Any) -> tuple[int, ...] | None:
    """Return the possible numbers of samples if each entry is a field."""
    common: tuple[int, ...] | None = None
    if _may_hold_samples(value) and all(map(_has_scalar, value[:2])):
        return None
    for _, item in _entries(value):
        counts = _counts(item)
        if counts is not None:
            common = counts if common is None else tuple(n for n in common if n in counts)
    return common


def _length(leaf: Any) -> tuple[int, ...]:
    """Return the number of samples in a leaf, or nothing if it is unknown."""
    if isinstance(leaf, (Tensor, np.ndarray)):
        return (leaf.size(0) if isinstance(leaf, Tensor) else len(leaf),)
    if isinstance(leaf, PackedSequence):
        return (int(leaf.batch_sizes[0]),)
    if _has_rows(leaf):
        return (leaf.batch_size[0],)
    # The length of a mapping, such as a single graph, is its number of fields.
    has_length = hasattr(leaf, "__len__") and not hasattr(leaf, "keys")
    return (len(leaf),) if has_length or _is_graphs(leaf) else ()


def _lists(value: Any, samples: int, is_top: bool = False) -> Iterator[tuple[int, bool]]:
    """Yield the id of each list that may hold samples, and whether it must hold them."""
    if not _is_container(value):
        return
    may = _may_hold_samples(value, is_top) and len(value) == samples
    if may and (_has_shapes_of_samples(value) or samples not in (_field_counts(value) or ())):
        yield id(value), True
        return
    inner = [found for _, item in _entries(value) for found in _lists(item, samples)]
    if may and not any(must for _, must in inner):
        yield id(value), False
    yield from inner


def _leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    if _is_container(value):
        for key, item in _entries(value):
            yield from _leaves(item, f"{place}[{key!r}]")
    elif not _is_shared(value):
        yield place, value


def _explain(batch: Any) -> str:
    """Return the reason why the samples of a batch cannot be counted."""
    lengths: dict[int, str] = {}
    for place, leaf in _leaves(batch, "batch"):
        length = _length(leaf)
        if not length:
            return f"{place} is {_describe(leaf)}, whose samples cannot be counted. {ADVICE}"
        lengths.setdefault(length[0], place)
    if not lengths:
        return f"There is no tensor in the batch to split. {ADVICE}"
    found = ", ".join(f"{place} has {length}" for length, place in lengths.items())
    return f"The parts of the batch have different numbers of samples: {found}. {ADVICE}"


def _describe(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return "a nested tensor" if leaf.is_nested else f"a tensor of layout {leaf.layout}"
    return f"an object of type {type(leaf).__module__}.{type(leaf).__qualname__}"


def cut(value: Any, start: int, end: int, lists: frozenset[int]) -> Any:
    if _is_container(value) and id(value) not in lists:
        return _rebuild(value, lambda item: cut(item, start, end, lists))
    if _is_shared(value):
        return value
    if _is_graphs(value):
        return type(value).from_data_list(value.to_data_list()[start:end])
    strided = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested
    if not (strided or isinstance(value, np.ndarray) or _is_list(value) or _has_rows(value)):
        raise UnsplittableBatchError(
            f"The batch has {_describe(value)}, which cannot be cut into samples. {ADVICE}"
        )
    return value[start:end]


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
                f"Entries of a {type(value).__qualname__} cannot be replaced ({error}). {ADVICE}"
            ) from error
        return rebuilt
    for key, item in entries:
        object.__setattr__(rebuilt, key, item)  # frozen dataclasses too
    return rebuilt
