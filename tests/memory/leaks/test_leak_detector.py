"""LeakDetector: planted leaks are found and named, sound trainings are left in peace."""

import ctypes
import gc
import logging
import os
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import lightning_opt as lo
from lightning_opt.core.measure.malloc import malloc_info
from lightning_opt.core.measure.memory import MemoryLimits, Usage
from lightning_opt.memory import object_graph as walking
from lightning_opt.memory.leaks import leak_detector as leaks
from lightning_opt.memory.leaks import signals as leak_signals
from lightning_opt.memory.leaks.census import collect_garbage
from lightning_opt.memory.leaks.signals import Signals
from lightning_opt.memory.leaks.suspects import Suspect
from tests.helpers.processes import launch
from tests.helpers.trainers import MemoryLogger, quiet_trainer
from tests.memory.leaks import leaky
from tests.memory.leaks.leaky import BATCHES, CLEAN, EPOCHS, LEAKS, Net, callbacks_of, logger_for

needs_heap = pytest.mark.skipif(malloc_info() is None, reason="needs glibc's malloc statistics")


@pytest.fixture(autouse=True)
def _collections_are_fast() -> Iterator[None]:
    """Set aside what pytest and other tests have made; counts and collections skip it."""
    gc.freeze()
    yield
    gc.unfreeze()


def train(model: Any, detector: lo.LeakDetector, **settings: Any) -> lo.LeakDetector:
    trainer = quiet_trainer(**{
        "callbacks": [detector, *callbacks_of(model)],
        "max_epochs": EPOCHS,
        "limit_val_batches": 0,
        **settings,
    })  # fmt: skip
    trainer.fit(model)
    return detector


def hunt(model: type[Net], settings: dict[str, Any], **detector: Any) -> list[Suspect]:
    gc.freeze()
    return train(model(), lo.LeakDetector(**detector), **settings).suspects


def suspects_of(model: type[Net], settings: Any = (), **detector: Any) -> list[Suspect]:
    """Train in a process of its own, where no other test's garbage raises or lowers the heap."""
    (suspects,) = launch(partial(hunt, **detector), model, dict(settings), processes=1)
    return suspects


def report_of_native() -> tuple[list[Suspect], str]:
    gc.freeze()
    detector = train(Native(), lo.LeakDetector())
    return detector.suspects, str(detector.report())


def hunt_planted(name: str, folder: Path) -> tuple[list[Suspect], str]:
    gc.freeze()
    detector = train(LEAKS[name][0](), lo.LeakDetector(), logger=logger_for(name, folder))
    return detector.suspects, str(detector.report())


# --- the ten and the twelve ---------------------------------------------------------------------


@needs_heap
@pytest.mark.parametrize("name", LEAKS)
def test_finds_a_leak_within_300_steps_and_names_it(name, tmp_path):
    _, kind, where, source = LEAKS[name]
    (((suspect,), report),) = launch(hunt_planted, name, tmp_path, processes=1)
    assert (suspect.kind, suspect.where) == (kind, where)
    assert suspect.step <= 300 == BATCHES * EPOCHS
    file, _, number = suspect.line.rpartition(":")
    assert Path(file).name == "leaky.py"
    assert source in Path(leaky.__file__).read_text().splitlines()[int(number) - 1]
    assert suspect.where in report
    assert suspect.advice in report


@pytest.mark.parametrize("name", CLEAN)
def test_leaves_a_sound_training_in_peace(name, tmp_path):
    make, settings = CLEAN[name]
    detector = train(make(), lo.LeakDetector(), logger=logger_for(name, tmp_path), **settings)
    assert detector.suspects == []
    assert "No leak was found." in str(detector.report())


# --- less common leaks --------------------------------------------------------------------------


class Native(Net):
    """Memory that no object of Python knows of."""

    def leak(self, batch, loss):
        ctypes.pythonapi.PyMem_RawMalloc(ctypes.c_size_t(20_000))


@needs_heap
def test_says_so_if_nothing_in_python_grows():
    ((suspects, report),) = launch(report_of_native, processes=1)
    assert suspects == []
    assert "The heap grows by 19" in report
    assert "no container of Python does" in report


class ValidationLeak(Net):
    """Grows in validation only, which is too rare for the steps of training to tell."""

    def prepare(self) -> None:
        self.kept: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.kept.append(torch.zeros(30_000))


@needs_heap
def test_finds_what_only_validation_grows():
    (suspect,) = suspects_of(
        ValidationLeak,
        {"limit_val_batches": 2, "val_check_interval": 25},
        every_n_steps=100,  # training has three samples
        warmup_steps=10,
    )
    assert suspect.where == "ValidationLeak.kept"
    assert suspect.step <= 300


class ModuleCache(Net):
    def leak(self, batch, loss):
        CACHE.append(torch.zeros(500))


CACHE: list[Tensor] = []


@needs_heap
def test_finds_a_list_of_a_module_that_was_frozen():
    (suspect,) = suspects_of(ModuleCache)
    assert suspect.where == f"{__name__}.CACHE"
    assert suspect.line.startswith("leaks/test_leak_detector.py")


# --- until the end of the epoch -----------------------------------------------------------------


def epoch_outputs(room: int) -> list[str]:
    def read(limits: MemoryLimits) -> list[Usage]:
        return [Usage("system", 10, 10 + room)]

    gc.freeze()
    with mock.patch.object(MemoryLimits, "read", read), mock.patch.object(leaky, "BATCHES", 300):
        detector = train(leaky.EpochOutputs(), lo.LeakDetector(), max_epochs=1)
    return [suspect.where for suspect in detector.suspects]


@needs_heap
@pytest.mark.parametrize("room", [10**15, 10**5])
def test_what_an_epoch_may_keep_has_to_fit_until_its_end(room):
    assert launch(epoch_outputs, room, processes=1) == [["EpochOutputs.outputs"] * (room == 10**5)]


# --- what happens then --------------------------------------------------------------------------


def raised(model: type[Net]) -> str:
    gc.freeze()
    try:
        train(model(), lo.LeakDetector(action="raise"))
    except RuntimeError as error:
        return str(error)
    return "went on"


@needs_heap
def test_raises_if_told_so():
    (message,) = launch(raised, leaky.LossList, processes=1)
    assert "at step 210. graph: LossList.losses" in message


def warned() -> tuple[list[str], MemoryLogger]:
    gc.freeze()
    logger, handler, messages = MemoryLogger(), logging.Handler(), []
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_opt").addHandler(handler)
    train(leaky.LossList(), lo.LeakDetector(), logger=logger, max_epochs=12)
    return [text for text in messages if "LeakDetector" in text], logger


@needs_heap
def test_warns_once_and_logs():
    (((message,), logger),) = launch(warned, processes=1)
    assert "grows by 1 Tensor a step" in message
    assert "detach()" in message
    assert logger.series("leaks/suspects")[-1] == 1
    # A step's graph: the activations of 4 rows, in 32 + 32 + 1 units, and autograd's nodes.
    assert 2 < logger.series("leaks/kb_per_step")[-1] < 40


def raise_on_two_ranks() -> str:
    gc.freeze()
    model = leaky.LossList() if os.environ["RANK"] == "1" else Net()
    try:
        train(model, lo.LeakDetector(action="raise"), strategy="ddp", devices=2)
    except RuntimeError as error:
        return str(error)
    return "went on"


@pytest.mark.distributed
@needs_heap
def test_all_ranks_stop_together():
    other, leaking = launch(raise_on_two_ranks)
    assert "at step 210." in leaking
    assert "LossList.losses" in leaking
    assert "at step 210." in other
    assert "Another rank" in other


def test_searches_only_if_something_grows(monkeypatch):
    rng = random.Random(0)
    monkeypatch.setattr(leaks, "read_signals", lambda device: {"heap": 1e9 + rng.gauss(0, 1e6)})
    detector = train(leaky.LossList(), lo.LeakDetector())
    assert " 0 searches" in str(detector.report())


@pytest.mark.parametrize("settings", [
    {"every_n_steps": 0}, {"warmup_steps": -1}, {"min_kb_per_step": 0}, {"action": "stop"},
])  # fmt: skip
def test_refuses_what_makes_no_sense(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        lo.LeakDetector(**settings)


# --- the parts ----------------------------------------------------------------------------------


def growth_of(values: list[float], min_rate: float = 100.0) -> list[str]:
    signals = Signals(min_rate)
    for place, value in enumerate(values):
        signals.add(10 * place, {"heap": value})
    return list(signals.growing())


NOISE = [random.Random(3).gauss(0, 3e3) for _ in range(24)]


@pytest.mark.parametrize(("values", "grows"), [
    ([2e3 * i + noise for i, noise in enumerate(NOISE)], True),
    ([5e2 * i + noise / 10 for i, noise in enumerate(NOISE)], False),  # 50 bytes a step
    (NOISE, False),
    ([min(i, 9) * 5e3 + noise / 100 for i, noise in enumerate(NOISE)], False),  # fills up
    ([(i % 5) * 5e4 for i in range(24)], False),  # a sawtooth
    ([1e5 * (i // 4) for i in range(24)], True),  # a staircase
    ([-3e3 * i for i in range(24)], False),
    ([3e3 * i + 1e7 * (i in (5, 17)) for i in range(24)], True),  # with outliers
])  # fmt: skip
def test_growth_is_steady_and_does_not_flatten(values, grows):
    assert growth_of(values) == ["heap"] * grows


def test_signals_are_bytes():
    before = leak_signals.read_signals(torch.device("cpu"))
    kept = torch.ones(3_000_000), [object() for _ in range(20_000)]
    after = leak_signals.read_signals(torch.device("cpu"))
    if "heap" in before:
        assert after["heap"] - before["heap"] == pytest.approx(12e6, rel=0.05)
    assert after["python"] - before["python"] == pytest.approx(20_000 * 96, rel=0.1)
    del kept


def test_garbage_is_told_and_gone():
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            leaky.Node(torch.zeros(2500))
        garbage = collect_garbage()
        again = collect_garbage()
    finally:
        gc.enable()
    assert garbage.types[leaky.Node] == garbage.types[leaky.Child] == garbage.tensors == 5
    assert garbage.bytes == pytest.approx(5 * 10_000, rel=0.2)
    assert again.objects == 0
    assert not gc.garbage
    assert gc.get_debug() == 0


def test_a_graph_is_as_long_as_its_operations():
    total = torch.zeros((), requires_grad=True)
    for _ in range(10):
        total = total + 1
    assert walking.graph_size(total) == 11  # and the leaf
    assert walking.graph_size(total, limit=5) == 5


def test_size_counts_a_storage_once_and_no_module():
    base = torch.zeros(10_000)
    model = Net()
    size = walking.deep_size([base, base.view(100, 100), base[5:], model])
    assert size == pytest.approx(40_000, rel=0.1)


def test_names_lead_through_anything():
    class Holder:
        pass

    holder, deep = Holder(), [1]

    def function() -> Any:
        return deep

    holder.table = {"a": [0, (function,)]}
    walk = walking.Walk([("root", holder)])
    assert walking.describe(walk.path(deep), "root") == "root.table['a'][1][0] closure deep"
    assert walking.Walk([("root", holder)]).path([]) == []


def test_looks_at_proxies_without_waking_them():
    import weakref

    class Gone:
        pass

    thing = Gone()
    proxy = weakref.proxy(thing)
    del thing
    assert walking.deep_size([[proxy]]) > 0
    assert walking.Walk([("root", [proxy])]).found
