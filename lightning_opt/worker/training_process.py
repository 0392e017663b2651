"""A run in a process of its own that takes steps when it is told."""

from __future__ import annotations

import contextlib
import os
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

from lightning_opt.core.arguments import at_least, positive
from lightning_opt.worker.child import LOG, PAYLOAD, train
from lightning_opt.worker.gate import Step
from lightning_opt.worker.recipes import Factory, Settings, check_factory, check_settings
from lightning_opt.worker.starting import ctrl_c_held, kill_tree, start

__all__ = ["Fit", "FitFailed", "Step"]

GRACE = 5.0
"""Seconds for a run to tidy up when it is told to end."""

_POLL = 0.1
"""Seconds after which a silent process is looked at: has it died?"""

_TAIL = 8000
"""Characters of its output that go into the details of a failure."""


class FitFailed(RuntimeError):  # noqa: N818 - the name says that a measurement has a result
    """A run could not go on.

    Attributes:
        kind: ``"setup"`` (before the first step), ``"error"`` (an exception in training),
            ``"out of memory"``, ``"died"`` (by a signal, or it left) or ``"timeout"``.
        message: One sentence, or the last line of the exception.
        details: The traceback, or the end of what the process printed.
    """

    def __init__(self, kind: str, message: str, details: str = "") -> None:
        super().__init__(f"{kind}: {message}")
        self.kind, self.message, self.details = kind, message, details


class Fit:
    """A run by a Lightning Trainer in a fresh process that takes steps when it is told.

    Between two calls of :meth:`advance` it waits and uses no CPU, so several may take turns. It
    ends with :meth:`close`, with the ``with`` block, with this object, and with this process
    however that ends; whatever it has started ends with it.

    Args:
        model: A function without arguments that makes the LightningModule, or its import path:
            ``"package.module:attribute"`` or ``"path/to/file.py:attribute"``. Functions of
            ``__main__`` and of notebooks are sent by value.
        data: The same for a LightningDataModule, or an iterable of batches such as a DataLoader.
        settings: Arguments of the Trainer, or a function that returns them, called in the process
            so that callbacks are new. Callbacks and others may be written as ``{"class_path": ...,
            "init_args": {...}}``. Where nothing is said there is no logger, checkpoint, progress
            bar or validation, and no limit of steps or epochs.
        seed: Of everything random, set anew before the Trainer, the model, the data and the
            run are begun, so that two runs begin alike whatever their settings draw.
        timeout: Seconds that the start, or one call of :meth:`advance`, may take.
        wait: Wait until the run is ready. False returns at once, and the first
            :meth:`advance`, or asking for the summary, waits.

    Raises:
        FitFailed: If the run cannot begin.
        TypeError: If a factory is none.
        ValueError: If a path or number is impossible.

    Example:
        >>> with Fit(make_model, make_data, {"accelerator": "cpu"}) as fit:  # doctest: +SKIP
        ...     steps = fit.advance(10)
    """

    def __init__(
        self,
        model: Factory,
        data: Factory,
        settings: Settings | None = None,
        *,
        seed: int = 0,
        timeout: float = 120.0,
        wait: bool = True,
    ) -> None:
        recipe = {
            "model": check_factory("model", model),
            "data": check_factory("data", data),
            "settings": check_settings("settings", settings),
        }
        self.timeout = positive("timeout", timeout)
        self._peak = 0
        self._summary: dict[str, Any] | None = None
        self._failure: FitFailed | None = None
        self._ended = False
        payload = {
            "path": [entry or str(Path.cwd()) for entry in sys.path],
            "threads": torch.get_num_threads(),
            "seed": seed,
            "recipe": _pickled(recipe),
        }
        self._folder = Path(tempfile.mkdtemp(prefix="lightning_opt_fit_"))
        try:
            with ctrl_c_held():
                (self._folder / PAYLOAD).write_bytes(pickle.dumps(payload))
            self._process, self._connection = start(train, str(self._folder))
        except BaseException:  # Ctrl-C too
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        # With a priority, because at the exit multiprocessing waits for all processes after that.
        ended = (self._process, self._connection, self._folder)
        self._finalizer = Finalize(self, _end, args=ended, exitpriority=1)
        if wait:
            self._wait_until_ready()

    @property
    def summary(self) -> dict[str, Any]:
        """Where it trains: device, how many of them, process."""
        self._wait_until_ready()
        assert self._summary is not None
        return self._summary

    @property
    def peak_bytes(self) -> int:
        """The most memory taken until the last block: of the device, or of the process on a CPU.

        On CUDA what torch had allocated at most. On a CPU the peak of resident memory above what
        was resident before the model was made, without workers of loaders. Of rank 0 if there are
        several.
        """
        return self._peak

    @property
    def closed(self) -> bool:
        """Whether the process is gone for good."""
        return not self._finalizer.still_active()

    def advance(self, steps: int, *, timeout: float | None = None) -> list[Step]:
        """Take steps and return them; fewer only if the run has come to its end.

        A step is a batch: with accumulated gradients not each of them updates the weights.

        Args:
            steps: How many, at least 1.
            timeout: Seconds to allow instead of the usual.

        Raises:
            FitFailed: If the run fails; from then on at every call.
            RuntimeError: If it was closed.
        """
        at_least("steps", steps, 1)
        self._wait_until_ready()
        if self._ended:
            return []
        self._tell(steps)
        message = self._receive(self.timeout if timeout is None else positive("timeout", timeout))
        if message[0] == "ended":
            self._ended, self._peak = True, message[1]
            return []
        _, taken, self._peak = message
        self._ended = len(taken) < steps
        return [Step(*step) for step in taken]

    def close(self) -> None:
        """End the run: it may tidy up for a few seconds, and then it is killed.

        Closing again does nothing.
        """
        ends_by = sys.exc_info()[1]
        if ends_by is not None and not isinstance(ends_by, Exception):
            self._finalizer()  # Ctrl-C: at once
        self.ask_to_end()
        if not self.closed:
            self._process.join(GRACE if self._failure is None else 0)
            self._finalizer()

    def ask_to_end(self) -> None:
        """Tell the run to end without waiting for that, as before closing one of several."""
        if not self.closed and self._failure is None and not self._ended:
            self._tell(0)
            self._ended = True

    def __enter__(self) -> Fit:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _wait_until_ready(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._summary is not None:
            if self.closed:
                raise RuntimeError("The training was closed.")
            return
        try:
            message = self._receive(self.timeout)
        except BaseException:  # Ctrl-C too
            self._finalizer()
            raise
        if message[0] != "ready":
            self._fail("setup", "The run had no step to take: its data are empty.", "")
        self._summary = message[1]

    def _tell(self, steps: int) -> None:
        with contextlib.suppress(OSError):  # it has died, which reading will find out
            self._connection.send(steps)

    def _receive(self, timeout: float) -> Any:
        deadline = time.monotonic() + timeout
        while not self._connection.poll(max(0.001, min(_POLL, deadline - time.monotonic()))):
            if not self._process.is_alive():
                assert self._process.pid is not None
                kill_tree(self._process.pid)  # its workers may hold the connection open
                break
            if time.monotonic() > deadline:
                self._fail("timeout", f"It took more than {timeout:g} s.", self._where())
        try:
            message = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(GRACE)
            self._fail(*describe_exit(self._process.exitcode or 0), self._log())
        if message[0] == "failed":
            self._fail(*message[1:])
        return message

    def _where(self) -> str:
        """Return what the process printed, with the stacks of its threads."""
        if hasattr(signal, "SIGUSR1"):
            assert self._process.pid is not None
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGUSR1)
            time.sleep(0.2)
        return self._log()

    def _log(self) -> str:
        try:
            return (self._folder / LOG).read_text(errors="replace")[-_TAIL:]
        except OSError:
            return ""

    def _fail(self, kind: str, message: str, details: str) -> NoReturn:
        self._failure = FitFailed(kind, message, details)
        self._finalizer()
        raise self._failure


def describe_exit(status: int) -> tuple[str, str]:
    """Say of what kind of failure an exit status is, and describe it."""
    if status >= 0:
        return "died", f"The process left with exit status {status}."
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    if name == "SIGKILL":
        return "out of memory", (
            "The process was killed (SIGKILL), as the system does when memory runs out."
        )
    return "died", f"The process died of {name}."


def _pickled(recipe: dict[str, Any]) -> bytes:
    import cloudpickle  # a dependency, but not needed by those who never measure

    try:
        return bytes(cloudpickle.dumps(recipe))
    except Exception as error:
        raise TypeError(
            "model, data and settings are sent to a process of their own, and something in them "
            f"cannot be pickled: {error}. Make it within the function instead of before it; "
            "settings may be a function too."
        ) from error


def _end(process: BaseProcess, connection: Connection, folder: Path) -> None:
    """Kill what is left of the process and what it has started, and remove its folder."""
    assert process.pid is not None
    kill_tree(process.pid)
    process.join()
    connection.close()
    shutil.rmtree(folder, ignore_errors=True)
