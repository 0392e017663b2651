"""What holds for every test: one thread, a fixed seed, a quiet Lightning, what is skipped where.

torch and Lightning are imported when tests are about to be collected: the process that hands them
out to pytest-xdist's workers needs neither, and the workers wait for it.
"""

import functools
import gc
import importlib
import inspect
import logging
import multiprocessing.process
import subprocess
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

IMPORTED = 200_000
"""Fewer objects than torch and Lightning make when they are imported, more than a test makes."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        action="store_true",
        help="leave out what trains or starts a process, at the latest when it is about to",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("quick"):
        config.option.markexpr = config.option.markexpr or "not slow and not distributed"
        config.option.reportchars = "fE"  # that most are left is no news


def pytest_collectstart() -> None:
    _prepare()


@functools.cache
def _prepare() -> None:
    """Import torch and Lightning once, before the first module of tests does."""
    import lightning.pytorch  # sets the level of its logger, which is then set anew
    import torch.distributed.fsdp
    from lightning.fabric.utilities import registry

    torch.set_num_threads(1)  # workers of pytest-xdist share the cores
    logging.getLogger(lightning.pytorch.__name__).setLevel(logging.WARNING)
    # Each of our thousands of Trainers would read the metadata of every package that is installed.
    registry.entry_points = functools.cache(registry.entry_points)
    if not hasattr(torch.distributed.fsdp, "fully_shard"):  # torch 2.5
        torch.distributed.fsdp.fully_shard = importlib.import_module(
            "torch.distributed._composable.fsdp"
        ).fully_shard
    trainer = lightning.pytorch.Trainer
    if "weights_only" not in inspect.signature(trainer.fit).parameters:  # before Lightning 2.6
        trainer.fit = _without_weights_only(trainer.fit)  # type: ignore[method-assign]


def _without_weights_only(fit: Callable[..., None]) -> Callable[..., None]:
    """Return ``fit`` as older versions of Lightning have it: they always load whole checkpoints."""

    @functools.wraps(fit)
    def older(*args: Any, weights_only: bool | None = None, **settings: Any) -> None:
        fit(*args, **settings)

    return older


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    if config.getoption("quick"):
        speaks = {id(item): _speaks_of(getattr(item, "function", None), set()) for item in items}
        config.hook.pytest_deselected(items=[item for item in items if speaks[id(item)]])
        items[:] = [item for item in items if not speaks[id(item)]]

    distributed = torch.distributed
    possible = {
        "gpu": (torch.cuda.is_available(), "needs a CUDA device"),
        "distributed": (
            distributed.is_available() and distributed.is_gloo_available(),
            "needs torch.distributed with gloo",
        ),
    }
    for item in items:
        for mark, (here, reason) in possible.items():
            if not here and item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish(session: pytest.Session) -> None:
    from lightning.pytorch import Trainer

    if session.config.getoption("quick"):
        for owner, names in {
            Trainer: ("fit", "validate", "test", "predict"),
            subprocess.Popen: ("__init__",),
            multiprocessing.process.BaseProcess: ("start",),
        }.items():
            for name in names:
                setattr(owner, name, _leaves_the_quick_lane(getattr(owner, name)))


def _speaks_of(function: Any, seen: set[Any]) -> bool:
    """Return whether a function of the tests, or one that it names, names a Trainer or a launch."""
    if not isinstance(function, types.FunctionType) or function in seen:
        return False
    seen.add(function)
    codes = [function.__code__]
    for code in codes:
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
    names = {name for code in codes for name in code.co_names}
    if names & {"Trainer", "quiet_trainer", "launch", "subprocess"}:
        return True
    named = [function.__globals__.get(name) for name in names]
    ours = [other for other in named if getattr(other, "__module__", "").startswith("tests.")]
    return any(_speaks_of(other, seen) for other in ours)


def _leaves_the_quick_lane(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return what skips the test that calls it, and looks like the method to LightningCLI."""

    @functools.wraps(method)
    def leave(*_: Any, **__: Any) -> None:
        pytest.skip(f"not quick: {method.__qualname__}")

    return leave


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
def _alone() -> Iterator[None]:
    """Begin as if no other test had run: ``Trainer(deterministic=True)`` puts nothing back."""
    import torch

    torch.manual_seed(0)
    yield
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = False
