"""New processes within tenths of a second, forked from one that has imported torch and Lightning.

To import them takes seconds of CPU in each new interpreter, which is more than many measurements.
So a server is started once, does nothing but import, and forks what is asked for: no thread, no
CUDA context and no module of the user's is in it. It ends with this process, or when nobody has
asked it for anything in a while.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

IDLE = 120.0
"""Seconds after which a server that has no process and no request ends."""

READ_EARLY = (
    "CUDA",
    "GOMP",
    "KMP",
    "LD_",
    "MALLOC",
    "MKL",
    "NUM",
    "NVIDIA",
    "OMP",
    "OPENBLAS",
    "PYTHON",
    "PYTORCH",
    "TORCH",
)
"""How variables begin that Python, libraries or torch may read when they start, and not again."""

_LENGTH = 8


class Forked:
    """A process that the server has forked, with the methods of :class:`subprocess.Popen` in use.

    Args:
        pid: Its number; it leads a group of its own.
        stdin: What it reads from.
        stdout: Where it writes to.
        status: A pipe by which the server says how it has ended.
    """

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes], status: int) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self._status = status
        self._close = weakref.finalize(self, os.close, status)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, or None as long as it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return the exit status, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: If it has not ended by then.
        """
        if self.returncode is None:
            poll = select.poll()  # `select` takes no numbers above 1023
            poll.register(self._status, select.POLLIN)
            if not poll.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("fork", timeout or 0.0)
            told = os.read(self._status, 4)
            # Without a word the server has been killed, and nobody knows.
            self.returncode = int.from_bytes(told, "big", signed=True) if told else -signal.SIGKILL
            self._close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        if self.poll() is None:
            os.kill(self.pid, number)


class ForkServer:
    """Asks a server of its own for processes.

    Args:
        module: What the server runs as ``python -m MODULE --serve FD``; it calls :func:`serve`.
        environment: Of the server. What it forks may have another, but for what is read early.
    """

    def __init__(self, module: str, environment: dict[str, str]) -> None:
        self._early = _read_early(environment)
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, "--serve", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        weakref.finalize(self, _stop, self._socket, self._process)

    def serves(self, environment: dict[str, str]) -> bool:
        """Whether it is there, and its processes can be as if started in this environment."""
        return self._process.poll() is None and self._early == _read_early(environment)

    def fork(self, argument: str, environment: dict[str, str], log: IO[bytes]) -> Forked:
        """Return a new process that runs what the server was told to, with one argument.

        Raises:
            OSError: If the server is gone.
        """
        their_input, stdin = os.pipe()
        stdout, their_output = os.pipe()
        status, their_status = os.pipe()
        theirs = [their_input, their_output, log.fileno(), their_status]
        try:
            with self._lock:
                request = pickle.dumps((argument, environment, str(Path.cwd())))
                # The descriptors come with the length, so that a request may be long.
                socket.send_fds(self._socket, [len(request).to_bytes(_LENGTH, "big")], theirs)
                self._socket.sendall(request)
                reply = self._socket.recv(_LENGTH)
            if not reply:
                raise OSError("The process that forks others has ended.")
        except BaseException:
            for own in (stdin, stdout, status):
                os.close(own)
            raise
        finally:
            for descriptor in (their_input, their_output, their_status):
                os.close(descriptor)
        pid = int.from_bytes(reply, "big")
        return Forked(pid, os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb"), status)


def _read_early(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_EARLY)}


def _stop(connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """Close the connection: the server ends as soon as it has no process to watch any more."""
    connection.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(2.0)
        return
    process.kill()
    process.wait()


def serve(descriptor: int, run: Callable[[str], int]) -> int:
    """Fork a process for each request, until nobody asks any more.

    Args:
        descriptor: Of the socket by which requests come.
        run: What a process does, given its argument; returns its exit status.
    """
    connection = socket.socket(fileno=descriptor)
    wake, waker = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    gc.collect()
    running: dict[int, int] = {}  # by process, where to tell its end
    asking = True
    while asking or running:
        sources: list[Any] = [connection, wake] if asking else [wake]
        ready = select.select(sources, [], [], None if running else IDLE)[0]
        if not ready:
            break
        if wake in ready:
            _reap(wake, running)
        if connection in ready:
            length, descriptors, _, _ = socket.recv_fds(connection, _LENGTH, 4)
            if not length:
                asking = False
                continue
            request = connection.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for other in (wake, waker, *running.values()):
                    os.close(other)
                connection.close()
                _leave(_become(request, descriptors, run))
            running[pid] = descriptors.pop()
            for other in descriptors:
                os.close(other)
            connection.sendall(pid.to_bytes(_LENGTH, "big"))
    return 0


def _reap(wake: int, running: dict[int, int]) -> None:
    """Tell how those have ended that have."""
    with contextlib.suppress(BlockingIOError):
        while os.read(wake, 512):
            pass
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            descriptor = running.pop(pid, None)
            if descriptor is None:
                continue
            with contextlib.suppress(OSError):  # nobody may listen any more
                code = os.waitstatus_to_exitcode(status)
                os.write(descriptor, code.to_bytes(4, "big", signed=True))
            os.close(descriptor)


def _become(request: bytes, descriptors: Sequence[int], run: Callable[[str], int]) -> int:
    argument, environment, folder = pickle.loads(request)
    os.setsid()
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    _stir()
    return run(argument)


def _leave(status: int) -> NoReturn:
    """End the process, but do not spend a tenth of a second on taking every module apart."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


_PADDING: list[Any] = []


def _stir() -> None:
    """Move what is allocated from now on by a random distance.

    Forks of one process would otherwise have their memory at the very same places, and how these
    fall into the caches would favour one of two configurations in every one of them alike.
    """
    sizes = (int.from_bytes(os.urandom(2), "big") + 513 for _ in range(8))
    _PADDING.extend(bytearray(size) for size in sizes)
