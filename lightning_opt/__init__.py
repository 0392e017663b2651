"""Callbacks, strategies and plugins that make a Lightning Trainer faster, smaller and safer."""

from lightning_opt.core.report import Report
from lightning_opt.gradients.clipper import GradientClipper
from lightning_opt.gradients.clipping import AdaptiveClipping
from lightning_opt.gradients.guard import NonFiniteGuard
from lightning_opt.gradients.health import GradientHealth
from lightning_opt.gradients.rules import (
    ClippingRule,
    FixedNorm,
    MeanStd,
    NormRule,
    Percentile,
    Robust,
    ZClip,
)
from lightning_opt.gradients.tensor_rules import FixedValue, PerParameter, UnitWise

__version__ = "0.1.0"

__all__ = [
    "AdaptiveClipping",
    "ClippingRule",
    "FixedNorm",
    "FixedValue",
    "GradientClipper",
    "GradientHealth",
    "MeanStd",
    "NonFiniteGuard",
    "NormRule",
    "PerParameter",
    "Percentile",
    "Report",
    "Robust",
    "UnitWise",
    "ZClip",
]
