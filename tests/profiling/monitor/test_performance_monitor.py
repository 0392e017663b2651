"""PerformanceMonitor: times, rates, samples of the machine, and falling throughput."""

import logging
import math
import random
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

import lightning_opt as lo
from lightning_opt.core import nvml
from lightning_opt.profiling.batch_flops import OperationCount
from lightning_opt.profiling.monitor.gpu import GpuReader, GpuReading, find_gpu, find_visible
from lightning_opt.profiling.monitor.performance_monitor import gpu as gpu_module
from lightning_opt.profiling.monitor.performance_monitor import step_times
from lightning_opt.profiling.monitor.record import Record, Thinned, quantile
from lightning_opt.profiling.monitor.report import Facts, judge
from lightning_opt.profiling.monitor.sampling import NAME, Processes, Sample, Sampler, children_of
from lightning_opt.profiling.monitor.slowdown import POINTS, Throughput, find_fall
from tests.helpers.models import SmallNet, assert_same_state, batches_of, loader_of
from tests.helpers.processes import launch
from tests.helpers.trainers import MemoryLogger, quiet_trainer
from tests.profiling.fakes import Card, Driver, mig_card

# --- times and rates ----------------------------------------------------------------------------


class Clock:
    """A clock that stands still unless it is told."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now


class Timed(SmallNet):
    """Its steps, its validation and its batches take seconds of a made-up clock."""

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


def timed(monkeypatch, monitor, seconds=lambda step: 2.0, **settings):
    clock, logger = Clock(), MemoryLogger()
    monkeypatch.setattr(step_times, "time", clock)
    quiet_trainer(callbacks=[monitor], logger=logger, **settings).fit(Timed(clock, seconds))
    return logger


def test_a_step_is_all_that_passes_between_two_batches_but_validation(monkeypatch):
    """A second for four rows, two in the step and half of one in backward."""
    monitor = lo.PerformanceMonitor(every_n_steps=4, tokens=10)
    logger = timed(monkeypatch, monitor, max_epochs=2, val_check_interval=6)
    steps = logger.series("perf/step_seconds")
    assert len(steps) == 6
    # Lightning fetches one batch ahead, so that some step has the wait of another.
    assert steps == [pytest.approx(3.5)] * 6
    assert max(logger.series("perf/step_p95_seconds")) < 5
    assert monitor._record.samples == 4 * 22  # without the first two steps
    first_of_something = 3  # the second epoch, and those behind validation in mid-epoch
    assert monitor._record.times.total == pytest.approx(22 * 3.5, abs=first_of_something * 1.0)
    rates = logger.series("perf/samples_per_second")
    assert rates == [pytest.approx(4 / 3.5, rel=0.15)] * 6
    ratio = [t / s for t, s in zip(logger.series("perf/tokens_per_second"), rates, strict=True)]
    assert ratio == [pytest.approx(10)] * 6


def test_the_first_two_steps_are_not_timed(monkeypatch):
    monitor = lo.PerformanceMonitor(every_n_steps=12)
    timed(monkeypatch, monitor, lambda step: 100.0 if step < 2 else 2.0)
    assert monitor._record.times.count == 10
    assert monitor._record.times.total == pytest.approx(35, abs=1.1)


def test_the_report_has_median_and_p95(monkeypatch):
    monitor = lo.PerformanceMonitor(every_n_steps=5)
    timed(monkeypatch, monitor, lambda step: 20.0 if step == 7 else 2.0)
    row = monitor.report().rows[0]
    assert row["quantity"] == "step"
    assert row["typical"] == pytest.approx(3500, rel=0.02)
    assert row["high"] == pytest.approx(21_500, rel=0.02)


class Tokens(SmallNet):
    def train_dataloader(self):
        rows = [{"ids": torch.zeros(7, dtype=torch.long), "x": torch.ones(6)} for _ in range(24)]
        return DataLoader(rows, batch_size=4)

    def training_step(self, batch, batch_idx):
        return self(batch["x"]).sum()


def test_tokens_of_a_key_are_its_elements():
    monitor = lo.PerformanceMonitor(tokens="ids")
    quiet_trainer(callbacks=[monitor]).fit(Tokens())
    assert (monitor._record.samples, monitor._record.tokens) == (4 * 4, 4 * 4 * 7)


@pytest.mark.parametrize(("net", "what"), [(Tokens, r"has \['ids', 'x'\]"), (SmallNet, "list")])
def test_a_batch_without_that_key_is_refused_at_once(net, what):
    trainer = quiet_trainer(callbacks=[lo.PerformanceMonitor(tokens="labels")])
    with pytest.raises(ValueError, match=f"labels.*{what}"):
        trainer.fit(net())
    assert trainer.global_step == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"every_n_steps": 0},
        {"sample_seconds": 0.0},
        {"tokens": 0},
        {"flops_per_step": "guess"},
        {"flops_per_step": -1.0},
        {"peak_flops": 0.0},
        {"slowdown": 1.5},
    ],
)
def test_arguments_out_of_range_are_named(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        lo.PerformanceMonitor(**settings)


def test_quantiles_are_those_of_numpy_and_torch():
    values = torch.rand(37, dtype=torch.float64)
    for q in (0.0, 0.5, 0.95, 1.0):
        assert quantile(values.tolist(), q) == pytest.approx(torch.quantile(values, q).item())


def test_a_series_is_thinned_evenly():
    thinned = Thinned(most=8)
    for value in range(100):
        thinned.add(value)
    assert list(thinned) == [0, 16, 32, 48, 64, 80, 96]


# --- operations ---------------------------------------------------------------------------------


class Wide(SmallNet):
    """Two products of known size, one of them computed again in the backward pass."""

    def __init__(self, checkpoint=False):
        super().__init__()
        self.checkpoint = checkpoint
        self.layer = nn.Linear(6, 64, bias=False)
        self.second = nn.Linear(64, 1, bias=False)

    def forward(self, x):
        if self.checkpoint:
            x = torch.utils.checkpoint.checkpoint(
                lambda x: self.layer(x).tanh(), x.requires_grad_(), use_reentrant=False
            )
        else:
            x = self.layer(x).tanh()
        return self.second(x)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_flops_are_those_of_the_formula_without_recomputation(checkpoint, monkeypatch):
    forward = 2 * 4 * 6 * 64 + 2 * 4 * 64
    # Gradients of both weights, and of what lies between; of the input too if it is checkpointed.
    backward = forward + 2 * 4 * 64 + (2 * 4 * 6 * 64 if checkpoint else 0)
    monitor = lo.PerformanceMonitor(every_n_steps=6, peak_flops=1e9)
    logger = MemoryLogger()
    quiet_trainer(callbacks=[monitor], logger=logger).fit(Wide(checkpoint))
    assert monitor._facts.flops_a_sample == (forward + backward) / 4
    (_, tflops) = logger.series("perf/tflops")
    rate = logger.series("perf/samples_per_second")[-1]
    assert tflops == pytest.approx(rate / 4 * (forward + backward) / 1e12)
    assert logger.series("perf/mfu")[-1] == pytest.approx(tflops * 1e12 / 1e9)


def test_flops_agree_with_those_of_torch():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    images = torch.randn(2, 3, 8, 8)
    with OperationCount() as ours:
        net(images).sum().backward()
    with FlopCounterMode(display=False) as theirs:
        net(images).sum().backward()
    assert ours.flops == theirs.get_total_flops() > 0
    assert ours.recomputed == 0


def test_a_formula_that_fails_stops_nothing(monkeypatch):
    from lightning_opt.profiling import batch_flops

    def broken(*args, **kwargs):
        raise ZeroDivisionError("planted")

    broken_registry = dict.fromkeys(batch_flops.flop_registry, broken)
    monkeypatch.setattr(batch_flops, "flop_registry", broken_registry)
    monitor = lo.PerformanceMonitor()
    quiet_trainer(callbacks=[monitor]).fit(SmallNet())
    assert any("ZeroDivisionError: planted" in note for note in monitor.report().notes)


def test_given_flops_are_taken_and_none_are_left_out():
    for given, expected in ((5e6, 5e6), (None, None)):
        monitor = lo.PerformanceMonitor(flops_per_step=given)
        quiet_trainer(callbacks=[monitor]).fit(SmallNet())
        assert monitor._facts.flops_a_sample is None
        assert monitor._flops(1, 4) == expected


def test_a_model_of_compile_model_is_not_counted():
    monitor = lo.PerformanceMonitor()
    quiet_trainer(callbacks=[monitor, lo.CompileModel(backend="eager")]).fit(SmallNet())
    assert monitor._facts.flops_a_sample is None
    assert any("give flops_per_step" in note for note in monitor.report().notes)


# --- the machine --------------------------------------------------------------------------------


def test_children_and_their_use_are_found():
    """Two processes below a child of ours, busy with one core each; sleeping, with none."""
    before = Processes().look()[2]  # such as the server that earlier tests' trainings fork from
    busy = "while True: pass"
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}])"
    child = subprocess.Popen([sys.executable, "-c", nested])
    try:
        processes = Processes()
        deadline = time.monotonic() + 20
        spent = 0.0
        while spent < 0.2 and time.monotonic() < deadline:
            time.sleep(0.1)
            percent, rss, children = processes.look()
            spent = max(spent, percent / 100)
        assert children == before + 2
        assert spent >= 0.2
        assert rss > lo.core.memory.resident_memory()
        assert len(children_of(child.pid)) == 1
    finally:
        for pid in [*children_of(child.pid), child.pid]:
            subprocess.run(["kill", "-9", str(pid)], check=False)
        child.wait()
    assert child.pid not in children_of(1)
    assert Processes().look()[2] == before


def test_without_the_lists_of_linux_children_are_searched(monkeypatch):
    from lightning_opt.profiling.monitor.performance_monitor import sampling

    def missing(path):
        raise FileNotFoundError(path)

    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        monkeypatch.setattr(sampling, "_read", missing)
        import os

        assert child.pid in children_of(os.getpid())
    finally:
        child.kill()
        child.communicate()
    assert children_of(child.pid) == []


def alive():
    return [thread.name for thread in threading.enumerate() if thread.name == NAME]


class Watcher(Callback):
    """Sees the thread, and goes on only when it has sampled."""

    def __init__(self, monitor):
        self.monitor, self.seen = monitor, []

    def on_train_start(self, trainer, pl_module):
        self.seen.append(len(alive()))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(len(alive()))
        deadline = time.monotonic() + 20
        while not self.monitor._sampler._samples and time.monotonic() < deadline:
            time.sleep(0.005)


def test_the_thread_lives_from_the_first_batch_to_the_end_of_training():
    monitor, logger = lo.PerformanceMonitor(every_n_steps=4, sample_seconds=0.01), MemoryLogger()
    watcher = Watcher(monitor)
    quiet_trainer(callbacks=[watcher, monitor], logger=logger).fit(SmallNet())
    assert watcher.seen == [0, *[1] * 12]
    assert alive() == []
    for key in ("cpu_percent", "rss_mb", "child_processes"):
        assert len(logger.series(f"perf/{key}")) == 3
    own = psutil.Process()  # and whatever earlier tests have left running below it
    resident = sum(p.memory_info().rss for p in [own, *own.children(recursive=True)]) / 2**20
    assert logger.series("perf/rss_mb")[-1] == pytest.approx(resident, rel=0.2)
    assert "resident memory, with children" in str(monitor.report())
    assert "sampling thread used" in str(monitor.report())


def test_the_thread_ends_after_an_exception_too():
    monitor = lo.PerformanceMonitor(sample_seconds=0.01)
    with pytest.raises(ArithmeticError, match="planted"):
        quiet_trainer(callbacks=[monitor]).fit(SmallNet(fail_at=5))
    assert alive() == []


def test_a_sample_that_fails_ends_the_thread_and_not_the_run(caplog):
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
    assert "samples no more: OSError: planted" in caplog.text


# --- which GPU ----------------------------------------------------------------------------------


@pytest.fixture
def three_cards():
    return Driver(
        Card("GPU-00aa", use=10, used=1, milliwatts=50_000, celsius=31),
        Card("GPU-01bb", use=20, used=2, milliwatts=60_000, celsius=32),
        Card("GPU-01cc", use=30, used=3, milliwatts=70_000, celsius=33),
    )


@pytest.mark.parametrize(
    ("visible", "index", "uuid", "expected"),
    [
        (None, 0, "01cc", "GPU-01cc"),  # CUDA puts the fastest first, NVML goes by the bus
        ("2,0", 1, "00aa", "GPU-00aa"),
        ("GPU-01bb", 0, "01bb", "GPU-01bb"),
        ("GPU-01b", 0, None, "GPU-01bb"),  # abbreviated, and torch does not tell
        ("GPU-01", 0, None, None),  # ambiguous
        ("1", 0, None, None),  # an order that is not known is not guessed
        (None, 0, "99ff", None),
    ],
)
def test_devices_are_found_by_name(three_cards, monkeypatch, visible, index, uuid, expected):
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = find_visible(three_cards, index, uuid)
    assert (None if found is None else found.uuid) == expected


@pytest.mark.parametrize(
    ("visible", "uuid", "expected"),
    [
        ("MIG-1-1", "1", "MIG-1-1"),  # CUDA says the UUID of the board
        ("MIG-1-1", "1-1", "MIG-1-1"),  # CUDA says that of the slice
        ("1", "1", "MIG-1-0"),  # the board by its number: CUDA takes the first slice
        ("0", "0", "GPU-0"),  # a board without slices
    ],
)
def test_slices_are_found(monkeypatch, visible, uuid, expected):
    driver = Driver(Card("GPU-0"), mig_card(1))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert find_visible(driver, 0, uuid).uuid == expected


def test_what_the_driver_tells_is_read(three_cards):
    reader = GpuReader(three_cards, three_cards.cards[1], "GPU-01bb")
    assert reader.read() == GpuReading(percent=20.0, memory=2, watts=60.0, celsius=32.0)
    assert not reader.is_slice


def test_power_and_temperature_of_a_slice_are_those_of_its_board():
    board = mig_card(1)
    driver = Driver(board)
    reader = GpuReader(driver, board.slices[1], "MIG-1-1")
    assert reader.is_slice
    assert reader.read() == GpuReading(percent=None, memory=101, watts=300.0, celsius=70.0)
    assert driver.asked == []  # the use of the board is that of all its tenants


def test_what_a_card_does_not_tell_is_left_out():
    driver = Driver(Card("GPU-0", used=5))
    assert GpuReader(driver, driver.cards[0], "GPU-0").read() == GpuReading(None, 5, None, None)


def test_the_device_of_a_run_is_asked(three_cards, monkeypatch):
    class Properties:
        uuid = "01cc"

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    monkeypatch.setattr(gpu_module, "open_nvml", lambda: three_cards)
    assert find_gpu(torch.device("cuda", 0)).name == "GPU-01cc"
    assert find_gpu(torch.device("cpu")) is None
    monkeypatch.setattr(gpu_module, "open_nvml", lambda: None)
    assert find_gpu(torch.device("cuda", 0)) is None


def test_without_nvml_a_run_on_a_gpu_goes_on_and_says_it_once(monkeypatch, caplog):
    """The real library, which finds no driver here or is made to find none."""
    monkeypatch.setattr(nvml, "_driver", nvml._Driver())
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monitor = lo.PerformanceMonitor()

    class OnGpu(Callback):
        """Lets the monitor think so for the moment in which it asks."""

        def on_train_start(self, trainer, pl_module):
            ask = monitor._start_sampling

            def start(trainer, batch):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(type(trainer.strategy), "root_device", torch.device("cuda", 0))
                    ask(trainer, batch)

            monkeypatch.setattr(monitor, "_start_sampling", start)

    with caplog.at_level(logging.INFO):
        quiet_trainer(callbacks=[OnGpu(), monitor], max_epochs=2).fit(SmallNet())
    assert caplog.text.count("NVML is not there or does not know this GPU") == 1
    assert any("NVML is not there" in note for note in monitor.report().notes)
    assert monitor._record.times.count == 22


@pytest.mark.gpu
def test_a_gpu_is_timed_and_sampled():
    monitor, logger = lo.PerformanceMonitor(every_n_steps=20, sample_seconds=0.02), MemoryLogger()
    quiet_trainer(callbacks=[monitor], logger=logger, accelerator="gpu", max_epochs=20).fit(
        SmallNet()
    )
    assert monitor._record.times.count == 238
    for key in ("step_seconds", "gpu_percent", "gpu_memory_mb", "gpu_watts", "gpu_celsius"):
        assert logger.series(f"perf/{key}"), key
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    assert uuid in monitor._facts.gpu or monitor._facts.gpu.startswith("MIG-")


# --- falling throughput -------------------------------------------------------------------------


def noise(kind, sigma, n, seed):
    rng, wandering = random.Random(seed), 0.0
    for i in range(n):
        wandering = 0.8 * wandering + 0.6 * rng.gauss(0, sigma)
        value = math.exp(wandering if kind == "wandering" else rng.gauss(0, sigma))
        if kind == "spikes":
            value *= 0.5 if rng.random() < 0.1 else 1
        if kind == "periodic":
            value *= 0.6 if i % 10 == 0 else 1
        if kind == "settling":
            value *= 1 - 0.5 * math.exp(-i / 5)
        yield value


def first_alarm(rates):
    history = Throughput()
    for i, rate in enumerate(rates):
        history.add(50 * i, 100 * rate, 100.0)
        fall = history.find_fall(0.1)
        if fall is not None:
            return i, fall
    return None


@pytest.mark.parametrize(
    ("kind", "sigma"),
    [
        ("white", 0.03),
        ("white", 0.2),
        ("wandering", 0.03),
        ("wandering", 0.05),
        ("spikes", 0.03),
        ("periodic", 0.03),
        ("settling", 0.03),
    ],
)
def test_noise_is_no_fall(kind, sigma):
    alarms = [first_alarm(noise(kind, sigma, 150, seed)) for seed in range(5)]
    assert alarms == [None] * 5


@pytest.mark.parametrize(
    ("shape", "sigma", "within", "beside"),
    [("step", 0.03, 10, 1), ("step", 0.1, 30, 10), ("ramp", 0.03, 30, 10)],
)
def test_a_fall_is_found_soon_with_its_begin(shape, sigma, within, beside):
    """Throughput falls by 20% at report 40: at once, or over the next 40 reports."""
    for seed in range(5):
        rates = [
            value * (1 - 0.2 * (i >= 40) * (1 if shape == "step" else (i - 40) / 40))
            for i, value in enumerate(noise("white", sigma, 80, seed))
        ]
        found_at, fall = first_alarm(rates)
        assert 40 < found_at <= 40 + within
        assert abs(fall.step / 50 - 40) <= beside
        assert 0.1 <= fall.drop <= 0.35


def test_what_has_recovered_is_no_fall():
    dip = [1.0] * 30 + [0.6] * 12 + [1.0] * 12
    assert find_fall(range(42), dip[:42], 0.1) is not None
    assert find_fall(range(54), dip, 0.1) is None


def test_what_comes_and_goes_is_no_fall():
    steady, ragged = [1.0] * 30, [0.6, 0.6, 0.6, 1.0, 1.0] * 8
    assert find_fall(range(70), steady + ragged, 0.1) is None
    assert find_fall(range(50), steady + [0.6] * 20, 0.1) is not None


def test_a_smaller_drop_than_asked_for_is_none():
    rates = [1.0] * 30 + [0.92] * 30
    assert find_fall(range(60), rates, 0.1) is None
    fall = find_fall(range(60), rates, 0.05)
    assert (fall.step, fall.before, fall.after) == (30, 1.0, 0.92)


def test_a_history_stays_small_and_exact_in_sum():
    history = Throughput()
    for i in range(5000):
        history.add(10 * i, 2.0, 0.5)
    assert len(history.newest) == POINTS
    assert POINTS // 2 <= len(history.whole) <= POINTS
    assert sum(point[1] for point in history.whole) == 10_000
    assert history.whole[0][0] == 0


def test_a_sudden_fall_late_in_a_long_run_is_seen_soon():
    rates = [1.0 + 0.01 * math.sin(i) for i in range(3000)] + [0.8] * 20
    found_at, fall = first_alarm(rates)
    assert found_at < 3000 + 10
    assert fall.step == 50 * 3000


def test_a_slow_decline_of_a_long_run_is_seen():
    """3% over the newest 96 reports: only the whole run shows it."""
    rates = [1 - i / 3200 for i in range(1000)]
    assert first_alarm(rates) is not None


def test_a_run_that_gets_slower_is_told_once_and_reported(monkeypatch, caplog):
    monitor = lo.PerformanceMonitor(every_n_steps=3)
    with caplog.at_level(logging.WARNING):
        timed(monkeypatch, monitor, lambda step: 2.0 if step < 48 else 6.0, max_epochs=8)
    (message,) = [r.getMessage() for r in caplog.records if "has fallen" in r.getMessage()]
    assert "since about step 48, from 1.1" in message
    assert monitor.fall.step == 48
    assert monitor.fall.drop == pytest.approx(1 - 3.5 / 7.5, abs=0.05)
    assert any("since about step 48" in note for note in monitor.report().notes)
    (verdict,) = [v for v in monitor.diagnose() if v.topic == "throughput"]
    assert verdict.state == "look"


def test_the_history_resumes(monkeypatch, tmp_path):
    def run(monitor, epochs, **settings):
        clock = Clock()
        monkeypatch.setattr(step_times, "time", clock)
        trainer = quiet_trainer(callbacks=[monitor], max_epochs=epochs)
        trainer.fit(Timed(clock, lambda step: 2.0 if step < 48 else 6.0), **settings)
        return trainer

    whole = lo.PerformanceMonitor(every_n_steps=3)
    run(whole, 8)
    file = tmp_path / "half.ckpt"
    run(lo.PerformanceMonitor(every_n_steps=3), 4).save_checkpoint(file)
    resumed = lo.PerformanceMonitor(every_n_steps=3)
    run(resumed, 8, ckpt_path=file, weights_only=True)
    # The first two steps of each run are not timed, so that one point differs.
    assert len(resumed.state_dict()["throughput"]["whole"]) == 32
    assert resumed.fall == whole.fall


def test_its_state_is_the_same_after_a_round_trip(monkeypatch):
    monitor = lo.PerformanceMonitor(every_n_steps=3)
    timed(monkeypatch, monitor)
    twin = lo.PerformanceMonitor(every_n_steps=3)
    twin.load_state_dict(monitor.state_dict())
    assert_same_state(twin.state_dict(), monitor.state_dict())


# --- verdicts and ranks -------------------------------------------------------------------------


def test_an_idle_gpu_and_a_slow_rank_are_looked_at():
    record = Record()
    record.times.add(0.1)
    facts = Facts(device="a GPU")
    assert judge(record, facts, None, watched=True)[0].state == "ok"
    assert judge(record, facts, None, watched=False)[0].state == "unknown"
    record.add([], [Sample(100.0, 1, 0, GpuReading(30.0, 1, None, None))])
    verdict = judge(record, facts, None, watched=True)[0]
    assert verdict.state == "look"
    assert "the GPU ran 30% of the time" in verdict.finding
    facts = Facts(leads=[0.1, 0.1, 0.15])
    verdict = judge(record, facts, None, watched=True)[0]
    assert "Rank 2 of 3 is the slowest" in verdict.finding
    assert judge(Record(), facts, None, watched=True)[0].state == "unknown"


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
def test_the_course_of_the_loss_is_judged(losses, state):
    record = Record()
    record.times.add(0.1)
    record.losses.extend(losses)
    assert judge(record, Facts(), None, watched=True)[1].state == state


def test_losses_are_those_of_the_report_steps():
    class Kept(Callback):
        losses: list[float] = []

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.losses.append(outputs["loss"].item())

    kept, monitor = Kept(), lo.PerformanceMonitor(every_n_steps=5)
    quiet_trainer(callbacks=[kept, monitor], max_epochs=2).fit(SmallNet())
    assert list(monitor._record.losses) == kept.losses[4::5]


def _slow_rank():
    class Uneven(SmallNet):
        def training_step(self, batch, batch_idx):
            time.sleep(0.03 if self.global_rank == 1 else 0.001)
            return super().training_step(batch, batch_idx)

    monitor, logger = lo.PerformanceMonitor(every_n_steps=6), MemoryLogger()
    quiet_trainer(callbacks=[monitor], devices=2, strategy="ddp", logger=logger).fit(Uneven())
    records = logger.series("perf/samples_per_second")
    return monitor.report().notes, monitor._record.samples, monitor._record.times.total, records


@pytest.mark.distributed
def test_the_slowest_rank_is_named_on_all_ranks():
    first, second = launch(_slow_rank)
    for notes, samples, seconds, _ in (first, second):
        assert any("Rank 1 of 2 is the slowest" in note for note in notes)
        assert samples == 4 * 10
        assert seconds > 10 * 0.03
    assert len(first[3]) == 2


def test_two_runs_of_one_instance_are_measured_apart():
    monitor = lo.PerformanceMonitor(every_n_steps=4)
    net = SmallNet()
    for _ in range(2):
        quiet_trainer(callbacks=[monitor]).fit(net, loader_of(12))
        assert monitor._record.times.count == 10
    steps = [point[0] for point in monitor._throughput.whole]
    assert steps == sorted(steps)
