"""Starting processes, and the pauses of a StepGate, with simulated devices."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing import connection, forkserver
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_opt.core.measure.timing import StepClock
from lightning_opt.worker import child, gate
from lightning_opt.worker.gate import Step, StepGate
from tests.helpers.processes import launch


def test_process_is_spawned_if_cuda_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork of a process that has used CUDA cannot use it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert child._context(dict(os.environ), "json").get_start_method() == "spawn"


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


class Limit:
    """A timer that a test ends."""

    def __init__(self, seconds: float, end: Callable[[], None]) -> None:
        assert seconds == child.MAX_SERVER_START
        Limit.end = staticmethod(end)

    def start(self) -> None:
        pass

    cancel = start


def _start_with_a_server_that_is_never_ready() -> None:
    multiprocessing.current_process().daemon = False  # which may not have children
    read = forkserver.read_signed

    def read_after_the_limit(descriptor: int) -> int:
        Limit.end()
        return read(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "Timer", Limit)
        patch.setattr(forkserver, "read_signed", read_after_the_limit)
        with pytest.raises(RuntimeError, match="did not import torch and Lightning within 600 s"):
            child.start_process(wait_for_eof)


def test_start_of_the_fork_server_has_a_limit() -> None:
    launch(_start_with_a_server_that_is_never_ready, processes=1)


class Distributed:
    """Records calls of torch.distributed."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def new_group(self, **settings: Any) -> str:
        self.calls.append(settings["backend"])
        return "the group"

    def broadcast(self, tensor: torch.Tensor, source: int, group: str) -> None:
        self.calls.append((tensor.device.type, source, group))
        tensor.fill_(5)


def test_ranks_pause_in_a_gloo_broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broadcast by NCCL would keep the GPU busy."""
    distributed = Distributed()
    monkeypatch.setattr(gate, "dist", distributed)
    monkeypatch.setattr(gate, "wait_for", lambda device: None)
    monkeypatch.setattr(gate, "StepClock", lambda device: StepClock(torch.device("cpu")))
    held = StepGate(lambda trainer, steps: 99)
    strategy = SimpleNamespace(root_device=torch.device("cuda", 1))
    trainer: Any = SimpleNamespace(world_size=2, is_global_zero=False, strategy=strategy)
    held.on_train_start(trainer, None)  # type: ignore[arg-type]
    assert distributed.calls == ["gloo", ("cpu", 0, "the group")]
    assert held._block_steps == 5


@pytest.mark.parametrize(("device", "rests"), [("cpu", ["rest"]), ("cuda", [])])
def test_openmp_threads_stop_spinning_before_the_steps_are_sent(
    monkeypatch: pytest.MonkeyPatch, device: str, rests: list[str]
) -> None:
    done: list[str] = []
    monkeypatch.setattr(gate.time, "sleep", lambda seconds: done.append("rest"))
    monkeypatch.setattr(gate, "wait_for", lambda device: None)
    monkeypatch.setattr(gate, "StepClock", lambda device: StepClock(torch.device("cpu")))

    def exchange(trainer: Any, steps: list[Step]) -> int:
        done.append(f"{len(steps)} steps")
        return 1

    held = StepGate(exchange)
    strategy = SimpleNamespace(root_device=torch.device(device))
    trainer: Any = SimpleNamespace(
        world_size=1, is_global_zero=True, local_rank=0, strategy=strategy,
        accumulate_grad_batches=1,
    )  # fmt: skip
    held.on_train_start(trainer, None)  # type: ignore[arg-type]
    held.on_train_batch_end(trainer, None, torch.tensor(1.0), torch.ones(2), 0)  # type: ignore[arg-type]
    assert done == ["0 steps", *rests, "1 steps"]


@pytest.mark.parametrize(
    ("device", "rank", "calls"),
    [("cpu", 0, [{2}, {2, 5, 7}]), ("cpu", 4, [{5}, {2, 5, 7}]), ("cuda", 0, [])],
)
def test_thread_moves_to_the_cpu_of_its_rank_without_being_pinned(
    monkeypatch: pytest.MonkeyPatch, device: str, rank: int, calls: list[set[int]]
) -> None:
    """Among the CPUs that the user allows. Each rank has its own."""
    made: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: {2, 5, 7}, raising=False)
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda thread, cpus: made.append(set(cpus)), raising=False
    )
    strategy = SimpleNamespace(root_device=torch.device(device))
    gate.start_on_first_cpu(SimpleNamespace(strategy=strategy, local_rank=rank))  # type: ignore[arg-type]
    assert made == calls


def test_every_step_starts_on_the_same_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[str] = []
    monkeypatch.setattr(gate, "start_on_first_cpu", lambda trainer: moved.append("moved"))
    granted = iter([2, 2, 0])
    held = StepGate(lambda trainer, steps: next(granted))
    data = BoringModel().train_dataloader
    gate.run(BoringModel, data, {"accelerator": "cpu"}, held, 0, lambda device: None)
    assert moved == ["moved"] * 4  # before the model is made, and after all steps but the last
