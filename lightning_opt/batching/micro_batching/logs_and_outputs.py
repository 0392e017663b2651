"""Merges the logs and outputs of micro-batches into the logs and output of the whole batch."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_opt.batching.comparison import LOG_PARAMETERS
from lightning_opt.core.modules.patching import replaced

if TYPE_CHECKING:
    import lightning.pytorch as pl

Weights = Sequence[Any]
"""One float or tensor per micro-batch."""


class LogRecorder:
    """Records calls of ``self.log`` in ``training_step``, and logs merged values once per batch.

    Args:
        module: The module whose ``log`` is recorded.
        sums: Names of values that are logged as means but are sums over samples. The caller may
            add names later.
    """

    def __init__(self, module: pl.LightningModule, sums: Set[str]) -> None:
        self._module, self._sums = module, sums
        self._full = 0  # samples of the largest batch so far
        self.clear()

    def clear(self) -> None:
        self._calls: dict[tuple[str, int], list[tuple[int, Any, dict[str, Any]]]] = {}

    @contextmanager
    def recording(self, part: int) -> Iterator[None]:
        counts: dict[str, int] = {}

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            kwargs.update(zip(LOG_PARAMETERS, args, strict=False))
            counts[name] = counts.get(name, -1) + 1
            if isinstance(value, Metric):
                value = (value, value._forward_cache)
            elif isinstance(value, Tensor):
                value = value.detach()
            self._calls.setdefault((name, counts[name]), []).append((part, value, kwargs))

        with replaced(self._module, log=log):
            yield

    def log(self, samples: Sequence[int], weights: Weights) -> None:
        """Log the merged values, and clear the recorded ones."""
        self._full = max(self._full, sum(samples))
        # Lightning attributes logged values to the hook in this attribute.
        with replaced(self._module, _current_fx_name="training_step"):
            for (name, _), calls in self._calls.items():
                self._log(name, calls, samples, weights)
        self.clear()

    def _log(self, name: str, calls: Any, samples: Sequence[int], weights: Weights) -> None:
        parts, values, arguments = zip(*calls, strict=True)
        kwargs = dict(arguments[0])
        samples, weights = [samples[part] for part in parts], [weights[part] for part in parts]
        if kwargs.get("batch_size") is not None and len(parts) > 1:
            sizes = [other["batch_size"] for other in arguments]
            if sizes == samples:
                kwargs["batch_size"] = sum(samples)
            elif set(sizes) not in ({1}, {sum(samples)}, {self._full}):  # such as tokens
                kwargs["batch_size"], weights = sum(sizes), sizes
        if isinstance(values[0], tuple):
            metric, caches = values[0][0], [cache for _, cache in values]
            are_scalars = all(isinstance(cache, Tensor) and cache.ndim == 0 for cache in caches)
            # The mean is exact only for metrics that are means.
            metric._forward_cache = combine(caches, weights) if are_scalars else caches[-1]
            self._module.log(name, metric, **kwargs)
        else:
            reduction = "sum" if name in self._sums else kwargs.get("reduce_fx", "mean")
            self._module.log(name, combine(values, weights, reduction), **kwargs)


def weighted(value: Any, weight: Any) -> Any:
    """Return ``value * weight``; 0 for a weight of 0, even if the value is NaN.

    A mean over no tokens is NaN. Its gradient is 0 for losses such as ``cross_entropy`` with
    ``ignore_index``.
    """
    if isinstance(weight, Tensor):
        return torch.where(weight > 0, value * weight, 0.0)
    if weight:
        return value * weight
    return value.nan_to_num(0.0, 0.0, 0.0) * 0.0 if isinstance(value, Tensor) else 0.0


def combine(values: Sequence[Any], weights: Weights, reduction: Any = "mean") -> Any:
    """Return the value of the whole batch, given the values of its parts."""
    if len(values) == 1:
        return values[0]
    name = str(getattr(reduction, "__name__", reduction)).lower()
    if name == "sum":
        return sum(values[1:], values[0])
    if name in ("min", "max"):
        tensors = [v if isinstance(v, Tensor) else torch.tensor(float(v)) for v in values]
        return getattr(torch.stack(tensors), name)()
    total = sum(weights[1:], weights[0])
    if not isinstance(total, Tensor) and not total:  # parts without tokens
        weights, total = [1.0] * len(values), len(values)
    terms = [weighted(_widen(value), weight) for value, weight in zip(values, weights, strict=True)]
    return sum(terms[1:], terms[0]) / total


def _widen(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype not in (torch.float32, torch.float64):
        return value.float()
    return value


def merge_outputs(outputs: Sequence[Any], samples: Sequence[int], weights: Weights) -> Any:
    """Merge the outputs of ``training_step`` for the parts, except the loss.

    Tensors, arrays and lists with one entry per sample are joined. Floating-point scalars are
    averaged. Dicts are merged by key, other lists and tuples by position. A hashable value that is
    equal in all parts is kept once. Anything else becomes a list with one entry per micro-batch.
    Tensors are detached.
    """
    outputs = [_detached(output) for output in outputs]
    first = outputs[0]
    if any(isinstance(output, float) for output in outputs):
        numbers = all(isinstance(output, (int, float)) for output in outputs)
        return combine(outputs, weights) if numbers else outputs
    if any(type(output) is not type(first) for output in outputs):
        return outputs
    if isinstance(first, (Tensor, np.ndarray)):
        return _merge_arrays(outputs, samples, weights)
    if isinstance(first, (list, tuple)):
        return _merge_lists(outputs, samples, weights)
    if isinstance(first, Mapping):
        if all(output.keys() == first.keys() for output in outputs):
            return {
                key: merge_outputs([output[key] for output in outputs], samples, weights)
                for key in first
            }
    elif isinstance(first, Hashable) and all(output == first for output in outputs):
        return first
    return outputs


def _merge_arrays(arrays: list[Any], samples: Sequence[int], weights: Weights) -> Any:
    first, lengths = arrays[0], [array.shape[:1] for array in arrays]
    if lengths == [(count,) for count in samples] and len({a.shape[1:] for a in arrays}) == 1:
        return torch.cat(arrays) if isinstance(first, Tensor) else np.concatenate(arrays)
    if isinstance(first, Tensor) and all(t.ndim == 0 and t.is_floating_point() for t in arrays):
        return combine(arrays, weights).to(first.dtype)
    return arrays


def _merge_lists(lists: list[Any], samples: Sequence[int], weights: Weights) -> Any:
    kind = type(lists[0]) if type(lists[0]) in (list, tuple) else list
    lengths = [len(entries) for entries in lists]
    holds_fields = all(
        isinstance(entry, (Tensor, np.ndarray)) and entry.shape[:1] in ((), (count,))
        for entries, count in zip(lists, samples, strict=True)
        for entry in entries
    )
    if lengths == list(samples) and not holds_fields:
        return kind(_detached(entry) for entries in lists for entry in entries)
    if len(set(lengths)) == 1 and any(
        isinstance(e, (Tensor, np.ndarray, Mapping)) for e in lists[0]
    ):
        return kind(
            merge_outputs(entries, samples, weights) for entries in zip(*lists, strict=True)
        )
    return lists


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
