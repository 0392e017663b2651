"""A training run in its own process that takes steps on request."""

from __future__ import annotations

import contextlib
import math
import pickle
import shutil
import signal
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NoReturn

import torch

from lightning_opt.core.arguments import check_at_least, check_positive
from lightning_opt.worker.child import (
    FAILED,
    LOG,
    PAYLOAD,
    defer_ctrl_c,
    kill_tree,
    start_process,
    train,
)
from lightning_opt.worker.gate import Step
from lightning_opt.worker.recipes import Factory, Settings, check_factory, check_settings

GRACE_SECONDS = 5.0
"""Seconds that a run has to clean up after a request to end, and to exit after a kill."""

POLL_SECONDS = 0.1
"""Seconds between checks whether a silent process is alive."""

STACK_SECONDS = 0.5
"""Seconds for a process to write its stacks."""

MAX_LOG_CHARACTERS = 16_000
"""Maximum number of characters of the process's output in the details of a failure."""


class FitFailed(RuntimeError):  # noqa: N818 - a failed run is a result of a measurement
    """A run could not continue. The traceback of its process is printed above this one.

    Attributes:
        kind: ``"setup"`` (before the first step), ``"error"`` (an exception in training, or a run
            that ended early), ``"out of memory"``, ``"died"`` (signal or exit) or ``"timeout"``.
        message: One sentence, or the last line of the exception.
        details: The traceback, or the end of the process's output.
    """

    def __init__(self, kind: str, message: str, details: str = "") -> None:
        super().__init__(f"{kind}: {message}")
        self.kind, self.message, self.details = kind, message, details
        if details:  # Python prints the cause first
            self.__cause__ = Exception(f"in the process of the training\n{details}")


class TrainingProcess:
    """A training in a new process that takes steps on request.

    Between two calls of :meth:`advance` the process waits and uses no CPU, so several processes can
    take turns. The constructor does not wait for the start, but the first :meth:`advance` does. The
    process and all processes that it has started end when :meth:`close` is called, when the
    ``with`` block ends, when this object is deleted, or when the parent process ends in any way.

    Args:
        model: A function without arguments that makes the LightningModule, or its import path:
            ``"package.module:attribute"`` or ``"path/to/file.py:attribute"``. Functions of
            ``__main__`` and of notebooks are sent by value.
        data: The same, for a LightningDataModule or an iterable of batches such as a DataLoader.
        settings: Arguments of the Trainer, or a function that returns them. The process calls it,
            so that callbacks are new. Objects may be written as ``{"class_path": ..., "init_args":
            {...}}``. By default there is no logger, checkpoint, progress bar or validation, and no
            limit of steps or epochs.
        seed: The random seed. It is set before each of Trainer, model, data and run is created, so
            that the random state is the same even if the settings draw random numbers.
        timeout: Maximum seconds for the start, and for each call of :meth:`advance`.

    Attributes:
        steps: All steps so far.
        timeout: The timeout. It can be changed.
        peak_bytes: Peak memory of rank 0 at the end of the last :meth:`advance`. On CUDA: the peak
            of memory allocated by torch. On a CPU: the peak of resident memory above the level
            before the model was created, without loader workers.

    Raises:
        TypeError: If model, data or settings are not factories.
        ValueError: If a path or number is invalid.

    Example:
        >>> with TrainingProcess(make_model, make_data) as process:  # doctest: +SKIP
        ...     steps = process.advance(10)
    """

    def __init__(
        self,
        model: Factory,
        data: Factory,
        settings: Settings | None = None,
        *,
        seed: int = 0,
        timeout: float = 120.0,
    ) -> None:
        recipe = {
            "model": check_factory("model", model),
            "data": check_factory("data", data),
            "settings": check_settings("settings", settings),
        }
        self.timeout = check_positive("timeout", timeout)
        self.steps: list[Step] = []
        self.peak_bytes = 0
        self._failure: FitFailed | None = None
        payload = {
            "path": [entry or str(Path.cwd()) for entry in sys.path],
            "threads": torch.get_num_threads(),
            "seed": seed,
            "recipe": _pickled(recipe),
        }
        self._folder = Path(tempfile.mkdtemp(prefix="lightning_opt_fit_"))
        try:
            with defer_ctrl_c():
                (self._folder / PAYLOAD).write_bytes(pickle.dumps(payload))
                (self._folder / LOG).touch()
            self._process, self._connection = start_process(train, str(self._folder))
        except BaseException:  # Ctrl-C too
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        # With this priority it runs before multiprocessing waits for all processes at exit.
        resources = (self._process, self._connection, self._folder)
        self._finalizer = Finalize(self, _clean_up, args=resources, exitpriority=1)

    @property
    def closed(self) -> bool:
        return not self._finalizer.still_active()

    def advance(self, steps: int) -> list[Step]:
        """Take steps and return them. A step is one batch, even if gradients are accumulated.

        Args:
            steps: The number of steps, at least 1.

        Raises:
            FitFailed: If the run cannot start, fails or ends too early; later calls raise it again.
            RuntimeError: If the process was closed.
        """
        check_at_least("steps", steps, 1)
        if self._failure is not None:
            raise self._failure
        if self.closed:
            raise RuntimeError("The training was closed.")
        try:
            self._send(steps)
            taken, self.peak_bytes = self._receive()
        except BaseException:  # after Ctrl-C, the next call would receive the steps of this one
            self._finalizer()
            raise
        self.steps += taken
        if not self.steps:
            self._fail("setup", "The run has no steps: its data is empty.")
        if len(taken) < steps:
            self._fail(
                "error",
                f"The training ended after {len(self.steps)} steps, because of its own limits "
                "(max_steps, max_epochs, early stopping) or the end of its data.",
            )
        return taken

    def close(self) -> None:
        """End the run. It is killed if it does not clean up within a few seconds."""
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, Exception):
            self._finalizer()  # Ctrl-C: kill at once
        self.ask_to_end()
        if not self.closed:
            self._process.join(GRACE_SECONDS)
            self._finalizer()

    def ask_to_end(self) -> None:
        """Ask the run to end, and return at once. Several processes can then end in parallel."""
        if not self.closed:
            self._send(0)

    def __enter__(self) -> TrainingProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _send(self, steps: int) -> None:
        with contextlib.suppress(OSError):  # the process has died, which `_receive` reports
            self._connection.send(steps)

    def _receive(self) -> tuple[list[Step], int]:
        """Wait for the steps of the last request, and the peak of memory."""
        seconds = self.timeout if self.steps else 2 * self.timeout  # for the start and the steps
        deadline = time.monotonic() + seconds
        while not self._connection.poll(max(0.001, min(POLL_SECONDS, deadline - time.monotonic()))):
            if any(self._folder.glob(f"*{FAILED}")):  # rank 0 may wait for the failed rank forever
                self._fail("died", "Another rank has failed.")
            if not self._process.is_alive():
                assert self._process.pid is not None
                kill_tree(self._process.pid)  # its loader workers may hold the connection open
                break
            if time.monotonic() > deadline:
                self._fail(
                    "timeout",
                    f"The run did not respond within {seconds:g} s.",
                    self._log_with_stacks(),
                )
        try:
            message = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(GRACE_SECONDS)
            self._fail(*describe_exit(self._process.exitcode or 0), self._log())
        if message[0] == "failed":
            _, failed_at, kind, last_line, details = message
            self._fail(kind, last_line, details, failed_at)
        _, steps, peak_bytes = message
        return steps, peak_bytes

    def _log_with_stacks(self) -> str:
        """Return the log after all ranks have written their stacks into it."""
        import psutil

        if hasattr(signal, "SIGUSR1"):
            with contextlib.suppress(psutil.Error):
                rank_0 = psutil.Process(self._process.pid)
                for process in (*rank_0.children(), rank_0):
                    process.send_signal(signal.SIGUSR1)
                    time.sleep(STACK_SECONDS)
        return self._log()

    def _log(self) -> str:
        return (self._folder / LOG).read_text(errors="replace")[-MAX_LOG_CHARACTERS:]

    def _fail(self, kind: str, message: str, details: str = "", at: float = math.inf) -> NoReturn:
        """Raise the earliest failure of all ranks. It usually causes the others."""
        others = [pickle.loads(file.read_bytes()) for file in self._folder.glob(f"*{FAILED}")]
        _, *first = min([(at, kind, message, details), *others])
        self._failure = FitFailed(*first)
        self._finalizer()
        raise self._failure


def describe_exit(status: int) -> tuple[str, str]:
    if status >= 0:
        return "died", f"The process ended with exit status {status}."
    name = next((known.name for known in signal.Signals if known == -status), f"signal {-status}")
    if name == "SIGKILL":
        return "out of memory", "The process was killed (SIGKILL): memory has probably run out."
    return "died", f"The process was killed by {name}."


def _pickled(recipe: dict[str, Any]) -> bytes:
    import cloudpickle  # only measurements need it

    try:
        return bytes(cloudpickle.dumps(recipe))
    except Exception as error:
        raise TypeError(
            "model, data and settings are sent to another process, but an object in them cannot "
            f"be pickled: {error}. Create it inside the function instead of outside; settings may "
            "be a function too."
        ) from error


def _clean_up(process: BaseProcess, connection: Connection, folder: Path) -> None:
    assert process.pid is not None
    kill_tree(process.pid)
    process.join(GRACE_SECONDS)
    connection.close()
    shutil.rmtree(folder, ignore_errors=True)
