"""What the micro-batches of one batch logged and returned, as the whole batch would have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_opt.core.modules.patching import replaced

if TYPE_CHECKING:
    import lightning.pytorch as pl

_ARGUMENTS = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx")
"""Of ``LightningModule.log`` behind name and value, in case someone gives them by position."""

Weights = Sequence[Any]
"""One float or tensor a micro-batch."""


class LogRecorder:
    """Listens to ``self.log`` in ``training_step``, and logs once what all micro-batches said.

    Args:
        module: Whose ``log`` it is.
        sums: Names of values that are logged as means and are sums over samples; it may grow.
    """

    def __init__(self, module: pl.LightningModule, sums: Set[str]) -> None:
        self._module, self._sums = module, sums
        self.forget()

    def forget(self) -> None:
        """Forget everything unsaid."""
        self._calls: dict[tuple[str, int], list[tuple[int, Any, dict[str, Any]]]] = {}

    @contextmanager
    def listening(self, part: int) -> Iterator[None]:
        """Take down what is logged within, for this micro-batch."""
        counts: dict[str, int] = {}

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            kwargs.update(zip(_ARGUMENTS, args, strict=False))
            counts[name] = counts.get(name, -1) + 1
            if isinstance(value, Metric):
                value = (value, value._forward_cache)
            elif isinstance(value, Tensor):
                value = value.detach()
            self._calls.setdefault((name, counts[name]), []).append((part, value, kwargs))

        with replaced(self._module, log=log):
            yield

    def tell(self, samples: Sequence[int], weights: Weights) -> None:
        """Log it.

        Args:
            samples: Of each micro-batch.
            weights: Of each micro-batch in a mean.
        """
        # Lightning takes what is logged for that of the hook that it notes here.
        module, before = self._module, self._module._current_fx_name
        module._current_fx_name = "training_step"
        try:
            for (name, _), calls in self._calls.items():
                self._log(name, calls, samples, weights)
        finally:
            module._current_fx_name = before
        self.forget()

    def _log(self, name: str, calls: Any, samples: Sequence[int], weights: Weights) -> None:
        parts, values, arguments = zip(*calls, strict=True)
        kwargs = dict(arguments[0])
        samples, weights = [samples[part] for part in parts], [weights[part] for part in parts]
        if kwargs.get("batch_size") is not None and len(parts) > 1:
            sizes = [other["batch_size"] for other in arguments]
            kwargs["batch_size"] = whole_batch_size(sizes, samples)
            if sizes != samples and kwargs["batch_size"] == sum(sizes):
                weights = sizes  # such as tokens: what the values are means over
        if isinstance(values[0], tuple):
            metric: Metric = values[0][0]
            metric._forward_cache = _mean_of_caches([cache for _, cache in values], weights)
            self._module.log(name, metric, **kwargs)
        else:
            reduction = "sum" if name in self._sums else kwargs.get("reduce_fx", "mean")
            self._module.log(name, combine(values, weights, reduction), **kwargs)


def whole_batch_size(sizes: Sequence[int], samples: Sequence[int]) -> int:
    """Return what ``batch_size`` would have been for the whole, given those of the parts.

    Counts (of samples, of tokens) add up; a constant of 1 or of the whole batch stays what it is.
    """
    for constant in (1, sum(samples)):
        if list(sizes) != list(samples) and all(size == constant for size in sizes):
            return constant
    return sum(sizes)


def combine(values: Sequence[Any], weights: Weights, reduction: Any = "mean") -> Any:
    """Return the value of the whole batch, given those of its parts.

    Args:
        values: Numbers, or tensors of one element.
        weights: Used for the mean.
        reduction: As in ``LightningModule.log``: ``"mean"``, ``"sum"``, ``"min"``, ``"max"`` or
            torch's functions of these names.
    """
    if len(values) == 1:
        return values[0]
    name = str(getattr(reduction, "__name__", reduction)).lower()
    if name == "sum":
        return sum(values[1:], values[0])
    if name in ("min", "max"):
        if isinstance(values[0], Tensor):
            return getattr(torch.stack(list(values)), name)()
        return {"min": min, "max": max}[name](values)
    weighted = [_wide(value) * weight for value, weight in zip(values, weights, strict=True)]
    total = sum(weights[1:], weights[0])
    return sum(weighted[1:], weighted[0]) / total


def _wide(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype not in (torch.float32, torch.float64):
        return value.float()
    return value


def _mean_of_caches(caches: Sequence[Any], weights: Weights) -> Any:
    """Return the value of a metric over the batch: the mean, which is exact for means alone."""
    if all(isinstance(cache, Tensor) and cache.ndim == 0 for cache in caches):
        return combine(caches, weights)
    return caches[-1]


def merge_outputs(outputs: Sequence[Any], samples: Sequence[int], weights: Weights) -> Any:
    """Return what ``training_step`` would have returned beside the loss, given that of its parts.

    Tensors and lists with one entry a sample are joined, floating-point scalars averaged, dicts,
    lists and tuples merged entry by entry, and of what is equal in all parts there is one. The rest
    becomes a list with one entry a micro-batch. Tensors are detached.
    """
    first = outputs[0]
    if isinstance(first, Mapping):
        if all(isinstance(other, Mapping) and other.keys() == first.keys() for other in outputs):
            return {
                key: merge_outputs([other[key] for other in outputs], samples, weights)
                for key in first
            }
    elif isinstance(first, Tensor):
        return _merge_tensors([_detached(other) for other in outputs], samples, weights)
    elif isinstance(first, float):
        return combine(outputs, weights)
    elif isinstance(first, (list, tuple)):
        if any(isinstance(item, (Tensor, Mapping)) for item in first):
            if len({len(other) for other in outputs}) == 1:
                merged = [
                    merge_outputs(entries, samples, weights)
                    for entries in zip(*outputs, strict=True)
                ]
                return type(first)(merged) if type(first) in (list, tuple) else merged
        elif [len(other) for other in outputs] == list(samples):
            return type(first)(item for other in outputs for item in other)
    elif all(type(other) is type(first) and other == first for other in outputs):
        return first
    return [_detached(other) for other in outputs]


def _merge_tensors(tensors: list[Any], samples: Sequence[int], weights: Weights) -> Any:
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        return tensors
    if all(t.ndim and len(t) == n for t, n in zip(tensors, samples, strict=True)):
        return torch.cat(tensors)
    if all(t.ndim == 0 and t.is_floating_point() for t in tensors):
        return combine(tensors, weights).to(tensors[0].dtype)
    return tensors


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
