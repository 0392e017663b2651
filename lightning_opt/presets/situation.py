"""The inputs of a preset's decisions: the Trainer's arguments, the machine and the model."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

import lightning_opt
from lightning_opt.strategies.strategy_strings import NamedStrategy
from lightning_opt.trainer.lightning import (
    PACKAGES,
    Accelerator,
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)

if TYPE_CHECKING:
    import lightning.pytorch as pl


def callbacks_in(arguments: Mapping[str, Any]) -> list[Any]:
    """Return the callbacks among arguments of the Trainer, or their entries in a configuration."""
    given = arguments.get("callbacks") or []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def class_names(callback: pl.Callback | Mapping[str, Any]) -> list[str]:
    """Return the names of a callback's class and base classes; only the class of an entry."""
    if isinstance(callback, Mapping):
        return [str(callback["class_path"]).rpartition(".")[2]]
    return [base.__name__ for base in type(callback).__mro__]


@dataclass(frozen=True)
class Situation:
    """The Trainer's arguments and the machine for which a preset is chosen.

    It is derived from arguments, without a Trainer: ``describe(devices=8)`` must work on a machine
    that could not create one.

    Args:
        arguments: The Trainer's arguments.
        overrides: The user's settings by callback name: a dict, True, or None to leave it out.
    """

    arguments: Mapping[str, Any]
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def user_callbacks(self) -> set[str]:
        """The names of the classes and base classes of the user's callbacks."""
        return {name for one in callbacks_in(self.arguments) for name in class_names(one)}

    @cached_property
    def device(self) -> str:
        """``"cpu"``, ``"cuda"``, ``"mps"``, or the name of another accelerator."""
        given = self.arguments.get("accelerator", "auto")
        given = getattr(self.arguments.get("strategy"), "accelerator", None) or given
        if isinstance(given, Accelerator):
            return type(given).__name__.removesuffix("Accelerator").lower()
        name = str(given or "auto").lower()
        if name in ("auto", "gpu"):
            accelerators = PACKAGES[0].accelerators
            if accelerators.MPSAccelerator.is_available():
                return "mps"
            return "cuda" if accelerators.CUDAAccelerator.is_available() or name == "gpu" else "cpu"
        return name

    @cached_property
    def nodes(self) -> int:
        return int(self.arguments.get("num_nodes") or 1)

    @cached_property
    def processes(self) -> int:
        return self.nodes * self._devices(self.arguments.get("devices", "auto"))

    def _devices(self, given: Any) -> int:
        if isinstance(given, str) and "," in given:
            given = [part for part in given.split(",") if part.strip()]
        if isinstance(given, Sequence) and not isinstance(given, str):
            return max(1, len(given))
        if given in ("auto", "", None, "-1", -1):
            return max(1, torch.cuda.device_count()) if self.device == "cuda" else 1
        return int(given)

    @cached_property
    def strategy_class(self) -> type[pl.strategies.Strategy] | None:
        """The strategy's class; None for an unknown name."""
        given = self.arguments.get("strategy") or "auto"
        if isinstance(given, Strategy):
            return type(given)
        strategies = PACKAGES[0].strategies
        kind: Any = None
        name = str(given).lower()
        if name == "auto":
            kind = strategies.DDPStrategy if self.processes > 1 else strategies.SingleDeviceStrategy
        elif name in strategies.StrategyRegistry:
            kind = strategies.StrategyRegistry[name]["strategy"]
        if isinstance(kind, NamedStrategy):
            kind = getattr(lightning_opt, kind.name)
        return kind if isinstance(kind, type) else None

    @cached_property
    def strategy(self) -> str:
        """``single``, ``ddp``, ``fsdp1``, ``fsdp2``, ``tensor_parallel``, ``deepspeed``, ``other``.

        ``ddp`` includes compressed DDP.
        """
        found = self.strategy_class
        if found is None:
            return "other"
        if issubclass(found, ModelParallelStrategy):
            # "auto" means all processes of a machine.
            size = getattr(self.arguments["strategy"], "_tensor_parallel_size", "auto")
            return "fsdp2" if size == 1 else "tensor_parallel"
        for base, name in (
            (DeepSpeedStrategy, "deepspeed"),
            (FSDPStrategy, "fsdp1"),
            (DDPStrategy, "ddp"),
            (SingleDeviceStrategy, "single"),
        ):
            if issubclass(found, base):
                return name
        return "other"

    @property
    def strategy_name(self) -> str:
        found = self.strategy_class
        return repr(self.arguments["strategy"]) if found is None else found.__name__

    @property
    def forks(self) -> bool:
        """Whether the strategy may fork processes, which need CUDA to be uninitialized."""
        name = str(self.arguments.get("strategy") or "auto").lower()
        interactive = hasattr(sys, "ps1")
        return name.endswith(("_fork", "_notebook")) or (interactive and self.processes > 1)
