"""Runtime: settings during a run, reports of failures, and complete undo."""

import contextlib
import errno
import os
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

import lightning_opt as lo
from lightning_opt.core.measure.machine import allowed_cpus
from lightning_opt.kernels.runtime import runtime as settings
from lightning_opt.kernels.runtime.runtime import NotSetError
from tests.helpers.models import SmallNet
from tests.helpers.processes import launch
from tests.helpers.trainers import quiet_trainer

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="settings of Linux")


# Replaces values per thread: threads of a shared process start and end at any time.
THREADS = {"affinity": 0, "priority": 0}


def state() -> dict[str, Any]:
    """Return all settings that Runtime may change."""
    return {
        "matmul": torch.get_float32_matmul_precision(),
        "benchmark": torch.backends.cudnn.benchmark,
        "cudnn": torch.backends.cudnn.deterministic,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "threads": torch.get_num_threads(),
        "affinity": by_thread(os.sched_getaffinity),
        "priority": by_thread(lambda thread: os.getpriority(os.PRIO_PROCESS, thread)),
    }


def by_thread(read: Callable[[int], Any]) -> dict[int, Any]:
    found = {}
    for thread in settings._threads():
        with contextlib.suppress(ProcessLookupError):  # it has ended since
            found[thread] = read(thread)
    return found


class Recorder(Callback):
    """Records the settings in each step, of this thread and of a new one."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.record()

    on_test_batch_end = lambda self, *_: self.record()  # noqa: E731

    def record(self) -> None:
        found = state()
        child: list[Any] = []
        thread = threading.Thread(target=lambda: child.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
        main = os.getpid()
        self.seen.append(
            {
                **found,
                "affinity": found["affinity"][main],
                "priority": found["priority"][main],
                "child": child[0],
            }
        )


def run(fail_at: int | None = None, test: bool = False, **asked: Any) -> Any:
    """Fit with these settings; return the states before, during and after it, rows and warnings."""
    callback, look, before = lo.Runtime(**asked), Recorder(), state()
    trainer, model = quiet_trainer(callbacks=[callback, look]), SmallNet(fail_at=fail_at)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            _ = trainer.test(model, verbose=False) if test else trainer.fit(model)
        except ArithmeticError:
            assert fail_at is not None
    messages = [str(w.message) for w in caught if "Runtime" in str(w.message)]
    rows = {row["setting"]: row for row in callback.report().rows}
    return before, look.seen, state(), rows, messages


def run_with(asked: dict[str, Any], fail_at: int | None, test: bool) -> Any:
    return run(fail_at, test, **asked)


def run_in_process(asked: dict[str, Any], fail_at: int | None = None, test: bool = False) -> Any:
    """Run in another process: threads and CPUs belong to the whole process."""
    (result,) = launch(run_with, asked, fail_at, test, processes=1)
    return result


@linux
@pytest.mark.parametrize("how", ["fit", "test", "fails"])
def test_settings_are_applied_and_restored(how):
    cpus = [min(allowed_cpus())]
    if how == "test":
        cpus = allowed_cpus()  # the share of a single process
    asked = {
        "matmul_precision": "medium",
        "deterministic": True,
        "cpu_affinity": "split" if how == "test" else cpus,
        "threads": 2,
    }
    fail_at = 3 if how == "fails" else None
    before, seen, after, rows, messages = run_in_process(asked, fail_at, how == "test")
    assert {**after, **THREADS} == {**before, **THREADS}
    assert {cpus for thread in after["affinity"].values() for cpus in [frozenset(thread)]} == {
        frozenset(thread) for thread in before["affinity"].values()
    }
    assert messages == []
    assert len(seen) == {"fit": 12, "test": 2, "fails": 3}[how]
    for found in seen:
        assert found["matmul"] == "medium"
        assert found["deterministic"] is True
        assert found["cudnn"] is True
        assert found["workspace"] == ":4096:8"
        assert found["threads"] == 2
        assert found["affinity"] == found["child"] == set(cpus)
    done = {name for name, row in rows.items() if row["set"]}
    assert done == {"matmul_precision", "deterministic", "cpu_affinity", "threads"}
    assert rows["threads"]["before"] == "1"
    assert rows["allocator"]["note"] == "cpu has no such allocator"
    assert rows["cudnn_benchmark"]["note"] == "cpu has no cuDNN"


def test_defaults_set_matmul_precision_on_a_cpu():
    nothing = {"matmul_precision": None, "cudnn_benchmark": None, "allocator": None}
    _, unchanged, _, rows, _ = run(**nothing)
    assert rows == {}
    before, seen, after, rows, messages = run()
    assert {**after, **THREADS} == {**before, **THREADS}
    assert messages == []
    assert unchanged[0]["matmul"] == before["matmul"]
    assert [found["matmul"] for found in seen] == ["high"] * 12
    changed = {"matmul": "high", **THREADS}
    assert all(
        {**found, **changed, "child": 0} == {**before, **changed, "child": 0} for found in seen
    )
    assert set(rows) == {"matmul_precision", "cudnn_benchmark", "allocator"}


# --- deterministic ------------------------------------------------------------------------------


@pytest.mark.parametrize("workspace", [None, ":16:8", ":0:0"])
@pytest.mark.parametrize("mode", ["default", "warn"])
def test_deterministic_mode_and_cublas_workspace_are_restored(workspace, mode, monkeypatch):
    if workspace is None:
        monkeypatch.delenv(settings.CUBLAS_ENV_VAR, raising=False)
    else:
        monkeypatch.setenv(settings.CUBLAS_ENV_VAR, workspace)
    torch.set_deterministic_debug_mode(mode)
    before = state()
    change = settings.set_deterministic()
    assert torch.get_deterministic_debug_mode() == 2
    assert os.environ[settings.CUBLAS_ENV_VAR] == (":16:8" if workspace == ":16:8" else ":4096:8")
    with pytest.raises(NotSetError):
        settings.set_cudnn_benchmark(True, CUDA)
    change.undo()
    after = state()
    torch.set_deterministic_debug_mode("default")
    assert {**after, **THREADS} == {**before, **THREADS}


@linux
def test_missing_cpu_warns_and_training_continues():
    before, seen, after, rows, messages = run_in_process({"cpu_affinity": [100_000]})
    assert len(seen) == 12
    assert rows["cpu_affinity"]["set"] is False
    assert rows["cpu_affinity"]["note"] == os.strerror(errno.EINVAL)
    assert messages == [
        "Runtime could not set cpu_affinity=[100000] (Invalid argument). Training continues."
    ]
    assert set(map(frozenset, after["affinity"].values())) == {
        frozenset(cpus) for cpus in before["affinity"].values()
    }


def test_split_gives_equal_shares():
    cpus = [0, 1, 4, 5, 6]
    assert [settings.share_of(cpus, rank, 2) for rank in range(2)] == [[0, 1], [4, 5]]
    assert settings.share_of([3], 1, 2) == []


@linux
def test_priority_holds_during_the_run():
    before, seen, after, rows, messages = run_in_process({"priority": 5})
    assert {found["priority"] for found in seen} == {5}
    main = min(before["priority"])  # the process's own thread
    if messages:
        assert "could not restore priority from 5 to 0" in messages[0]  # without privileges
        assert "could not be restored" in rows["priority"]["note"]
    else:
        assert after["priority"][main] == before["priority"][main]


@linux
def test_failure_to_restore_the_priority_warns(monkeypatch):
    niceness = {"now": 0}

    def only_up(which: int, thread: int, value: int) -> None:
        if value < niceness["now"]:
            raise PermissionError(errno.EACCES, "Permission denied")
        niceness["now"] = value

    monkeypatch.setattr(os, "setpriority", only_up)
    monkeypatch.setattr(os, "getpriority", lambda which, thread: niceness["now"])
    _, _, _, rows, messages = run(priority=7)
    assert "could not restore priority from 7 to 0: Permission denied" in messages[0]
    assert rows["priority"]["note"] == "could not be restored: Permission denied"


# --- CUDA, faked --------------------------------------------------------------------------------


def fake_cuda(monkeypatch: pytest.MonkeyPatch, present: str = "", is_new: bool = True) -> list[str]:
    """Fake CUDA, and return the settings of its allocator, `present` first."""
    values = [present]
    functions = {
        "getAllocatorSettings": lambda: values[-1],
        "setAllocatorSettings": values.append,
    }
    for name, function in functions.items():
        monkeypatch.setattr(torch._C, f"_accelerator_{name}", function, raising=False)
    if not is_new:  # as before torch 2.9
        for name in functions:
            monkeypatch.delattr(torch._C, f"_accelerator_{name}")
        old = torch.cuda.memory
        monkeypatch.setattr(old, "_set_allocator_settings", values.append, raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    return values


def test_allocator_uses_expandable_segments(monkeypatch):
    messages = fake_cuda(monkeypatch)
    settings.set_expandable_segments(CUDA).undo()
    assert messages[1:] == ["expandable_segments:True", "expandable_segments:False"]


@pytest.mark.parametrize("variable", settings.ALLOCATOR_ENV_VARS)
@pytest.mark.parametrize("is_new", [True, False])
def test_users_allocator_settings_stay(variable, is_new, monkeypatch):
    """The allocator resets options that are not repeated."""
    users = "max_split_size_mb:64,garbage_collection_threshold:0.8"
    for name in settings.ALLOCATOR_ENV_VARS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, users)
    messages = fake_cuda(monkeypatch, present=users, is_new=is_new)
    settings.set_expandable_segments(CUDA).undo()
    assert messages[1:] == [f"{users},expandable_segments:True", users]


def test_user_setting_of_expandable_segments_wins():
    users = "expandable_segments:False,max_split_size_mb:64"
    with pytest.MonkeyPatch.context() as patch:
        settings_of_allocator = fake_cuda(patch, present=users)
        with pytest.raises(NotSetError, match=users) as caught:
            settings.set_expandable_segments(CUDA)
    assert not caught.value.failed
    assert settings_of_allocator == [users]


def test_allocator_error_is_reported(monkeypatch):
    fake_cuda(monkeypatch)

    def denied(text: str) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", denied, raising=False)
    advice = "planted; set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before you start"
    with pytest.raises(NotSetError, match=advice) as caught:
        settings.set_expandable_segments(CUDA)
    assert caught.value.failed


class Varying(SmallNet):
    """Batches of given sizes."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.sizes = sizes

    def train_dataloader(self) -> Any:
        batches = [(torch.ones(n, 6), torch.ones(n, 1)) for n in self.sizes]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "flags"),
    [([4, 3, 4, 3, 4, 3], [True] * 6), ([1, 2, 3, 4, 5, 6], [True] * 4 + [False] * 2)],
)
def test_cudnn_benchmark_stops_if_shapes_keep_changing(sizes, flags, monkeypatch):
    fake_cuda(monkeypatch)
    original = settings.set_cudnn_benchmark
    monkeypatch.setattr(
        settings,
        "set_cudnn_benchmark",
        lambda on, device: original(on, CUDA),
    )
    callback, look, before = lo.Runtime(), Recorder(), state()
    quiet_trainer(callbacks=[callback, look], limit_val_batches=0).fit(Varying(sizes))
    assert [found["benchmark"] for found in look.seen] == flags
    assert {**state(), **THREADS} == {**before, **THREADS}
    row = next(row for row in callback.report().rows if row["setting"] == "cudnn_benchmark")
    assert row["set"] is flags[-1]


# --- invalid settings ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"matmul_precision": "low"}, "matmul_precision"),
        ({"cudnn_benchmark": "yes"}, "cudnn_benchmark"),
        ({"deterministic": True, "cudnn_benchmark": True}, "contradicts"),
        ({"allocator": "jemalloc"}, "allocator"),
        ({"cpu_affinity": []}, "cpu_affinity"),
        ({"cpu_affinity": [-1]}, "cpu_affinity"),
        ({"cpu_affinity": "all"}, "cpu_affinity"),
        ({"priority": 20}, "priority"),
        ({"priority": -21}, "priority"),
        ({"threads": 0}, "threads"),
    ],
)
def test_invalid_arguments_raise_in_init(asked, named):
    with pytest.raises(ValueError, match=named):
        lo.Runtime(**asked)


@pytest.mark.gpu
def test_settings_are_applied_on_gpu():
    callback = lo.Runtime(deterministic=True)
    quiet_trainer(callbacks=[callback], accelerator="gpu").fit(SmallNet())
    rows = {row["setting"]: row for row in callback.report().rows}
    assert rows["allocator"]["set"] or "set to" in rows["allocator"]["note"]
    assert rows["deterministic"]["set"]
