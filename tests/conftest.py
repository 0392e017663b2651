"""Settings for every test: one thread, a fixed seed, a quiet Lightning, skips and order.

torch and Lightning are imported when collection begins: xdist's controller process needs neither.
"""

import functools
import gc
import importlib
import logging
import multiprocessing.process
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.helpers.fork_server import share_fork_server, use_fork_server


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        action="store_true",
        help="skip each test when it creates a Trainer or starts a process",
    )


def pytest_configure(config: pytest.Config) -> None:
    shared = getattr(config, "workerinput", {}).get("fork_server")
    if shared is not None:
        use_fork_server(shared)
    if config.getoption("quick"):
        config.option.markexpr = config.option.markexpr or "not slow and not distributed"
        config.option.reportchars = "fE"  # skips are expected


def pytest_collectstart() -> None:
    _prepare()


@functools.cache
def _prepare() -> None:
    """Import torch and Lightning, and adapt old versions, before the first test module does."""
    gc.disable()  # it would visit the imported modules again and again
    import hypothesis
    import lightning.pytorch  # sets its logger's level, which is changed below
    import torch.distributed.fsdp

    torch.set_num_threads(1)  # pytest-xdist's workers share the cores
    # The same examples in each run, on machines of any speed.
    hypothesis.settings.register_profile(
        "tests",
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.settings.load_profile("tests")
    logging.getLogger(lightning.pytorch.__name__).setLevel(logging.WARNING)
    if not hasattr(torch.distributed.fsdp, "fully_shard"):  # torch 2.5
        torch.distributed.fsdp.fully_shard = importlib.import_module(
            "torch.distributed._composable.fsdp"
        ).fully_shard
    importlib.import_module("tests.helpers.ample_memory")
    importlib.import_module("tests.helpers.trainers")


@pytest.hookimpl(trylast=True)  # after others have removed items
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    available = {
        "gpu": (torch.cuda.is_available(), "needs a CUDA device"),
        "distributed": (
            torch.distributed.is_available() and torch.distributed.is_gloo_available(),
            "needs torch.distributed with gloo",
        ),
    }
    for item in items:
        for mark, (is_available, reason) in available.items():
            if not is_available and item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))
    items[:] = _slow_files_first(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def _slow_files_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Order tests so that each worker begins with its share of the files that hold slow tests.

    ``--dist worksteal`` gives each worker one contiguous part. Quick tests remain for the end, when
    workers take tests from each other. No file of slow tests is in two parts: each worker would
    start the processes that its tests share.
    """
    files: dict[Any, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    parts: list[list[pytest.Item]] = [[] for _ in range(workers)]
    quick: list[pytest.Item] = []
    for tests in files.values():
        is_slow = any(
            test.get_closest_marker("slow") or test.get_closest_marker("distributed")
            for test in tests
        )
        (min(parts, key=len) if is_slow else quick).extend(tests)
    ordered: list[pytest.Item] = []
    for number, slow in enumerate(parts):
        size = (len(items) - len(ordered)) // (workers - number)  # as pytest-xdist divides them
        added = max(size - len(slow), 0)
        ordered += slow + quick[:added]
        del quick[:added]
    return ordered


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.enable()
    from lightning.pytorch import Trainer

    if session.config.getoption("quick"):
        for owner, name in (
            (Trainer, "__init__"),
            (subprocess.Popen, "__init__"),
            (multiprocessing.process.BaseProcess, "start"),
        ):
            setattr(owner, name, _skips(getattr(owner, name)))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    if not node.config.getoption("quick"):
        node.workerinput["fork_server"] = share_fork_server()


def _skips(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that skips the calling test, with the method's signature."""

    @functools.wraps(method)
    def skip(*_: Any, **__: Any) -> None:
        pytest.skip(f"not quick: {method.__qualname__}")

    return skip


@functools.cache
def _freeze_imports(fifties_of_modules: int) -> None:
    """Freeze all objects, so that no garbage collection visits what was imported.

    Called before each test. The cache lets it run only after some fifty further imports.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """For tests of freezing."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["host", "device"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The host path and the device path, both with tensors of the CPU."""
    if request.param == "device":
        from tests.helpers.syncs import take_device_path

        take_device_path(monkeypatch)
    return str(request.param)


@pytest.fixture
def device_path(path: str) -> bool:
    """Whether the test runs on the device path; it runs on both."""
    return path == "device"


@pytest.fixture(autouse=True)
def _default_settings() -> Iterator[None]:
    """Seed torch before each test, and reset global state that tests change."""
    import torch

    _freeze_imports(len(sys.modules) // 50)
    torch.manual_seed(0)
    environment = dict(os.environ)
    if registry := sys.modules.get("lightning_opt.presets.registry"):
        registry._builders = dict(registry.BUILT_IN)  # doctests and other tests register presets
    yield
    for name in os.environ.keys() - environment.keys():  # PL_SEED_WORKERS changes later tests
        del os.environ[name]
    os.environ.update(environment)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = False
