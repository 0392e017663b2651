"""GarbageCollection: when Python collects during a run, what is frozen, and what is put back."""

import gc
import weakref
from collections.abc import Iterator
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
    """Makes garbage at each batch, and notes the batches in which Python collected what.

    Attributes:
        collections: Batch of training and generation of each collection.
        enabled: Whether automatic collection was on, at each batch.
        frozen: Objects frozen, at each batch.
        nodes: One weak reference a batch, to a cycle that is garbage at once.
    """

    def __init__(self, garbage: int = 3000) -> None:
        self.garbage, self.batch = garbage, 0
        self.collections: list[tuple[int, int]] = []
        self.enabled: list[bool] = []
        self.frozen: list[int] = []
        self.nodes: list[weakref.ref[Node]] = []
        self.alive: list[int] = []

    def on_train_start(self, trainer, pl_module):
        gc.callbacks.append(self.note)

    def on_train_end(self, trainer, pl_module):
        gc.callbacks.remove(self.note)

    on_exception = lambda self, trainer, pl_module, error: gc.callbacks.remove(self.note)  # noqa: E731

    def note(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self.collections.append((self.batch, info["generation"]))

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batch += 1
        self.enabled.append(gc.isenabled())
        self.frozen.append(gc.get_freeze_count())
        self.alive.append(sum(node() is not None for node in self.nodes))
        self.nodes.append(weakref.ref(Node()))
        self.kept = [[i] for i in range(self.garbage)]  # enough for several automatic collections


@pytest.fixture(autouse=True)
def _collection_is_left_as_found(nothing_frozen: None) -> Iterator[None]:
    before = (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), len(gc.callbacks))
    yield
    assert (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), len(gc.callbacks)) == before


def train(callback: lo.GarbageCollection, batches: int = 12, **settings: Any) -> Spy:
    spy = Spy()
    trainer = quiet_trainer(callbacks=[callback, spy], limit_val_batches=0, **settings)
    trainer.fit(SmallNet(), train_dataloaders=loader_of(batches))
    return spy


def test_without_it_python_collects_at_any_step():
    spy = Spy()
    quiet_trainer(callbacks=[spy]).fit(SmallNet())
    assert len({batch for batch, _ in spy.collections}) >= 10


def test_collects_on_its_schedule_and_never_else():
    spy = train(lo.GarbageCollection(every_n_steps=4))
    assert not any(spy.enabled)
    assert spy.collections == [(4, 2), (8, 2), (12, 2)]
    assert gc.isenabled()


def test_garbage_lives_until_then_and_no_longer():
    spy = train(lo.GarbageCollection(every_n_steps=4))
    assert spy.alive == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]


def test_freezes_what_is_there_before_and_after_the_first_collection():
    spy = train(lo.GarbageCollection(every_n_steps=4))
    assert all(count > 10_000 for count in spy.frozen)
    before, after = spy.frozen[:4], spy.frozen[5:]  # the spy looks before the collection
    # A frozen object that dies leaves the count, and other threads have some.
    assert max(before) - min(before) < 100
    assert max(after) - min(after) < 100
    assert min(after) > max(before)
    assert gc.get_freeze_count() == 0


def test_does_not_freeze_if_told_so():
    spy = train(lo.GarbageCollection(every_n_steps=4, freeze=False))
    assert set(spy.frozen) == {0}
    assert [batch for batch, _ in spy.collections] == [4, 8, 12]


def test_leaves_what_others_have_frozen():
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        spy = train(lo.GarbageCollection(every_n_steps=4))
        # A frozen object that dies leaves the count.
        assert gc.get_freeze_count() == pytest.approx(count, rel=0.01)
        assert max(spy.frozen) <= count
        assert spy.collections == [(4, 2), (8, 2), (12, 2)]
    finally:
        gc.unfreeze()


def test_leaves_collection_off_where_it_was_off():
    gc.disable()
    try:
        spy = train(lo.GarbageCollection(every_n_steps=6))
        assert not gc.isenabled()
        assert spy.collections == [(6, 2), (12, 2)]
    finally:
        gc.enable()


def test_puts_everything_back_after_an_exception():
    callback, spy = lo.GarbageCollection(), Spy()
    with pytest.raises(ArithmeticError, match="planted"):
        quiet_trainer(callbacks=[callback, spy]).fit(SmallNet(fail_at=3))
    assert spy.enabled[-1] is False
    assert gc.isenabled()


def test_validation_counts_and_the_sanity_check_does_not():
    class Note(Callback):
        def on_validation_batch_end(self, trainer, pl_module, *_):
            at.append((trainer.sanity_checking, len(logger.series("gc/pause_ms"))))

    at: list[Any] = []
    logger = MemoryLogger()
    garbage = lo.GarbageCollection(every_n_steps=7)
    quiet_trainer(
        callbacks=[garbage, Note()], logger=logger, num_sanity_val_steps=2, val_check_interval=6
    ).fit(SmallNet())  # 6 + 2 batches, twice
    assert at == [(True, 0), (True, 0), (False, 1), (False, 1), (False, 2), (False, 2)]


def test_report_compares_with_a_collection_before_freezing():
    logger = MemoryLogger()
    garbage = lo.GarbageCollection(every_n_steps=5)
    train(garbage, batches=20, logger=logger)
    before, scheduled = garbage.report().rows
    pauses = logger.series("gc/pause_ms")
    assert (before["count"], scheduled["count"]) == (1, len(pauses)) == (1, 4)
    assert scheduled["longest ms"] == pytest.approx(max(pauses))
    assert scheduled["mean ms"] == pytest.approx(sum(pauses) / 4)
    # Five nodes each, and what the spy dropped; the node and its `__dict__` are one each.
    assert min(logger.series("gc/collected")) >= 5


def collect_on_two_ranks() -> list[tuple[int, int]]:
    # Each rank makes garbage of its own, so that Python by itself would collect at other steps.
    spy = Spy(garbage=500 + 4000 * int(__import__("os").environ["RANK"]))
    trainer = quiet_trainer(
        callbacks=[lo.GarbageCollection(every_n_steps=5), spy],
        strategy="ddp",
        devices=2,
        limit_val_batches=0,
    )
    trainer.fit(SmallNet())
    return spy.collections


@pytest.mark.distributed
def test_all_ranks_collect_at_the_same_step():
    assert launch(collect_on_two_ranks) == [[(5, 2), (10, 2)]] * 2


@pytest.mark.parametrize("settings", [{"every_n_steps": 0}])
def test_refuses_what_makes_no_sense(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        lo.GarbageCollection(**settings)
