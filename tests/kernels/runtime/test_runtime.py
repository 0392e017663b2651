"""Runtime: settings during a run, reports of failures, and complete undo."""

import os
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

import lightning_opt as lo
from lightning_opt.kernels.runtime import runtime as settings
from lightning_opt.kernels.runtime.runtime import NotSetError
from tests.helpers.models import SmallNet
from tests.helpers.trainers import quiet_trainer

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


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
    }


class Recorder(Callback):
    """Records the settings in each step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(state())

    on_test_batch_end = on_train_batch_end


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


@pytest.mark.parametrize("how", ["fit", "test", "fails"])
def test_settings_are_applied_and_restored(how):
    asked = {"matmul_precision": "medium", "deterministic": True, "threads": 2}
    fail_at = 3 if how == "fails" else None
    before, seen, after, rows, messages = run(fail_at, how == "test", **asked)
    assert after == before
    assert messages == []
    assert len(seen) == {"fit": 12, "test": 2, "fails": 3}[how]
    for found in seen:
        assert found["matmul"] == "medium"
        assert found["deterministic"] is True
        assert found["cudnn"] is True
        assert found["workspace"] == ":4096:8"
        assert found["threads"] == 2
    assert {name for name, row in rows.items() if row["set"]} == asked.keys()
    assert rows["threads"]["before"] == "1"
    assert rows["allocator"]["note"] == "cpu has no such allocator"
    assert rows["cudnn_benchmark"]["note"] == "cpu has no cuDNN"


def test_defaults_set_matmul_precision_on_a_cpu():
    nothing = {"matmul_precision": None, "cudnn_benchmark": None, "allocator": None}
    _, unchanged, _, rows, _ = run(**nothing)
    assert rows == {}
    before, seen, after, rows, messages = run()
    assert after == before
    assert messages == []
    assert unchanged[0]["matmul"] == before["matmul"]
    assert [found["matmul"] for found in seen] == ["high"] * 12
    assert all(found == {**before, "matmul": "high"} for found in seen)
    assert set(rows) == {"matmul_precision", "cudnn_benchmark", "allocator"}


def test_failure_warns_and_training_continues(monkeypatch):
    def excluded(precision: str) -> None:
        raise RuntimeError("planted\nand more")

    monkeypatch.setattr(torch, "set_float32_matmul_precision", excluded)
    _, seen, _, rows, messages = run(matmul_precision="medium", threads=2)
    assert [found["threads"] for found in seen] == [2] * 12
    assert rows["matmul_precision"]["note"] == "planted"
    assert messages == [
        "Runtime could not set matmul_precision=medium (planted). Training continues."
    ]


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
    assert after == before


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
    assert state() == before
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
