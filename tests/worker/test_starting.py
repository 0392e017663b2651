"""How processes start where there is CUDA, and how ranks wait, on pretended devices."""

import os
import signal
import threading
from collections.abc import Iterable
from multiprocessing import connection
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_opt.core.measure.timing import StepClock
from lightning_opt.worker import gate, starting
from lightning_opt.worker.gate import StepGate


def test_with_cuda_a_process_is_spawned_and_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork of a process that has used CUDA cannot use it; a server may have been made to."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert starting._context(dict(os.environ), "json").get_start_method() == "spawn"


def waits_for_its_end(end: connection.Connection, place: starting.Place) -> None:
    with end, pytest.raises(EOFError):
        end.recv()


def test_ctrl_c_waits_until_what_is_opened_has_an_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever thread it comes to: in between, sockets and a process belonged to nobody."""
    begun, sent, went_on = threading.Event(), threading.Event(), []

    def sender() -> None:
        begun.wait()
        signal.raise_signal(signal.SIGINT)
        sent.set()

    def pipe(duplex: bool) -> tuple[connection.Connection, connection.Connection]:
        begun.set()
        assert sent.wait(300)
        ends = usual_pipe(duplex)
        went_on.extend(ends)
        return ends

    usual_pipe = connection.Pipe
    starting.start(waits_for_its_end)[0].join()  # the server has started
    monkeypatch.setattr(connection, "Pipe", pipe)
    threading.Thread(target=sender, daemon=True).start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            starting.start(waits_for_its_end)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    ours, theirs = went_on
    assert theirs.closed
    ours.close()


class Distributed:
    """Remembers what is asked of torch.distributed."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def new_group(self, **settings: Any) -> str:
        self.asked.append(settings["backend"])
        return "the group"

    def broadcast(self, tensor: torch.Tensor, source: int, group: str) -> None:
        self.asked.append((tensor.device.type, source, group))
        tensor.fill_(5)


def test_ranks_wait_on_the_cpu_while_others_have_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a broadcast of NCCL they would keep their GPU busy."""
    distributed = Distributed()
    monkeypatch.setattr(gate, "dist", distributed)
    monkeypatch.setattr(gate, "wait_for", lambda device: None)
    monkeypatch.setattr(gate, "StepClock", lambda device: StepClock(torch.device("cpu")))
    held = StepGate(lambda trainer: None, lambda: 99, lambda steps: None)
    strategy = SimpleNamespace(root_device=torch.device("cuda", 1))
    trainer: Any = SimpleNamespace(world_size=2, is_global_zero=False, strategy=strategy)
    held.on_train_start(trainer, None)  # type: ignore[arg-type]
    assert distributed.asked == ["gloo", ("cpu", 0, "the group")]
    assert held._block_steps == 5


@pytest.mark.parametrize(("device", "rests"), [("cpu", ["rest"]), ("cuda", [])])
def test_threads_have_come_to_rest_when_the_next_one_has_its_turn(
    monkeypatch: pytest.MonkeyPatch, device: str, rests: list[str]
) -> None:
    """Those of OpenMP go on spinning for some milliseconds, on a CPU that the other one needs."""
    done: list[str] = []
    monkeypatch.setattr(gate.time, "sleep", lambda seconds: done.append("rest"))
    monkeypatch.setattr(gate, "wait_for", lambda device: None)
    monkeypatch.setattr(gate, "StepClock", lambda device: StepClock(torch.device("cpu")))

    def wait() -> int:
        done.append("wait")
        return 1

    held = StepGate(lambda trainer: None, wait, lambda steps: done.append(f"{len(steps)} steps"))
    strategy = SimpleNamespace(root_device=torch.device(device))
    trainer: Any = SimpleNamespace(
        world_size=1,
        is_global_zero=True,
        local_rank=0,
        strategy=strategy,
        accumulate_grad_batches=1,
    )
    held.on_train_start(trainer, None)  # type: ignore[arg-type]
    held.on_train_batch_end(trainer, None, torch.tensor(1.0), torch.ones(2), 0)  # type: ignore[arg-type]
    assert done == ["wait", *rests, "1 steps", "wait"]


class Cpus:
    """A machine's CPUs, and those to which its one thread is asked to go."""

    def __init__(self) -> None:
        self.allowed = {2, 5, 7}
        self.asked: list[set[int]] = []

    def sched_getaffinity(self, thread: int) -> set[int]:
        return self.allowed

    def sched_setaffinity(self, thread: int, cpus: Iterable[int]) -> None:
        self.allowed = set(cpus)
        self.asked.append(self.allowed)


@pytest.mark.parametrize(
    ("device", "rank", "asked"),
    [("cpu", 0, [{2}, {2, 5, 7}]), ("cpu", 4, [{5}, {2, 5, 7}]), ("cuda", 0, [])],
)
def test_runs_that_are_compared_go_to_the_same_cpu_and_are_not_held_there(
    monkeypatch: pytest.MonkeyPatch, device: str, rank: int, asked: list[set[int]]
) -> None:
    """Of the CPUs that the user allows; ranks of one run go to different ones."""
    cpus = Cpus()
    for name in ("sched_getaffinity", "sched_setaffinity"):
        monkeypatch.setattr(os, name, getattr(cpus, name), raising=False)
    strategy = SimpleNamespace(root_device=torch.device(device))
    gate.start_on_first_cpu(SimpleNamespace(strategy=strategy, local_rank=rank))  # type: ignore[arg-type]
    assert cpus.asked == asked


def test_every_step_begins_on_the_same_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[str] = []
    monkeypatch.setattr(gate, "start_on_first_cpu", lambda trainer: moved.append("moved"))
    granted = iter([2, 2, 0])
    held = StepGate(lambda trainer: None, lambda: next(granted), lambda steps: None)
    data = BoringModel().train_dataloader
    gate.run(BoringModel, data, {"accelerator": "cpu"}, held, 0, lambda device: None)
    assert moved == ["moved"] * 4  # before the model is made, and after all steps but the last
