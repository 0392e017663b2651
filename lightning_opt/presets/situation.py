"""The inputs of a preset's decisions: the Trainer's arguments and the machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from lightning_opt.trainer.lightning import PACKAGES, Accelerator, ModelParallelStrategy
from lightning_opt.worker.recipes import as_list, class_names


@dataclass(frozen=True)
class Situation:
    """The Trainer's arguments and the machine for which a preset is chosen.

    It needs no Trainer, so that ``describe(devices=8)`` works on a machine with fewer devices.

    Args:
        arguments: The Trainer's arguments.
        overrides: The user's settings by callback name: a dict, True, or None to leave it out.
    """

    arguments: Mapping[str, Any]
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def user_callbacks(self) -> set[str]:
        """The names of the classes and base classes of the user's callbacks."""
        given = as_list(self.arguments.get("callbacks"))
        return {name for callback in given for name in class_names(callback)}

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
    def strategy(self) -> str:
        """``single``, ``ddp``, ``fsdp1``, ``fsdp2``, ``tensor_parallel``, ``deepspeed``, ``other``.

        ``ddp`` includes compressed DDP and DiLoCo.
        """
        given = self.arguments.get("strategy") or "auto"
        if given == "auto":
            return "ddp" if self.processes > 1 else "single"
        if isinstance(given, ModelParallelStrategy):  # "auto" means all processes of a machine
            size = getattr(given, "_tensor_parallel_size", "auto")
            return "fsdp2" if size == 1 else "tensor_parallel"
        names = given if isinstance(given, str) else " ".join(class_names(given))
        kinds = {"deepspeed": "deepspeed", "fsdp": "fsdp1", "ddp": "ddp", "diloco": "ddp"}
        kinds["single"] = "single"
        return next((kind for word, kind in kinds.items() if word in names.lower()), "other")

    @property
    def forks(self) -> bool:
        """Whether the strategy may fork processes, which must happen before CUDA starts."""
        name = str(self.arguments.get("strategy") or "auto").lower()
        interactive = hasattr(sys, "ps1")
        return name.endswith(("_fork", "_notebook")) or (interactive and self.processes > 1)
