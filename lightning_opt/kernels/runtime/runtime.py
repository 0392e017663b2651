"""Process settings that last for a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_opt.core.arguments import check_at_least, check_one_of
from lightning_opt.core.modules.batches import tensors_of
from lightning_opt.core.output.report import Report
from lightning_opt.trainer.run_callback import RunCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl

CUBLAS_ENV_VAR = "CUBLAS_WORKSPACE_CONFIG"
DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")
ALLOCATOR_ENV_VARS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
EXPANDABLE_SEGMENTS = "expandable_segments"

MatmulPrecision = Literal["highest", "high", "medium"]

# Number of different batch shapes above which cuDNN's timing of kernels costs more than it gains.
MAX_SHAPES = 4
# Number of batches whose shapes are counted.
MAX_BATCHES = 100


class Runtime(RunCallback):
    """Sets precision, cuDNN, allocator and threads for the run, and restores them afterwards.

    Settings are applied in ``setup``, the first hook of every stage, and restored in ``teardown``
    and after an exception. :meth:`report` lists the settings and the reasons of failures; a failure
    of a requested setting warns once. An argument of None
    leaves its setting unchanged.

    Nothing is logged.

    Args:
        matmul_precision: ``"highest"``, ``"high"`` (TF32 on GPUs that have it) or ``"medium"``, for
            products of float32 matrices: see :func:`torch.set_float32_matmul_precision`.
        cudnn_benchmark: Whether cuDNN times its kernels for each new shape of a convolution.
            ``"auto"`` does so on CUDA, unless deterministic algorithms are requested, and stops if
            more than four batch shapes occur in the first 100 batches.
        deterministic: Make runs from one seed bit-identical on the same machine with the same
            versions: only deterministic algorithms run, and operators without one raise. Set the
            seed yourself: ``lightning.seed_everything``. False leaves the setting unchanged.
        allocator: ``"expandable_segments"`` lets CUDA's allocator grow segments, which reduces
            fragmentation if shapes vary. Linux only.
        threads: Threads of one operation on the CPU, at least 1.

    Raises:
        ValueError: In ``__init__`` for arguments that are out of range or contradict each other; in
            ``setup`` for a second ``Runtime``.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> trainer = L.Trainer(callbacks=[lo.Runtime(threads=1)], logger=False)
    """

    only_one = True
    not_pickled = ("_undo",)

    def __init__(
        self,
        matmul_precision: MatmulPrecision | None = "high",
        cudnn_benchmark: bool | Literal["auto"] | None = "auto",
        deterministic: bool = False,
        allocator: Literal["expandable_segments"] | None = "expandable_segments",
        threads: int | None = None,
    ) -> None:
        check_one_of("matmul_precision", matmul_precision, (*get_args(MatmulPrecision), None))
        check_one_of("cudnn_benchmark", cudnn_benchmark, (True, False, "auto", None))
        if deterministic and cudnn_benchmark is True:
            raise ValueError(
                "deterministic=True contradicts cudnn_benchmark=True, which selects the kernel "
                "that is fastest at that moment. Leave cudnn_benchmark at 'auto'."
            )
        if allocator not in (None, "expandable_segments"):
            raise ValueError(
                f"allocator must be 'expandable_segments' or None, got {allocator!r}. Set other "
                "options in the environment variable PYTORCH_CUDA_ALLOC_CONF."
            )
        self.matmul_precision = matmul_precision
        self.cudnn_benchmark = cudnn_benchmark
        self.deterministic = deterministic
        self.allocator = allocator
        self.threads = None if threads is None else check_at_least("threads", threads, 1)
        self._rows: list[dict[str, Any]] = []
        self._undo: list[Callable[[], object]] = []
        self._warned = False
        self._batches = 0
        self._shapes = set[tuple[tuple[int, ...], ...]]()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Apply all settings."""
        super().setup(trainer, pl_module, stage)
        self.release(trainer)
        self._rows, self._undo = [], []
        self._batches = 0
        self._shapes = set()
        failed = []
        for name, value, apply in self._requests(trainer):
            row = {"setting": name, "asked": str(value), "before": "", "set": True, "note": ""}
            self._rows.append(row)
            try:
                change = apply()
            except NotSetError as error:
                row.update(set=False, note=str(error))
                if error.failed:
                    failed.append(f"{name}={value} ({error})")
            else:
                row.update(before=str(change.before))
                self._undo.append(change.undo)
        if failed and not self._warned:
            self._warned = True
            rank_zero_warn(f"Runtime could not set {', '.join(failed)}. Training continues.")

    def _requests(self, trainer: pl.Trainer) -> Iterator[tuple[str, Any, Callable[[], Change]]]:
        """Yield the name and the value of each setting, and the function that applies it."""
        device = trainer.strategy.root_device
        if (precision := self.matmul_precision) is not None:
            yield "matmul_precision", precision, partial(set_matmul_precision, precision)
        if self.deterministic:  # before cuDNN's benchmark, which depends on it
            yield "deterministic", True, set_deterministic
        if self.cudnn_benchmark is not None:
            on = bool(self.cudnn_benchmark)
            yield "cudnn_benchmark", on, partial(set_cudnn_benchmark, on, device)
        if self.allocator is not None:
            change = partial(set_expandable_segments, device)
            yield "allocator", self.allocator, change
        if self.threads is not None:
            yield "threads", self.threads, partial(set_threads, self.threads)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Turn cuDNN's benchmark off if shapes keep changing."""
        if self.cudnn_benchmark != "auto" or self._batches >= MAX_BATCHES:
            return
        self._batches += 1
        for row in self._rows:
            if row["setting"] == "cudnn_benchmark" and row["set"]:
                self._shapes.add(tuple(tuple(tensor.shape) for tensor in tensors_of(batch)))
                if len(self._shapes) > MAX_SHAPES:
                    torch.backends.cudnn.benchmark = False
                    self._batches = MAX_BATCHES
                    row.update(set=False, note="turned off, because shapes keep changing")

    def report(self) -> Report:
        """Return the settings with their previous values, and the reasons of failures."""
        return Report("Runtime", self._rows)

    def release(self, trainer: pl.Trainer) -> None:
        """Restore all settings, and keep the report."""
        while self._undo:
            self._undo.pop()()


# --- settings -------------------------------------------------------------------------------------


class Change(NamedTuple):
    """A setting that was changed: its previous value, and how to restore it."""

    before: Any
    undo: Callable[[], object]


class NotSetError(Exception):
    """A setting was not changed.

    Args:
        note: The reason.
        failed: Whether the change failed unexpectedly, so that a warning is due.
    """

    def __init__(self, note: str, failed: bool = False) -> None:
        super().__init__(note)
        self.failed = failed


def set_matmul_precision(precision: str) -> Change:
    try:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
    except RuntimeError as error:  # torch's newer API was used, which excludes this one
        raise NotSetError(str(error).splitlines()[0], failed=True) from None
    return Change(before, partial(torch.set_float32_matmul_precision, before))


def set_cudnn_benchmark(on: bool, device: torch.device) -> Change:
    """Set whether cuDNN times its kernels for each new shape."""
    if device.type != "cuda" or not torch.backends.cudnn.is_available():
        raise NotSetError(f"{device.type} has no cuDNN")
    if on and torch.are_deterministic_algorithms_enabled():
        raise NotSetError("deterministic algorithms are requested")
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = on
    return Change(before, lambda: setattr(torch.backends.cudnn, "benchmark", before))


def set_deterministic() -> Change:
    """Allow deterministic algorithms only; others raise an error."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn
    flags = (cudnn.deterministic, cudnn.benchmark)
    workspace = os.environ.get(CUBLAS_ENV_VAR)
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    if workspace not in DETERMINISTIC_WORKSPACES:
        os.environ[CUBLAS_ENV_VAR] = DETERMINISTIC_WORKSPACES[0]

    def undo() -> None:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        cudnn.deterministic, cudnn.benchmark = flags
        if workspace is None:
            os.environ.pop(CUBLAS_ENV_VAR, None)
        else:
            os.environ[CUBLAS_ENV_VAR] = workspace

    return Change(before, undo)


def set_expandable_segments(device: torch.device) -> Change:
    """Let CUDA's allocator grow its segments instead of adding new ones."""
    if device.type != "cuda":
        raise NotSetError(f"{device.type} has no such allocator")
    if not sys.platform.startswith("linux"):
        raise NotSetError("only on Linux", failed=True)
    present = _allocator_settings()
    if EXPANDABLE_SEGMENTS in present:
        raise NotSetError(f"it is set to {present} already")
    requested = f"{EXPANDABLE_SEGMENTS}:True"
    try:
        # The allocator resets options that are missing, so the present ones are repeated.
        _configure_allocator(f"{present},{requested}" if present else requested)
    except (RuntimeError, ValueError, AttributeError) as error:
        note = f"{error}; set {ALLOCATOR_ENV_VARS[1]}={requested} before you start"
        raise NotSetError(note, failed=True) from None
    undo = partial(_configure_allocator, present or f"{EXPANDABLE_SEGMENTS}:False")
    return Change(present, undo)


def _allocator_settings() -> str:
    """Return the allocator's current settings; if torch cannot return them, the environment's."""
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if read is not None:
        return str(read())
    return next((os.environ[name] for name in ALLOCATOR_ENV_VARS if os.environ.get(name)), "")


def _configure_allocator(settings: str) -> None:
    configure = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if configure is None:  # before torch 2.9
        configure = torch.cuda.memory._set_allocator_settings
    configure(settings)


def set_threads(number: int) -> Change:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    return Change(before, partial(torch.set_num_threads, before))
