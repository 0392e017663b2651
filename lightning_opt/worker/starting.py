"""Processes that train: how they start, and that they end with all that they have started.

To import torch and Lightning takes seconds of CPU in each new interpreter, which is more than many
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

RANKS = (
    "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK",
    "RANK", "WORLD_SIZE",
)  # fmt: skip
"""Variables by which a process knows that it is one of several: the new training is not."""

CLUSTERS = ("SLURM_", "TORCHELASTIC_")
"""How others of the kind begin."""

READ_EARLY = (
    "CUDA", "GOMP", "KMP", "LD_", "MALLOC", "MKL", "NUM", "NVIDIA", "OMP", "OPENBLAS", "PYTHON",
    "PYTORCH", "TORCH",
)  # fmt: skip
"""How variables begin that Python, libraries or torch may read when they start, and not again."""

_lock = threading.Lock()
_environment_of_server: dict[str, str] = {}


def start(run: Callable[..., None], *arguments: Any) -> tuple[BaseProcess, Connection]:
    """Start a process that knows nothing of ranks and has never touched CUDA.

    Args:
        run: A function of a module, called in the process with its end of a connection, a
            :class:`Place` to settle in, and the arguments.
        *arguments: Of the function; they are pickled.

    Returns:
        The process, and our end of the connection.
    """
    path = [entry or os.getcwd() for entry in sys.path]  # noqa: PTH109 - as Python writes it
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in RANKS and not name.startswith(CLUSTERS)
    }
    environment["PYTHONPATH"] = os.pathsep.join(path)
    place = Place(environment, os.getcwd(), multiprocessing.get_start_method(allow_none=True))  # noqa: PTH109
    with _lock, mock.patch.dict(os.environ, environment, clear=True), _script_left_out():
        context = _context(environment, run.__module__)
        get_temp_dir()  # else each process makes one, which stays when it is killed
        with ctrl_c_held():
            ours, theirs = context.Pipe()
            with theirs:
                process = context.Process(target=run, args=(theirs, place, *arguments))
                process.start()
    return process, ours


def _context(environment: dict[str, str], module: str) -> Any:
    """Return the context of the fork server, if what it forks can be as if started anew."""
    if sys.platform == "linux" and not torch.cuda.is_available():
        early = {n: value for n, value in environment.items() if n.startswith(READ_EARLY)}
        if _environment_of_server in ({}, early):
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([module])
            if not _environment_of_server:
                _launch_server(context)
                _environment_of_server.update(early)
            return context
    return multiprocessing.get_context("spawn")


def _launch_server(context: Any) -> None:
    """Start the fork server, and wait until it has imported all."""
    import psutil

    here = psutil.Process()
    resource_tracker.ensure_running()  # unblocks Ctrl-C when it starts
    before = here.children()
    with ctrl_c_held():
        forkserver.ensure_running()
    for server in set(here.children()) - set(before):
        # By itself it would take seconds to end, after whoever started it.
        Finalize(None, server.kill, exitpriority=-1)
    context.Process(target=os.getpid).start()


@contextlib.contextmanager
def ctrl_c_held() -> Iterator[None]:
    """Have Ctrl-C wait until the end, so that what is opened or started has an owner by then.

    A terminal sends it to all, and it is blocked too: processes started here never hear of it.
    """
    usual = signal.getsignal(signal.SIGINT)
    here = threading.current_thread() is threading.main_thread()
    came: list[Any] = []
    if here and callable(usual):  # whichever thread takes the signal, this one hears of it
        signal.signal(signal.SIGINT, lambda *call: came.append(call))
    blocks = hasattr(signal, "pthread_sigmask")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if blocks else ()
    try:
        yield
    finally:
        if blocks:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if here and callable(usual):
            signal.signal(signal.SIGINT, usual)
            if came:
                usual(*came[0])


@contextlib.contextmanager
def _script_left_out() -> Iterator[None]:
    """Have multiprocessing not run the user's script again, which may lack the usual guard."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class Place(NamedTuple):
    """Where a new process lives.

    Attributes:
        environment: Its variables.
        folder: Where it works.
        start_method: How it starts workers; None for the system's way.
    """

    environment: dict[str, str]
    folder: str
    start_method: str | None

    def settle_in(self, log: str) -> None:
        """Make this process independent of whoever started it, and have it print into a file."""
        _print_into(os.devnull, 0, 1, 2)  # also if the log's folder is gone already
        _print_into(log, 1, 2)
        if hasattr(os, "setsid"):
            os.setsid()
        if hasattr(signal, "pthread_sigmask"):
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # forgets what came while it was blocked
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        multiprocessing.set_start_method(self.start_method, force=True)
        _stir()


def _print_into(path: str, *descriptors: int) -> None:
    opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    for descriptor in descriptors:
        os.dup2(opened, descriptor)


_PADDING: list[Any] = []


def _stir() -> None:
    """Move what is allocated from now on by a random distance.

    Forks of one process would otherwise have their memory at the very same places, and how these
    fall into the caches would favour one of two configurations in every one of them alike.
    """
    _PADDING.extend(bytearray(int.from_bytes(os.urandom(2), "big") + 513) for _ in range(8))


def kill_tree(pid: int) -> None:
    """Kill a process, the group that it leads, and whatever else descends from it.

    Args:
        pid: Of the process, which may have ended but not have been waited for.
    """
    import psutil

    below = []
    with contextlib.suppress(psutil.Error):
        below = psutil.Process(pid).children(recursive=True)  # some lead sessions of their own
    for process in below:
        with contextlib.suppress(psutil.Error):
            process.kill()
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(psutil.Error):
        psutil.Process(pid).kill()  # it may not have begun a group yet
