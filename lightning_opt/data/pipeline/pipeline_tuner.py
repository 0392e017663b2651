"""Chooses the training loader's settings by measurement before the first step."""

from __future__ import annotations

import logging
import math
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_opt.core.arguments import check_at_least, check_positive
from lightning_opt.core.measure.machine import available_cpus
from lightning_opt.core.measure.timing import time_calls
from lightning_opt.core.modules.patching import Patches, replaced
from lightning_opt.core.modules.preserve import isolated_random
from lightning_opt.core.modules.sharding import largest_over_ranks
from lightning_opt.core.modules.trial import (
    WrittenParameters,
    prepare_batch,
    run_step,
    without_side_effects,
)
from lightning_opt.core.output.report import Report
from lightning_opt.data.pipeline.loaders import (
    LoaderSettings,
    attributes_for,
    endless_indices,
    probe,
    reason_to_skip,
    settings_of,
    time_loader,
)
from lightning_opt.data.pipeline.search import Measured, Search
from lightning_opt.trainer.run_callback import RunCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)

MEASUREMENT_SECONDS = 0.4
"""Duration of one measurement, in seconds."""

MAX_WAITING_WORKERS = 16
"""Maximum number of workers if items wait for a disk or network, unless the CPUs allow more."""


class MeasuringError(Exception):
    """Raised with the reason if a loader cannot be measured."""


class DataPipelineTuner(RunCallback):
    """Measures the training loader before the first step, and keeps the fastest settings.

    It tries a few numbers of workers and two values of ``prefetch_factor`` on the real dataset.
    Between the batches it runs the real training step (forward and backward pass). It stops as soon
    as the loader is no longer the bottleneck. On CUDA memory is pinned. Workers persist from one
    epoch to the next only if you set ``persistent_workers=True``: they do not see changes that are
    made to the dataset between epochs. The loader is changed in place and restored after the run:
    dataset, sampler (DDP's too), collate function, generator and subclass stay the same.

    The order of samples is the same as without it. Measurements do not change the dataset or the
    sampler of this process, and random state is restored. Some loaders stay unchanged, with a
    warning that gives the reason: iterable datasets, several training loaders, datasets that cannot
    be pickled for spawned workers, samplers that draw batch by batch, and loaders whose trial
    fails. Random augmentation in workers draws different numbers, as it does whenever
    ``num_workers`` changes.

    With several processes, all of them use the settings that are best for the slowest process. A
    resumed run uses the settings of its checkpoint.

    Args:
        max_workers: The largest number of workers per process. None uses the process's share of the
            CPUs that affinity and control groups allow, or up to 16 if items wait for a disk or a
            network.
        budget_seconds: Seconds after which no further trial starts, and the longest wait for one
            batch.
        verbose: Print the table.

    Attributes:
        chosen: The chosen settings, or None if the loader stays unchanged.

    Raises:
        ValueError: In ``__init__`` for arguments out of range; in ``setup`` for a second instance.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> tuner = lo.DataPipelineTuner()
        >>> trainer = L.Trainer(callbacks=[tuner], logger=False)
    """

    only_one = True
    runs_in_trials = False
    not_pickled = ("_loader",)

    def __init__(
        self, max_workers: int | None = None, budget_seconds: float = 20.0, verbose: bool = True
    ) -> None:
        if max_workers is not None:
            check_at_least("max_workers", max_workers, 0)
        self.max_workers = max_workers
        self.budget_seconds = check_positive("budget_seconds", budget_seconds)
        self.verbose = verbose
        self._reset()

    def _reset(self) -> None:
        self.chosen: LoaderSettings | None = None
        self._tried: list[Measured] = []
        self._notes: list[str] = []
        self._loader: DataLoader[Any] | None = None  # the loader whose settings are changed
        self._loader_patches = Patches()
        self._is_unsupported = False

    def setup_fit(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reset the state of an earlier fit."""
        self.release(trainer)
        self._reset()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Intercept each training loader after Lightning has added its sampler."""
        source, strategy = trainer.fit_loop._data_source, trainer.strategy
        original_request, original_process = source.dataloader, strategy.process_dataloader

        def dataloader() -> Any:
            requested = original_request()
            self._is_unsupported = not isinstance(requested, DataLoader)
            return requested

        def process_dataloader(dataloader: object) -> object:
            dataloader = original_process(dataloader)
            if trainer.training:
                self._tune_or_reuse(trainer, pl_module, dataloader)
            return dataloader

        self._replace(source, dataloader=dataloader)
        self._replace(strategy, process_dataloader=process_dataloader)

    def _tune_or_reuse(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loader: Any
    ) -> None:
        """Tune ``loader``, or apply the settings that were chosen for an earlier one."""
        self._restore_loader()  # the previous loader, if loaders are reloaded each epoch
        device = trainer.strategy.root_device
        try:
            reason = self._reason_to_skip(trainer, loader)
        except Exception as error:  # noqa: BLE001 - the user's sampler may raise anything
            reason = f"its sampler failed: {error!r}"
        if largest_over_ranks([float(reason is not None)], device)[0]:
            self._skip(reason or "another rank cannot change it")
            return
        if self.chosen is None and not self._notes:
            try:
                with isolated_random(device):
                    self._tune(trainer, pl_module, loader)
            except MeasuringError as error:
                self._skip(str(error))
        if self.chosen is not None:
            self._loader = loader
            attributes = attributes_for(loader, self.chosen)
            self._loader_patches.enter_context(replaced(loader, **attributes))

    def _restore_loader(self) -> None:
        loader, self._loader = self._loader, None
        if loader is not None:
            before = settings_of(loader)
            self._loader_patches.close()
            if settings_of(loader) != before:
                vars(loader)["_iterator"] = None  # ends persistent workers

    def _reason_to_skip(self, trainer: pl.Trainer, loader: Any) -> str | None:
        if self._is_unsupported:
            return "there are several training loaders, or one that is not a torch DataLoader"
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return "fast_dev_run is too short to measure"
        return reason_to_skip(loader)

    def _skip(self, reason: str) -> None:
        if not self._notes:
            self._notes = [f"The loader stays unchanged: {reason}."]
            log.warning("DataPipelineTuner leaves the training loader unchanged: %s.", reason)

    def _tune(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loader: DataLoader[Any]
    ) -> None:
        start, current = time.perf_counter(), settings_of(loader)
        indices = endless_indices(loader)
        device, failure = trainer.strategy.root_device, "another rank could not measure it"
        try:
            fetch_seconds, busy, batch = probe(loader, indices, self.budget_seconds)
        except Exception as error:  # noqa: BLE001 - the user's dataset may raise anything
            failure = f"a separate process could not fetch a batch: {end_failed_trial(error)}"
            fetch_seconds, busy, batch = math.inf, 1.0, None
        # One reduction for all values. The minimum of CPUs is the maximum of their negatives.
        fetch_seconds, busy, cpus = largest_over_ranks(
            [fetch_seconds, busy, -float(available_cpus())], device
        )
        if math.isinf(fetch_seconds):
            raise MeasuringError(failure)
        written = WrittenParameters(pl_module)
        step, step_seconds = self._trial_step(trainer, pl_module, batch, written)

        def measure(settings: LoaderSettings) -> Measured | None:
            nonlocal failure
            limit = self.budget_seconds
            if largest_over_ranks([time.perf_counter() - start], device)[0] > limit:
                return None
            try:
                measured = time_loader(loader, indices, settings, step, MEASUREMENT_SECONDS, limit)
            except Exception as error:  # noqa: BLE001 - the user's dataset may raise anything
                failure, measured = f"{settings} failed: {end_failed_trial(error)}", (math.inf, 1.0)
            seconds, wait = largest_over_ranks(measured, device)
            if math.isinf(seconds):  # the trial failed on a rank, so all ranks stop
                raise MeasuringError(failure)
            return Measured(settings, seconds, wait)

        largest = max_workers_for(int(-cpus), trainer.num_devices, busy)
        search = Search(
            measure,
            max_workers=largest if self.max_workers is None else self.max_workers,
            # Keep workers if there were any: without them, later draws of the sampler would differ.
            min_workers=int(current.workers > 0),
            pin=current.pin or device.type == "cuda",
        )
        with without_side_effects(trainer, pl_module, written):
            self.chosen = search.run(fetch_seconds, step_seconds)
        self._tried = search.tried
        step_time = f"{1e3 * step_seconds:.3g} ms" if step_seconds else "an unknown time"
        self._notes = [
            f"Ended because {search.reason}, after {time.perf_counter() - start:.1f} s. A batch "
            f"takes {1e3 * fetch_seconds:.3g} ms to fetch without workers, a step {step_time}."
        ]
        if self.verbose and trainer.is_global_zero:
            self.report().print()

    def _trial_step(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        written: WrittenParameters,
    ) -> tuple[Callable[[Any], object], float]:
        """Return a training step for trials, and its duration in seconds; 0 if it fails."""

        def step(batch: Any) -> None:
            run_step(trainer, pl_module, prepare_batch(trainer, pl_module, batch), 0)
            for parameter in pl_module.parameters():
                parameter.grad = None

        model, seconds = trainer.strategy.model, math.inf
        if model is pl_module or isinstance(model, DistributedDataParallel):  # not sharded
            try:
                with without_side_effects(trainer, pl_module, written):
                    step(batch)  # shows which parameters it writes
                with without_side_effects(trainer, pl_module, written):
                    seconds = statistics.median(time_calls(partial(step, batch)) for _ in range(3))
            except Exception as error:  # noqa: BLE001 - the user's step may raise anything
                log.info("DataPipelineTuner could not try a training step: %s", error)
        (seconds,) = largest_over_ranks([seconds], trainer.strategy.root_device)
        if math.isinf(seconds):
            return lambda batch: None, 0.0
        if trainer.world_size > 1:  # ranks take unequal numbers of steps, so reductions would hang
            return lambda batch: time.sleep(seconds), seconds
        return step, seconds

    def report(self) -> Report:
        """Return a table of all measurements."""
        rows = [
            {
                "workers": measured.settings.workers,
                "prefetch": measured.settings.prefetch,
                "pinned": measured.settings.pin,
                "ms a batch": 1e3 * measured.seconds,
                "waiting": measured.wait,
                "taken": "yes" if measured.settings == self.chosen else "",
            }
            for measured in self._tried
        ]
        notes = self._notes or ["Nothing was measured yet."]
        if self.chosen is not None and not rows:
            notes = [f"{self.chosen} was taken from the checkpoint."]
        return Report("DataPipelineTuner: a batch with its training step", rows, notes)

    def state_dict(self) -> dict[str, Any]:
        """Return the chosen settings."""
        return {} if self.chosen is None else {"settings": asdict(self.chosen)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Use the settings of a checkpoint."""
        saved = state_dict["settings"]  # earlier versions saved more
        self.chosen = LoaderSettings(saved["workers"], saved["prefetch"], saved["pin"])

    def release(self, trainer: pl.Trainer) -> None:
        """Restore the loader, the Trainer and the strategy."""
        super().release(trainer)
        self._restore_loader()


def end_failed_trial(error: Exception) -> str:
    """End the workers of a failed trial, and return the last line of its error.

    The error's traceback holds references to the workers, so they only end once it is cleared.
    """
    traceback.clear_frames(error.__traceback__)
    # A worker's error contains its whole traceback.
    return (str(error).strip().splitlines() or [repr(error)])[-1].rstrip(".")


def max_workers_for(cpus: int, processes: int, busy: float) -> int:
    """Return the worker limit: the CPUs per process, or more if items leave them idle."""
    share = max(1, cpus // max(1, processes))
    limit = MAX_WAITING_WORKERS
    return max(share, min(limit, int(share / max(busy, 1 / limit))))
