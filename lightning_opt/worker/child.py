"""The process of a `TrainingProcess`: it takes training steps on request.

Rank 0 receives numbers of steps through a connection, sends messages back, and prints into the
folder's log. When the connection closes because the parent process has ended, rank 0 kills itself
and all its descendants. Lightning starts the other ranks by executing this file as a
script. They have no connection. They write failures into files in the folder.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_opt.core.measure.exhaustion import is_out_of_memory
from lightning_opt.core.measure.memory import PeakMeter
from lightning_opt.worker.gate import Step, StepGate, run
from lightning_opt.worker.starting import ProcessState, kill_tree

if TYPE_CHECKING:
    import lightning.pytorch as pl

PAYLOAD, LOG, FAILED = "payload.pkl", "log", ".failed"
"""Files in the folder, and the suffix of the failure files of ranks above 0."""


class Worker:
    """Trains the run that the folder describes.

    Args:
        folder: The folder of the run.
        connection: The connection to the parent process; None on ranks above 0.
    """

    def __init__(self, folder: Path, connection: Connection | None) -> None:
        self._folder, self._connection = folder, connection
        self._requests: queue.Queue[int] = queue.Queue()
        self._meter: PeakMeter | None = None
        self._resident = 0

    def run(self) -> None:
        gate = StepGate(self._exchange)
        try:
            payload = pickle.loads((self._folder / PAYLOAD).read_bytes())
            sys.path[:] = payload["path"]
            torch.set_num_threads(payload["threads"])
            recipe, seed = pickle.loads(payload["recipe"]), payload["seed"]
            if self._connection is not None:
                threading.Thread(target=self._listen, args=(self._connection,), daemon=True).start()
            trainer = run(**recipe, gate=gate, seed=seed, on_device=self._measure_memory)
            self._send_steps(gate.take_steps(trainer))  # fewer than requested: the data has ended
        except BaseException as error:  # noqa: BLE001 - the parent reports any failure
            self._report(error, "error" if gate.started else "setup")

    def _listen(self, connection: Connection) -> None:
        try:
            while True:
                self._requests.put(connection.recv())
        except (EOFError, OSError):
            kill_tree(os.getpid())

    def _measure_memory(self, device: torch.device) -> None:
        # Start the thread pool early. If memory for its threads is missing later, the process dies.
        torch.ones(1 << 20).add_(1)
        self._meter = PeakMeter(device)
        self._resident = 0 if device.type == "cuda" else self._meter.read()

    def _exchange(self, trainer: pl.Trainer, steps: list[Step]) -> int:
        """Send the steps of the last block, and wait for the number of steps of the next."""
        if steps:
            self._send_steps(steps)
        else:
            place = {"device": str(trainer.strategy.root_device), "devices": trainer.world_size}
            self._send("ready", place | {"pid": os.getpid()})
        return self._requests.get()

    def _send_steps(self, steps: list[Step]) -> None:
        peak = 0 if self._meter is None else max(0, self._meter.read() - self._resident)
        self._send("steps", [tuple(step) for step in steps], peak)

    def _send(self, *message: Any) -> None:
        if self._connection is not None:
            self._connection.send(message)

    def _report(self, error: BaseException, kind: str) -> None:
        """Report a failure with its time, because the first failure of a rank causes the others."""
        kind = "out of memory" if is_out_of_memory(error) else kind
        last = "".join(traceback.format_exception_only(error)).strip()
        failure = (time.time(), kind, last, "".join(traceback.format_exception(error)))
        if self._connection is not None:
            self._connection.send(("failed", *failure))
        else:
            unfinished = self._folder / str(os.getpid())
            unfinished.write_bytes(pickle.dumps(failure))
            unfinished.replace(unfinished.with_suffix(FAILED))  # the parent never reads half a file


def train(connection: Connection, state: ProcessState, folder: str) -> None:
    state.apply(str(Path(folder) / LOG))
    sys.argv[:] = [__file__, folder]  # Lightning repeats them to start the other ranks
    start(connection)


def start(connection: Connection | None) -> None:
    faulthandler.enable()
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)  # writes the stacks to the log
    Worker(Path(sys.argv[1]), connection).run()


if __name__ == "__main__":
    start(None)
