"""Footprints: the state of a model, a Trainer or the process after a run, to compare two runs.

A footprint contains no object identities, so footprints of two equal models are equal.
"""

import gc
import logging
import os
import signal
import sys
import threading
import warnings
from collections import deque
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import nn
from torch.nn.modules import module as module_globals


def model_footprint(model: nn.Module) -> dict[str, Any]:
    """Return tensors (kind, layout, flags), attributes and hooks of a model by name."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {
        "state_dict": list(model.state_dict()),
        "tensors": {
            name: {
                "kind": (type(tensor).__name__, tensor.dtype, tensor.device, tuple(tensor.shape)),
                "strides": tensor.stride(),
                "requires_grad": tensor.requires_grad,
                "hooks": len(tensor._backward_hooks or ())
                + len(getattr(tensor, "_post_accumulate_grad_hooks", None) or ()),
                "attributes": sorted(vars(tensor)),
            }
            for name, tensor in tensors
        },
        "modules": {
            name: {
                "class": type(module).__qualname__,
                "training": module.training,
                "attributes": _attributes(module),
                "hooks": {
                    key: len(value)
                    for key, value in vars(module).items()
                    if key.endswith("hooks") and value is not None
                },
            }
            for name, module in model.named_modules()
        },
    }


def trainer_footprint(trainer: Trainer) -> dict[str, Any]:
    """Return the classes and attributes of the Trainer, its parts and its optimizers."""
    loop = trainer.fit_loop
    parts = {
        "trainer": trainer,
        "strategy": trainer.strategy,
        "accelerator": trainer.accelerator,
        "precision": trainer.precision_plugin,
        "fit_loop": loop,
        "epoch_loop": loop.epoch_loop,
        "automatic_optimization": loop.epoch_loop.automatic_optimization,
        "manual_optimization": loop.epoch_loop.manual_optimization,
        "validation": loop.epoch_loop.val_loop,
        "data": trainer._data_connector,
        "logging": trainer._logger_connector,
        "checkpoints": trainer._checkpoint_connector,
        "signals": trainer._signal_connector,
    }
    objects = {
        name: {"class": type(part).__qualname__, "attributes": _attributes(part)}
        for name, part in parts.items()
    }
    return {
        **objects,
        "optimizers": [
            {
                "class": type(optimizer).__qualname__,
                "attributes": _attributes(optimizer),
                "groups": [
                    {key: value for key, value in group.items() if key != "params"}
                    for group in optimizer.param_groups
                ],
                "hooks": {
                    key: len(value) for key, value in vars(optimizer).items() if "hooks" in key
                },
            }
            for optimizer in trainer.optimizers
        ],
    }


def process_footprint() -> dict[str, Any]:
    """Return the global settings of torch and Python that a callback could change."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return {
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn": (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32),
        "mkldnn": torch.backends.mkldnn.enabled,
        "matmul": (
            cuda.matmul.allow_tf32,
            cuda.matmul.allow_fp16_reduced_precision_reduction,
            cuda.matmul.allow_bf16_reduced_precision_reduction,
        ),
        "attention": (
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
            nn.functional.scaled_dot_product_attention,
        ),
        "compiler": [
            bool(getattr(sys.modules.get(module), name, default))
            for module, name, default in (
                ("torch._dynamo.config", "optimize_ddp", True),
                ("torch._functorch.config", "force_non_lazy_backward_lowering", False),
            )
        ],
        "autograd": (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_anomaly_enabled(),
            torch.is_autocast_enabled("cpu"),
        ),
        "module_hooks": {
            name: len(value)
            for name, value in vars(module_globals).items()
            if name.startswith("_global_") and hasattr(value, "__len__")
        },
        "gc": (gc.isenabled(), gc.get_threshold(), len(gc.callbacks)),
        # Tests freeze what is imported, which takes 50 ms to count.
        "frozen": len(gc.get_objects(generation=2)) < 200_000,
        # The compiler of torch 2.5 adds a filter.
        "warnings": [
            f for f in warnings.filters if getattr(f[3], "pattern", "") != "torch.distributed"
        ],
        "logging": {
            name: (logger.level, len(logger.handlers))
            for name, logger in [("", logging.root), *logging.root.manager.loggerDict.items()]
            if not name.startswith("torch.")  # the compiler sets some
            and isinstance(logger, logging.Logger)
            and (logger.level or logger.handlers)
        },
        "environment": {
            key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"
        },
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "hooks": (sys.excepthook, sys.unraisablehook, threading.excepthook),
        "threads_alive": {thread.name for thread in threading.enumerate()},
    }


def _attributes(instance: Any) -> dict[str, str]:
    """Return the type of each instance attribute; of a function, its name."""
    return {
        key: getattr(value, "__qualname__", type(value).__qualname__)
        for key, value in vars(instance).items()
        if not isinstance(value, Callback)
    }


def counts_in(owner: object, seen: tuple[int, ...] = ()) -> dict[str, Any]:
    """Return numbers and lengths in an object of lightning_opt, also in those that it holds.

    Numbers are integers and flags; equal runs leave them equal.
    """
    counts: dict[str, Any] = {}
    names = [*getattr(owner, "__dict__", ()), *getattr(type(owner), "__slots__", ())]
    for name in names:
        value = getattr(owner, name, None)
        if isinstance(value, int):
            counts[name] = value
        elif type(value).__module__.startswith("lightning_opt") and id(value) not in seen:
            counts[name] = counts_in(value, (*seen, id(owner)))
        elif isinstance(value, list | tuple | dict | deque | set):
            counts[name] = len(value)
    return counts
