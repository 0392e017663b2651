"""torch's own compressed reductions under one word, to compare with."""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel


class HookedDDPStrategy(DDPStrategy):
    """DDP with one of the communication hooks that torch brings, on gloo too.

    Args:
        hook: ``"fp16"`` or ``"bf16"``, which cast what they send, or ``"powersgd"``, which sends
            low-rank factors of each matrix with error feedback.
        rank: Rank of PowerSGD's factors.
        warmup_steps: Steps that PowerSGD does not compress, at least 2.
        **kwargs: What :class:`~lightning.pytorch.strategies.DDPStrategy` and
            :class:`~torch.nn.parallel.DistributedDataParallel` take.

    Raises:
        ValueError: For an unknown hook, and for PowerSGD on a CPU with a ``bucket_cap_mb``: its
            nested collectives deadlock on gloo unless there is a single bucket.

    References:
        Vogels, Karimireddy and Jaggi (2019), *PowerSGD: Practical Low-Rank Gradient Compression
        for Distributed Optimization*.
    """

    def __init__(
        self,
        hook: Literal["fp16", "bf16", "powersgd"] = "fp16",
        rank: int = 1,
        warmup_steps: int = 10,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if hook not in ("fp16", "bf16", "powersgd"):
            raise ValueError(f"hook must be 'fp16', 'bf16' or 'powersgd', got {hook!r}.")
        self.hook = hook
        self.rank = rank
        self.warmup_steps = warmup_steps

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        if self.hook == "powersgd" and self.root_device.type == "cpu":
            if "bucket_cap_mb" in self._ddp_kwargs:
                raise ValueError(
                    "PowerSGD on CPUs needs one bucket for the whole model, so bucket_cap_mb "
                    "cannot be given: torch's hook launches collectives from within collectives, "
                    "which deadlocks on gloo with two buckets."
                )
            size = sum(p.numel() * p.element_size() for p in model.parameters())
            self._ddp_kwargs = {**self._ddp_kwargs, "bucket_cap_mb": size // 2**20 + 1}
            try:
                return super()._setup_model(model)
            finally:
                del self._ddp_kwargs["bucket_cap_mb"]
        return super()._setup_model(model)

    def _register_ddp_hooks(self) -> None:
        # Lightning registers hooks on CUDA only; gloo takes them as well.
        model = self.model
        assert isinstance(model, DistributedDataParallel)
        if self.hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(
                None,
                matrix_approximation_rank=self.rank,
                start_powerSGD_iter=self.warmup_steps,
            )
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif self.hook == "fp16":
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        else:
            model.register_comm_hook(None, send_bf16)


def send_bf16(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Cast to bf16 as torch's hook does, which DDP refuses by its name where there is no CUDA."""
    return default_hooks.bf16_compress_hook(state, bucket)


# DDP compares annotations with the classes themselves, and finds strings here.
send_bf16.__annotations__.clear()
