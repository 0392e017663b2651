"""Chooses how to send gradients from what this run's network and processors turn out to take."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_opt.core.output.report import Report
from lightning_opt.strategies.compression.choosing.cost_model import gentlest_that_pays
from lightning_opt.strategies.compression.choosing.measurements import (
    Measured,
    Scheme,
    WarmUp,
    name_of,
)
from lightning_opt.strategies.compression.choosing.network_probe import agree
from lightning_opt.strategies.compression.choosing.ramp import Ramp

LOOK = 5
"""Backward passes that are watched before the choice."""

TRIAL = 12
"""Steps after which a choice to compress is compared with the uncompressed ones before it."""


class AutoChoice:
    """Watches the warm-up, chooses once, and sees whether that pays.

    All ranks choose alike: they agree on the slowest rank's measurements, and rank 0 decides.
    Measuring takes place at the beginning of a step's reduction, when no bucket is on its way.

    Args:
        schemes: What to choose from, the gentlest for the gradients first: None, for uncompressed.
        first: Backward pass (the first is 0) that is the first to be sent as chosen.
        ramp: What to send instead of its last compressor at first, once that has shown that it
            pays.

    Attributes:
        schemes: See above.
        choice: Index of what was chosen; None during the warm-up.
        ramped: Steps that the ramp has had.
    """

    def __init__(self, schemes: Sequence[Scheme], first: int, ramp: Ramp) -> None:
        self.schemes = list(schemes)
        self._first = first
        self._ramp = ramp
        self.restore(None, 0)

    def restore(self, name: str | None, ramped: int) -> None:
        """Take the choice of a checkpoint again, or begin anew.

        Args:
            name: What :attr:`name` was; None to choose.
            ramped: See :class:`AutoChoice`.
        """
        names = [name_of(scheme) for scheme in self.schemes]
        self.choice = names.index(name) if name in names else None
        self.ramped = ramped
        self._warm_up = WarmUp()
        self._measured: Measured | None = None
        self._on_trial = False
        self._pass = -1
        self._due: int | None = self._first
        self._began = 0.0
        self._steps: deque[float] = deque(maxlen=TRIAL)
        if self.choice is not None:
            self._due = None
            rank_zero_info(f"Compressed DDP: gradients are sent as before: {name}.")

    @property
    def name(self) -> str | None:
        """What was chosen; None during the warm-up."""
        return None if self.choice is None else name_of(self.schemes[self.choice])

    def begin_step(self) -> Scheme:
        """Take note of a step's first bucket, and return how to send all of them."""
        if self._due is not None:
            now = time.perf_counter()
            if self._pass >= self._due - max(LOOK, TRIAL * self._on_trial):
                self._steps.append(now - self._began)
            self._pass += 1
            if self._pass == self._due:
                self._look()
            self._began = time.perf_counter()
        scheme = None if self.choice is None else self.schemes[self.choice]
        if scheme is self._ramp.final and not self._on_trial:
            scheme = self._ramp.at(self.ramped)
            self.ramped += 1
        return scheme

    def note(self, index: int, gradient: Tensor) -> None:
        """Take note of a bucket of the warm-up."""
        if self.choice is None and self._due is not None and self._pass >= self._due - LOOK:
            last = self._pass == self._due - 1
            self._warm_up.note(index, gradient, self._began, sample=last)

    def _look(self) -> None:
        self._due = None
        if self._on_trial:
            self._on_trial = False
            self._judge()
        elif self._warm_up.sizes:  # or there is nothing to choose for
            measured = self._measured = self._warm_up.measure(self.schemes, self._steps)
            options, seconds = zip(*measured.predicted, strict=True)
            best = gentlest_that_pays(seconds, [option.margin for option in options])
            decided = torch.tensor([best], device=self._warm_up.sample.device)
            dist.broadcast(decided, 0)
            self.choice = int(decided)
            rank_zero_info(self._summary(measured))
            if self.choice > 0:
                # The trial is of what most steps will be like, and so comes before a ramp.
                self._on_trial, self._due = True, self._pass + TRIAL + 1
        self._steps.clear()

    def _judge(self) -> None:
        """Go back to uncompressed steps if the compressed ones have taken longer."""
        assert self._measured is not None
        taken = agree([median(self._steps)], self._warm_up.sample.device)[0]
        if taken > self._measured.step:
            self.choice = 0
            rank_zero_info(
                f"Compressed DDP: compressed steps took {_ms(taken)}, uncompressed ones "
                f"{_ms(self._measured.step)}, so gradients are sent uncompressed again."
            )

    def _summary(self, measured: Measured) -> str:
        predicted = ", ".join(f"{option.name} {_ms(own)}" for option, own in measured.predicted)
        return (
            f"Compressed DDP: a collective takes {_ms(measured.link.fixed)} and "
            f"{_ms(1e6 * measured.link.slope)} a megabyte that a rank sends; an uncompressed step "
            f"takes {_ms(measured.step)}. Predicted steps: {predicted}. Chosen: {self.name}."
        )

    def report(self) -> Report | None:
        """Return what was measured and chosen; None where nothing was measured."""
        measured = self._measured
        if measured is None:
            return None
        rows = [
            {
                "scheme": option.name,
                "megabytes a step": sum(option.sent) / 1e6,
                "processor ms": 1e3 * (sum(option.before) + sum(option.after)),
                "predicted step ms": 1e3 * seconds,
                "chosen": index == self.choice,
            }
            for index, (option, seconds) in enumerate(measured.predicted)
        ]
        return Report("How gradients are sent", rows, [self._summary(measured)])


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
