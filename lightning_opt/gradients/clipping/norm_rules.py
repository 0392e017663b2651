"""Rules that set a threshold for the total gradient norm from the norms that came before.

A rule holds its settings only. Its state is a plain ``dict`` made by :meth:`ClippingRule.init` and
kept by whoever applies the rule, one for each optimizer, so that a checkpoint can take it as it is.
On a CPU a rule gets Python floats. On a device it gets 0-dimensional tensors, where each operator
costs a launch whatever it does: what is done there is a fixed polynomial of few operators.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from lightning_opt.core.arguments import at_least, between, fraction, one_of, positive
from lightning_opt.core.numerics.norms import GradientStep
from lightning_opt.core.numerics.scalars import DeviceCopy, Scalar, constant
from lightning_opt.core.numerics.statistics import LogBand, State, Window


@dataclass(slots=True)
class Clip:
    """What a rule did to one step's gradients.

    Attributes:
        clipped: Share of the gradient that was over its threshold: 0 or 1 for a rule on the total
            norm, the share of tensors, units or elements for the others. None says that it is
            whether the coefficient is below 1, which nobody has to compute at every step.
        threshold: The threshold on the total norm; None for rules that have no such thing.
        coefficient: What the gradients were multiplied with; the smallest of them where there are
            several; None where nothing was multiplied.
    """

    clipped: Scalar | None = None
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


class NormRule(ClippingRule):
    """A rule with a threshold on the total norm of all gradients of an optimizer."""

    @abstractmethod
    def limit(self, norm: Scalar, state: State) -> Scalar:
        """Return the threshold for a step of total norm ``norm`` and take the norm into ``state``.

        Args:
            norm: The total norm, a float or a 0-dimensional tensor. It is 0 where the gradient is,
                and where it is not finite: such a norm must leave ``state`` as it was. A statistic
                of zeros would be a threshold that nothing passes ever after.
            state: The rule's state, updated in place.

        Returns:
            The largest norm that passes; infinity lets everything pass.
        """

    def clip(self, step: GradientStep, state: State) -> Clip:
        """Multiply all gradients by ``threshold / norm`` where the norm is over the threshold.

        A gradient whose norm is NaN or infinite is left as it is.
        """
        norm = step.norms.total
        if isinstance(norm, Tensor):
            norm = norm.nan_to_num(0.0, 0.0)
            threshold = self.limit(norm, state)
            one = state.get("one")
            if one is None or one.device != norm.device:
                one = state["one"] = DeviceCopy(norm.device, one=1.0)
            # Without a norm the ratio is infinity, or NaN for a threshold of 0, which `fmin` passes
            # over.
            coefficient = torch.fmin(threshold / norm, one.tensors["one"])
            step.gradients.scale_(coefficient)
            return Clip(None, threshold, coefficient)
        norm = norm if norm < math.inf else 0.0
        threshold = self.limit(norm, state)
        if not norm > threshold:
            return Clip(0.0, threshold, 1.0)
        step.gradients.scale_(threshold / norm)
        return Clip(1.0, threshold, threshold / norm)


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
        self.history = one_of("history", history, ("raw", "clipped"))
        if at_least("warmup", warmup, 2) > window:
            raise ValueError(f"warmup must be at most window ({window}), got {warmup!r}.")
        self.window, self.warmup = window, warmup

    def init(self) -> State:
        """Return an empty history."""
        return self._norms.init()

    def limit(self, norm: Scalar, state: State) -> Scalar:
        """Return the threshold from the history, then let the norm into it."""
        self._norms.place(state, norm)
        mean, std = self._norms.mean_std(state)
        warm, passed, threshold = state["count"] < self.warmup, norm, mean
        if isinstance(norm, Tensor):
            threshold = torch.add(mean, std, alpha=self.k).masked_fill_(warm, math.inf)
            passed = norm.minimum(threshold) if self.history == "clipped" else norm
        else:
            threshold = math.inf if warm else mean + self.k * std
            passed = min(norm, threshold) if self.history == "clipped" else norm
        self._norms.update(state, passed)
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
        self._norms.update(state, norm)
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
        self, alpha: float = 0.97, z: float = 2.5, warmup: int = 25, max_norm: float | None = None
    ) -> None:
        self.alpha, self.z = fraction("alpha", alpha), positive("z", z)
        self.warmup = at_least("warmup", warmup, 2)
        self.max_norm = None if max_norm is None else positive("max_norm", max_norm)

    def init(self) -> State:
        """Return the state before any norm: mean, variance and count."""
        return {"moments": [0.0, 0.0, 0.0]}

    def limit(self, norm: Scalar, state: State) -> Scalar:
        """Return the threshold for this norm, then average the norm that passes."""
        if isinstance(norm, Tensor):
            return self._limit_on_device(norm, state)
        mean, var, count = map(float, state["moments"])
        std, threshold = math.sqrt(var), math.inf
        score = (norm - mean) / (std + 1e-6)
        if score > self.z and count >= self.warmup:
            threshold = mean + self.z * std * self.z / score
        keep, weight, gain = self._weights(count)
        away = min(norm, threshold) - mean
        new_var = keep * var + gain * (away * away)
        if norm > 0.0 and new_var < math.inf:  # the square of 1e155 overflows
            state["moments"] = [mean + weight * away, new_var, count + 1.0]
        return threshold if self.max_norm is None else min(threshold, self.max_norm)

    def _weights(self, count: float) -> tuple[float, float, float]:
        """Return what is kept of the variance, and the weights of a deviation and of its square.

        They make the plain mean and population variance in the warm-up, then exponential averages.
        """
        weight = 1.0 / (count + 1) if count < self.warmup else 1.0 - self.alpha
        square = weight * (1.0 - weight)
        return 1.0 - weight, weight, square if count < self.warmup else square * (1.0 - weight)

    def _limit_on_device(self, norm: Tensor, state: State) -> Tensor:
        """Do the same as ``moments = keep * moments + gain * deviation ** [1, 2, 0]``."""
        copy = state.get("device")
        if copy is None or copy.device != norm.device:
            table = []
            for count in range(self.warmup + 1):
                keep, weight, gain = self._weights(count)
                warm = count < self.warmup
                bound = math.inf if warm else self.z
                table.append([1.0, keep, 1.0, weight, gain, float(warm), bound])
            copy = DeviceCopy(norm.device, table=table, powers=[1.0, 2.0, 0.0])
            state["device"], state["moments"] = copy, constant(state["moments"], norm.device)
            state["moments"][2].clamp_(max=self.warmup)
        before = state["moments"]
        weights = copy.tensors["table"].index_select(0, before[2:].long())[0]
        mean, std = before[0], before[1].sqrt()
        score = (norm - mean) / (std + 1e-6)
        threshold = torch.addcdiv(mean, std, score, value=self.z * self.z)
        threshold = threshold.masked_fill_(score <= weights[6], math.inf)
        powers = (norm.minimum(threshold) - mean).pow(copy.tensors["powers"])
        after = torch.addcmul(before * weights[:3], weights[3:6], powers)
        taken = after[1] < norm * math.inf  # neither a norm of 0 nor a square that overflows
        state["moments"] = torch.where(taken, after, before)
        return threshold if self.max_norm is None else threshold.clamp(max=self.max_norm)


class Robust(LogBand, NormRule):
    """The default: clip above the upper edge of a band around the usual norms.

    See :class:`~lightning_opt.core.numerics.statistics.LogBand`.

    No spike widens that band, and one spike or ten leave the threshold where it was. If
    ``patience`` steps in a row are clipped, the norm has moved for good (a new phase of training, a
    changed learning rate), and the band moves to their level. That lets a run through that truly
    diverges, 25 steps late: put a guard behind it.

    A run begins with norms that fall, often tenfold within a hundred steps; the band follows
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
