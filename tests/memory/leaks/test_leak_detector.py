"""LeakDetector: leaks are found and named, trainings without leaks have no suspects."""

import ctypes
import gc
import itertools
import random
import weakref
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor

import lightning_opt as lo
from lightning_opt.core.measure.memory import MemoryLimits, Usage, malloc_info
from lightning_opt.memory.leaks import leak_detector, suspects
from lightning_opt.memory.leaks.suspects import MemoryTrend, Suspect, Walk, mean_size
from tests.helpers.models import SmallNet
from tests.helpers.processes import launch
from tests.helpers.trainers import MemoryLogger, logged_warnings, quiet_trainer
from tests.memory.leaks import leaky
from tests.memory.leaks.leaky import BATCHES, CLEAN, EPOCHS, LEAKS, HoardingLogger, Net

needs_heap = pytest.mark.skipif(malloc_info() is None, reason="needs glibc's malloc statistics")


@pytest.fixture(autouse=True)
def _searches_are_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the objects of pytest and other tests in this process."""
    monkeypatch.setattr(leak_detector, "user_modules", lambda: [(leaky.__name__, leaky)])
    gc.freeze()


def train(model: Any, detector: lo.LeakDetector, **settings: Any) -> lo.LeakDetector:
    settings = {"max_epochs": EPOCHS, "limit_val_batches": 0, **settings}
    quiet_trainer(callbacks=[detector], **settings).fit(model)
    return detector


def test_user_modules_include_scripts_and_notebooks_but_no_libraries(monkeypatch):
    files = {
        "__main__": None,
        "train": "/home/user/train.py",
        "built_in": None,
        "system_numpy": "/usr/lib/python3/dist-packages/numpy/__init__.py",
        "user_numpy": "/home/user/.local/lib/python3.11/site-packages/numpy/__init__.py",
    }
    modules = {}
    for name, file in files.items():
        modules[name] = ModuleType(name)
        if file:
            modules[name].__file__ = file
    installed = {"torch": torch, "random": random, "lightning_opt": lo}
    imported = SimpleNamespace(modules={**modules, **installed})
    monkeypatch.setattr(suspects, "sys", imported)
    assert [name for name, _ in suspects.user_modules()] == ["__main__", "train"]


class Found(NamedTuple):
    suspects: list[Suspect]
    report: str
    warnings: list[str]
    logger: MemoryLogger


def train_frozen(model: Callable[[], Any], settings: dict[str, Any], **detector: Any) -> Found:
    gc.freeze()
    logger = HoardingLogger()
    with logged_warnings() as messages:
        trained = train(model(), lo.LeakDetector(**detector), logger=logger, **settings)
    warnings = [text for text in messages if "LeakDetector" in text]
    found = Found(trained.suspects, str(trained.report()), warnings, logger)
    train(Net(), trained, max_epochs=1)
    assert trained.suspects == []  # a second run starts anew
    return found


def find_leaks(model: Callable[[], Any], settings: Any = (), **detector: Any) -> Found:
    """Train in a new process, whose heap does not contain garbage of other tests."""
    (found,) = launch(partial(train_frozen, **detector), model, dict(settings), processes=1)
    return found


# --- leaks, and trainings without ---------------------------------------------------------------


@needs_heap
@pytest.mark.parametrize("name", LEAKS)
def test_leak_is_found_within_300_steps_with_its_holder_and_warns_once(name):
    model, kind, paths = LEAKS[name]
    suspects, report, warnings, logger = find_leaks(model)
    assert {suspect.where for suspect in suspects} == paths
    assert len(suspects) == len(warnings) == logger.series("leaks/suspects")[-1] == len(paths)
    for suspect, warning in zip(suspects, warnings, strict=True):
        assert suspect.kind == kind
        assert suspect.step <= 300 == BATCHES * EPOCHS
        for text in (report, warning):
            assert suspect.where in text
            assert suspect.advice in text
    if name == "loss list":
        assert "grows by 1 Tensor per step" in warnings[0]
        assert "detach()" in warnings[0]
        # The graph of a step: activations of 4 rows in 32 + 32 + 1 units, and autograd's nodes.
        assert 2 < logger.series("leaks/kb_per_step")[-1] < 40


@pytest.mark.parametrize("name", CLEAN)
def test_training_without_leak_has_no_suspects(name):
    make, settings = CLEAN[name]
    detector = train(make(), lo.LeakDetector(), **settings)
    assert detector.suspects == []
    assert "No leak was found." in str(detector.report())


# --- less common leaks --------------------------------------------------------------------------


class Native(Net):
    """Memory that no Python object references."""

    def leak(self, batch, loss):
        ctypes.pythonapi.PyMem_RawMalloc(ctypes.c_size_t(20_000))


@needs_heap
def test_report_names_the_counter_if_no_container_grows():
    found = find_leaks(Native)
    assert found.suspects == []
    assert "The heap grows by 19" in found.report
    assert "but no container that your objects hold" in found.report


class ValidationLeak(Net):
    """Grows in validation, too rarely for the training samples."""

    def prepare(self) -> None:
        self.kept: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.kept.append(torch.zeros(30_000))


@needs_heap
def test_growth_in_validation_is_found():
    (suspect,) = find_leaks(
        ValidationLeak,
        {"limit_val_batches": 2, "val_check_interval": 25},
        every_n_steps=100,  # training has three samples
        warmup_steps=10,
    ).suspects
    assert suspect.where == "ValidationLeak.kept"
    assert suspect.step <= 300


# --- until the end of the epoch -----------------------------------------------------------------


def epoch_outputs() -> list[list[str]]:
    """Return the suspects with much room and with little."""
    found, usages = [], [Usage("system", 10, 10 + room) for room in (10**15, 10**5)]
    gc.freeze()
    for usage in usages:
        read = lambda limits, usage=usage: [usage]  # noqa: E731
        with (
            mock.patch.object(MemoryLimits, "read", read),
            mock.patch.object(leaky, "BATCHES", 300),
        ):
            detector = train(leaky.EpochOutputs(), lo.LeakDetector(), max_epochs=1)
        found.append([suspect.where for suspect in detector.suspects])
    return found


@needs_heap
def test_outputs_of_an_epoch_are_suspects_only_if_memory_would_run_out():
    assert launch(epoch_outputs, processes=1) == [[[], ["EpochOutputs.outputs"]]]


# --- the schedule -------------------------------------------------------------------------------


def test_only_steps_and_validations_of_the_training_are_sampled(monkeypatch):
    sampled: list[Any] = []
    monkeypatch.setattr(
        leak_detector, "read_counters", lambda _: sampled.append(1) or {"heap": 1e9}
    )
    detector, model = lo.LeakDetector(warmup_steps=0), SmallNet()
    before = LambdaCallback(on_train_start=lambda *_: counts.append(len(sampled)))
    counts: list[int] = []
    for _ in range(2):  # the second run has a sanity check when the steps of the first are known
        trainer = quiet_trainer(callbacks=[detector, before], num_sanity_val_steps=1, max_epochs=1)
        trainer.fit(model)
        counts.append(len(sampled))
        trainer.validate(model, verbose=False)
    first = counts[1]
    assert counts == [0, first, first, 2 * first]


def test_searches_that_find_nothing_become_rarer(monkeypatch):
    samples, counted = itertools.count(), []
    monkeypatch.setattr(leak_detector, "FIRST_PAUSE", 12)
    monkeypatch.setattr(leak_detector, "Walk", lambda roots, excluded: None)
    monkeypatch.setattr(leak_detector, "read_counters", lambda _: {"heap": 1e5 * next(samples)})
    monkeypatch.setattr(
        leak_detector,
        "take_census",
        lambda step, epoch, _: counted.append(step) or leak_detector.Census(step, epoch, {}, 0),
    )
    train(SmallNet(), lo.LeakDetector(warmup_steps=0, every_n_steps=1), max_epochs=12)
    ends, starts = counted[3::4], counted[4::4]
    assert [start - end for end, start in zip(ends, starts, strict=False)] == [12, 24, 48]


# --- the parts ----------------------------------------------------------------------------------


def growth_of(values: list[float], min_bytes_per_step: float = 100.0) -> list[str]:
    trend = MemoryTrend(min_bytes_per_step)
    for place, value in enumerate(values):
        trend.add(10 * place, {"heap": value})
    return list(trend.growing())


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
def test_growth_must_be_steady_and_not_flatten(values, grows):
    assert growth_of(values) == ["heap"] * grows


def test_size_counts_a_storage_once_and_no_referenced_module():
    base, graph = torch.zeros(10_000), torch.zeros((), requires_grad=True)
    for _ in range(10):
        graph = graph + 1
    size = 2 * mean_size([[base, base.view(100, 100), base[5:], graph], {"model": Net()}])
    assert size == pytest.approx(40_000 + 1000 * 11 + 4 * 500, rel=0.05)


def test_path_leads_through_containers_and_closures():
    class Holder:
        pass

    holder, deep, gone = Holder(), [1], Holder()

    def function() -> Any:
        return deep

    holder.table = {"a": [weakref.proxy(gone), (function,)]}
    del gone  # a proxy without its object raises for any attribute
    walk = Walk([("root", holder)])
    assert walk.describe(deep) == "root.table['a'][1][0] -> tuple[0] -> list"
    assert mean_size([holder]) > 0
