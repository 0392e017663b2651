"""Helpers for tests of clipping rules: one of each rule, and ways to run it."""

import io
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_opt.core.numerics.scalars import to_plain
from lightning_opt.gradients.clipping.norm_rules import (
    ClippingRule,
    FixedNorm,
    MeanStd,
    NormRule,
    Percentile,
    Robust,
    ZClip,
)
from lightning_opt.gradients.clipping.tensor_rules import FixedValue, PerParameter, UnitWise

# Warm-ups and windows shorter than the 60 steps of a test.
ALL_RULES: dict[str, Callable[[], ClippingRule]] = {
    "fixed_norm": lambda: FixedNorm(0.8),
    "mean_std-raw": lambda: MeanStd(k=1.0, window=16, warmup=5),
    "mean_std-clipped": lambda: MeanStd(k=1.0, window=16, history="clipped", warmup=5),
    "percentile-all": lambda: Percentile(30.0),
    "percentile-window": lambda: Percentile(30.0, window=16),
    "zclip": lambda: ZClip(z=1.0, warmup=10),
    "zclip-max_norm": lambda: ZClip(z=1.0, warmup=10, max_norm=1.5),
    "robust": lambda: Robust(k=1.0, decay=0.9, warmup=10, patience=3),
    "robust-no_patience": lambda: Robust(k=1.0, decay=0.9, warmup=10, patience=None),
    "fixed_value": lambda: FixedValue(0.3),
    "per_parameter": lambda: PerParameter(factor=1.0, warmup=10),
    "unit_wise": lambda: UnitWise(clip_factor=0.3, exclude=None),
}

every_rule = pytest.mark.parametrize("make", ALL_RULES.values(), ids=list(ALL_RULES))
both_paths = pytest.mark.parametrize("path", ["host", "device"])


def thresholds_of(
    rule: NormRule, norms: Iterable[float], path: str = "host", state: dict[str, Any] | None = None
) -> list[float]:
    """Return the threshold of each step, read after the last of them."""
    state = rule.init() if state is None else state
    given: Any = list(norms)
    if path == "device":
        given = torch.tensor(given, dtype=torch.float64).unbind()
    limits = [rule.limit(norm, state) for norm in given]
    return [float(limit) for limit in limits]


def statistics_of(state: dict[str, Any]) -> dict[str, Any]:
    """Return the statistics of a rule's state in one form for host and device.

    A window's buffer on a device is padded with NaN, and a band's matrix on a device holds the
    step's own share of the variance.
    """
    plain: dict[str, Any] = to_plain(state)
    if "values" in plain:
        count = int(plain["count"])
        values = torch.as_tensor(plain["values"], dtype=torch.float64)
        return {"count": count, "values": values[~values.isnan()].tolist()}
    if "averages" in plain:
        averages = plain["averages"].items()
        finite = {name: value for name, value in averages if math.isfinite(value)}
        return {"count": int(plain["count"]), **finite}
    statistics = {name: torch.as_tensor(value).tolist() for name, value in plain.items()}
    if "band" in statistics:
        statistics["band"][0][1] = 0.0  # the share of the variance is recomputed at each step
    return statistics


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
    return loaded


class Net(nn.Module):
    """Five parameters of different shapes, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2, dtype=torch.float64)
        self.body = nn.Linear(4, 3, dtype=torch.float64)
        self.gain = nn.Parameter(torch.ones((), dtype=torch.float64))


def set_gradients(module: nn.Module, norm: float, seed: int) -> None:
    """Give ``module`` gradients of total norm ``norm``; NaN or infinity in one element."""
    generator = torch.Generator().manual_seed(seed)
    parameters = list(module.parameters())
    fresh = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in parameters]
    if not math.isfinite(norm):
        fresh[seed % len(fresh)].view(-1)[0] = norm
    else:
        length = torch.linalg.vector_norm(torch.cat([g.flatten() for g in fresh]))
        fresh = [g * (norm / length) for g in fresh]
    for parameter, gradient in zip(parameters, fresh, strict=True):
        parameter.grad = gradient.to(parameter.dtype)
