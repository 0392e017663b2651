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

STATES = 4
"""Memory of parameters, gradients and Adam's two states, in sizes of the parameters."""

TIGHT = 0.5
"""If these take a larger share of the memory, activations are checkpointed. It is a share of the
total and not of the free memory, so that all ranks decide alike."""


@dataclass(frozen=True)
class Situation:
    """The Trainer's arguments, the machine and the model for which a preset is chosen.

    It is derived from arguments, without a Trainer: `describe(devices=8)` must work on a machine
    that could not create one. ``wishes`` are the user's settings of single callbacks: a dict, True,
    or None to leave one out.
    """

    arguments: Mapping[str, Any]
    wishes: Mapping[str, Any] = field(default_factory=dict)
    model: LightningModule | None = None

    # --- the Trainer's arguments ----------------------------------------------------------------

    @cached_property
    def given(self) -> list[Callback]:
        callbacks = self.arguments.get("callbacks") or []
        return [callbacks] if isinstance(callbacks, Callback) else list(callbacks)

    def wants(self, name: str) -> Mapping[str, Any] | None:
        """Return the settings of a callback that the user has given or requested, or None."""
        for callback in self.given:
            if any(base.__name__ == name for base in type(callback).__mro__):
                return vars(callback)
        wish = self.wishes.get(name)
        return {} if wish is True else wish

    def excludes(self, name: str) -> bool:
        return self.wishes.get(name, True) is None

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
        kind, _, strategy = self.strategy_parts
        if kind is None:
            return "other"
        if issubclass(kind, ModelParallelStrategy):
            # "auto" means all processes of a machine.
            size = getattr(strategy, "_tensor_parallel_size", "auto")
            return "fsdp2" if size == 1 else "tensor_parallel"
        for base, name in (
            (DeepSpeedStrategy, "deepspeed"),
            (FSDPStrategy, "fsdp1"),
            (DDPStrategy, "ddp"),
            (SingleDeviceStrategy, "single"),
        ):
            if issubclass(kind, base):
                return name
        return "other"

    @property
    def strategy_name(self) -> str:
        kind = self.strategy_parts[0]
        return kind.__name__ if kind is not None else repr(self.arguments.get("strategy"))

    @property
    def forks(self) -> bool:
        """Whether the strategy may fork processes, which need CUDA to be uninitialized."""
        name = str(self.arguments.get("strategy") or "auto").lower()
        interactive = hasattr(sys, "ps1")
        return name.endswith(("_fork", "_notebook")) or (interactive and self.processes > 1)

    @property
    def accumulates(self) -> bool:
        return (self.arguments.get("accumulate_grad_batches") or 1) != 1 or any(
            isinstance(callback, GradientAccumulationScheduler) for callback in self.given
        )

    # --- the model ------------------------------------------------------------------------------

    @property
    def manual(self) -> bool:
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
        states = STATES * sum(
            parameter.numel() * parameter.element_size() for parameter in self.model.parameters()
        )
        if self.strategy in ("fsdp1", "fsdp2"):
            states //= self.processes
        limits = MemoryLimits(torch.device(self.device), host=self.device == "cpu")
        return states, min((usage.total for usage in limits.read()), default=math.inf)

    @property
    def memory_is_tight(self) -> str | None:
        """Why activations should take less memory, or None; None too if the model is unknown."""
        states, memory = self._memory
        if states <= TIGHT * memory:
            return None
        return (
            f"weights, gradients and two states of each weight take {states / 1e9:.3g} GB of "
            f"{memory / 1e9:.3g} GB"
        )

    @property
    def does_not_fit(self) -> str | None:
        """Why no preset can make the model fit, and what can; None if it may fit."""
        states, memory = self._memory
        if states <= memory:
            return None
        whole = states * (self.processes if self.strategy.startswith("fsdp") else 1)
        ranks = max(self.processes, math.ceil(whole / (TIGHT * memory)))
        return (
            f"Does not fit: {self.memory_is_tight}. FSDP2 (strategy=ModelParallelStrategy"
            f"(data_parallel_size={ranks})) shards them over {ranks} devices."
        )
