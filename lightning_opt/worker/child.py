"""Starts and kills the process of a `TrainingProcess`, and runs the training inside it.

A new interpreter takes seconds to import torch and Lightning, longer than many measurements. On
Linux without CUDA, the standard library's fork server imports them once and is then forked: a run
starts in 0.2 s instead of 5.

Each run has a folder with its payload, its log and its failures. Through a connection, rank 0
receives the number of steps to take, and sends results back. When the connection closes because the
parent process has ended, rank 0 kills itself and all its descendants. Lightning starts the other
ranks by executing this file as a script. They have no connection, and write failures into the
folder.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import get_temp_dir
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch

from lightning_opt.core.measure.exhaustion import is_out_of_memory
from lightning_opt.core.measure.memory import PeakMeter
from lightning_opt.worker.gate import Step, StepGate, run
from lightning_opt.worker.recipes import import_attribute

if TYPE_CHECKING:
    import lightning.pytorch as pl

PAYLOAD, LOG, FAILED = "payload.pkl", "log", ".failed"
"""Files in the folder, and the suffix of the failure files of ranks above 0."""

RANK_VARIABLES = (
    "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK",
    "RANK", "WORLD_SIZE",
)  # fmt: skip
"""Environment variables of a distributed run. They are removed for the new process, which is not a
rank of the run that starts it."""

CLUSTER_PREFIXES = ("SLURM_", "TORCHELASTIC_")
"""Prefixes of other variables of a distributed run."""

STARTUP_PREFIXES = (
    "CUDA", "GOMP", "KMP", "LD_", "MALLOC", "MKL", "NUM", "NVIDIA", "OMP", "OPENBLAS", "PYTHON",
    "PYTORCH", "TORCH",
)  # fmt: skip
"""Prefixes of variables that Python or a library may read only when it starts. A fork ignores
changes since the start of the server.
"""

READ_LATER = ("PYTHONPATH", "TORCHINDUCTOR_CACHE_DIR")
"""Exceptions, in which a change since the start of the server does not matter: a run sets its own
``sys.path``, and torch sets its folder of compiled code when it first compiles."""

_lock = threading.Lock()
_startup_variables_of_server: dict[str, str] | None = None


def start_process(function: Callable[..., None], *arguments: Any) -> tuple[BaseProcess, Connection]:
    """Start a process that is not a rank of this distributed run and has not used CUDA.

    Args:
        function: A module-level function. The process calls it with a connection, the
            :class:`ProcessState` to apply, and the arguments.
        *arguments: Further arguments of the function. They are pickled.

    Returns:
        The process, and this end of the connection.
    """
    path = [entry or os.getcwd() for entry in sys.path]  # noqa: PTH109 - as Python writes it
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in RANK_VARIABLES and not name.startswith(CLUSTER_PREFIXES)
    }
    environment["PYTHONPATH"] = os.pathsep.join(path)
    start_method = multiprocessing.get_start_method(allow_none=True)
    state = ProcessState(environment, os.getcwd(), start_method)  # noqa: PTH109
    with _lock, mock.patch.dict(os.environ, environment, clear=True), _without_main_script():
        context = _context(environment, function.__module__)
        get_temp_dir()  # otherwise each process creates a folder that remains after a kill
        with defer_ctrl_c():
            ours, theirs = context.Pipe()
            with theirs:
                process = context.Process(target=function, args=(theirs, state, *arguments))
                process.start()
    return process, ours


def _context(environment: dict[str, str], module: str) -> Any:
    """Choose the fork server's context if its forks behave like new processes, else spawn's."""
    global _startup_variables_of_server  # noqa: PLW0603 - one server per process
    if sys.platform == "linux" and not torch.cuda.is_available():
        read_at_start = {
            name: value
            for name, value in environment.items()
            if name.startswith(STARTUP_PREFIXES) and name not in READ_LATER
        }
        if _startup_variables_of_server in (None, read_at_start):
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([module])
            if _startup_variables_of_server is None:
                resource_tracker.ensure_running()  # before Ctrl-C is blocked: its start unblocks it
                with defer_ctrl_c():
                    forkserver.ensure_running()
                # This returns when the server has imported torch and Lightning.
                context.Process(target=os.getpid).start()
                _startup_variables_of_server = read_at_start
            return context
    return multiprocessing.get_context("spawn")


@contextlib.contextmanager
def defer_ctrl_c() -> Iterator[None]:
    """Defer Ctrl-C to the end of the context, so that every new file or process is cleaned up.

    A terminal sends Ctrl-C to all its processes. So the signal is also blocked: processes started
    here inherit the mask, and discard the signal before they unblock it.
    """
    handler = signal.getsignal(signal.SIGINT)
    in_main_thread = threading.current_thread() is threading.main_thread()
    deferred: list[Any] = []
    if in_main_thread and callable(handler):  # another thread may receive the signal
        signal.signal(signal.SIGINT, lambda *call: deferred.append(call))
    can_block = hasattr(signal, "pthread_sigmask")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if can_block else ()
    try:
        yield
    finally:
        if can_block:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if in_main_thread and callable(handler):
            signal.signal(signal.SIGINT, handler)
            if deferred:
                handler(*deferred[0])


@contextlib.contextmanager
def _without_main_script() -> Iterator[None]:
    """Keep multiprocessing from running the user's script again, which may lack a main guard."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class ProcessState(NamedTuple):
    """The environment variables, working directory and start method for a new process."""

    environment: dict[str, str]
    folder: str
    start_method: str | None

    def apply(self, log: str) -> None:
        """Make this process independent of its parent, and redirect its output into a file."""
        _redirect_output(os.devnull, 0, 1, 2)  # in case the log's folder no longer exists
        _redirect_output(log, 1, 2)
        if hasattr(os, "setsid"):
            os.setsid()
        if hasattr(signal, "pthread_sigmask"):
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # discards a pending signal
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        multiprocessing.set_start_method(self.start_method, force=True)
        # Shift all later allocations by a random distance. Otherwise all forks have the same
        # addresses, and cache effects could favour the same configuration at every start.
        _PADDING.extend(bytearray(int.from_bytes(os.urandom(2), "big") + 513) for _ in range(8))


def _redirect_output(path: str, *descriptors: int) -> None:
    opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    for descriptor in descriptors:
        os.dup2(opened, descriptor)


_PADDING: list[Any] = []


def kill_tree(pid: int) -> None:
    """Kill a process, the group that it leads, and its other descendants."""
    import psutil

    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        family = [*process.children(recursive=True), process]  # some lead their own group
    for member in family:
        with contextlib.suppress(psutil.Error):
            member.kill()
    if hasattr(os, "killpg"):  # also kills processes whose parent has ended
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


# --- in the process -------------------------------------------------------------------------------


class Worker:
    """Runs the training that is pickled in the folder.

    Args:
        folder: The folder of the run.
        connection: The connection to the parent process; None on ranks above 0.
    """

    def __init__(self, folder: Path, connection: Connection | None) -> None:
        self._folder, self._connection = folder, connection
        self._requests: queue.Queue[int] = queue.Queue()

    def run(self) -> None:
        faulthandler.enable()
        if hasattr(signal, "SIGUSR1"):
            faulthandler.register(signal.SIGUSR1)  # writes the stacks to the log
        gate = StepGate(self._exchange)
        try:
            payload = pickle.loads((self._folder / PAYLOAD).read_bytes())
            sys.path[:] = payload["path"]
            torch.set_num_threads(payload["threads"])
            recipe, seed = pickle.loads(payload["recipe"]), payload["seed"]
            for factory in recipe.values():
                path = getattr(factory, "target", factory)  # the CLI wraps its paths
                if isinstance(path, str):
                    import_attribute(path)  # before the memory baseline is read
            torch.ones(1 << 20).add_(1)  # starts torch's thread pool, for the same reason
            self._meter = PeakMeter(torch.device("cpu"))
            self._baseline = self._meter.read()
            if self._connection is not None:
                threading.Thread(target=self._listen, args=(self._connection,), daemon=True).start()
            trainer = run(**recipe, gate=gate, seed=seed)
            self._send_steps(gate.take_steps(trainer))  # fewer than requested: the data has ended
        except BaseException as error:  # noqa: BLE001 - the parent reports any failure
            self._report(error, "error" if gate.started else "setup")

    def _listen(self, connection: Connection) -> None:
        try:
            while True:
                self._requests.put(connection.recv())
        except (EOFError, OSError):
            kill_tree(os.getpid())

    def _exchange(self, trainer: pl.Trainer, steps: list[Step]) -> int:
        """Send the steps of the last block, and wait for the number of steps of the next."""
        device = trainer.strategy.root_device
        if steps:
            self._send_steps(steps)
        elif device.type == "cuda":
            self._meter, self._baseline = PeakMeter(device), 0
        return self._requests.get()

    def _send_steps(self, steps: list[Step]) -> None:
        if self._connection is not None:
            peak = max(0, self._meter.read() - self._baseline)
            self._connection.send(("steps", steps, peak))

    def _report(self, error: BaseException, kind: str) -> None:
        """Report a failure with its time: the first failure of a rank causes the others."""
        kind = "out of memory" if is_out_of_memory(error) else kind
        last = "".join(traceback.format_exception_only(error)).strip()
        failure = (time.time(), kind, last, "".join(traceback.format_exception(error)))
        if self._connection is not None:
            self._connection.send(("failed", *failure))
        else:
            unfinished = self._folder / str(os.getpid())
            unfinished.write_bytes(pickle.dumps(failure))
            unfinished.replace(unfinished.with_suffix(FAILED))  # never a partial file


def train(connection: Connection, state: ProcessState, folder: str) -> None:
    state.apply(str(Path(folder) / LOG))
    sys.argv[:] = [__file__, folder]  # Lightning repeats them to start the other ranks
    Worker(Path(folder), connection).run()


if __name__ == "__main__":
    Worker(Path(sys.argv[1]), None).run()
