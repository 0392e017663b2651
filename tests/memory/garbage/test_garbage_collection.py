"""GarbageCollection: the schedule, frozen objects, and what is restored afterwards.

The heap of imported modules is frozen before each test, so that collections are fast.
"""

import copy
import gc
import os
import weakref
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

import lightning_opt as lo
from tests.helpers.models import SmallNet, loader_of
from tests.helpers.processes import launch
from tests.helpers.trainers import MemoryLogger, quiet_trainer


class Node:
    """Half of a reference cycle that holds a tensor."""

    def __init__(self) -> None:
        self.me, self.tensor = self, torch.zeros(3)


class Spy(Callback):
    """Makes garbage at each batch, and records collections.

    Attributes:
        collections: Training batch and generation of each collection.
        enabled: Whether automatic collection was on, at each batch.
        frozen: Number of frozen objects, at each batch.
        alive: Number of garbage cycles not yet collected, at each batch.
    """

    def __init__(self, garbage: int = 3000) -> None:
        self.garbage, self.batch = garbage, 0
        self.collections: list[tuple[int, int]] = []
        self.enabled: list[bool] = []
        self.frozen: list[int] = []
        self.nodes: list[weakref.ref[Node]] = []
        self.alive: list[int] = []

    def on_train_start(self, trainer, pl_module):
        gc.callbacks.append(self.record)

    def on_train_end(self, trainer, pl_module):
        gc.callbacks.remove(self.record)

    def on_exception(self, trainer, pl_module, exception):
        gc.callbacks.remove(self.record)

    def record(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self.collections.append((self.batch, info["generation"]))

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batch += 1
        self.enabled.append(gc.isenabled())
        self.frozen.append(gc.get_freeze_count())
        self.alive.append(sum(node() is not None for node in self.nodes))
        self.nodes.append(weakref.ref(Node()))
        self.kept = [[i] for i in range(self.garbage)]  # enough for several automatic collections
        copy.deepcopy(trainer.callbacks[0]).release(trainer)  # a copy has nothing to restore


def train(callback: lo.GarbageCollection, batches: int = 12, **settings: Any) -> Spy:
    spy = Spy()
    trainer = quiet_trainer(callbacks=[callback, spy], limit_val_batches=0, **settings)
    trainer.fit(SmallNet(), train_dataloaders=loader_of(batches))
    return spy


def test_collections_happen_only_on_schedule_and_objects_are_frozen(nothing_frozen):
    logger, callback = MemoryLogger(), lo.GarbageCollection(every_n_steps=4)
    spy = train(callback, logger=logger)
    assert not any(spy.enabled)
    assert spy.collections == [(4, 2), (8, 2), (12, 2)]
    assert spy.alive == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]
    assert min(logger.series("gc/collected")) >= 4  # nodes
    # Objects are frozen at the start and after the first collection. The spy counts before it.
    assert all(count > 10_000 for count in spy.frozen)
    before, after = spy.frozen[:4], spy.frozen[5:]
    # The count falls when a frozen object is freed.
    assert max(before) - min(before) < 100
    assert max(after) - min(after) < 100
    assert min(after) > max(before)
    assert gc.get_freeze_count() == 0


def test_schedule_restarts_with_each_fit_and_earlier_settings_are_kept():
    gc.freeze()
    gc.disable()
    count, callback = gc.get_freeze_count(), lo.GarbageCollection(every_n_steps=4)
    try:
        for batches in (5, 4):
            assert train(callback, batches).collections == [(4, 2)]
        spy = train(callback)
        assert not gc.isenabled()
    finally:
        gc.enable()
    # The count falls when a frozen object is freed.
    assert gc.get_freeze_count() == pytest.approx(count, rel=0.01)
    assert max(spy.frozen) <= count
    assert spy.collections == [(4, 2), (8, 2), (12, 2)]


def test_validation_batches_count_but_not_in_the_sanity_check():
    class Note(Callback):
        def on_validation_batch_end(self, trainer, pl_module, *_):
            at.append((trainer.sanity_checking, len(logger.series("gc/pause_ms"))))

    at: list[Any] = []
    logger = MemoryLogger()
    garbage = lo.GarbageCollection(every_n_steps=7)
    quiet_trainer(
        callbacks=[garbage, Note()], logger=logger, num_sanity_val_steps=2, val_check_interval=6
    ).fit(SmallNet())  # 6 + 2 batches, twice
    # Validation batches 7, 8, 13 and 14. Training batch 7 follows the first two.
    assert at == [(True, 0), (True, 0), (False, 1), (False, 1), (False, 2), (False, 3)]


def collect_on_two_ranks() -> list[tuple[int, int]]:
    # Ranks make different amounts of garbage, so that automatic collections would differ.
    spy = Spy(garbage=500 + 4000 * int(os.environ["RANK"]))
    trainer = quiet_trainer(
        callbacks=[lo.GarbageCollection(every_n_steps=5), spy],
        strategy="ddp",
        devices=2,
        limit_val_batches=1 + int(os.environ["RANK"]),
        val_check_interval=6,
    )
    trainer.fit(SmallNet())
    return spy.collections


@pytest.mark.distributed
def test_all_ranks_collect_at_the_same_step():
    assert launch(collect_on_two_ranks) == [[(5, 2), (10, 2)]] * 2
