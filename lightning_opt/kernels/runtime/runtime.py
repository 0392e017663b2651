"""Process settings that last for a run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_opt.core.arguments import check_at_least, check_one_of
from lightning_opt.core.measure.machine import allowed_cpus
from lightning_opt.core.modules.batches import tensors_of
from lightning_opt.core.output.report import Report
from lightning_opt.kernels.runtime import process_settings
from lightning_opt.trainer.run_callback import RunCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)

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
    not_pickled = ("_outcomes",)

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
        self._outcomes: list[process_settings.Outcome] = []
        self._warned = False
        self._batches = 0
        self._shapes = set[tuple[tuple[int, ...], ...]]()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Apply all settings."""
        super().setup(trainer, pl_module, stage)
        self.release(trainer)
        self._outcomes = []
        self._batches = 0
        self._shapes = set()
        for outcome in self._apply(trainer):
            self._outcomes.append(outcome)
            if not outcome.done:
                log.info("Runtime: %s is not set: %s.", outcome.setting, outcome.note)
        failed = [f"{o.setting}={o.requested} ({o.note})" for o in self._outcomes if o.failed]
        if failed and not self._warned:
            self._warned = True
            rank_zero_warn(f"Runtime could not set {', '.join(failed)}. Training continues.")

    def _apply(self, trainer: pl.Trainer) -> Iterator[process_settings.Outcome]:
        device = trainer.strategy.root_device
        if self.matmul_precision is not None:
            yield process_settings.set_matmul_precision(self.matmul_precision, device)
        if self.deterministic:  # before cuDNN's benchmark, which depends on it
            yield process_settings.set_deterministic()
        if self.cudnn_benchmark is not None:
            yield process_settings.set_cudnn_benchmark(bool(self.cudnn_benchmark), device)
        if self.allocator is not None:
            yield process_settings.set_expandable_segments(device)
        if self.cpu_affinity is not None:
            cpus = self.cpu_affinity
            if cpus == "split":
                ranks = max(1, trainer.num_devices)
                cpus = process_settings.share_of(allowed_cpus(), trainer.local_rank, ranks)
            yield process_settings.set_affinity(cpus)
        if self.priority is not None:
            yield process_settings.set_priority(self.priority)
        if self.threads is not None:
            yield process_settings.set_threads(self.threads)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Turn cuDNN's benchmark off if shapes keep changing."""
        if self.cudnn_benchmark != "auto" or self._batches >= MAX_BATCHES:
            return
        self._batches += 1
        for outcome in self._outcomes:
            if outcome.setting == "cudnn_benchmark" and outcome.done:
                self._shapes.add(tuple(tuple(tensor.shape) for tensor in tensors_of(batch)))
                if len(self._shapes) > MAX_SHAPES:
                    torch.backends.cudnn.benchmark = False
                    self._batches = MAX_BATCHES
                    outcome.done, outcome.note = False, "turned off, because shapes keep changing"

    def report(self) -> Report:
        """Return the settings with their previous values, and the reasons of failures."""
        return Report("Runtime", [outcome.row() for outcome in self._outcomes or ()])

    def release(self, trainer: pl.Trainer) -> None:
        """Restore all settings, and keep the report."""
        for outcome in reversed(self._outcomes or ()):
            undo, outcome.undo = outcome.undo, None
            try:
                if undo is not None:
                    undo()
            except OSError as error:
                outcome.note = f"could not be restored: {error.strerror}"
                rank_zero_warn(
                    f"Runtime could not restore {outcome.setting} from {outcome.requested} to "
                    f"{outcome.before}: {error.strerror}."
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
