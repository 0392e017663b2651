"""The inputs of a preset's decisions: the Trainer's arguments, the machine and the model."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.accelerators import (
    Accelerator,
    CUDAAccelerator,
    MPSAccelerator,
    XLAAccelerator,
)
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
    StrategyRegistry,
)

from lightning_opt.core.measure.memory import MemoryLimits
from lightning_opt.core.modules.compiling import has_checkpointed_parts, has_compiled_parts

STATE_MULTIPLE = 4
"""Memory of parameters, gradients and Adam's two states, relative to the parameters alone."""

MAX_STATE_SHARE = 0.5
"""Activations are checkpointed if parameters, gradients and states take a larger share of the total
memory. Free memory is not used, because ranks could then decide differently."""


@dataclass(frozen=True)
class Situation:
    """The Trainer's arguments, the machine and the model for which a preset is chosen.

    It is derived from arguments, without a Trainer: `describe(devices=8)` must work on a machine
    that could not create one. ``overrides`` are the user's settings by callback name: a
    dict, True, or None to leave the callback out.
    """

    arguments: Mapping[str, Any]
    overrides: Mapping[str, Any] = field(default_factory=dict)
    model: LightningModule | None = None

    # --- the Trainer's arguments ----------------------------------------------------------------

    @cached_property
    def user_callbacks(self) -> list[Callback]:
        callbacks = self.arguments.get("callbacks") or []
        return [callbacks] if isinstance(callbacks, Callback) else list(callbacks)

    def requested_settings(self, name: str) -> Mapping[str, Any] | None:
        """Return the settings of a callback that the user passed or requested, or None."""
        for callback in self.user_callbacks:
            if any(base.__name__ == name for base in type(callback).__mro__):
                return vars(callback)
        override = self.overrides.get(name)
        return {} if override is True else override

    def excludes(self, name: str) -> bool:
        return self.overrides.get(name, True) is None

    @cached_property
    def device(self) -> str:
        """``"cpu"``, ``"cuda"``, ``"mps"``, ``"tpu"``, or the name of another accelerator."""
        given = self.arguments.get("accelerator", "auto")
        given = getattr(self.arguments.get("strategy"), "accelerator", None) or given
        if isinstance(given, Accelerator):
            name = type(given).__name__.removesuffix("Accelerator").lower()
            return {"xla": "tpu"}.get(name, name)
        name = str(given or "auto").lower()
        if name in ("auto", "gpu"):
            if name == "auto" and XLAAccelerator.is_available():
                return "tpu"
            if MPSAccelerator.is_available():
                return "mps"
            return "cuda" if CUDAAccelerator.is_available() or name == "gpu" else "cpu"
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
    def strategy_parts(self) -> tuple[type[Strategy] | None, Mapping[str, Any], Strategy | None]:
        """The strategy's class, its settings, and the object if one is given."""
        given = self.arguments.get("strategy") or "auto"
        if isinstance(given, Strategy):
            return type(given), getattr(given, "_ddp_kwargs", {}), given
        name = str(given).lower()
        if name == "auto":
            return (DDPStrategy if self.processes > 1 else SingleDeviceStrategy), {}, None
        if name in StrategyRegistry:
            entry = StrategyRegistry[name]
            return entry["strategy"], entry["init_params"], None
        return None, {}, None

    @cached_property
    def strategy(self) -> str:
        """``single``, ``ddp``, ``fsdp1``, ``fsdp2``, ``tensor_parallel``, ``deepspeed``, ``other``.

        ``ddp`` includes compressed DDP.
        """
        strategy_class, _, strategy = self.strategy_parts
        if strategy_class is None:
            return "other"
        if issubclass(strategy_class, ModelParallelStrategy):
            # "auto" means all processes of a machine.
            size = getattr(strategy, "_tensor_parallel_size", "auto")
            return "fsdp2" if size == 1 else "tensor_parallel"
        for base, name in (
            (DeepSpeedStrategy, "deepspeed"),
            (FSDPStrategy, "fsdp1"),
            (DDPStrategy, "ddp"),
            (SingleDeviceStrategy, "single"),
        ):
            if issubclass(strategy_class, base):
                return name
        return "other"

    @property
    def strategy_name(self) -> str:
        strategy_class = self.strategy_parts[0]
        if strategy_class is None:
            return repr(self.arguments.get("strategy"))
        return strategy_class.__name__

    @property
    def forks(self) -> bool:
        """Whether the strategy may fork processes, which need CUDA to be uninitialized."""
        name = str(self.arguments.get("strategy") or "auto").lower()
        interactive = hasattr(sys, "ps1")
        return name.endswith(("_fork", "_notebook")) or (interactive and self.processes > 1)

    @property
    def accumulates(self) -> bool:
        return (self.arguments.get("accumulate_grad_batches") or 1) != 1 or any(
            isinstance(callback, GradientAccumulationScheduler) for callback in self.user_callbacks
        )

    # --- the model ------------------------------------------------------------------------------

    @property
    def manual_optimization(self) -> bool:
        return self.model is not None and not self.model.automatic_optimization

    @property
    def compiled(self) -> bool:
        return self.model is not None and has_compiled_parts(self.model)

    @property
    def checkpointed(self) -> bool:
        """Whether the strategy or a part of the model is checkpointed already."""
        if getattr(self.strategy_parts[2], "_activation_checkpointing_kwargs", None):
            return True
        return self.model is not None and has_checkpointed_parts(self.model)

    @cached_property
    def _memory(self) -> tuple[float, float]:
        """Bytes of weights, gradients and optimizer states on each device, and its total memory."""
        if self.model is None or self.device not in ("cpu", "cuda"):
            return 0, 1
        if self.device == "cuda" and self.forks:
            return 0, 1
        states = STATE_MULTIPLE * sum(
            parameter.numel() * parameter.element_size() for parameter in self.model.parameters()
        )
        if self.strategy in ("fsdp1", "fsdp2"):
            states //= self.processes
        limits = MemoryLimits(torch.device(self.device), host=self.device == "cpu")
        return states, min((usage.total for usage in limits.read()), default=math.inf)

    @property
    def why_memory_is_tight(self) -> str | None:
        """The reason to save activation memory; None if there is none or no model is known."""
        states, memory = self._memory
        if states <= MAX_STATE_SHARE * memory:
            return None
        return (
            f"weights, gradients and two states of each weight take {states / 1e9:.3g} GB of "
            f"{memory / 1e9:.3g} GB"
        )

    @property
    def why_it_does_not_fit(self) -> str | None:
        """Why no preset can make the model fit, with a remedy; None if it may fit."""
        states, memory = self._memory
        if states <= memory:
            return None
        total_bytes = states * (self.processes if self.strategy.startswith("fsdp") else 1)
        ranks = max(self.processes, math.ceil(total_bytes / (MAX_STATE_SHARE * memory)))
        return (
            f"Does not fit: {self.why_memory_is_tight}. FSDP2 (strategy=ModelParallelStrategy"
            f"(data_parallel_size={ranks})) shards them over {ranks} devices."
        )
