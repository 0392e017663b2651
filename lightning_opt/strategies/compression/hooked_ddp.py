"""torch's own communication hooks that cast gradients, for comparison."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from lightning_opt.core.arguments import check_one_of
from lightning_opt.trainer.lightning import BaseDDPStrategy


class HookedDDPStrategy(BaseDDPStrategy):
    """DDP with one of torch's own communication hooks, on gloo too.

    Args:
        hook: ``"fp16"`` or ``"bf16"``: the dtype that gradients are sent in.
        **kwargs: Arguments of :class:`~lightning.pytorch.strategies.DDPStrategy` and
            :class:`~torch.nn.parallel.DistributedDataParallel`.

    Raises:
        ValueError: For an unknown hook.
    """

    def __init__(self, hook: Literal["fp16", "bf16"] = "fp16", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hook = check_one_of("hook", hook, ("fp16", "bf16"))

    def _register_ddp_hooks(self) -> None:
        # Lightning registers hooks on CUDA only; gloo takes them as well.
        model = self.model
        assert isinstance(model, DistributedDataParallel)
        hook = default_hooks.fp16_compress_hook if self.hook == "fp16" else send_bf16
        model.register_comm_hook(None, hook)


def send_bf16(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Call torch's bf16 hook, which DDP rejects by its name without CUDA."""
    return default_hooks.bf16_compress_hook(state, bucket)


# DDP compares annotations with classes, but here they are strings.
send_bf16.__annotations__.clear()
