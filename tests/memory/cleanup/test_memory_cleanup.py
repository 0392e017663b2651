"""MemoryCleanup: the rule, the callback with limits, and several ranks."""

import gc
import logging
import os
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

import lightning_opt as lo
from lightning_opt.core.measure.memory import (
    MB,
    MemoryLimits,
    Usage,
    address_space,
    malloc_info,
    malloc_trim,
)
from lightning_opt.memory.cleanup import memory_cleanup as cleanup_module
from lightning_opt.memory.cleanup.memory_cleanup import Pressure
from tests.helpers.models import SmallNet, loader_of
from tests.helpers.processes import launch
from tests.helpers.trainers import MemoryLogger, quiet_trainer

needs_heap = pytest.mark.skipif(malloc_info() is None, reason="needs glibc's malloc statistics")

# --- the rule -----------------------------------------------------------------------------------


def test_cleanups_begin_again_below_release():
    pressure = Pressure(0.8, 0.6)
    for level in (0.8, 0.9, 0.95):
        assert pressure.is_high(level)
        assert not pressure.record_cleanup(fraction=level, freed=0.04)
    assert not pressure.is_high(0.65)  # not yet below release
    assert not pressure.is_high(0.999)
    assert not pressure.is_high(0.59)
    assert pressure.is_high(0.81)
    pressure.record_cleanup(0.81, freed=0.0)
    assert pressure.level < 1  # the failures count anew


def test_only_failures_in_a_row_end_the_cleanups():
    pressure = Pressure(0.8, 0.6)
    for freed in (0.0, 0.0, 0.1, 0.0, 0.0):
        pressure.record_cleanup(0.9, freed)
    assert pressure.level < 1


@pytest.mark.parametrize(("freed", "fraction", "success", "level"), [
    (0.051, 0.7, True, 0.85), (0.049, 0.7, False, 0.85), (0.001, 0.59, True, 0.8),
])  # fmt: skip
def test_success_depends_on_the_gap_between_threshold_and_release(freed, fraction, success, level):
    pressure = Pressure(0.8, 0.6)
    assert pressure.record_cleanup(fraction, freed) is success
    assert pressure.level == level


class Cycle:
    def __init__(self, megabytes: float) -> None:
        self.me = self
        self.tensor = torch.ones(int(megabytes * MB), dtype=torch.uint8)


# --- the callback, with an artificial limit -----------------------------------------------------


class Ballast(Callback):
    """Allocates megabytes at each batch: garbage in cycles, or a working set."""

    def __init__(self, garbage: float = 0.0, kept: float = 0.0) -> None:
        self.garbage, self.kept = garbage, kept
        self.working_set: list[Tensor] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.garbage:
            Cycle(self.garbage)
        if self.kept:
            self.working_set.append(torch.ones(int(self.kept * MB), dtype=torch.uint8))


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Make 200 MB of heap growth the only limit, and turn off automatic collection."""
    gc.collect()
    malloc_trim()  # else free blocks of other tests are filled first, and the heap does not grow
    gc.freeze()  # so that collecting is fast
    base = malloc_info().used
    monkeypatch.setattr(
        MemoryLimits, "read", lambda self: [Usage("heap", malloc_info().used - base, 200 * MB)]
    )
    gc.disable()
    yield base
    gc.enable()


def train(*callbacks: Callback, batches: int = 60, **settings: Any) -> MemoryLogger:
    logger = MemoryLogger()
    trainer = quiet_trainer(callbacks=[*callbacks], logger=logger, **settings)
    trainer.fit(SmallNet(), train_dataloaders=loader_of(batches))
    return logger


@needs_heap
def test_garbage_is_freed_and_reported(limit):
    cleanup = lo.MemoryCleanup(every_n_steps=4)
    logger = train(Ballast(garbage=10), cleanup, limit_val_batches=0)  # 160 MB at the 16th batch
    assert [event["step"] for event in cleanup.events] == [16, 32, 48]
    for event in cleanup.events:
        assert event["useful"]
        assert event["limit"] == "heap"
        assert event["before"] == pytest.approx(0.8, abs=0.02)
        assert event["after"] == pytest.approx(0.0, abs=0.05)
        assert event["freed_mb"] == pytest.approx(160, rel=0.02)
    assert logger.series("memory/cleanups") == [(step // 16) for step in range(4, 61, 4)]
    assert logger.series("memory/freed_mb")[-1] == pytest.approx(480, rel=0.02)
    seconds = sum(event["seconds"] for event in cleanup.events)
    assert logger.series("memory/cleanup_seconds")[-1] == pytest.approx(seconds)
    assert logger.series("memory/used_fraction")[-1] == pytest.approx(0.6, abs=0.03)
    assert cleanup.report().rows == cleanup.events
    assert "3 cleanups in 60 steps freed 480 MB" in str(cleanup.report())


@needs_heap
@pytest.mark.parametrize("source", ["cuda:0", "this process's share of cuda:0"])
def test_host_memory_is_not_counted_as_freed_on_a_device(limit, monkeypatch, source):
    monkeypatch.setattr(MemoryLimits, "read", lambda self: [Usage(source, 90 * MB, 100 * MB)])
    cleanup = lo.MemoryCleanup(every_n_steps=4)
    train(Ballast(garbage=10), cleanup, batches=4, limit_val_batches=0)
    (event,) = cleanup.events
    assert (event["useful"], event["freed_mb"]) == (False, 0.0)


@needs_heap
def test_garbage_of_validation_is_freed(limit):
    class Validation(Callback):
        def on_validation_batch_start(self, *arguments):
            Cycle(10)

    cleanup = lo.MemoryCleanup(every_n_steps=1)
    quiet_trainer(callbacks=[Validation(), cleanup], limit_train_batches=1).fit(
        SmallNet(), loader_of(2), loader_of(20, seed=1)
    )
    assert [round(event["before"], 1) for event in cleanup.events] == [0.8]


@needs_heap
def test_large_working_set_is_cleaned_three_times_and_advised_once(limit, caplog):
    cleanup = lo.MemoryCleanup(every_n_steps=1)
    ballast = Ballast(kept=3.3)  # grows to 198 of 200 MB
    with caplog.at_level(logging.WARNING, logger=cleanup_module.__name__):
        train(ballast, cleanup, limit_val_batches=0)
    assert [round(event["before"], 2) for event in cleanup.events] == [0.81, 0.91, 0.96]
    assert not any(event["useful"] for event in cleanup.events)
    (advice,) = caplog.messages
    assert "the run needs this memory" in advice
    assert 'lightning_opt.ActivationCheckpointing("auto")' in advice


def test_second_run_starts_anew():
    cleanup = lo.MemoryCleanup()
    for _ in range(2):
        quiet_trainer(callbacks=[cleanup]).fit(SmallNet())
        assert " in 14 steps " in str(cleanup.report())  # two of validation


def test_limits_are_read_only_on_schedule(monkeypatch):
    reads: list[int] = []
    monkeypatch.setattr(
        MemoryLimits, "read", lambda self: reads.append(1) or [Usage("system", 1, 10**15)]
    )
    logger = train(lo.MemoryCleanup(every_n_steps=10), batches=60, limit_val_batches=0)
    assert len(reads) == len(logger.records) == 6


# --- several ranks ------------------------------------------------------------------------------


def clean_on_two_ranks(delayed: bool) -> tuple[list[int], list[bool], float]:
    gc.collect()
    gc.freeze()
    gc.disable()
    if delayed:
        cleanup_module.reads_are_free = lambda device: False
    rank, base = int(os.environ["RANK"]), malloc_info().used
    MemoryLimits.read = lambda self: [Usage("heap", malloc_info().used - base, 200 * MB)]
    cleanup, logger = lo.MemoryCleanup(every_n_steps=5), MemoryLogger()
    trainer = quiet_trainer(
        callbacks=[Ballast(garbage=15 if rank else 0.1), cleanup],
        strategy="ddp",
        devices=2,
        limit_val_batches=0,
        logger=logger,
    )
    trainer.fit(SmallNet(), train_dataloaders=loader_of(30))
    steps = [event["step"] for event in cleanup.events]
    useful = [event["useful"] for event in cleanup.events]
    MemoryLimits.read = lambda self: [Usage("heap", 20 * (1 + rank) * MB, 100 * MB)]
    trainer.fit_loop.epoch_progress.reset()
    trainer.fit(SmallNet(), train_dataloaders=loader_of(30))
    used = trainer.callback_metrics["memory/used_fraction"].item()
    # Only rank 1 can read a limit.
    MemoryLimits.read = lambda self: [Usage("heap", 90 * MB, 100 * MB)] if rank else []
    trainer.fit_loop.epoch_progress.reset()
    trainer.fit(SmallNet(), train_dataloaders=loader_of(30))
    assert cleanup.events
    return steps, useful, used


@pytest.mark.distributed
@pytest.mark.parametrize("delayed", [False, True])
@needs_heap
def test_all_ranks_clean_when_one_needs_it(delayed):
    (steps, useful, used), (other_steps, other_useful, other_used) = launch(
        clean_on_two_ranks, delayed
    )
    # 15 MB per step on one rank exceed 160 MB at step 11, read at 15; the delayed result at 20.
    assert steps == other_steps == ([20] if delayed else [15, 30])
    assert other_useful == [True] * len(steps)
    assert useful == [False] * len(steps)
    assert used == other_used == pytest.approx(0.4)  # of rank 1


# --- a limited address space --------------------------------------------------------------------


def train_under_a_limit(with_cleanup: bool) -> tuple[int, str, int]:
    """Return the number of steps, the error or "completed", and the number of cleanups."""
    import resource

    model, ballast = SmallNet(), Ballast(garbage=8)
    quiet_trainer(limit_train_batches=2, callbacks=[ballast]).fit(model)
    gc.collect()
    gc.freeze()
    limit = psutil.Process().memory_info().vms + 400 * MB
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    assert address_space().total == limit
    cleanup = lo.MemoryCleanup(threshold=1 - 150 * MB / limit, release=1 - 300 * MB / limit)
    callbacks = [ballast, cleanup] if with_cleanup else [ballast]
    trainer = quiet_trainer(callbacks=callbacks, limit_val_batches=0)
    try:
        trainer.fit(model, train_dataloaders=loader_of(300))
    except (RuntimeError, MemoryError) as error:
        return trainer.global_step, str(error), len(cleanup.events)
    return trainer.global_step, "completed", len(cleanup.events)


@pytest.mark.distributed
@needs_heap
def test_run_with_cyclic_garbage_completes_only_with_cleanup():
    ((steps, end, _),) = launch(train_under_a_limit, False, processes=1)
    assert steps < 300
    assert "allocate memory" in end
    ((steps, end, cleanups),) = launch(train_under_a_limit, True, processes=1)
    assert (steps, end) == (300, "completed")
    assert cleanups >= 3
