"""Runtime: settings during a run, reports of failures, and complete undo."""

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

import lightning_opt as lo
from lightning_opt.kernels.runtime import runtime as settings
from lightning_opt.kernels.runtime.runtime import NotSetError
from tests.helpers.models import SmallNet
from tests.helpers.trainers import quiet_trainer, warnings_of

CUDA = torch.device("cuda")


def state() -> dict[str, Any]:
    """Return all settings that Runtime may change."""
    return {
        "matmul": torch.get_float32_matmul_precision(),
        "benchmark": torch.backends.cudnn.benchmark,
        "threads": torch.get_num_threads(),
    }


class Recorder(Callback):
    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(state())

    on_test_batch_end = on_train_batch_end


def run(test: bool = False, **asked: Any) -> Any:
    """Fit with these settings; return the states before, during and after it, rows and warnings."""
    callback, look, before = lo.Runtime(**asked), Recorder(), state()
    trainer, model = quiet_trainer(callbacks=[callback, look]), SmallNet()
    stage = partial(trainer.test, verbose=False) if test else trainer.fit
    _, messages = warnings_of(lambda: stage(model), "Runtime")
    rows = {row["setting"]: row for row in callback.report().rows}
    return before, look.seen, state(), rows, messages


@pytest.mark.parametrize("how", ["fit", "test"])
def test_settings_are_applied_and_restored(how):
    asked = {"matmul_precision": "medium", "threads": 2}
    before, seen, after, rows, messages = run(how == "test", **asked)
    assert after == before
    assert messages == []
    assert len(seen) == {"fit": 12, "test": 2}[how]
    for found in seen:
        assert found["matmul"] == "medium"
        assert found["threads"] == 2
    assert {name for name, row in rows.items() if row["set"]} == asked.keys()
    assert rows["allocator"]["note"] == "cpu has no such allocator"
    assert rows["cudnn_benchmark"]["note"] == "cpu has no cuDNN"


def test_defaults_set_matmul_precision_on_a_cpu():
    before, seen, *_, rows, _ = run()
    assert seen == [{**before, "matmul": "high"}] * 12
    assert set(rows) == {"matmul_precision", "cudnn_benchmark", "allocator"}


def test_failure_warns_and_training_continues(monkeypatch):
    def excluded(precision: str) -> None:
        raise RuntimeError("planted\nand more")

    monkeypatch.setattr(torch, "set_float32_matmul_precision", excluded)
    _, seen, _, rows, messages = run(matmul_precision="medium", threads=2)
    assert [found["threads"] for found in seen] == [2] * 12
    assert rows["matmul_precision"]["note"] == "planted"
    assert messages == ["Runtime could not set matmul_precision=medium: planted"]


# --- CUDA, faked --------------------------------------------------------------------------------


def fake_cuda(monkeypatch: pytest.MonkeyPatch, present: str = "") -> list[str]:
    """Fake cuDNN and CUDA's allocator, and return the allocator's settings, `present` first."""
    values = [present]
    functions = {
        "getAllocatorSettings": lambda: values[-1],
        "setAllocatorSettings": values.append,
    }
    for name, function in functions.items():
        monkeypatch.setattr(torch._C, f"_accelerator_{name}", function, raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    return values


def test_allocator_uses_expandable_segments_and_keeps_the_users_settings(monkeypatch):
    """The allocator resets options that are not repeated."""
    messages = fake_cuda(monkeypatch)
    settings.set_allocator("expandable_segments", CUDA)()
    assert messages[1:] == ["expandable_segments:True", "expandable_segments:False"]
    users = "max_split_size_mb:64,garbage_collection_threshold:0.8"
    messages = fake_cuda(monkeypatch, users)
    settings.set_allocator("expandable_segments", CUDA)()
    assert messages[1:] == [f"{users},expandable_segments:True", users]
    users = "expandable_segments:False,max_split_size_mb:64"
    messages = fake_cuda(monkeypatch, users)
    with pytest.raises(NotSetError, match=users):
        settings.set_allocator("expandable_segments", CUDA)
    assert messages == [users]


def test_older_torch_reads_the_settings_from_the_snapshot(monkeypatch):
    messages = fake_cuda(monkeypatch)
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings")
    snapshot = {"allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}}
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: snapshot)
    settings.set_allocator("expandable_segments", CUDA)()
    assert messages[1:] == ["max_split_size_mb:64,expandable_segments:True", "max_split_size_mb:64"]


def test_cudnn_benchmark_is_off_with_deterministic_algorithms(monkeypatch):
    fake_cuda(monkeypatch)
    undo = settings.set_cudnn_benchmark(True, CUDA)
    assert torch.backends.cudnn.benchmark
    undo()
    assert not torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    with pytest.raises(NotSetError, match="deterministic"):
        settings.set_cudnn_benchmark(True, CUDA)


@pytest.mark.gpu
def test_settings_are_applied_on_gpu():
    class Segments(Callback):
        def on_train_batch_end(self, *args):
            seen.append(torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])

    seen: list[bool] = []
    callback, before = lo.Runtime(), state()
    quiet_trainer(callbacks=[callback, Segments()], accelerator="gpu").fit(SmallNet())
    Segments().on_train_batch_end()
    rows = {row["setting"]: row for row in callback.report().rows}
    assert rows["cudnn_benchmark"]["set"]
    assert rows["allocator"]["set"], rows["allocator"]["note"]
    assert seen == [True] * (len(seen) - 1) + [False]
    assert state() == before
