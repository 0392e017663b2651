"""Process settings that last for a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_opt.core.arguments import check_at_least, check_one_of
from lightning_opt.core.measure.machine import allowed_cpus
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
    """Sets precision, cuDNN, allocator, CPUs and threads for the run, and restores them afterwards.

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
        cpu_affinity: CPUs that this process may run on, with the workers that it starts;
            ``"split"`` gives each process of the machine an equal share of the allowed CPUs.
        priority: Niceness, from -20 to 19, of this process and the workers that it starts.
            Restoring it, or values below 0, need privileges.
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
        cpu_affinity: list[int] | Literal["split"] | None = None,
        priority: int | None = None,
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
        self.cpu_affinity = _check_cpus(cpu_affinity)
        if priority is not None and check_at_least("priority", priority, -20) > 19:
            raise ValueError(f"priority must be a niceness from -20 to 19, got {priority!r}.")
        self.priority = priority
        self.threads = None if threads is None else check_at_least("threads", threads, 1)
        self._rows: list[dict[str, Any]] = []
        self._undo: list[tuple[dict[str, Any], Callable[[], object]]] = []
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
                self._undo.append((row, change.undo))
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
        if (cpus := self.cpu_affinity) is not None:
            if cpus == "split":
                ranks = max(1, trainer.num_devices)
                cpus = share_of(allowed_cpus(), trainer.local_rank, ranks)
            yield "cpu_affinity", cpus or "split", partial(set_affinity, cpus)
        if self.priority is not None:
            yield "priority", self.priority, partial(set_priority, self.priority)
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
            row, undo = self._undo.pop()
            try:
                undo()
            except OSError as error:
                row["note"] = f"could not be restored: {error.strerror}"
                rank_zero_warn(
                    f"Runtime could not restore {row['setting']} from {row['asked']} to "
                    f"{row['before']}: {error.strerror}."
                )


def _check_cpus(cpus: Any) -> list[int] | Literal["split"] | None:
    if cpus is None or cpus == "split":
        return cpus  # type: ignore[no-any-return]
    whole = isinstance(cpus, (list, tuple)) and all(type(cpu) is int and cpu >= 0 for cpu in cpus)
    if not whole or not cpus:
        raise ValueError(
            f"cpu_affinity must be a list of numbers of CPUs, 'split' or None, got {cpus!r}."
        )
    return list(cpus)


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


def share_of(cpus: list[int], rank: int, ranks: int) -> list[int]:
    """Return the part of ``cpus`` for one process; empty if there are fewer CPUs than processes."""
    size = len(cpus) // ranks
    return cpus[rank * size : (rank + 1) * size]


def set_affinity(cpus: Iterable[int]) -> Change:
    """Bind the threads of this process and threads that they start to CPUs."""
    requested = sorted(cpus)
    if not requested:
        raise NotSetError("fewer CPUs than processes", failed=True)
    if not hasattr(os, "sched_setaffinity"):
        raise NotSetError(f"not possible on {sys.platform}", failed=True)
    return _set_for_all_threads(
        requested, lambda thread: sorted(os.sched_getaffinity(thread)), os.sched_setaffinity
    )


def set_priority(niceness: int) -> Change:
    """Set the niceness of the threads of this process and of threads that they start."""
    if not sys.platform.startswith("linux"):
        raise NotSetError(f"not possible on {sys.platform}", failed=True)
    return _set_for_all_threads(
        niceness,
        lambda thread: os.getpriority(os.PRIO_PROCESS, thread),
        lambda thread, value: os.setpriority(os.PRIO_PROCESS, thread, value),
    )


def _set_for_all_threads(
    requested: Any, read: Callable[[int], Any], write: Callable[[int, Any], None]
) -> Change:
    """Set a value that Linux stores per thread and that new threads inherit."""
    process_value = read(0)
    before = {}
    for thread in _threads():
        with suppress(ProcessLookupError):  # the thread has ended
            before[thread] = read(thread)

    def write_all(value_of: Callable[[int], Any]) -> None:
        for thread in _threads():
            with suppress(ProcessLookupError):
                write(thread, value_of(thread))

    undo = partial(write_all, lambda thread: before.get(thread, process_value))
    try:
        write_all(lambda thread: requested)
        actual = read(0)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    else:
        if actual == requested:
            return Change(process_value, undo)
        reason = f"the system set it to {actual}"
    with suppress(OSError):
        undo()
    raise NotSetError(reason, failed=True)


def _threads() -> list[int]:
    import psutil

    return [thread.id for thread in psutil.Process().threads()]
