"""Chooses how to send gradients from what this run's network and processors turn out to take."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_opt.core.report import Report
from lightning_opt.strategies.compression.choosing.cost_model import (
    LATE_MARGIN,
    Choice,
    choose,
    choose_stages,
)
from lightning_opt.strategies.compression.choosing.measurements import (
    Measured,
    Scheme,
    WarmUp,
    name_of,
)
from lightning_opt.strategies.compression.choosing.network_probe import agree, measure_network
from lightning_opt.strategies.compression.choosing.ramp import Ramp

LOOK = 5
"""Backward passes that are watched before the first choice."""

TRIAL = 12
"""Steps after which a choice to compress is compared with the uncompressed ones before it."""

HASTY = 0.1
"""Seconds that one probe of the network may take once the run is under way."""

SLOWER = 1.5
"""How many times slower a network must get until what did not pay is tried again."""


class AutoChoice:
    """Watches the warm-up, chooses, sees whether that pays, and looks again from time to time.

    All ranks choose alike: they agree on the slowest rank's measurements, and rank 0 decides.
    Measuring takes place at the beginning of a step's reduction, when no bucket is on its way.

    Args:
        schemes: What to choose from, the gentlest for the gradients first. If that is None, which
            is uncompressed, a choice that turns out not to pay is taken back.
        first: Backward pass (the first is 0) that is the first to be sent as chosen.
        every: Passes from one look at the network to the next.
        staged: Says of a scheme whether its messages travel in two stages.
        ramp: What to send instead of the last scheme at first, once that has shown that it pays.

    Attributes:
        choice: The latest choice; None during the warm-up.
        measured: What it was based on; None during the warm-up.
        sent: Steps that the last scheme has had, but for trials.
        late_margin: Share of a step that must be saved by what sends most elements late.
    """

    def __init__(
        self,
        schemes: Sequence[Scheme],
        *,
        first: int,
        every: int,
        staged: Callable[[Scheme], bool],
        ramp: Ramp | None = None,
    ) -> None:
        self.choice: Choice | None = None
        self.measured: Measured | None = None
        self.sent = 0
        self.late_margin = LATE_MARGIN
        self._schemes = list(schemes)
        self._every = every
        self._staged = staged
        self._ramp = ramp
        self._stages: list[Scheme] = []
        self._warm_up: WarmUp | None = WarmUp()
        self._watch_from = first - LOOK
        self._due = first
        self._on_trial = False
        self._refuted = 0.0
        self._pass = -1
        self._began = 0.0
        self._steps: deque[float] = deque(maxlen=TRIAL)

    # --- what the reduction asks ------------------------------------------------------------------

    def begin_step(self, landed: float) -> None:
        """Take note of a step's first bucket; every now and then, measure.

        Args:
            landed: When the last bucket of the step before had arrived, by ``perf_counter``.
        """
        now = time.perf_counter()
        if self._pass >= self._watch_from:
            self._steps.append(now - self._began)
            if self._warm_up is not None:
                self._warm_up.end_step(landed - self._began)
        self._pass += 1
        if self._pass == self._due:
            self._look()
            self._steps.clear()
            now = time.perf_counter()
        self._began = now
        last = self.choice is not None and self.choice.best == len(self._schemes) - 1
        if last and not self._on_trial:
            self.sent += 1

    def scheme(self, index: int, gradient: Tensor) -> Scheme:
        """Return how to send a bucket; during the warm-up, take note of it."""
        if self.choice is None or self.measured is None:
            if self._warm_up is not None and self._pass >= self._watch_from:
                last = self._pass == self._due - 1
                self._warm_up.note(index, gradient, self._began, sample=last)
            return None
        place = self.measured.places.get(index)
        option = self.choice.best if place is None else self.choice.plan[place]
        if option == len(self._schemes) - 1 and self._ramp is not None and not self._on_trial:
            stage = self._ramp.stage(max(self.sent - 1, 0))
            if stage is not None:
                return self._stages[stage]
        return self._schemes[option]

    @property
    def mixed(self) -> bool:
        """Whether buckets are sent in different ways."""
        return self.choice is not None and len(set(self.choice.plan)) > 1

    # --- choosing ---------------------------------------------------------------------------------

    def _look(self) -> None:
        if self._warm_up is not None and self._warm_up.is_empty:
            return  # there is nothing to choose for
        before = 0 if self.choice is None else self.choice.best
        on_trial, self._on_trial = self._on_trial, False
        if self._warm_up is not None:
            ramp = self._ramp
            stages = [] if ramp is None or ramp.steps == 0 else ramp.stages
            self.measured = self._warm_up.measure(
                self._schemes,
                self._staged,
                self._steps,
                stages=stages,
                late_margin=self.late_margin,
            )
            self._warm_up = None
            self._choose(self.measured)
        elif on_trial:
            self._judge()
        elif self.measured is not None:
            device, largest = self.measured.device, self.measured.largest
            step = agree([median(self._steps)], device)[0] if self._is_uncompressed else None
            self.measured.renew(measure_network(device, largest, HASTY), step)
            self._choose(self.measured)
        assert self.choice is not None
        self._due = self._pass + self._every
        if self.choice.best not in (before, 0) and self._schemes[0] is None:
            # The trial is of what most steps will be like, and so comes before a ramp.
            self._on_trial = True
            self._due = self._pass + TRIAL + 1

    @property
    def _is_uncompressed(self) -> bool:
        return self.choice is not None and self._schemes[0] is None and not any(self.choice.plan)

    def _choose(self, measured: Measured) -> None:
        choice = choose(
            measured.ready,
            measured.options,
            measured.link,
            compute=measured.compute,
            current=None if self.choice is None else self.choice.best,
        )
        if measured.link.slope < SLOWER * self._refuted:
            choice = uncompressed(choice)
        stages = choose_stages(
            measured.ready, measured.options, measured.stages, measured.link, measured.compute
        )
        decided = torch.tensor([choice.best, *choice.plan, *stages], device=measured.device)
        dist.broadcast(decided, 0)
        best, *plan = decided.tolist()
        plan, stages = plan[: len(choice.plan)], plan[len(choice.plan) :]
        if self._ramp is not None:
            everything = [*self._schemes, *self._ramp.stages]
            self._stages = [everything[index] for index in stages]
        changed = self.choice is None or best != self.choice.best
        self.choice = Choice(best, plan, choice.seconds, choice.planned)
        if changed:
            rank_zero_info(self._summary(measured))

    def _judge(self) -> None:
        """Go back to uncompressed steps if the compressed ones have taken longer."""
        assert self.measured is not None
        assert self.choice is not None
        taken = agree([median(self._steps)], self.measured.device)[0]
        if taken > self.measured.step:
            self._refuted = self.measured.link.slope
            self.choice = uncompressed(self.choice)
            rank_zero_info(
                f"Compressed DDP: compressed steps took {_ms(taken)}, uncompressed ones "
                f"{_ms(self.measured.step)}, so gradients are sent uncompressed again."
            )

    # --- telling ----------------------------------------------------------------------------------

    def _summary(self, measured: Measured) -> str:
        assert self.choice is not None
        link = measured.link
        predicted = ", ".join(
            f"{option.name} {_ms(seconds)}"
            for option, seconds in zip(measured.options, self.choice.seconds, strict=True)
        )
        plan = Counter(measured.options[index].name for index in self.choice.plan)
        chosen = ", ".join(f"{count} {name}" for name, count in plan.items())
        if self._is_uncompressed:
            chosen += "; fallback='never' would compress in any case"
        if self._ramp is not None and self._stages and len(self._schemes) - 1 in self.choice.plan:
            stages = ", ".join(map(name_of, self._stages))
            chosen += f", after a ramp of {self._ramp.steps} steps: {stages}"
        return (
            f"Compressed DDP: a collective takes {_ms(link.fixed)} and {_ms(1e6 * link.slope)} a "
            f"megabyte that a rank sends; an uncompressed step takes {_ms(measured.step)}. "
            f"Predicted steps: {predicted}. Chosen for the {len(self.choice.plan)} buckets: "
            f"{chosen}."
        )

    def report(self) -> Report | None:
        """Return what was measured and chosen; None during the warm-up."""
        if self.choice is None or self.measured is None:
            return None
        plan = Counter(self.choice.plan)
        rows = [
            {
                "scheme": option.name,
                "megabytes a step": sum(option.sent) / 1e6,
                "processor ms": 1e3 * (sum(option.before) + sum(option.after)),
                "predicted step ms": 1e3 * seconds,
                "buckets": plan.get(index, 0),
            }
            for index, (option, seconds) in enumerate(
                zip(self.measured.options, self.choice.seconds, strict=True)
            )
        ]
        return Report("How gradients are sent", rows, [self._summary(self.measured)])


def uncompressed(choice: Choice) -> Choice:
    """Return the same with the first option for all."""
    return Choice(0, [0] * len(choice.plan), choice.seconds, choice.seconds[0])


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
