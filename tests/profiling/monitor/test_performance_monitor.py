"""PerformanceMonitor: step times, rates, slowdowns and verdicts."""

import logging
import math

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

import lightning_opt as lo
from lightning_opt.core.measure import timing
from lightning_opt.profiling.monitor.slowdown import Record, judge
from tests.helpers.models import SmallNet, batches_of, loader_of
from tests.helpers.trainers import MemoryLogger, quiet_trainer
from tests.profiling.clock import Clock

# --- times and rates ----------------------------------------------------------------------------


class Timed(SmallNet):
    """A model whose steps, validation and batches advance the clock."""

    def __init__(self, clock, seconds=lambda step: 2.0, **settings):
        super().__init__(**settings)
        self.clock, self.seconds = clock, seconds

    def training_step(self, batch, batch_idx):
        self.clock.now += self.seconds(self.global_step)
        return super().training_step(batch, batch_idx)

    def backward(self, loss, *args, **kwargs):
        self.clock.now += 0.5
        super().backward(loss, *args, **kwargs)

    def validation_step(self, batch, batch_idx):
        self.clock.now += 1000.0

    def train_dataloader(self):
        clock = self.clock

        class Slow(torch.utils.data.TensorDataset):
            def __getitem__(self, index):
                clock.now += 0.25
                return super().__getitem__(index)

        return DataLoader(Slow(*batches_of(12).tensors), batch_size=4)


def timed(monkeypatch, monitor, seconds=lambda step: 2.0, ckpt_path=None, **settings):
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    trainer = quiet_trainer(callbacks=[monitor], logger=MemoryLogger(), **settings)
    trainer.fit(Timed(clock, seconds), ckpt_path=ckpt_path, weights_only=True)
    return trainer


def test_step_time_includes_loading_but_not_validation(monkeypatch):
    """Loading takes 1 s, the step 2 s, backward 0.5 s."""
    monitor = lo.PerformanceMonitor(every_n_steps=4, tokens=10)
    logger = timed(monkeypatch, monitor, max_epochs=2, val_check_interval=6).logger
    steps = logger.series("perf/step_seconds")
    assert len(steps) == 6
    # Lightning fetches one batch ahead, so a step may include the wait of the next one.
    assert steps == [pytest.approx(3.5, rel=0.005)] * 6
    assert max(logger.series("perf/step_p95_seconds")) < 5
    assert "22 steps" in monitor.report().title  # without the first two
    first_of_something = 3  # the second epoch, and those behind validation in mid-epoch
    assert 4 * 22 / report_of(monitor)["samples per second"] == pytest.approx(
        22 * 3.5, abs=first_of_something * 1.0
    )
    rates = logger.series("perf/samples_per_second")
    assert rates == [pytest.approx(4 / 3.5, rel=0.15)] * 6
    ratio = [t / s for t, s in zip(logger.series("perf/tokens_per_second"), rates, strict=True)]
    assert ratio == [pytest.approx(10)] * 6


def test_report_has_median_and_p95_without_the_first_two_steps(monkeypatch):
    monitor = lo.PerformanceMonitor(every_n_steps=5)
    timed(monkeypatch, monitor, lambda step: 100.0 if step < 2 else 20.0 if step == 7 else 2.0)
    assert "10 steps" in monitor.report().title
    row = monitor.report().rows[0]
    assert row["quantity"] == "step"
    assert row["typical"] == pytest.approx(3500, rel=0.02)
    assert row["high"] == pytest.approx(21_500, rel=0.02)


def report_of(monitor):
    return {row["quantity"]: row["typical"] for row in monitor.report().rows}


class Tokens(SmallNet):
    def train_dataloader(self):
        rows = [{"ids": torch.zeros(7, dtype=torch.long), "x": torch.ones(6)} for _ in range(24)]
        return DataLoader(rows, batch_size=4)

    def training_step(self, batch, batch_idx):
        return self(batch["x"]).sum()


@pytest.mark.parametrize(("net", "what"), [(Tokens, r"has \['ids', 'x'\]"), (SmallNet, "list")])
def test_missing_batch_key_raises_before_the_first_step(net, what):
    trainer = quiet_trainer(callbacks=[lo.PerformanceMonitor(tokens="labels")])
    with pytest.raises(ValueError, match=f"labels.*{what}"):
        trainer.fit(net())
    assert trainer.global_step == 0


# --- falling throughput -------------------------------------------------------------------------


def test_slowdown_warns_once_and_appears_in_the_report(monkeypatch, caplog):
    monitor = lo.PerformanceMonitor(every_n_steps=3)
    with caplog.at_level(logging.WARNING):
        timed(monkeypatch, monitor, lambda step: 2.0 if step < 48 else 6.0, max_epochs=8)
    (message,) = [r.getMessage() for r in caplog.records if "has fallen" in r.getMessage()]
    assert "since about step 45, from 1.1" in message  # one report early
    assert monitor.fall.step == 48
    assert monitor.fall.drop == pytest.approx(1 - 3.5 / 7.5, abs=0.05)
    assert any("since about step 48" in note for note in monitor.report().notes)
    (verdict,) = [v for v in monitor.diagnose() if v.topic == "throughput"]
    assert verdict.state == "look"


def test_throughput_history_resumes(monkeypatch, tmp_path):
    def run(monitor, epochs, **settings):
        slower = lambda step: 2.0 if step < 48 else 6.0  # noqa: E731
        return timed(monkeypatch, monitor, slower, max_epochs=epochs, **settings)

    whole = lo.PerformanceMonitor(every_n_steps=3)
    run(whole, 8)
    file = tmp_path / "half.ckpt"
    run(lo.PerformanceMonitor(every_n_steps=3), 4).save_checkpoint(file)
    resumed = lo.PerformanceMonitor(every_n_steps=3)
    run(resumed, 8, ckpt_path=file)
    # The first two steps of each run are not timed, so that one point differs.
    assert len(resumed.state_dict()["throughput"]["whole"]) == 32
    assert resumed.record.work.steps.count == whole.record.work.steps.count - 48
    assert resumed.fall == whole.fall
    assert whole.state_dict()["warned"]


# --- verdicts -------------------------------------------------------------------------


def test_verdict_on_throughput_depends_on_gpu_use():
    record = Record()
    assert judge(record, None)[0].state == "unknown"
    record.work.add(0.1, 1, 0)
    assert judge(record, None)[0].state == "ok"
    record.add([{"cpu_percent": 100.0, "gpu_percent": 30.0}])
    verdict = judge(record, None)[0]
    assert verdict.state == "look"
    assert "the GPU was busy 30% of the time" in verdict.finding


@pytest.mark.parametrize(
    ("losses", "state"),
    [
        ([1.0 / (i + 1) for i in range(20)], "ok"),
        ([1.0 + i for i in range(20)], "look"),
        ([1.0, math.nan] * 5, "look"),
        ([1.0, 2.0] * 10, "unknown"),
        ([1.0], "unknown"),
    ],
)
def test_verdict_on_the_trend_of_the_loss(losses, state):
    record = Record()
    record.work.add(0.1, 1, 0)
    for step, loss in enumerate(losses):
        record.losses.add("loss", step, loss)
    assert judge(record, None)[1].state == state


def test_loss_is_recorded_once_per_report(monkeypatch):
    class Rises(Callback):
        """The loss rises at reports and falls in between."""

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            at_report = trainer.global_step % 3 == 0
            outputs["loss"].data.fill_(trainer.global_step if at_report else -trainer.global_step)

    for every, state in ((3, "look"), (1, "ok")):
        monitor = lo.PerformanceMonitor(every_n_steps=every)
        quiet_trainer(callbacks=[Rises(), monitor], max_epochs=4).fit(SmallNet())
        (verdict,) = [v for v in monitor.diagnose() if v.topic == "convergence"]
        assert verdict.state == state, verdict.finding


def test_second_run_has_its_own_measurements():
    monitor = lo.PerformanceMonitor(every_n_steps=4)
    net = SmallNet()
    for _ in range(2):
        quiet_trainer(callbacks=[monitor]).fit(net, loader_of(12))
        assert "10 steps" in monitor.report().title
    steps = [point[0] for point in monitor.state_dict()["throughput"]["whole"]]
    assert steps == sorted(steps)


@pytest.mark.filterwarnings("ignore:.*yielded None")
def test_tokens_of_a_batch_key_are_its_elements_and_a_skipped_batch_has_none():
    batches = [*Tokens().train_dataloader()]
    batches[:1] = [None, batches[0], None, None]
    monitor = lo.PerformanceMonitor(every_n_steps=1, tokens="ids")
    profiler = lo.StepProfiler(tokens="ids", print_table=False)
    trainer = quiet_trainer(callbacks=[monitor], profiler=profiler, max_epochs=2)
    trainer.fit(Tokens(), DataLoader(batches, batch_size=None))
    assert trainer.global_step == 12
    assert monitor.record.work.samples == 4 * 11  # the second batch is a warmup step
    rates = report_of(monitor)
    assert rates["tokens per second"] == pytest.approx(7 * rates["samples per second"])
