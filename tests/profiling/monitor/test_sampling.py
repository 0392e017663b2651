"""The sampling thread: its values, its lifetime, and the GPU that it reads."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch import Callback

import lightning_opt as lo
from lightning_opt.core.measure.memory import resident_memory
from lightning_opt.profiling.monitor import sampling
from lightning_opt.profiling.monitor.sampling import (
    THREAD_NAME,
    Sampler,
    descendants,
    find_gpu,
)
from tests.helpers.models import SmallNet
from tests.helpers.trainers import MemoryLogger, quiet_trainer


def test_descendants_and_their_use_are_sampled(monkeypatch):
    nested = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    child = subprocess.Popen([sys.executable, "-c", nested])
    sampler = Sampler(0.01, None)
    try:
        deadline = time.monotonic() + 100
        while not descendants(child.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        family = [child.pid, *descendants(child.pid)]
        assert len(family) == 2
        sampler.take()
        samples: list[dict[str, float]] = []
        while time.monotonic() < deadline:  # the child has to get 0.2 s of processor time
            samples += sampler.take()
            if sum(sample["cpu_percent"] for sample in samples) > 20 / 0.01:
                break
            time.sleep(0.05)
        else:
            pytest.fail("The CPU use of a busy descendant was not sampled.")
        number = len(descendants(os.getpid()))  # with others, such as the fork server of tests
        assert samples[-1]["child_processes"] == number >= 2
        assert samples[-1]["rss_mb"] * 2**20 > resident_memory()
        monkeypatch.setattr(sys, "platform", "darwin")
        assert set(family) <= set(descendants(os.getpid()))
    finally:
        sampler.stop()
        for pid in family[::-1]:
            os.kill(pid, signal.SIGKILL)
        child.wait()
    assert descendants(child.pid) == []


def alive():
    return [thread.name for thread in threading.enumerate() if thread.name == THREAD_NAME]


class Watcher(Callback):
    """Counts the sampling threads, and waits for a sample."""

    def __init__(self):
        self.seen = []

    def on_train_start(self, trainer, pl_module):
        self.seen.append(len(alive()))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(len(alive()))
        while not trainer.callbacks[1]._sampler._samples:
            time.sleep(0.005)


def test_thread_runs_from_the_first_batch_to_the_end_of_training():
    monitor, logger = lo.PerformanceMonitor(every_n_steps=4, sample_seconds=0.01), MemoryLogger()
    watcher = Watcher()
    quiet_trainer(callbacks=[watcher, monitor], logger=logger).fit(SmallNet())
    assert watcher.seen == [0, *[1] * 12]
    assert alive() == []
    for key in ("cpu_percent", "rss_mb", "child_processes"):
        assert len(logger.series(f"perf/{key}")) == 3
    own = psutil.Process()  # and whatever earlier tests have left running below it
    resident = sum(p.memory_info().rss for p in [own, *own.children(recursive=True)]) / 2**20
    assert logger.series("perf/rss_mb")[-1] == pytest.approx(resident, rel=0.2)
    assert "resident memory, with children" in str(monitor.report())


def test_failed_sample_ends_the_thread_but_not_the_run(caplog):
    def broken():
        raise OSError("planted")

    with caplog.at_level(logging.WARNING):
        sampler = Sampler(0.01, broken)
        sampler._thread.join(100)
    assert alive() == []
    sampler.stop()
    assert "stopped sampling: OSError('planted')" in caplog.text


# --- the GPU ---


DEVICES: dict[str, dict[str, Any]] = {
    "GPU-00aa": {"use": 10, "used": 1, "milliwatts": 50_000, "celsius": 31},
    "GPU-01cc": {"use": 30, "used": 3, "milliwatts": 70_000, "celsius": 33},
    "MIG-7": {"used": 101},
}
DRIVER = SimpleNamespace(
    NVMLError=KeyError,
    NVML_TEMPERATURE_GPU=0,
    nvmlMemory_v2=2,
    nvmlDeviceGetHandleByUUID=DEVICES.__getitem__,
    nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=handle["use"]),
    nvmlDeviceGetMemoryInfo=lambda handle, version: SimpleNamespace(used=handle["used"]),
    nvmlDeviceGetPowerUsage=lambda handle: handle["milliwatts"],
    nvmlDeviceGetTemperature=lambda handle, sensor: handle["celsius"],
)
"""A stand-in for NVML. A handle is a dict of values, and missing values raise."""


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """CUDA numbers the devices in another order than NVML."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    names = ["01cc", "00aa", "99ff"]
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=names[index])
    )
    monkeypatch.setattr(sampling, "open_nvml", lambda: DRIVER)
    return monkeypatch


def test_gpu_is_found_by_its_uuid(cuda):
    assert find_gpu(torch.device("cuda", 0))() == {
        "gpu_percent": 30.0,
        "gpu_memory_mb": 3 / 2**20,
        "gpu_watts": 70.0,
        "gpu_celsius": 33.0,
    }
    assert find_gpu(torch.device("cuda", 1))()["gpu_celsius"] == 31.0
    assert find_gpu(torch.device("cuda", 2)) is None
    assert find_gpu(torch.device("cpu")) is None


def test_mig_slice_is_found_by_its_name_and_has_only_memory(cuda):
    cuda.setenv("CUDA_VISIBLE_DEVICES", "MIG-7, 0")
    assert find_gpu(torch.device("cuda", 0))() == {"gpu_memory_mb": 101 / 2**20}
    assert find_gpu(torch.device("cuda", 1))()["gpu_celsius"] == 31.0


def test_missing_nvml_warns_once_and_training_continues(monkeypatch, caplog):
    class OnGpu(Callback):
        """Shows a CUDA device to the monitor, at the first batch."""

        def on_train_batch_start(self, trainer, *args):
            if trainer.global_step == 0:
                device = torch.device("cuda", 0)
                monkeypatch.setattr(type(trainer.strategy), "root_device", device)

    class OnCpuAgain(Callback):
        def on_train_batch_start(self, *args):
            monkeypatch.undo()

    monkeypatch.setattr(sampling, "open_nvml", lambda: None)
    callbacks = [OnGpu(), lo.PerformanceMonitor(), OnCpuAgain()]
    with caplog.at_level(logging.WARNING):
        quiet_trainer(callbacks=callbacks, max_epochs=2).fit(SmallNet())
    assert caplog.text.count("NVML is not available or does not list this GPU") == 1


@pytest.mark.gpu
def test_gpu_is_timed_and_sampled():
    monitor, logger = lo.PerformanceMonitor(every_n_steps=20, sample_seconds=0.02), MemoryLogger()
    quiet_trainer(callbacks=[monitor], logger=logger, accelerator="gpu", max_epochs=20).fit(
        SmallNet()
    )
    assert "238 steps" in monitor.report().title
    for key in ("step_seconds", "gpu_percent", "gpu_memory_mb", "gpu_watts", "gpu_celsius"):
        assert logger.series(f"perf/{key}"), key
