"""Starting processes, and the pauses of a StepGate, with simulated devices."""

import os
import signal
import sys
import threading
from multiprocessing import connection, spawn
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_opt.core.measure import timing
from lightning_opt.core.measure.timing import StepClock
from lightning_opt.worker import child, gate
from lightning_opt.worker.gate import Step, StepGate


def test_process_is_spawned_if_cuda_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork of a process that has used CUDA cannot use it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert child._context(dict(os.environ), "json").get_start_method() == "spawn"


def test_main_script_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script without a main guard would start its processes again in each of them."""
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "script.py", raising=False)
    keys = {"init_main_from_name", "init_main_from_path"}
    assert keys & spawn.get_preparation_data("name").keys()
    with child._without_main_script():
        assert not keys & spawn.get_preparation_data("name").keys()
    assert keys & spawn.get_preparation_data("name").keys()


def wait_for_eof(end: connection.Connection, state: child.ProcessState) -> None:
    with end, pytest.raises(EOFError):
        end.recv()


def test_ctrl_c_during_a_start_closes_the_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if another thread receives the signal."""
    opening, sent, ends = threading.Event(), threading.Event(), []

    def sender() -> None:
        opening.wait()
        signal.raise_signal(signal.SIGINT)
        sent.set()

    def pipe(duplex: bool) -> tuple[connection.Connection, connection.Connection]:
        opening.set()
        assert sent.wait(300)
        ends.extend(original_pipe(duplex))
        return ends[0], ends[1]

    original_pipe = connection.Pipe
    child.start_process(wait_for_eof)[0].join()  # the server has started
    monkeypatch.setattr(connection, "Pipe", pipe)
    threading.Thread(target=sender, daemon=True).start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            child.start_process(wait_for_eof)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    ours, theirs = ends
    assert theirs.closed
    ours.close()


def test_ranks_pause_in_a_gloo_broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broadcast by NCCL would keep the GPU busy."""
    calls: list[Any] = []

    def broadcast(tensor: torch.Tensor, source: int, group: str) -> None:
        calls.append((tensor.device.type, source, group))
        tensor.fill_(5)

    dist = SimpleNamespace(broadcast=broadcast, new_group=lambda backend, timeout: backend)
    monkeypatch.setattr(gate, "dist", dist)
    monkeypatch.setattr(gate, "wait_for", lambda device: None)
    monkeypatch.setattr(gate, "StepClock", lambda device: StepClock(torch.device("cpu")))
    held = StepGate(lambda trainer, steps: 99)
    strategy = SimpleNamespace(root_device=torch.device("cuda", 1))
    trainer: Any = SimpleNamespace(world_size=2, is_global_zero=False, strategy=strategy)
    held.on_train_start(trainer, None)  # type: ignore[arg-type]
    assert calls == [("cpu", 0, "gloo")]
    assert held._block_steps == 5


class Scheduled(BoringModel):
    """Computes its schedule from the number of steps."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        total = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, int(total))]


def test_steps_exclude_pauses_and_start_on_the_first_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread is not pinned to the CPU. OpenMP's threads stop spinning while it rests."""
    done: list[Any] = []
    seconds: list[float] = []
    now = [0.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(gate.time, "sleep", lambda seconds: done.append("rest"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: {2, 5, 7}, raising=False)
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda thread, cpus: done.append(set(cpus)), raising=False
    )
    granted = iter([2, 1, 0])

    def exchange(trainer: Any, steps: list[Step]) -> int:
        done.append(f"{len(steps)} steps")
        seconds.extend(step.seconds for step in steps)
        now[0] += 1000.0  # the pause is not part of a step
        return next(granted)

    data = BoringModel().train_dataloader
    gate.run(Scheduled, data, {"accelerator": "cpu"}, StepGate(exchange), 0)
    assert seconds == [0.0] * 3
    moved = [{2}, {2, 5, 7}]
    assert done == ["0 steps", *moved, "rest", "2 steps", *moved, "rest", "1 steps"]

    done.clear()
    cpu, cuda = (SimpleNamespace(root_device=torch.device(kind)) for kind in ("cpu", "cuda"))
    gate.start_on_first_cpu(SimpleNamespace(strategy=cpu, local_rank=4))  # type: ignore[arg-type]
    gate.start_on_first_cpu(SimpleNamespace(strategy=cuda, local_rank=0))  # type: ignore[arg-type]
    assert done == [{5}, {2, 5, 7}]  # each rank has its own
