"""The strategy strings of ``Trainer(strategy=...)``."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning_opt

START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}

STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp_topk": ("CompressedDDPStrategy", {"compressor": "topk"}),
    "ddp_threshold": ("CompressedDDPStrategy", {"compressor": "threshold"}),
    "ddp_int8": ("CompressedDDPStrategy", {"compressor": "int8"}),
    "ddp_int4": ("CompressedDDPStrategy", {"compressor": "int4"}),
    "ddp_compressed": ("CompressedDDPStrategy", {"compressor": "auto"}),
    "ddp_fp16": ("HookedDDPStrategy", {"hook": "fp16"}),
    "ddp_bf16": ("HookedDDPStrategy", {"hook": "bf16"}),
    "diloco": ("DiLoCoStrategy", {}),
    "diloco_streaming": (
        "DiLoCoStrategy",
        {"sync_every": 30, "fragments": 4, "delay": 5, "compression": "int4"},
    ),
}


def _create(strategy: str, **arguments: Any) -> Any:
    return getattr(lightning_opt, strategy)(**arguments)  # imported only now


def register_strategies(registry: Any) -> None:
    """Register the strategy strings with a package's StrategyRegistry, unless they exist."""
    for name, (strategy, arguments) in STRATEGIES.items():
        for suffix, start_method in START_METHODS.items():
            if name + suffix not in registry:
                create = partial(_create, strategy)
                registry.register(name + suffix, create, start_method=start_method, **arguments)
