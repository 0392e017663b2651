"""Fixes random numbers and disables dropout, to compare a batch with its parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ONLY_FLOAT_IS_DROPOUT = (
    "scaled_dot_product_attention",
    "lstm",
    "gru",
    "rnn_tanh",
    "rnn_relu",
)
"""Functions with exactly one positional float argument, the dropout rate."""


class WithoutDropout(TorchFunctionMode):
    """Turns dropout off, including functional calls."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        if "dropout" in name and "native" not in name:
            return args[0] if args else kwargs["input"]
        if name in ONLY_FLOAT_IS_DROPOUT:
            args = tuple(0.0 if isinstance(value, float) else value for value in args)
            kwargs.pop("dropout_p", None)
        elif name == "multi_head_attention_forward":
            kwargs["training"] = False
        return func(*args, **kwargs)


class FixedDraws(TorchDispatchMode):
    """Makes torch draw the same random numbers for a sample in a part as in the whole batch.

    The first step, on the whole batch, records torch's draws. In later steps, the n-th drawn tensor
    is overwritten with the part's rows of the n-th recorded tensor. A drawn permutation is replaced
    by the reversed order, because a permutation of the whole batch has no rows for its parts.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorded: list[tuple[Tensor, list[Any]]] = []
        self._samples = 0

    def begin(self, start: int, samples: int) -> None:
        """Begin a step on ``samples`` samples, from index ``start`` of the whole batch on."""
        self._records = self._samples == 0
        self._samples = self._samples or samples  # set by the first step
        self._start, self._part, self._drawn = start, samples, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags or not isinstance(result, Tensor):
            return result
        if func is torch.ops.aten.randperm.default:
            return result.copy_(torch.arange(len(result)).flip(0))
        # Draws with other limits, such as indices into a batch of another size, are kept.
        limits = [value for value in args if isinstance(value, (int, float))]
        if func is torch.ops.aten.multinomial.default:
            limits = [args[0].shape[-1]]
        if self._records:
            self._recorded.append((result.detach().clone(), limits))
        elif self._drawn < len(self._recorded) and self._recorded[self._drawn][1] == limits:
            rows = self._rows(self._recorded[self._drawn][0], result.shape)
            if rows.shape == result.shape:
                result.copy_(rows)
        self._drawn += 1
        return result

    def _rows(self, recorded: Tensor, shape: torch.Size) -> Tensor:
        """Return the rows of this part, along each dimension that grows with the samples."""
        for dimension, (whole, part) in enumerate(zip(recorded.shape, shape, strict=False)):
            per_sample = part // self._part
            expected = self._samples * per_sample, self._part * per_sample
            if whole != part and (whole, part) == expected:
                recorded = recorded.narrow(dimension, self._start * per_sample, part)
        return recorded
