"""Starting processes that train, and killing them with all that they have started.

Importing torch and Lightning takes seconds of CPU in each new interpreter, more than many
measurements. On Linux the standard library's fork server imports them once, and forks from there.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize, get_temp_dir
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch

RANK_VARIABLES = (
    "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK",
    "RANK", "WORLD_SIZE",
)  # fmt: skip
"""Environment variables of a rank, removed because the new training is not a rank of this one."""

CLUSTER_PREFIXES = ("SLURM_", "TORCHELASTIC_")
"""Prefixes of further such variables."""

EARLY_PREFIXES = (
    "CUDA", "GOMP", "KMP", "LD_", "MALLOC", "MKL", "NUM", "NVIDIA", "OMP", "OPENBLAS", "PYTHON",
    "PYTORCH", "TORCH",
)  # fmt: skip
"""Prefixes of variables that Python, libraries or torch may read only when they start."""

_lock = threading.Lock()
_environment_of_server: dict[str, str] = {}


def start(run: Callable[..., None], *arguments: Any) -> tuple[BaseProcess, Connection]:
    """Start a process that is not a rank and has never used CUDA.

    Args:
        run: A function of a module, called in the process with its end of a connection, a
            :class:`Place` to enter, and the arguments.
        *arguments: Further arguments of the function; they are pickled.

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
    place = Place(environment, os.getcwd(), multiprocessing.get_start_method(allow_none=True))  # noqa: PTH109
    with _lock, mock.patch.dict(os.environ, environment, clear=True), _without_main_script():
        context = _context(environment, run.__module__)
        get_temp_dir()  # else each process creates one that remains after a kill
        with ctrl_c_held():
            ours, theirs = context.Pipe()
            with theirs:
                process = context.Process(target=run, args=(theirs, place, *arguments))
                process.start()
    return process, ours


def _context(environment: dict[str, str], module: str) -> Any:
    """Return the fork server's context if its forks behave like new processes, else spawn's."""
    if sys.platform == "linux" and not torch.cuda.is_available():
        early = {n: value for n, value in environment.items() if n.startswith(EARLY_PREFIXES)}
        if _environment_of_server in ({}, early):
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([module])
            if not _environment_of_server:
                _launch_server(context)
                _environment_of_server.update(early)
            return context
    return multiprocessing.get_context("spawn")


def _launch_server(context: Any) -> None:
    import psutil

    here = psutil.Process()
    resource_tracker.ensure_running()  # unblocks Ctrl-C when it starts
    before = here.children()
    with ctrl_c_held():
        forkserver.ensure_running()
    for server in set(here.children()) - set(before):
        # Without this it would end seconds after this process.
        Finalize(None, server.kill, exitpriority=-1)
    context.Process(target=os.getpid).start()


@contextlib.contextmanager
def ctrl_c_held() -> Iterator[None]:
    """Defer Ctrl-C to the end of the context, when new files and processes have an owner.

    A terminal sends Ctrl-C to all processes. The signal is also blocked, so that processes started
    here inherit the mask and do not receive it.
    """
    handler = signal.getsignal(signal.SIGINT)
    in_main_thread = threading.current_thread() is threading.main_thread()
    deferred: list[Any] = []
    if in_main_thread and callable(handler):  # the handler runs here, whichever thread is signalled
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
    """Keep multiprocessing from running the user's script again, which may lack the usual guard."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class Place(NamedTuple):
    """Environment variables, working directory and start method of a new process."""

    environment: dict[str, str]
    folder: str
    start_method: str | None

    def enter(self, log: str) -> None:
        """Make this process independent of its parent, and redirect its output into a file."""
        _print_into(os.devnull, 0, 1, 2)  # in case the log's folder is gone already
        _print_into(log, 1, 2)
        if hasattr(os, "setsid"):
            os.setsid()
        if hasattr(signal, "pthread_sigmask"):
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # discards a pending one
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        multiprocessing.set_start_method(self.start_method, force=True)
        _shift_allocations()


def _print_into(path: str, *descriptors: int) -> None:
    opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    for descriptor in descriptors:
        os.dup2(opened, descriptor)


_PADDING: list[Any] = []


def _shift_allocations() -> None:
    """Shift all later allocations by a random distance.

    Forks of one process would otherwise have the same addresses, whose place in the caches would
    favour the same configuration in each of them.
    """
    _PADDING.extend(bytearray(int.from_bytes(os.urandom(2), "big") + 513) for _ in range(8))


def kill_tree(pid: int) -> None:
    """Kill a process, the group that it leads, and its other descendants."""
    import psutil

    descendants = []
    with contextlib.suppress(psutil.Error):
        descendants = psutil.Process(pid).children(recursive=True)  # some lead their own sessions
    for process in descendants:
        with contextlib.suppress(psutil.Error):
            process.kill()
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(psutil.Error):
        psutil.Process(pid).kill()  # it may not lead a group yet
