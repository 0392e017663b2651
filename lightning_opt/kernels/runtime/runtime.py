"""Process settings that last for a run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_opt.core.arguments import check_at_least, check_one_of
from lightning_opt.core.output.report import Report
from lightning_opt.trainer.run_callback import RunCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl

MatmulPrecision = Literal["highest", "high", "medium"]


class Runtime(RunCallback):
    """Sets precision, cuDNN, allocator and threads for the run, and restores them afterwards.

    Settings are applied in ``setup``, the first hook of every stage, and restored in ``teardown``
    and after an exception. :meth:`report` lists the settings, and the reason if one was not set; an
    error of torch is also a warning. An argument of None leaves its setting unchanged.

    Nothing is logged.

    Args:
        matmul_precision: ``"highest"``, ``"high"`` (TF32 on GPUs that have it) or ``"medium"``, for
            products of float32 matrices: see :func:`torch.set_float32_matmul_precision`.
        cudnn_benchmark: Whether cuDNN times its kernels for each new shape of a convolution. This
            pays off if there are few shapes. It stays off if deterministic algorithms are
            requested, as with ``Trainer(deterministic=True)``.
        allocator: ``"expandable_segments"`` lets CUDA's allocator grow segments, which reduces
            fragmentation if shapes vary. Linux and torch 2.9 or newer.
        threads: Threads of one operation on the CPU, at least 1.

    Raises:
        ValueError: In ``__init__`` for arguments out of range; in ``setup`` for a second
            ``Runtime``.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> trainer = L.Trainer(callbacks=[lo.Runtime(threads=1)], logger=False)
    """

    only_one = True

    def __init__(
        self,
        matmul_precision: MatmulPrecision | None = "high",
        cudnn_benchmark: bool | None = True,
        allocator: Literal["expandable_segments"] | None = "expandable_segments",
        threads: int | None = None,
    ) -> None:
        check_one_of("matmul_precision", matmul_precision, (*get_args(MatmulPrecision), None))
        check_one_of("cudnn_benchmark", cudnn_benchmark, (True, False, None))
        if allocator not in (None, "expandable_segments"):
            raise ValueError(
                f"allocator must be 'expandable_segments' or None, got {allocator!r}. Set other "
                "options in the environment variable PYTORCH_CUDA_ALLOC_CONF."
            )
        self.matmul_precision = matmul_precision
        self.cudnn_benchmark = cudnn_benchmark
        self.allocator = allocator
        self.threads = None if threads is None else check_at_least("threads", threads, 1)
        self._rows: list[dict[str, Any]] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Apply all settings."""
        super().setup(trainer, pl_module, stage)
        self.release(trainer)
        self._rows = []
        for name, apply in SETTINGS.items():
            value = getattr(self, name)
            if value is None:
                continue
            note = ""
            try:
                self._patches.callback(apply(value, trainer.strategy.root_device))
            except NotSetError as error:
                note = str(error)
            except RuntimeError as error:
                note = str(error).splitlines()[0]
                rank_zero_warn(f"Runtime could not set {name}={value}: {note}")
            self._rows.append({"setting": name, "asked": str(value), "set": not note, "note": note})

    def report(self) -> Report:
        """Return the settings, and the reasons why some were not set."""
        return Report("Runtime", self._rows)


# --- settings -------------------------------------------------------------------------------------

Undo = Callable[[], object]


class NotSetError(Exception):
    """A setting does not apply here. The message is the reason."""


def set_matmul_precision(precision: str, device: torch.device) -> Undo:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    return partial(torch.set_float32_matmul_precision, before)


def set_cudnn_benchmark(on: bool, device: torch.device) -> Undo:
    if device.type != "cuda" or not torch.backends.cudnn.is_available():
        raise NotSetError(f"{device.type} has no cuDNN")
    if on and torch.are_deterministic_algorithms_enabled():
        raise NotSetError("deterministic algorithms are requested")
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = on
    return lambda: setattr(torch.backends.cudnn, "benchmark", before)


def set_allocator(option: str, device: torch.device) -> Undo:
    """Let CUDA's allocator grow its segments instead of adding new ones."""
    if device.type != "cuda":
        raise NotSetError(f"{device.type} has no such allocator")
    configure = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if configure is None or not sys.platform.startswith("linux"):
        raise NotSetError("it needs Linux and torch 2.9 or newer")
    present = str(getattr(torch._C, "_accelerator_getAllocatorSettings", _settings_in_snapshot)())
    if option in present:
        raise NotSetError(f"it is set to {present} already")
    # The allocator resets options that are missing, so the present ones are repeated.
    configure(f"{present},{option}:True" if present else f"{option}:True")
    return partial(configure, present or f"{option}:False")


def _settings_in_snapshot() -> str:
    """Return the allocator's settings, for versions of torch that cannot read them otherwise."""
    return str(torch.cuda.memory._snapshot()["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"])


def set_threads(number: int, device: torch.device) -> Undo:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    return partial(torch.set_num_threads, before)


SETTINGS: dict[str, Callable[[Any, torch.device], Undo]] = {
    "matmul_precision": set_matmul_precision,
    "cudnn_benchmark": set_cudnn_benchmark,
    "allocator": set_allocator,
    "threads": set_threads,
}
"""The function that applies each setting, by the name of its argument."""
