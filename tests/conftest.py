"""What holds for every test: one thread, a fixed seed, a quiet Lightning, what is skipped where."""

import functools
import gc
import logging
import multiprocessing.process
import subprocess
from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch  # sets the level of its logger, which is then set anew
import pytest
import torch
from lightning.fabric.utilities import registry

SKIPS = {
    "gpu": (torch.cuda.is_available(), "needs a CUDA device"),
    "distributed": (
        torch.distributed.is_available() and torch.distributed.is_gloo_available(),
        "needs torch.distributed with gloo",
    ),
}

IMPORTED = 200_000
"""Fewer objects than torch and Lightning make when they are imported, more than a test makes."""

TRAINS = [(lightning.pytorch.Trainer, name) for name in ("fit", "validate", "test", "predict")]
STARTS = [(subprocess.Popen, "__init__"), (multiprocessing.process.BaseProcess, "start")]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        action="store_true",
        help="leave a test as skipped as soon as it trains or starts a process",
    )


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # workers of pytest-xdist share the cores
    logging.getLogger(lightning.pytorch.__name__).setLevel(logging.WARNING)
    # Each of our thousands of Trainers would read the metadata of every package that is installed.
    registry.entry_points = functools.cache(registry.entry_points)
    if config.getoption("quick"):
        for owner, name in (*TRAINS, *STARTS):
            setattr(owner, name, _leaves_the_quick_lane(getattr(owner, name)))


def _leaves_the_quick_lane(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return what skips the test that calls it, and looks like the method to LightningCLI."""

    @functools.wraps(method)
    def leave(*_: Any, **__: Any) -> None:
        pytest.skip(f"not quick: {method.__qualname__}")

    return leave


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    for item in items:
        for mark, (possible, reason) in SKIPS.items():
            if not possible and item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Keep what was imported out of the garbage collector, which would walk it all each time."""
    thawed = len(gc.get_objects(generation=2)) > IMPORTED
    if thawed and "nothing_frozen" not in item.fixturenames:  # type: ignore[attr-defined]
        gc.collect()
        gc.freeze()


@pytest.fixture
def nothing_frozen() -> None:
    """For tests of who freezes what."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
