"""Runs a function in several processes of one gloo process group, within a time limit.

Processes have the environment of ``torchrun``, so Lightning starts none itself and any strategy
works. A fork server imports torch and Lightning once; after that a launch takes tenths of a second.
The store is created here, so no other process can take its port.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tests.helpers.ample_memory  # noqa: F401 - in each process that imports this module
from tests.helpers.fork_server import PRELOAD

GRACE = 60.0
"""Seconds for the other processes to report their error after the first failure."""

STACKS = signal.SIGUSR2
"""Makes a process write the stacks of its threads to its log."""


def launch(
    function: Callable[..., Any], *args: Any, processes: int = 2, timeout: float = 240.0
) -> list[Any]:
    """Return the result of ``function(*args)`` in each process, by rank.

    Args:
        function: A function at the top level of a test module. It creates a Trainer with
            ``devices=processes``, or calls :func:`torch.distributed.init_process_group`.
        args: Its arguments, pickled.
        processes: Number of processes.
        timeout: Seconds until all are killed.

    Raises:
        AssertionError: If a process raises, dies or runs out of time; with the stack and the last
            output of each rank. No process outlives the call.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            "LOCAL_WORLD_SIZE": str(processes),
            "NODE_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # all ranks are clients of this store
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        children = [
            context.Process(
                target=_run,
                args=(function, args, rank, Path(folder), environment, warnings.filters),
                daemon=True,
            )
            for rank in range(processes)
        ]
        try:
            for child in children:
                child.start()
            seconds = _wait(children, timeout)
            failed = [rank for rank, child in enumerate(children) if child.exitcode != 0]
            assert not failed, _describe(children, Path(folder), seconds)
            results = [_result(Path(folder), rank) for rank in range(processes)]
            return [torch.load(file, weights_only=False) for file in results]
        finally:
            for child in children:
                _end(child)


def _wait(children: Sequence[Any], timeout: float) -> float:
    """Wait until all have ended, or until ``GRACE`` after the first failure; return the seconds."""
    began = time.monotonic()
    deadline = began + timeout
    running = {child.sentinel: child for child in children}
    while running and (left := deadline - time.monotonic()) > 0:
        for sentinel in wait(list(running), timeout=left):
            if running.pop(sentinel).exitcode != 0:
                deadline = min(deadline, time.monotonic() + GRACE)
    return min(time.monotonic(), deadline) - began


def _end(child: Any) -> None:
    """Kill the process and its children."""
    if child.pid is None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)  # it is the leader of its process group
    child.kill()
    child.join()
    child.close()


def _describe(children: Sequence[Any], folder: Path, seconds: float) -> str:
    parts = []
    for rank, child in enumerate(children):
        code = child.exitcode
        state = f"ended with {code}"
        if code is None:
            state = f"had not ended after {seconds:.0f} s"
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, STACKS)
            time.sleep(1.0)  # for its log
        log = _log(folder, rank)
        output = log.read_text(errors="replace")[-6000:] if log.exists() else ""
        parts.append(f"rank {rank} {state}:\n{output}")
    return "\n".join(parts)


def _log(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.log"


def _result(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.pt"


def _run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    folder: Path,
    environment: dict[str, str],
    filters: list[Any],
) -> None:
    os.setsid()
    log = os.open(_log(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(file=log)
    faulthandler.register(STACKS, file=log)
    os.environ.update(environment, LOCAL_RANK=str(rank), RANK=str(rank))
    torch.set_num_threads(1)
    warnings.filters[:] = filters  # type: ignore[index]  # of pytest
    warnings.filterwarnings("default", append=True)  # invalidates Python's cache of filters
    try:
        result = function(*args)
        torch.save(result, _result(folder, rank))
        if dist.is_initialized():
            dist.barrier()  # gloo reports a lost peer as an error
            dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - reported by the caller
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # threads of gloo may wait for the other ranks
