"""Which GPU is asked, and what its driver tells."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

import lightning_opt as lo
from lightning_opt.profiling.monitor import gpu
from lightning_opt.profiling.monitor.gpu import GpuReader, find_gpu
from tests.helpers.models import SmallNet
from tests.helpers.trainers import MemoryLogger, quiet_trainer


class Driver:
    """Answers what NVML answers, with its errors, for devices that are dicts by UUID."""

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
    """CUDA's own numbering, in which the first is the last on the bus."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    names = ["01cc", "00aa", "99ff"]
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=names[index])
    )
    monkeypatch.setattr(gpu, "open_nvml", lambda: DRIVER)
    return monkeypatch


def test_the_device_is_found_by_the_name_that_cuda_gives_it(cuda):
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
    cuda.setattr(gpu, "open_nvml", lambda: None)
    assert find_gpu(torch.device("cuda", 0)) is None


def test_a_slice_is_found_by_its_own_name_and_tells_only_its_memory(cuda):
    """CUDA may say the UUID of the whole board, whose use is that of all its tenants."""
    cuda.setenv("CUDA_VISIBLE_DEVICES", "MIG-7, 0")
    found = find_gpu(torch.device("cuda", 0))
    assert found.name == "MIG-7"
    assert found.read() == {"gpu_memory_mb": 101 / 2**20}
    assert find_gpu(torch.device("cuda", 1)).name == "GPU-00aa"


def test_what_a_card_does_not_tell_is_left_out():
    assert GpuReader(Driver(GPU_0={"celsius": 5}), "GPU-0").read() == {"gpu_celsius": 5.0}


class OnGpu(Callback):
    """Lets the callback after it think that the run is on a GPU, at the first batch."""

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


def test_without_nvml_a_run_on_a_gpu_goes_on_and_says_it_once(monkeypatch, caplog):
    monkeypatch.setattr(gpu, "open_nvml", lambda: None)
    monitor, on_gpu = lo.PerformanceMonitor(), OnGpu()
    callbacks = [on_gpu, monitor, OnCpuAgain(on_gpu)]
    with caplog.at_level(logging.WARNING):
        quiet_trainer(callbacks=callbacks, max_epochs=2).fit(SmallNet())
    assert caplog.text.count("NVML is not available or does not know this GPU") == 1
    assert any("NVML is not available" in note for note in monitor.report().notes)
    assert monitor.report().rows[0]["quantity"] == "step"


@pytest.mark.gpu
def test_a_gpu_is_timed_and_sampled():
    monitor, logger = lo.PerformanceMonitor(every_n_steps=20, sample_seconds=0.02), MemoryLogger()
    quiet_trainer(callbacks=[monitor], logger=logger, accelerator="gpu", max_epochs=20).fit(
        SmallNet()
    )
    assert "238 steps" in monitor.report().title
    for key in ("step_seconds", "gpu_percent", "gpu_memory_mb", "gpu_watts", "gpu_celsius"):
        assert logger.series(f"perf/{key}"), key
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    assert any(uuid in note or "MIG-" in note for note in monitor.report().notes)
