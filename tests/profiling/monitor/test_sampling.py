"""The sampling thread: its values, its lifetime, and the GPU that it reads."""

import logging
import os
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
    Processes,
    Sampler,
    descendants,
    find_gpu,
)
from tests.helpers.models import SmallNet
from tests.helpers.trainers import MemoryLogger, quiet_trainer


def test_descendants_and_their_use_are_found():
    before = Processes().sample()[2]  # such as the server that earlier tests' trainings fork from
    busy = "while True: pass"
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}])"
    child = subprocess.Popen([sys.executable, "-c", nested])
    try:
        processes = Processes()
        deadline = time.monotonic() + 20
        spent = 0.0
        while spent < 0.2 and time.monotonic() < deadline:
            time.sleep(0.1)
            percent, rss, children = processes.sample()
            spent = max(spent, percent / 100)
        assert children == before + 2
        assert spent >= 0.2
        assert rss > resident_memory()
        assert len(descendants(child.pid)) == 1
    finally:
        for pid in [*descendants(child.pid), child.pid]:
            subprocess.run(["kill", "-9", str(pid)], check=False)
        child.wait()
    assert child.pid not in descendants(1)
    assert Processes().sample()[2] == before


def without_lists(path, listdir=os.listdir):
    if str(path).endswith("/task"):
        raise FileNotFoundError(path)
    return listdir(path)


def test_descendants_are_found_without_proc(monkeypatch):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(os, "listdir", without_lists)
            assert child.pid in descendants(os.getpid())
    finally:
        child.kill()
        child.communicate()
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
        time.sleep(0.05)


def test_thread_runs_from_the_first_batch_to_the_end_of_training():
    monitor, logger = lo.PerformanceMonitor(every_n_steps=4, sample_seconds=0.01), MemoryLogger()
    watcher = Watcher()
    quiet_trainer(callbacks=[watcher, monitor], logger=logger).fit(SmallNet())
    assert watcher.seen == [0, *[1] * 12]
    assert alive() == []
    for key in ("cpu_percent", "rss_mb", "child_processes"):
        assert logger.series(f"perf/{key}")
    own = psutil.Process()  # and whatever earlier tests have left running below it
    resident = sum(p.memory_info().rss for p in [own, *own.children(recursive=True)]) / 2**20
    assert logger.series("perf/rss_mb")[-1] == pytest.approx(resident, rel=0.2)
    assert "resident memory, with children" in str(monitor.report())


def test_thread_ends_after_an_exception():
    monitor = lo.PerformanceMonitor(sample_seconds=0.01)
    with pytest.raises(ArithmeticError, match="planted"):
        quiet_trainer(callbacks=[monitor]).fit(SmallNet(fail_at=5))
    assert alive() == []


def test_failed_sample_ends_the_thread_but_not_the_run(caplog):
    class Broken:
        def read(self):
            raise OSError("planted")

    with caplog.at_level(logging.WARNING):
        sampler = Sampler(0.01, Broken())
        deadline = time.monotonic() + 20
        while alive() and time.monotonic() < deadline:
            time.sleep(0.005)
    sampler.stop()
    assert sampler.failure == "OSError: planted"
    assert "stopped sampling: OSError: planted" in caplog.text


# --- the GPU ---


class Driver:
    """A stand-in for NVML: devices are dicts by UUID, and missing values raise."""

    NVML_TEMPERATURE_GPU = 0
    nvmlMemory_v2 = 2  # noqa: N815 - as in pynvml

    class NVMLError(Exception):
        pass

    def __init__(self, **devices: dict[str, Any]) -> None:
        self.devices = {name.replace("_", "-"): values for name, values in devices.items()}

    def _known(self, uuid: str, what: str) -> Any:
        if what not in self.devices.get(uuid, {}):
            raise self.NVMLError("Not Supported")
        return self.devices[uuid][what]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid not in self.devices:
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetUUID(self, uuid: str) -> str:  # noqa: N802
        return uuid

    def nvmlDeviceGetUtilizationRates(self, uuid: str) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=self._known(uuid, "use"))

    def nvmlDeviceGetMemoryInfo(self, uuid: str, version: int = 1) -> Any:  # noqa: N802
        used = self._known(uuid, "used")
        return SimpleNamespace(used=used, free=1, total=used + 1, reserved=0)

    def nvmlDeviceGetPowerUsage(self, uuid: str) -> int:  # noqa: N802
        return self._known(uuid, "milliwatts")

    def nvmlDeviceGetTemperature(self, uuid: str, sensor: int) -> int:  # noqa: N802
        return self._known(uuid, "celsius")


DRIVER = Driver(
    GPU_00aa={"use": 10, "used": 1, "milliwatts": 50_000, "celsius": 31},
    GPU_01cc={"use": 30, "used": 3, "milliwatts": 70_000, "celsius": 33},
    MIG_7={"used": 101},
)


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
    found = find_gpu(torch.device("cuda", 0))
    assert found.name == "GPU-01cc"
    assert found.read() == {
        "gpu_percent": 30.0,
        "gpu_memory_mb": 3 / 2**20,
        "gpu_watts": 70.0,
        "gpu_celsius": 33.0,
    }
    assert find_gpu(torch.device("cuda", 1)).name == "GPU-00aa"
    assert find_gpu(torch.device("cuda", 2)) is None
    assert find_gpu(torch.device("cpu")) is None
    cuda.setattr(sampling, "open_nvml", lambda: None)
    assert find_gpu(torch.device("cuda", 0)) is None


def test_mig_slice_is_found_by_its_name_and_has_only_memory(cuda):
    cuda.setenv("CUDA_VISIBLE_DEVICES", "MIG-7, 0")
    found = find_gpu(torch.device("cuda", 0))
    assert found.name == "MIG-7"
    assert found.read() == {"gpu_memory_mb": 101 / 2**20}
    assert find_gpu(torch.device("cuda", 1)).name == "GPU-00aa"


class OnGpu(Callback):
    """Makes later callbacks see a CUDA device at the first batch."""

    def __init__(self) -> None:
        self.patch = pytest.MonkeyPatch()

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 0:
            device = torch.device("cuda", 0)
            self.patch.setattr(type(trainer.strategy), "root_device", device)


class OnCpuAgain(OnGpu):
    def __init__(self, other: OnGpu) -> None:
        self.other = other

    def on_train_batch_start(self, *args: Any) -> None:
        self.other.patch.undo()


def test_missing_nvml_warns_once_and_training_continues(monkeypatch, caplog):
    monkeypatch.setattr(sampling, "open_nvml", lambda: None)
    monitor, on_gpu = lo.PerformanceMonitor(), OnGpu()
    callbacks = [on_gpu, monitor, OnCpuAgain(on_gpu)]
    with caplog.at_level(logging.WARNING):
        quiet_trainer(callbacks=callbacks, max_epochs=2).fit(SmallNet())
    assert caplog.text.count("NVML is not available or does not list this GPU") == 1
    assert any("NVML is not available" in note for note in monitor.report().notes)
    assert monitor.report().rows[0]["quantity"] == "step"


@pytest.mark.gpu
def test_gpu_is_timed_and_sampled():
    monitor, logger = lo.PerformanceMonitor(every_n_steps=20, sample_seconds=0.02), MemoryLogger()
    quiet_trainer(callbacks=[monitor], logger=logger, accelerator="gpu", max_epochs=20).fit(
        SmallNet()
    )
    assert "238 steps" in monitor.report().title
    for key in ("step_seconds", "gpu_percent", "gpu_memory_mb", "gpu_watts", "gpu_celsius"):
        assert logger.series(f"perf/{key}"), key
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    assert any(uuid in note or "MIG-" in note for note in monitor.report().notes)
