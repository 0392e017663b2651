"""Settings of the process for the time of a run."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from lightning.pytorch.utilities import rank_zero_warn

from lightning_opt.core.arguments import at_least, one_of
from lightning_opt.core.measure.machine import allowed_cpus
from lightning_opt.core.modules.batches import tensors_of
from lightning_opt.core.output.report import Report
from lightning_opt.kernels.runtime.process_settings import (
    Outcome,
    set_affinity,
    set_cudnn_benchmark,
    set_deterministic,
    set_expandable_segments,
    set_matmul_precision,
    set_priority,
    set_threads,
    share_of,
)
from lightning_opt.trainer.run_callback import RunCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)

MatmulPrecision = Literal["highest", "high", "medium"]

SHAPES = 4
"""Batches of more different shapes make cuDNN's trials cost more than they bring."""

WATCHED = 100
"""Batches whose shapes are looked at."""


class Runtime(RunCallback):
    """Sets precision, cuDNN, allocator, CPUs and threads for the run, and restores them afterwards.

    Settings are applied in ``setup`` of every stage, the first hook there is, and restored in
    ``teardown`` and after an exception. :meth:`report` lists what could not be set; if you asked
    for it and the system refused, a warning says so once. None leaves a setting alone.

    Nothing is logged.

    Args:
        matmul_precision: ``"highest"``, ``"high"`` (TF32 on GPUs that have it) or ``"medium"``, for
            products of float32 matrices: see :func:`torch.set_float32_matmul_precision`.
        cudnn_benchmark: Whether cuDNN tries its kernels for each new shape of a convolution.
            ``"auto"`` does so on CUDA, unless deterministic algorithms are asked for, until batches
            of a fifth shape come within the first 100.
        deterministic: Whether runs from one seed are to be bit-identical on the same machine with
            the same versions: only deterministic algorithms, and an error where there is none.
            Seeds are yours: call ``lightning.seed_everything``. False changes nothing.
        allocator: ``"expandable_segments"`` lets CUDA's allocator grow segments, which fragments
            less where shapes vary; on Linux.
        cpu_affinity: CPUs that this process may run on, with the workers that it starts;
            ``"split"`` gives each process of the machine an equal share of those allowed.
        priority: Niceness, from -20 to 19, of this process and the workers that it starts. To put
            it back, or to go below 0, takes privileges.
        threads: Threads of one operation on the CPU, at least 1.

    Raises:
        ValueError: In ``__init__`` for arguments that are out of range or contradict each other; in
            ``setup`` if there are two.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> trainer = L.Trainer(callbacks=[lo.Runtime(threads=1)], logger=False)
    """

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
        one_of("matmul_precision", matmul_precision, (*get_args(MatmulPrecision), None))
        one_of("cudnn_benchmark", cudnn_benchmark, (True, False, "auto", None))
        if deterministic and cudnn_benchmark is True:
            raise ValueError(
                "deterministic=True contradicts cudnn_benchmark=True, which takes whatever kernel "
                "is the fastest at that moment. Leave cudnn_benchmark at 'auto'."
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
        self.cpu_affinity = _checked_cpus(cpu_affinity)
        if priority is not None and at_least("priority", priority, -20) > 19:
            raise ValueError(f"priority must be a niceness from -20 to 19, got {priority!r}.")
        self.priority = priority
        self.threads = None if threads is None else at_least("threads", threads, 1)
        self._outcomes: list[Outcome] = []
        self._warned = False
        self._batches, self._shapes = 0, set[tuple[tuple[int, ...], ...]]()

    only_one = True
    process_only = ("_outcomes",)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Set everything."""
        super().setup(trainer, pl_module, stage)
        self.release(trainer)
        self._outcomes = []
        self._batches, self._shapes = 0, set()
        self._set(trainer)
        for outcome in self._outcomes:
            if not outcome.done:
                log.info("Runtime: %s is not set: %s.", outcome.setting, outcome.note)
        failed = [f"{o.setting}={o.asked} ({o.note})" for o in self._outcomes if o.failed]
        if failed and not self._warned:
            self._warned = True
            rank_zero_warn(f"Runtime could not set {', '.join(failed)}. Training continues.")

    def _set(self, trainer: pl.Trainer) -> None:
        device, outcomes = trainer.strategy.root_device, self._outcomes
        if self.matmul_precision is not None:
            outcomes.append(set_matmul_precision(self.matmul_precision, device))
        if self.deterministic:  # before cuDNN's benchmark, which asks for it
            outcomes.append(set_deterministic())
        if self.cudnn_benchmark is not None:
            outcomes.append(set_cudnn_benchmark(bool(self.cudnn_benchmark), device))
        if self.allocator is not None:
            outcomes.append(set_expandable_segments(device))
        if self.cpu_affinity is not None:
            cpus: list[int] | str = self.cpu_affinity
            if isinstance(cpus, str):
                cpus = share_of(allowed_cpus(), trainer.local_rank, max(1, trainer.num_devices))
            outcomes.append(
                set_affinity(cpus)
                if cpus
                else Outcome.refused(
                    "cpu_affinity", "split", "fewer CPUs than processes", failed=True
                )
            )
        if self.priority is not None:
            outcomes.append(set_priority(self.priority))
        if self.threads is not None:
            outcomes.append(set_threads(self.threads))

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Turn cuDNN's trials off again where shapes keep changing."""
        if self.cudnn_benchmark != "auto" or self._batches >= WATCHED:
            return
        self._batches += 1
        for outcome in self._outcomes:
            if outcome.setting == "cudnn_benchmark" and outcome.done:
                self._shapes.add(tuple(tuple(tensor.shape) for tensor in tensors_of(batch)))
                if len(self._shapes) > SHAPES:
                    torch.backends.cudnn.benchmark = False
                    self._batches = WATCHED
                    outcome.done, outcome.note = False, "off again, since shapes keep changing"

    def report(self) -> Report:
        """Return what was set, what it was before, and what was not set and why."""
        return Report("Runtime", [outcome.row() for outcome in self._outcomes or ()])

    def release(self, trainer: pl.Trainer) -> None:
        """Put everything back; the report stays."""
        for outcome in reversed(self._outcomes or ()):
            undo, outcome.undo = outcome.undo, None
            try:
                if undo is not None:
                    undo()
            except OSError as error:
                outcome.note = f"could not be put back: {error.strerror}"
                rank_zero_warn(
                    f"Runtime could not put {outcome.setting} back from {outcome.asked} to "
                    f"{outcome.before}: {error.strerror}."
                )


def _checked_cpus(cpus: Any) -> list[int] | Literal["split"] | None:
    if cpus is None or cpus == "split":
        return cpus  # type: ignore[no-any-return]
    whole = isinstance(cpus, (list, tuple)) and all(type(cpu) is int and cpu >= 0 for cpu in cpus)
    if not whole or not cpus:
        raise ValueError(
            f"cpu_affinity must be a list of numbers of CPUs, 'split' or None, got {cpus!r}."
        )
    return list(cpus)
