"""The process of a ``Fit``: trains, when told to, step by step.

It finds in its folder what to train, and has a connection: commands come by it, one number of steps
each, and messages leave. What the run prints goes to the folder's log. When the other end is
closed, because whoever asked for the run is gone, it kills itself and all that it has started.
The other ranks of a distributed training run this file, and only take part in the steps.
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
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_opt.core.measure.exhaustion import is_out_of_memory
from lightning_opt.core.measure.memory import PeakMeter
from lightning_opt.worker.gate import Step, StepGate, run
from lightning_opt.worker.starting import Place, kill_tree

PAYLOAD, LOG = "payload.pkl", "log"
"""Files in the folder: what is to be done, and what was printed."""


class Worker:
    """Trains what the payload describes.

    Args:
        connection: To whoever gives commands; None in the other ranks.
    """

    def __init__(self, connection: Connection | None) -> None:
        self._connection = connection
        self._commands: queue.Queue[int] = queue.Queue()
        self._meter: PeakMeter | None = None
        self._resident = 0
        self._began = False

    def run(self, payload: dict[str, Any]) -> None:
        """Train until told to stop."""
        if self._connection is not None:
            threading.Thread(target=self._listen, args=(self._connection,), daemon=True).start()
        try:
            torch.set_num_threads(payload["threads"])
            recipe = pickle.loads(payload["recipe"])
            gate = StepGate(self._ready, self._commands.get, self._deliver)
            seed = payload["seed"]
            gate.flush(run(**recipe, gate=gate, seed=seed, on_device=self._watch_memory))
            self._send("ended", self._peak())
        except BaseException as error:  # noqa: BLE001 - whatever it is, the parent has to hear of it
            self._send("failed", *self._describe(error))

    def _listen(self, connection: Connection) -> None:
        try:
            while True:
                self._commands.put(connection.recv())
        except (EOFError, OSError):
            kill_tree(os.getpid())

    def _watch_memory(self, device: torch.device) -> None:
        torch.ones(1 << 20).add_(1)  # starts the threads of the pool: with too little memory they
        self._meter = PeakMeter(device)  # could not, and that ends a process
        self._resident = 0 if device.type == "cuda" else self._meter.read()

    def _ready(self, trainer: pl.Trainer) -> None:
        self._began = True
        place = {"device": str(trainer.strategy.root_device), "devices": trainer.world_size}
        self._send("ready", place | {"pid": os.getpid()})

    def _deliver(self, steps: list[Step]) -> None:
        self._send("steps", [tuple(step) for step in steps], self._peak())

    def _peak(self) -> int:
        return 0 if self._meter is None else max(0, self._meter.read() - self._resident)

    def _send(self, *message: Any) -> None:
        if self._connection is not None:
            self._connection.send(message)

    def _describe(self, error: BaseException) -> tuple[str, str, str]:
        began = "error" if self._began else "setup"
        kind = "out of memory" if is_out_of_memory(error) else began
        last = "".join(traceback.format_exception_only(error)).strip()
        return kind, last, "".join(traceback.format_exception(error))


def train(connection: Connection, place: Place, folder: str) -> None:
    """Train in a process that was just started; its first function."""
    place.settle_in(str(Path(folder) / LOG))
    sys.argv[:] = [__file__, folder]  # Lightning repeats them where it starts the other ranks
    faulthandler.enable()
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)  # by which the parent asks where it hangs
    _train(folder, connection)


def _train(folder: str, connection: Connection | None) -> None:
    payload = pickle.loads((Path(folder) / PAYLOAD).read_bytes())
    sys.path[:] = payload["path"]
    Worker(connection).run(payload)


if __name__ == "__main__":
    _train(sys.argv[1], None)
