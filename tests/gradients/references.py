"""Independent implementations of the clipping rules in numpy, from papers and docstrings.

They use whole histories instead of recursions where possible.
"""

import math
from collections.abc import Iterable

import numpy as np


def lognormal_norms(steps: int, seed: int = 0, sigma: float = 0.5) -> list[float]:
    """Return lognormal norms around 1 with rare spikes."""
    rng = np.random.default_rng(seed)
    spikes = np.where(rng.random(steps) < 0.01, 30.0, 1.0)
    return [float(norm) for norm in np.exp(sigma * rng.standard_normal(steps)) * spikes]


def mean_std(
    norms: Iterable[float], k: float, window: int, history: str, warmup: int
) -> list[float]:
    passed: list[float] = []
    thresholds = []
    for norm in norms:
        recent = np.array(passed[-window:])
        threshold = math.inf if len(passed) < warmup else float(recent.mean() + k * recent.std())
        thresholds.append(threshold)
        passed.append(min(norm, threshold) if history == "clipped" else norm)
    return thresholds


def percentile(norms: Iterable[float], percentile: float, window: int | None) -> list[float]:
    seen = np.array(list(norms))
    starts = [0 if window is None else max(0, n + 1 - window) for n in range(len(seen))]
    return [float(np.percentile(seen[start : n + 1], percentile)) for n, start in enumerate(starts)]


def robust(
    norms: Iterable[float],
    k: float = 3.0,
    decay: float = 0.99,
    winsor: float = 2.0,
    warmup: int = 20,
    patience: int | None = 25,
    min_std: float = 0.1,
) -> list[float]:
    """Use first and second moments of the logarithm, where the package uses mean and variance."""
    logs: list[float] = []
    mean, square = 0.0, 0.0
    half_squares: list[float] = []  # of the differences between neighbours, in the warm-up
    streak: list[float] = []
    thresholds = []
    for norm in norms:
        x, seen = math.log(norm), len(logs)
        variance = float(np.mean(half_squares or [0.0])) if seen <= warmup else square - mean**2
        if seen == warmup:
            square = variance + mean**2
        std = max(math.sqrt(max(variance, 0.0)), min_std)
        threshold = math.inf if seen < warmup else math.exp(mean + k * std)
        thresholds.append(threshold)

        reach = winsor * (max(std, 0.5) if seen < warmup else std)
        share = max(1 - decay, 3 / (seen + 3))
        near = min(max(x, mean - reach), mean + reach) if seen else x
        if 0 < seen < warmup:
            half_squares.append(min(abs(x - logs[-1]), reach) ** 2 / 2)
        if seen >= warmup and norm <= threshold:
            square += share * (near**2 - square)
            mean += share * (near - mean)
        else:
            mean += share * (near - mean)
            square = variance + mean**2
        logs.append(x)
        streak = [*streak, x] if norm > threshold else []
        if patience is not None and len(streak) == patience:
            variance = square - mean**2
            mean = float(np.mean(streak))
            square = variance + mean**2
            streak = []
    return thresholds


class AdaGC:
    """Algorithm 1 of Wang et al. (2025), with the two differences that ``PerParameter`` lists."""

    def __init__(self, factor: float, decay: float, warmup: int, warmup_norm: float) -> None:
        self.factor, self.decay = factor, decay
        self.warmup, self.warmup_norm = warmup, warmup_norm
        self.steps = 0
        self.averages: dict[str, float] = {}

    def clip(self, gradients: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        norms = {name: float(np.linalg.norm(g)) for name, g in gradients.items()}
        total = math.hypot(*norms.values())
        if not math.isfinite(total):
            return gradients
        self.steps += 1
        clipped = {}
        for name, gradient in gradients.items():
            norm, average = norms[name], self.averages.get(name)
            if norm == 0:
                clipped[name] = gradient
                continue
            if self.steps <= self.warmup:
                scale = min(self.warmup_norm / total, 1.0)
                self.averages[name] = min(norm * scale, math.inf if average is None else average)
            elif average is None:
                scale, self.averages[name] = 1.0, norm
            else:
                scale = min(self.factor * average / norm, 1.0)
                self.averages[name] = self.decay * average + (1 - self.decay) * norm * scale
            clipped[name] = gradient * scale
        return clipped


def unit_wise(
    weight: np.ndarray, gradient: np.ndarray, axis: int | None, clip_factor: float, eps: float
) -> np.ndarray:
    """Return the gradient clipped as in Brock et al. (2021).

    Args:
        weight: The parameter.
        gradient: Its gradient.
        axis: The dimension that counts units; None where the whole tensor is one.
        clip_factor: The paper's lambda.
        eps: The paper's epsilon.
    """
    clipped = gradient.astype(np.float64)
    for unit in (
        [...]
        if axis is None
        else [(slice(None),) * axis + (index,) for index in range(weight.shape[axis])]
    ):
        norm = np.linalg.norm(np.ravel(clipped[unit]))
        allowed = clip_factor * max(np.linalg.norm(np.ravel(weight[unit]).astype(np.float64)), eps)
        if norm > allowed:
            clipped[unit] *= allowed / norm
    return clipped
