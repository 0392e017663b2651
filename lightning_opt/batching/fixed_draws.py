"""Random numbers and dropout in a check that compares a batch with its parts."""

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
"""Functions whose only positional argument that is a float is the dropout rate."""


class WithoutDropout(TorchFunctionMode):
    """Turns dropout off, also where modules call it as a function."""

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
    """Gives each part of a batch torch's random numbers of its samples in the whole batch.

    The first step draws for the whole batch. In later steps, the n-th tensor that is drawn gets
    the rows of the n-th tensor of the first step. Permutations reverse their order, because a
    permutation of the whole batch has no rows for its parts.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorded: list[tuple[Tensor, list[Any]]] = []
        self._samples = 0

    def begin(self, start: int, samples: int) -> None:
        """Begin a step on ``samples`` samples, of which the first is number ``start``."""
        self._records = self._samples == 0
        self._samples = self._samples or samples  # of the first step
        self._start, self._part, self._drawn = start, samples, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags or not isinstance(result, Tensor):
            return result
        if func is torch.ops.aten.randperm.default:
            return result.copy_(torch.arange(len(result)).flip(0))
        # Indices into a batch depend on its size.
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
        """Return the rows of this part, along each dimension that depends on the samples."""
        for dimension, (whole, part) in enumerate(zip(recorded.shape, shape, strict=False)):
            per_sample = part // self._part
            expected = self._samples * per_sample, self._part * per_sample
            if whole != part and (whole, part) == expected:
                recorded = recorded.narrow(dimension, self._start * per_sample, part)
        return recorded
