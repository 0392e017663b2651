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
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any, NamedTuple

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
    with _lock, _environment(environment), _script_left_out():
        context = _context(environment, run.__module__)
        ours, theirs = context.Pipe()
        process = context.Process(target=run, args=(theirs, place, *arguments))
        process.start()
    theirs.close()
    return process, ours


def _context(environment: dict[str, str], module: str) -> Any:
    """Return the context of the fork server, if what it forks can be as if started anew."""
    if sys.platform == "linux" and not torch.cuda.is_available():
        early = {n: value for n, value in environment.items() if n.startswith(READ_EARLY)}
        if not _environment_of_server:
            _environment_of_server.update(early)
        if _environment_of_server == early:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([module])
            return context
    return multiprocessing.get_context("spawn")


@contextlib.contextmanager
def _environment(environment: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    _replace_environment(environment)
    try:
        yield
    finally:
        _replace_environment(before)


def _replace_environment(environment: dict[str, str]) -> None:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


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
        if hasattr(os, "setsid"):
            os.setsid()
        _replace_environment(self.environment)
        os.chdir(self.folder)
        multiprocessing.set_start_method(self.start_method, force=True)
        nothing = os.open(os.devnull, os.O_RDONLY)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number, descriptor in enumerate((nothing, output, output)):
            os.dup2(descriptor, number)
        _stir()


_PADDING: list[Any] = []


def _stir() -> None:
    """Move what is allocated from now on by a random distance.

    Forks of one process would otherwise have their memory at the very same places, and how these
    fall into the caches would favour one of two configurations in every one of them alike.
    """
    sizes = (int.from_bytes(os.urandom(2), "big") + 513 for _ in range(8))
    _PADDING.extend(bytearray(size) for size in sizes)


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
