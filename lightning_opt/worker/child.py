"""The process of a `TrainingProcess`: it trains step by step on request.

Its folder holds the payload to train. It receives numbers of steps through a connection, sends
messages back, and prints into the folder's log. When the other end closes, because that process has
ended, it kills itself and all processes that it has started. Other ranks of a distributed run
execute this file as a script, without a connection.
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
from typing import TYPE_CHECKING, Any

import torch

from lightning_opt.core.measure.exhaustion import is_out_of_memory
from lightning_opt.core.measure.memory import PeakMeter
from lightning_opt.worker.gate import Step, StepGate, run
from lightning_opt.worker.starting import Surroundings, kill_tree

if TYPE_CHECKING:
    import lightning.pytorch as pl

PAYLOAD, LOG = "payload.pkl", "log"
"""Files in the folder."""


class Worker:
    """Trains the run that the payload describes."""

    def __init__(self, connection: Connection | None) -> None:
        self._connection = connection
        self._requests: queue.Queue[int] = queue.Queue()
        self._meter: PeakMeter | None = None
        self._resident = 0
        self._started = False

    def run(self, payload: dict[str, Any]) -> None:
        if self._connection is not None:
            threading.Thread(target=self._listen, args=(self._connection,), daemon=True).start()
        try:
            torch.set_num_threads(payload["threads"])
            recipe = pickle.loads(payload["recipe"])
            gate, seed = StepGate(self._exchange), payload["seed"]
            trainer = run(**recipe, gate=gate, seed=seed, on_device=self._measure_memory)
            self._send_steps(gate.take_steps(trainer))  # fewer than requested: the data has ended
        except BaseException as error:  # noqa: BLE001 - the parent reports any failure
            self._send("failed", *self._describe(error))

    def _listen(self, connection: Connection) -> None:
        try:
            while True:
                self._requests.put(connection.recv())
        except (EOFError, OSError):
            kill_tree(os.getpid())

    def _measure_memory(self, device: torch.device) -> None:
        # Starts the threads of the pool: without memory for them the process would die.
        torch.ones(1 << 20).add_(1)
        self._meter = PeakMeter(device)
        self._resident = 0 if device.type == "cuda" else self._meter.read()

    def _exchange(self, trainer: pl.Trainer, steps: list[Step]) -> int:
        """Send the steps of the last block, and wait for the number of steps of the next."""
        if self._started:
            self._send_steps(steps)
        else:
            self._started = True
            place = {"device": str(trainer.strategy.root_device), "devices": trainer.world_size}
            self._send("ready", place | {"pid": os.getpid()})
        return self._requests.get()

    def _send_steps(self, steps: list[Step]) -> None:
        peak = 0 if self._meter is None else max(0, self._meter.read() - self._resident)
        self._send("steps", [tuple(step) for step in steps], peak)

    def _send(self, *message: Any) -> None:
        if self._connection is not None:
            self._connection.send(message)

    def _describe(self, error: BaseException) -> tuple[str, str, str]:
        kind = "error" if self._started else "setup"
        kind = "out of memory" if is_out_of_memory(error) else kind
        last = "".join(traceback.format_exception_only(error)).strip()
        return kind, last, "".join(traceback.format_exception(error))


def train(connection: Connection, surroundings: Surroundings, folder: str) -> None:
    surroundings.apply(str(Path(folder) / LOG))
    sys.argv[:] = [__file__, folder]  # Lightning repeats them to start the other ranks
    faulthandler.enable()
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)  # writes the stacks to the log
    _train(folder, connection)


def _train(folder: str, connection: Connection | None) -> None:
    payload = pickle.loads((Path(folder) / PAYLOAD).read_bytes())
    sys.path[:] = payload["path"]
    Worker(connection).run(payload)


if __name__ == "__main__":
    _train(sys.argv[1], None)
