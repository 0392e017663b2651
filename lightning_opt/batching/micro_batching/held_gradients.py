"""Gradients of earlier batches of an accumulation window, while a batch may be taken back."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


class HeldGradients:
    """Gradients of earlier batches of an accumulation window, held aside while a batch runs.

    So a failed attempt has nothing to spoil. They are added to those of the batch at the end of its
    last backward pass, which is the work that autograd would have had, and kept until the batch can
    no longer fail; the memory is that of a second gradient. At the first batch of a window there
    are none.

    Args:
        parameters: All of them.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._held = [(p, p.grad) for p in self._parameters if p.grad is not None]
        self._added = False
        if self._held:
            self.drop()

    def drop(self) -> None:
        """Forget the gradients of the batch."""
        self._added = False
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def add_up(self) -> None:
        """Have each parameter's gradient be what is held aside and that of the batch."""
        self._added = True
        olds, news = [], []
        for parameter, old in self._held:
            new = parameter.grad
            if new is None:
                parameter.grad = old
            elif old.is_sparse or new.is_sparse:
                parameter.grad = old + new
            else:
                olds.append(old)
                news.append(new)
        if olds:
            torch._foreach_add_(news, olds)

    def end(self) -> None:
        """End the batch: put back what was not added up, and let go of the rest."""
        if not self._added:
            for parameter, old in self._held:
                parameter.grad = old
        self._held = []
