"""The thread that looks at the machine: what it finds, and that it ends."""

import logging
import os
import subprocess
import sys
import threading
import time

import psutil
import pytest
from lightning.pytorch import Callback

import lightning_opt as lo
from lightning_opt.core.measure.memory import resident_memory
from lightning_opt.profiling.monitor.sampling import NAME, Processes, Sampler, children_of
from tests.helpers.models import SmallNet
from tests.helpers.trainers import MemoryLogger, quiet_trainer


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
        assert rss > resident_memory()
        assert len(children_of(child.pid)) == 1
    finally:
        for pid in [*children_of(child.pid), child.pid]:
            subprocess.run(["kill", "-9", str(pid)], check=False)
        child.wait()
    assert child.pid not in children_of(1)
    assert Processes().look()[2] == before


def without_lists(path, listdir=os.listdir):
    if str(path).endswith("/task"):
        raise FileNotFoundError(path)
    return listdir(path)


def test_without_the_lists_of_linux_children_are_searched(monkeypatch):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(os, "listdir", without_lists)
            assert child.pid in children_of(os.getpid())
    finally:
        child.kill()
        child.communicate()
    assert children_of(child.pid) == []


def alive():
    return [thread.name for thread in threading.enumerate() if thread.name == NAME]


class Watcher(Callback):
    """Counts the threads, and leaves them time for a sample."""

    def __init__(self):
        self.seen = []

    def on_train_start(self, trainer, pl_module):
        self.seen.append(len(alive()))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(len(alive()))
        time.sleep(0.05)


def test_the_thread_lives_from_the_first_batch_to_the_end_of_training():
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
