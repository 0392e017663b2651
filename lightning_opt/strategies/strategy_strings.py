"""The strategy strings of ``Trainer(strategy=...)``."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from lightning_opt.strategies.compression.compressed_ddp import CompressedDDPStrategy
from lightning_opt.strategies.compression.hooked_ddp import HookedDDPStrategy
from lightning_opt.strategies.diloco.diloco_strategy import DiLoCoStrategy

START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}

STRATEGIES: dict[str, tuple[type, dict[str, Any]]] = {
    "ddp_topk": (CompressedDDPStrategy, {"compressor": "topk"}),
    "ddp_threshold": (CompressedDDPStrategy, {"compressor": "threshold"}),
    "ddp_int8": (CompressedDDPStrategy, {"compressor": "int8"}),
    "ddp_int4": (CompressedDDPStrategy, {"compressor": "int4"}),
    "ddp_compressed": (CompressedDDPStrategy, {"compressor": "auto"}),
    "ddp_fp16": (HookedDDPStrategy, {"hook": "fp16"}),
    "ddp_bf16": (HookedDDPStrategy, {"hook": "bf16"}),
    "ddp_powersgd": (CompressedDDPStrategy, {"compressor": "powersgd"}),
    "diloco": (DiLoCoStrategy, {}),
    "diloco_streaming": (DiLoCoStrategy, {"sync_every": 30, "fragments": 4, "delay": 5}),
}


def register_strategies() -> None:
    """Register the strategy strings, except those that exist already."""
    for name, (strategy, arguments) in STRATEGIES.items():
        for suffix, start_method in START_METHODS.items():
            if name + suffix not in StrategyRegistry:
                StrategyRegistry.register(
                    name + suffix,
                    strategy,
                    description=f"{strategy.__name__}({arguments}), started by {start_method!r}",
                    start_method=start_method,
                    **arguments,
                )
