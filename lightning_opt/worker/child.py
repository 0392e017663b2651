"""The process of a ``Fit``: trains, when told to, step by step.

It is started as ``python -m lightning_opt.worker.child FOLDER``, or forked from one started with
``--serve``, and finds in the folder what to train.
Commands come by its standard input, one number of steps each; messages leave by what was its
standard output. What the training prints goes to its standard error. When the input is closed,
because whoever asked for the training is gone, it kills itself and all that it has started.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import IO, Any

import lightning.pytorch as pl
import torch

from lightning_opt.core.exhaustion import is_out_of_memory
from lightning_opt.worker.channel import receive, send
from lightning_opt.worker.fork_server import serve
from lightning_opt.worker.gate import PeakMeter, Step, StepGate, fit, prepare
from lightning_opt.worker.processes import kill_tree

PAYLOAD = "payload.pkl"
"""The file in the folder that says what to do."""


class Worker:
    """Trains what the payload describes.

    Args:
        messages: Where they are sent; None in the other processes of a distributed training, which
            only take part in the steps.
        commands: The numbers of steps, as they come.
    """

    def __init__(self, messages: IO[bytes] | None, commands: queue.Queue[int]) -> None:
        self._messages, self._commands = messages, commands
        self._device = torch.device("cpu")
        self._meter: PeakMeter | None = None
        self._limit: int | None = None
        self._began = False

    def run(self, payload: dict[str, Any]) -> int:
        """Train until told to stop, and return the exit status."""
        try:
            torch.set_num_threads(payload["threads"])
            self._limit = payload["memory_limit"]
            recipe = pickle.loads(payload["recipe"])
            gate = StepGate(self._ready, self._commands.get, self._deliver)
            made = prepare(**recipe, gate=gate, seed=payload["seed"], on_device=self._watch_memory)
            fit(made)
            gate.flush(made.trainer)
            self._send("ended", self._peak())
        except BaseException as error:  # noqa: BLE001 - whatever it is, the parent has to hear of it
            self._send("failed", *self._describe(error))
            return 1
        return 0

    def _watch_memory(self, device: torch.device) -> None:
        self._device = device
        torch.ones(1 << 20).add_(1)  # starts the threads of the pool: with too little memory they
        self._meter = PeakMeter()  # could not, and that ends a process
        if self._limit is not None:
            _limit_memory(device, self._limit)

    def _ready(self, trainer: pl.Trainer) -> None:
        self._began = True
        self._send("ready", _summarise(trainer))

    def _deliver(self, steps: list[Step]) -> None:
        self._send("steps", [tuple(step) for step in steps], self._peak())

    def _peak(self) -> int:
        return 0 if self._meter is None else self._meter.read(self._device)

    def _send(self, *message: Any) -> None:
        if self._messages is not None:
            send(self._messages, message)

    def _describe(self, error: BaseException) -> tuple[str, str, str]:
        kind = "error" if self._began else "setup"
        if is_out_of_memory(error):
            kind = "out of memory"
        last = "".join(traceback.format_exception_only(error)).strip()
        return kind, last, "".join(traceback.format_exception(error))


def _limit_memory(device: torch.device, limit: int) -> None:
    """Have allocations fail that go ``limit`` bytes beyond what is taken now."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
    else:
        import resource

        from lightning_opt.core.memory import process_memory

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        wanted = process_memory().virtual + limit
        wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


def _summarise(trainer: pl.Trainer) -> dict[str, Any]:
    module = trainer.lightning_module
    return {
        "model": type(module).__name__,
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "device": str(trainer.strategy.root_device),
        "devices": trainer.world_size,
        "strategy": type(trainer.strategy).__name__,
        "precision": str(trainer.precision),
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "prefetched": _prefetched(trainer),
        "threads": torch.get_num_threads(),
        "pid": os.getpid(),
        "peak_of": "rank 0" if trainer.world_size > 1 else "the process",
    }


def _prefetched(trainer: pl.Trainer) -> int:
    """Return how many batches workers may have made ready in a pause, which in a run they lack."""
    loaders = getattr(trainer.fit_loop._combined_loader, "flattened", [])
    counts = [
        getattr(loader, "num_workers", 0) * (getattr(loader, "prefetch_factor", None) or 2)
        for loader in loaders
    ]
    return max(counts, default=0)


def _listen(stream: IO[bytes], commands: queue.Queue[int]) -> None:
    try:
        while True:
            commands.put(receive(stream))
    except (EOFError, OSError):
        if os.name != "posix" or os.getpgrp() == os.getpid():
            kill_tree(os.getpid())
        os._exit(1)


def train(folder: str) -> int:
    """Read the payload and train; return the exit status."""
    sys.argv[1:] = [folder]  # Lightning repeats them where it starts the other ranks
    commands: queue.Queue[int] = queue.Queue()
    messages: IO[bytes] | None = None
    faulthandler.enable()
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)  # by which the parent asks where it hangs
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:  # Lightning starts the others, who listen to us
        messages = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        stream = os.fdopen(os.dup(0), "rb")
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        threading.Thread(target=_listen, args=(stream, commands), daemon=True).start()
    payload = pickle.loads((Path(folder) / PAYLOAD).read_bytes())
    sys.path[:] = payload["path"]
    return Worker(messages, commands).run(payload)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        sys.exit(serve(int(sys.argv[2]), train))
    sys.exit(train(sys.argv[1]))
