"""Rules that compute a threshold for the total gradient norm from earlier norms.

A rule holds only its settings. Each optimizer has its own state, a plain ``dict`` from
:meth:`ClippingRule.init` that a checkpoint can store as it is. Norms are Python floats on a CPU
and 0-dimensional tensors on a device, where each operator costs a kernel launch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from lightning_opt.core.arguments import (
    check_at_least,
    check_between,
    check_fraction,
    check_one_of,
    check_positive,
)
from lightning_opt.core.numerics.norms import GradientStep
from lightning_opt.core.numerics.scalars import DeviceCache, Scalar, constant, where
from lightning_opt.core.numerics.statistics import LogBand, State, Window


@dataclass(slots=True)
class Clip:
    """The result of clipping one step's gradients.

    Attributes:
        clipped: Share that was clipped: 0 or 1 for a rule on the total norm, else a share of
            tensors or units. None means 1 if the coefficient is below 1, else 0.
        threshold: The threshold on the total norm; None for rules without one.
        coefficient: The factor on the gradients, the smallest if there are several; None for rules
            that do not multiply.
    """

    clipped: Scalar | None = None
    threshold: Scalar | None = None
    coefficient: Scalar | None = None


class ClippingRule(ABC):
    """Limits the size of gradients. Subclasses implement :meth:`clip`."""

    needs_whole_tensors: ClassVar[bool] = False
    """Whether the rule needs each gradient in its own shape (FSDP1 flattens it)."""

    def init(self) -> State:
        """Return the state before the first step, as plain types."""
        return {}

    def attach(self, module: nn.Module) -> None:
        """Inspect the model. Called before the first step."""

    def detach(self) -> None:
        """Drop references to the model."""

    @abstractmethod
    def clip(self, step: GradientStep, state: State) -> Clip:
        """Clip the gradients of ``step`` in place, and update ``state`` in place."""

    def __repr__(self) -> str:
        settings = ", ".join(
            f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_")
        )
        return f"{type(self).__name__}({settings})"


class NormRule(ClippingRule):
    """A rule with a threshold on the total norm of an optimizer's gradients."""

    @abstractmethod
    def limit(self, norm: Scalar, state: State) -> Scalar:
        """Return the threshold for a step of total norm ``norm``, and add the norm to ``state``.

        Args:
            norm: The total norm, a float or a 0-dimensional tensor. A non-finite norm is passed
                as 0. A norm of 0 must not change ``state``: a statistic of zeros would clip every
                later gradient to 0.
            state: The rule's state, updated in place.

        Returns:
            The largest norm that is not clipped; infinity for no clipping.
        """

    def clip(self, step: GradientStep, state: State) -> Clip:
        """Multiply all gradients by ``threshold / norm`` if the norm exceeds the threshold.

        Gradients with a NaN or infinite norm stay unchanged.
        """
        norm = step.norms.total
        if isinstance(norm, Tensor):
            norm = norm.nan_to_num(0.0, 0.0)
            threshold = self.limit(norm, state)
            cache = state.get("one")
            if cache is None or cache.device != norm.device:
                cache = state["one"] = DeviceCache(norm.device, one=1.0)
            # A norm of 0 gives infinity, or NaN if the threshold is 0. `fmin` then returns 1.
            coefficient = torch.fmin(threshold / norm, cache.tensors["one"])
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
        max_norm: The largest norm that is not clipped, above 0.

    References:
        Pascanu, Mikolov and Bengio (2013), *On the difficulty of training recurrent neural
        networks*.
    """

    def __init__(self, max_norm: float = 1.0) -> None:
        self.max_norm = check_positive("max_norm", max_norm)

    def limit(self, norm: Scalar, state: State) -> Scalar:
        """Return ``max_norm``."""
        return self.max_norm


class MeanStd(NormRule):
    """Clips above the mean plus ``k`` standard deviations of the last ``window`` norms.

    A norm is compared with earlier norms, so a spike does not raise its own threshold. With the raw
    history a spike raises later thresholds: the tenth spike in a row is hardly clipped, and a new
    level of the norm is accepted within a few steps. With the clipped history all ten are clipped,
    and a new level is accepted slowly.

    Args:
        k: Standard deviations (population) above the mean, above 0.
        window: Number of norms to keep, at least 2.
        history: ``"raw"`` keeps norms before clipping, ``"clipped"`` after clipping.
        warmup: Finite norms before the first clipping, from 2 to ``window``.
    """

    def __init__(
        self,
        k: float = 2.0,
        window: int = 100,
        history: Literal["raw", "clipped"] = "raw",
        warmup: int = 10,
    ) -> None:
        self.k = check_positive("k", k)
        self._norms = Window(check_at_least("window", window, 2))
        self.history = check_one_of("history", history, ("raw", "clipped"))
        if check_at_least("warmup", warmup, 2) > window:
            raise ValueError(f"warmup must be at most window ({window}), got {warmup!r}.")
        self.window, self.warmup = window, warmup

    def init(self) -> State:
        """Return an empty history."""
        return self._norms.init()

    def limit(self, norm: Scalar, state: State) -> Scalar:
        """Return the threshold from the history, then add the norm to it."""
        self._norms.place(state, norm)
        usual = self._norms.mean_plus_std(state, self.k)
        threshold = where(state["count"] < self.warmup, math.inf, usual)
        kept = where(norm > threshold, threshold, norm) if self.history == "clipped" else norm
        self._norms.update(state, kept)
        return threshold


class Percentile(NormRule):
    """AutoClip: the ``percentile``-th percentile of the norms so far, including the current one.

    With the default of 10 the rule clips nine of ten steps. This normalises the gradient rather
    than removing spikes.

    Args:
        percentile: From 0 to 100, interpolated linearly.
        window: Number of norms to keep, at least 2. None keeps all of them, as in the paper. Each
            step then adds at least eight bytes to every checkpoint.

    References:
        Seetharaman, Wichern, Pardo and Le Roux (2020), *AutoClip: Adaptive Gradient Clipping for
        Source Separation Networks*.
    """

    def __init__(self, percentile: float = 10.0, window: int | None = None) -> None:
        self.percentile = check_between("percentile", percentile, 0, 100)
        self._norms, self.window = Window(window), window

    def init(self) -> State:
        """Return an empty history."""
        return self._norms.init()

    def limit(self, norm: Scalar, state: State) -> Scalar:
        """Add the norm to the history and return the percentile."""
        self._norms.update(state, norm)
        return self._norms.quantile(state, self.percentile / 100.0)


class ZClip(NormRule):
    """Clips norms with a z-score above ``z``: the higher the score, the lower the threshold.

    The threshold of a norm with z-score s > z is ``mean + z * std * (z / s)``. Mean and variance
    are exponential averages over the clipped norms. Thresholds equal those of the published package
    (zclip 1.0, adaptive scaling), with one exception: a norm that is NaN, infinite or 0 never
    changes the state, not even in the warm-up.

    Args:
        alpha: Share of the old mean and variance that is kept at each step, in [0, 1).
        z: The z-score above which a norm is clipped, above 0.
        warmup: Number of norms for the first mean and variance, at least 2. Until then only
            ``max_norm`` clips.
        max_norm: An additional fixed threshold, or None. The paper uses 1.0.

    References:
        Kumar, Owen, Roy Chowdhury and Güra (2025), *ZClip: Adaptive Spike Mitigation for LLM
        Pre-Training*.
    """

    def __init__(
        self, alpha: float = 0.97, z: float = 2.5, warmup: int = 25, max_norm: float | None = None
    ) -> None:
        self.alpha, self.z = check_fraction("alpha", alpha), check_positive("z", z)
        self.warmup = check_at_least("warmup", warmup, 2)
        self.max_norm = None if max_norm is None else check_positive("max_norm", max_norm)

    def init(self) -> State:
        """Return the state before any norm: mean, variance and count."""
        return {"moments": [0.0, 0.0, 0.0]}

    def limit(self, norm: Scalar, state: State) -> Scalar:
        """Return the threshold for this norm, and add the clipped norm to the averages.

        With ``deviation = min(norm, threshold) - mean`` and the coefficients of :meth:`_weights`::

            mean     += weight * deviation
            variance  = keep * variance + gain * deviation**2
        """
        if isinstance(norm, Tensor):
            return self._limit_on_device(norm, state)
        mean, var, count = map(float, state["moments"])
        std, threshold = math.sqrt(var), math.inf
        score = (norm - mean) / (std + 1e-6)
        if score > self.z and count >= self.warmup:
            threshold = mean + self.z * std * self.z / score
        keep, weight, gain = self._weights(count)
        deviation = min(norm, threshold) - mean
        new_var = keep * var + gain * (deviation * deviation)
        if norm > 0.0 and new_var < math.inf:  # the square of 1e155 overflows
            state["moments"] = [mean + weight * deviation, new_var, count + 1.0]
        return threshold if self.max_norm is None else min(threshold, self.max_norm)

    def _weights(self, count: float) -> tuple[float, float, float]:
        """Return ``keep``, ``weight`` and ``gain`` after ``count`` norms.

        In the warm-up they yield the plain mean and population variance. After it they yield
        exponential averages.
        """
        weight = 1.0 / (count + 1) if count < self.warmup else 1.0 - self.alpha
        gain = weight * (1.0 - weight)
        return 1.0 - weight, weight, gain if count < self.warmup else gain * (1.0 - weight)

    def _limit_on_device(self, norm: Tensor, state: State) -> Tensor:
        """Compute :meth:`limit` on the device, with coefficients from row ``count`` of a table."""
        cache = state.get("device")
        if cache is None or cache.device != norm.device:
            table = []
            for count in range(self.warmup + 1):
                keep, weight, gain = self._weights(count)
                warming_up = count < self.warmup
                bound = math.inf if warming_up else self.z
                table.append([1.0, keep, 1.0, weight, gain, float(warming_up), bound])
            cache = DeviceCache(norm.device, table=table, powers=[1.0, 2.0, 0.0])
            state["device"], state["moments"] = cache, constant(state["moments"], norm.device)
            state["moments"][2].clamp_(max=self.warmup)
        before = state["moments"]
        row = cache.tensors["table"].index_select(0, before[2:].long())[0]
        mean, std = before[0], before[1].sqrt()
        score = (norm - mean) / (std + 1e-6)
        threshold = torch.addcdiv(mean, std, score, value=self.z * self.z)
        threshold = threshold.masked_fill_(score <= row[6], math.inf)
        powers = (norm.minimum(threshold) - mean).pow(cache.tensors["powers"])
        after = torch.addcmul(before * row[:3], row[3:6], powers)
        valid = after[1] < norm * math.inf  # False for a norm of 0, and if the square overflows
        state["moments"] = torch.where(valid, after, before)
        return threshold if self.max_norm is None else threshold.clamp(max=self.max_norm)


class Robust(LogBand, NormRule):
    """The default: clips norms above the usual range of their logarithm.

    Uses the formula of :class:`~lightning_opt.core.numerics.statistics.LogBand`. Ten spikes in a
    row do not raise the threshold. If ``patience`` steps in a row are clipped, the norm has changed
    for good (a new phase of training, another learning rate), and the range moves to the new level.
    A diverging run is therefore no longer clipped after 25 steps: add a guard. At the start of a
    run norms often fall tenfold within a hundred steps, and the range follows them down.

    Args:
        k: Standard deviations above the mean, above 0. With 3 one step in 400 of a steady run is
            clipped.
        decay: Share of the old estimate that is kept at each step, in [0, 1).
        winsor: Norms further from the mean count as this many deviations, above 0.
        warmup: Norms before the first clipping, at least 2.
        patience: Clipped steps in a row after which the new level is accepted; None for never.
        min_std: Lower bound of the deviation of the natural logarithm. Without it a run with hardly
            any noise would be clipped often. With 0.1, norms up to 1.35 times the mean are not
            clipped.
    """
