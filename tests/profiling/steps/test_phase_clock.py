"""The clocks of StepProfiler, with simulated time."""

import contextlib
import pickle
import random
import statistics
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule

from lightning_opt.profiling.durations import Durations
from lightning_opt.profiling.steps import phase_clock
from lightning_opt.profiling.steps.phase_clock import (
    DATA,
    FORWARD,
    HOST,
    IGNORED,
    LOSS,
    MAX_PHASES,
    OPTIMIZER,
    SETUP,
    DeviceClock,
    PhaseClock,
    Phases,
)
from lightning_opt.profiling.steps.step_profiler import Measures, StepProfiler
from lightning_opt.profiling.steps.step_run import StepRun
from tests.helpers.models import SmallNet
from tests.helpers.trainers import quiet_trainer
from tests.profiling.clock import Clock, Device, simulate_device


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(phase_clock, "perf_counter", clock)
    return clock


def totals(clock: PhaseClock) -> dict[int, float]:
    return {phase: round(d.total, 9) for phase, d in clock.durations.items()}


# --- durations ----------------------------------------------------------------------------------


def test_quantiles_of_durations_are_within_half_a_percent():
    draw = random.Random(0)
    values = [0.0] * 500 + sorted(draw.lognormvariate(-5.0, 1.0) for _ in range(5000))
    durations = Durations()
    for value in values:
        durations.add(value)
    assert durations.mean == pytest.approx(statistics.fmean(values))
    for q in (0.05, 0.5, 0.95):
        exact = values[int(q * len(values)) - 1]
        assert durations.quantile(q) == pytest.approx(exact, rel=0.006, abs=1e-12)
    assert Durations().quantile(0.5) == Durations().mean == 0.0


# --- the host's clock ---------------------------------------------------------------------------


def test_memory_is_bounded_over_many_steps_and_action_names(timer, monkeypatch):
    trainer = quiet_trainer()
    trainer.strategy.connect(SmallNet())
    measures = Measures("fit", PhaseClock(Phases(), SETUP))
    run = StepRun(trainer, measures, StepProfiler(log_every_n_steps=10))
    draw = random.Random(0)
    run.start("run_training_epoch")

    def take(steps: int) -> int:
        for _ in range(steps):
            run.start("[_TrainingEpochLoop].train_dataloader_next")
            timer.spend(draw.lognormvariate(-5.0, 3.0))
            run.stop("[_TrainingEpochLoop].train_dataloader_next")
            run.start("run_training_batch")
            name = f"part {draw.random()}"
            run.start(name)
            timer.spend(draw.lognormvariate(-5.0, 3.0))
            run.stop(name)
            run.stop("run_training_batch")
        size = 0
        for value in vars(run).values():
            with contextlib.suppress(Exception):  # the Trainer and its patched methods
                size += len(pickle.dumps(value))
        return size

    first = take(3000)
    assert take(6000) < 1.5 * first
    assert len(run.clock.phases.names) == MAX_PHASES
    assert run.measures.batches == 9000
    run.stop("run_training_epoch")
    run.finish()
    assert sum(measures.seconds.values()) == pytest.approx(measures.wall, rel=1e-9)


# --- names --------------------------------------------------------------------------------------


class Net(LightningModule):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        pass


class Data(LightningDataModule):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


def test_each_action_of_lightning_has_its_phase():
    fitting: Any = SimpleNamespace(
        state=SimpleNamespace(fn="fit"), callbacks=[], gradient_clip_val=None,
        lightning_module=Net(), datamodule=Data(),
    )  # fmt: skip
    phases = Phases()
    expected = {
        "[Strategy]DDPStrategy.batch_to_device": "transfer",
        "[Strategy]SingleDeviceStrategy.validation_step": "validation",
        "[Callback]ModelCheckpoint{'monitor': 'a.b', 'mode': 'min'}.on_train_batch_end":
            "callback ModelCheckpoint",
        "[Callback]X.on_save_checkpoint": "checkpoint",
        "[LightningModule]Net.optimizer_zero_grad": "zeroing gradients",
        "[LightningModule]Net.configure_gradient_clipping": "clipping",
        "[LightningModule]Net.lr_scheduler_step": "LR scheduler",
        "[LightningDataModule]Data.on_before_batch_transfer": "transfer",
        "[_EvaluationLoop].val_next": "validation",
        "save_checkpoint": "checkpoint",
        "optimizer_step": "optimizer step",
        "something of mine": "something of mine",
    }  # fmt: skip
    for action, name in expected.items():
        assert phases.names[phases.of(action, fitting)] == name, action
    assert phases.of("[Strategy]DDPStrategy.on_train_batch_start", fitting) == IGNORED
    assert phases.of("[Loop].something_new", fitting) == IGNORED
    validating: Any = SimpleNamespace(state=SimpleNamespace(fn="validate"))
    assert phases.of("[_EvaluationLoop].val_next", validating) == DATA
    assert phases.of("[Strategy]DDPStrategy.validation_step", validating) == FORWARD


# --- the device's clock -------------------------------------------------------------------------


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return simulate_device(monkeypatch)


@pytest.mark.parametrize("behind", [0, 40])
def test_device_time_is_assigned_to_the_phase_of_the_host_without_waiting(device, timer, behind):
    """For a device that is some steps behind the host."""
    clock = PhaseClock(Phases(), SETUP, DeviceClock(torch.device("cuda")))
    assert clock.device is not None
    ends: list[float] = []
    for step in range(400):
        # While the host waits for data, the device still runs the last update.
        for phase, seconds in ((DATA, 0.5), (LOSS, 1.0), (OPTIMIZER, 2.0 + step % 2)):
            with clock.within(phase):
                device.work(seconds)
        ends.append(device.queued)
        device.done = ends[step - behind] if step >= behind else 0.0
        clock.end_step(trained=True)
    assert device.waits == 0
    clock.device.finish()
    found = clock.device.durations
    assert {phase: d.count for phase, d in found.items()} == {HOST: 400, LOSS: 400, OPTIMIZER: 400}
    for phase, mean in ((HOST, 0.5), (LOSS, 1.0), (OPTIMIZER, 2.5)):
        assert found[phase].mean == pytest.approx(mean, rel=0.001)


@pytest.mark.gpu
def test_device_time_equals_event_time_on_a_gpu():
    clock = DeviceClock(torch.device("cuda"))
    for _ in range(40):
        clock.mark(FORWARD)
        torch.cuda._sleep(20_000_000)
        clock.mark(HOST)
        clock.end_step()
    clock.finish()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(20_000_000)
    end.record()
    end.synchronize()
    expected = start.elapsed_time(end) / 1e3
    assert clock.durations[FORWARD].quantile(0.5) == pytest.approx(expected, rel=0.2)
