"""DataMonitor and DevicePrefetcher."""

import logging
from collections import UserDict
from dataclasses import dataclass

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

import lightning_opt as lo
from lightning_opt.data.pipeline import data_monitor as monitor_module
from lightning_opt.data.pipeline.device_prefetcher import is_transparent
from tests.data.runs import Recorded, Rows
from tests.helpers.models import assert_same_weights
from tests.helpers.trainers import MemoryLogger, quiet_trainer
from tests.profiling.clock import Clock


class Timed(Rows):
    """Fetching a row takes a second of the fake clock."""

    def __init__(self, clock, length=24):
        super().__init__(length)
        self.clock = clock

    def __getitem__(self, index):
        self.clock.now += 1.0
        return super().__getitem__(index)


def monitored(monkeypatch, step=4.0, validation=100.0, callback=None, **settings):
    clock, logger = Clock(), MemoryLogger()
    monkeypatch.setattr(monitor_module, "time", clock)

    class Net(Recorded):
        def training_step(self, batch, batch_idx):
            clock.now += step
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            clock.now += validation

    callback = callback or lo.DataMonitor(every_n_steps=2, **settings)
    trainer = quiet_trainer(
        callbacks=[callback], logger=logger, val_check_interval=3, profiler="simple"
    )
    trainer.fit(Net(), DataLoader(Timed(clock), batch_size=4), DataLoader(Rows(4), batch_size=4))
    counted = trainer.profiler.recorded_durations
    (key,) = [key for key in counted if key.endswith("train_dataloader_next")]
    assert len(counted[key]) == 6  # the profiler still records each fetch
    return callback, logger


def test_wait_fraction_and_rate_are_logged(monkeypatch):
    """A batch of four rows takes four seconds to fetch, and its step takes four seconds."""
    monkeypatch.setattr(Trainer, "distributed_sampler_kwargs", {"num_replicas": 3, "rank": 0})
    callback, _ = monitored(monkeypatch, step=1.0)
    callback, logger = monitored(monkeypatch, callback=callback)  # starts anew
    assert logger.series("data/wait_fraction") == [pytest.approx(0.5)] * 3
    assert logger.series("data/samples_per_second") == [pytest.approx(3 * 0.5)] * 3
    assert callback.wait_fraction == pytest.approx(0.5)
    assert callback.report().rows[0]["share"] == pytest.approx(0.5)


def test_long_waiting_warns_once(monkeypatch, caplog):
    with caplog.at_level(logging.WARNING):
        monitored(monkeypatch, threshold=0.4, patience=1)
        monitored(monkeypatch, threshold=0.6, patience=1)
        monitored(monkeypatch, threshold=0.4, patience=3)  # the first report does not count
    (record,) = [r for r in caplog.records if "waits for data" in r.getMessage()]
    assert "50% of the time (step 4)" in record.getMessage()
    assert "DataPipelineTuner" in record.getMessage()


# --- DevicePrefetcher ---------------------------------------------------------------------------


@dataclass
class Pair:
    x: torch.Tensor


class Opaque:
    def __init__(self) -> None:
        self.x = torch.ones(1)


def test_transparent_batches():
    assert is_transparent({"a": [torch.ones(1), 2.5], "b": ("text", None)})
    assert is_transparent(UserDict(a=Pair(torch.ones(1))))  # like BatchEncoding
    assert not is_transparent([Opaque()])


def test_prefetcher_does_nothing_on_cpu_and_logs_that(caplog):
    def fit(*callbacks):
        torch.manual_seed(0)
        model = Recorded()
        quiet_trainer(callbacks=list(callbacks)).fit(model, DataLoader(Rows(), batch_size=4))
        return model

    prefetcher = lo.DevicePrefetcher()
    with caplog.at_level(logging.INFO):
        assert_same_weights(fit(prefetcher), fit())
    assert prefetcher.copies == 0
    assert any("does nothing on cpu" in record.getMessage() for record in caplog.records)


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [True, False])
def test_every_batch_arrives_complete_on_gpu(pinned, caplog):
    """Queued work between the copies makes memory that is reused too early visible."""

    class Net(Recorded):
        def training_step(self, batch, batch_idx):
            work = torch.ones(2048, 2048, device=self.device)
            for _ in range(20):
                work = work @ work / 2048
            sums.append(batch[1].sum() + 0 * work.sum())
            return super().training_step(batch, batch_idx)

    sums = []
    prefetcher = lo.DevicePrefetcher()
    model = Net()
    data = DataLoader(Rows(400), batch_size=4, pin_memory=pinned)
    with caplog.at_level(logging.WARNING):
        trainer = quiet_trainer(callbacks=[prefetcher], accelerator="gpu", limit_val_batches=0)
        trainer.fit(model, data)
    expected = [sum(range(4 * i, 4 * i + 4)) for i in range(100)]
    assert [value.item() for value in sums] == expected
    assert prefetcher.copies == 100
    assert any("pinned" in record.getMessage() for record in caplog.records) != pinned
    assert "transfer_batch_to_device" not in vars(model)


@pytest.mark.gpu
def test_overridden_transfer_is_not_replaced():
    class Net(Recorded):
        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            return [part.to(device) for part in batch]

    prefetcher = lo.DevicePrefetcher()
    quiet_trainer(callbacks=[prefetcher], accelerator="gpu").fit(
        Net(), DataLoader(Rows(), batch_size=4)
    )
    assert prefetcher.copies == 0
