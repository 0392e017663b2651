"""Rules that set a threshold for the total gradient norm from the norms that came before.

A rule holds its settings only. Its state is a plain ``dict`` made by :meth:`ClippingRule.init` and
kept by whoever applies the rule, one for each optimizer, so that a checkpoint can take it as it is.
A rule is written once for Python floats and for tensors on a device (see
:mod:`lightning_opt.core.scalars`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor, nn

from lightning_opt.core.arguments import at_least, between, fraction, positive
from lightning_opt.core.norms import GradientStep
from lightning_opt.core.scalars import (
    Condition,
    Scalar,
    isfinite,
    logical_and,
    minimum,
    sqrt,
    where,
)
from lightning_opt.core.statistics import LogBand, State, Window

NORM_EPSILON = 1e-6
"""Added to a norm before a threshold is divided by it, as in ``torch.nn.utils.clip_grad_norm_``."""


@dataclass(slots=True)
class Clip:
    """What a rule did to one step's gradients.

    Attributes:
        clipped: Share of the gradient that was over its threshold: 0 or 1 for a rule on the total
            norm, the share of tensors, units or elements for the others.
        threshold: The threshold on the total norm; None for rules that have no such thing.
        coefficient: What the gradients were multiplied with; the smallest of them where there are
            several; None where nothing was multiplied.
    """

    clipped: Scalar
    threshold: Scalar | None = None
    coefficient: Scalar | None = None


class ClippingRule(ABC):
    """Decides how much of a gradient passes.

    A subclass needs :meth:`clip`, or only :meth:`NormRule.limit` if its threshold is one on the
    total norm.
    """

    needs_whole_tensors: ClassVar[bool] = False
    """Whether the rule needs each gradient in its own shape (FSDP1 flattens it)."""

    def init(self) -> State:
        """Return the state before the first step, of plain types."""
        return {}

    def attach(self, module: nn.Module) -> None:
        """Look at the model that is going to be trained. Called before the first step."""

    def detach(self) -> None:
        """Forget the model and remove what was put on it."""

    @abstractmethod
    def clip(self, step: GradientStep, state: State) -> Clip:
        """Clip the gradients of ``step`` in place, and update ``state`` in place."""

    def __repr__(self) -> str:
        settings = ", ".join(
            f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_")
        )
        return f"{type(self).__name__}({settings})"


def tells(norm: Scalar) -> Condition:
    """Return whether ``norm`` tells anything of how large norms are; NaN, infinity and 0 do not.

    A statistic of zeros alone would be a threshold of 0, which nothing passes ever after.
    """
    return logical_and(norm > 0.0, norm < math.inf)


class NormRule(ClippingRule):
    """A rule with a threshold on the total norm of all gradients of an optimizer."""

    @abstractmethod
    def limit(self, norm: Scalar, state: State) -> Scalar:
        """Return the threshold for a step of total norm ``norm`` and take the norm into ``state``.

        Args:
            norm: The total norm, a float or a 0-dimensional tensor. It may be NaN, infinite or 0:
                such a norm must leave ``state`` as it was (see :func:`tells`).
            state: The rule's state, updated in place.

        Returns:
            The largest norm that passes; infinity lets everything pass.
        """

    def clip(self, step: GradientStep, state: State) -> Clip:
        """Multiply all gradients by ``threshold / norm`` where the norm is over the threshold.

        A gradient whose norm is NaN or infinite is left as it is.
        """
        norm = step.norms.total
        threshold = self.limit(norm, state)
        over = logical_and(norm > threshold, isfinite(norm))
        coefficient = where(over, threshold / (norm + NORM_EPSILON), 1.0)
        if isinstance(over, Tensor) or over:
            step.gradients.scale_(coefficient)
        return Clip(where(over, 1.0, 0.0), threshold, coefficient)


class FixedNorm(NormRule):
    """The total norm is at most ``max_norm``, as in ``torch.nn.utils.clip_grad_norm_``.

    Args:
        max_norm: The largest norm that passes, above 0.

    References:
        Pascanu, Mikolov and Bengio (2013), *On the difficulty of training recurrent neural
        networks*.
    """

    def __init__(self, max_norm: float = 1.0) -> None:
        self.max_norm = positive("max_norm", max_norm)

    def limit(self, norm: Scalar, state: State) -> Scalar:
        """Return ``max_norm``."""
        return self.max_norm


class MeanStd(NormRule):
    """Mean plus ``k`` standard deviations of the last ``window`` norms.

    The norm of a step is compared with those before it and joins them afterwards, so a spike does
    not raise its own threshold. With the raw history a spike raises the thresholds after it: the
    last of ten spikes in a row passes almost whole, and a lasting change of the norm is accepted
    within a few steps. The history of clipped norms is the other way round.

    Args:
        k: Standard deviations (population) above the mean, above 0.
        window: How many norms are remembered, at least 2.
        history: ``"raw"`` remembers norms as they were, ``"clipped"`` as they were passed on.
        warmup: Finite norms to see before anything is clipped, from 2 to ``window``.
    """

    def __init__(
        self,
        k: float = 2.0,
        window: int = 100,
        history: Literal["raw", "clipped"] = "raw",
        warmup: int = 10,
    ) -> None:
        self.k = positive("k", k)
        self._norms = Window(at_least("window", window, 2))
        if history not in ("raw", "clipped"):
            raise ValueError(f"history must be 'raw' or 'clipped', got {history!r}.")
        if at_least("warmup", warmup, 2) > window:
            raise ValueError(f"warmup must be at most window ({window}), got {warmup!r}.")
        self.window, self.history, self.warmup = window, history, warmup

    def init(self) -> State:
        """Return an empty history."""
        return self._norms.init()

    def limit(self, norm: Scalar, state: State) -> Scalar:
        """Return the threshold from the history, then let the norm into it."""
        self._norms.place(state, norm)
        mean, std = self._norms.mean_std(state)
        threshold = where(state["count"] >= self.warmup, mean + self.k * std, math.inf)
        passed = minimum(threshold, norm) if self.history == "clipped" else norm
        self._norms.update(state, where(tells(norm), passed, math.nan))
        return threshold


class Percentile(NormRule):
    """AutoClip: the ``percentile``-th percentile of the norms so far, that of the step included.

    With the default of 10 nine steps in ten are clipped, which normalises the gradient more than it
    guards against spikes.

    Args:
        percentile: From 0 to 100, linear between neighbours.
        window: How many norms are remembered, at least 2. None remembers all of them, as in the
            paper: eight bytes and more a step in every checkpoint.

    References:
        Seetharaman, Wichern, Pardo and Le Roux (2020), *AutoClip: Adaptive Gradient Clipping for
        Source Separation Networks*.
    """

    def __init__(self, percentile: float = 10.0, window: int | None = None) -> None:
        self.percentile = between("percentile", percentile, 0, 100)
        self._norms, self.window = Window(window), window

    def init(self) -> State:
        """Return an empty history."""
        return self._norms.init()

    def limit(self, norm: Scalar, state: State) -> Scalar:
        """Let the norm into the history and return its percentile."""
        self._norms.update(state, where(tells(norm), norm, math.nan))
        return self._norms.quantile(state, self.percentile / 100.0)


class ZClip(NormRule):
    """Norms with a z-score above ``z`` shrink to below the band: the further out, the smaller.

    The threshold of a norm with z-score s > z is ``mean + z * std * (z / s)``, with mean and
    variance averaged exponentially over the norms that were passed on. Thresholds are those of the
    published package (zclip 1.0, adaptive scaling). It differs in that a norm that is NaN, infinite
    or 0 changes nothing, during warm-up too.

    Args:
        alpha: Share of the old mean and variance that is kept at each step, in [0, 1).
        z: The z-score from which a norm is clipped, above 0.
        warmup: Norms from which the first mean and variance are taken, at least 2. Until then only
            ``max_norm`` clips.
        max_norm: A fixed bound beside the adaptive one; None for no such bound. The paper has 1.0.

    References:
        Kumar, Owen, Roy Chowdhury and Güra (2025), *ZClip: Adaptive Spike Mitigation for LLM
        Pre-Training*.
    """

    def __init__(
        self,
        alpha: float = 0.97,
        z: float = 2.5,
        warmup: int = 25,
        max_norm: float | None = None,
    ) -> None:
        self.alpha, self.z = fraction("alpha", alpha), positive("z", z)
        self.warmup = at_least("warmup", warmup, 2)
        self.max_norm = None if max_norm is None else positive("max_norm", max_norm)

    def init(self) -> State:
        """Return the state before any norm."""
        return {"count": 0, "mean": 0.0, "var": 0.0}

    def limit(self, norm: Scalar, state: State) -> Scalar:
        """Return the threshold for this norm, then average the norm that passes."""
        count, mean, var = state["count"], state["mean"], state["var"]
        warm = count < self.warmup
        std = sqrt(var)
        score = (norm - mean) / (std + 1e-6)
        over = logical_and(score > self.z, count >= self.warmup)
        adaptive = where(over, mean + self.z * std * self.z / where(over, score, 1.0), math.inf)
        passed = where(over, adaptive, norm)

        # The plain mean and population variance of the warm-up, then exponential averages.
        weight = where(warm, 1.0 / (count + 1), 1.0 - self.alpha)
        new_mean = mean + weight * (passed - mean)
        deviation = (passed - new_mean) * where(warm, passed - mean, passed - new_mean)
        new_var = (1.0 - weight) * var + weight * deviation
        taken = logical_and(tells(norm), isfinite(new_var))  # the square of 1e155 overflows
        state["mean"] = where(taken, new_mean, mean)
        state["var"] = where(taken, new_var, var)
        state["count"] = count + where(taken, 1, 0)
        return adaptive if self.max_norm is None else minimum(adaptive, self.max_norm)


class Robust(LogBand, NormRule):
    """The default: the norms' own :class:`~lightning_opt.core.statistics.LogBand` as threshold.

    No spike widens that band, and one spike or ten leave the threshold where it was. If
    ``patience`` steps in a row are clipped, the norm has moved for good (a new phase of training, a
    changed learning rate), and the band moves to their level. That lets a run through that truly
    diverges, 25 steps late: put a guard behind it.

    A training begins with norms that fall, often tenfold within a hundred steps; the band follows
    them down in its warm-up.

    Args:
        k: Standard deviations above the mean, above 0. At 3 a steady run has one step in 400
            clipped.
        decay: Share of the old estimate that is kept at each step, in [0, 1).
        winsor: Deviations from the mean beyond which a norm counts as no further, above 0.
        warmup: Norms to see before anything is clipped, at least 2.
        patience: Clipped steps in a row after which the new level is accepted; None for never.
        min_std: The band's deviation is at least this (of the natural logarithm), so that runs with
            hardly any noise are not clipped at every turn. 0.1 lets through 1.35 times the mean.
    """
