"""One fork server for all workers of pytest-xdist.

A fork server imports torch and Lightning once. If each worker had its own, all would import them at
the same time, and the first launch in each would wait for minutes.
"""

import os
from multiprocessing import forkserver
from typing import Any

PRELOAD = ["tests", "lightning.pytorch", "torch.distributed.fsdp", "pytest", "tests.helpers.frozen"]
"""Modules that the fork server imports."""


def share_fork_server() -> dict[str, Any]:
    """Start the fork server of this process, and return its address for other processes."""
    forkserver.set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()
    shared = ("_forkserver_address", "_forkserver_authkey")  # the second since Python 3.14
    return {name: value for name, value in vars(forkserver._forkserver).items() if name in shared}


def use_fork_server(shared: dict[str, Any]) -> None:
    """Fork from another process's server. It ends with that process."""
    server: Any = forkserver._forkserver
    vars(server).update(shared, _forkserver_alive_fd=os.open(os.devnull, os.O_WRONLY))
    server.ensure_running = forkserver.ensure_running = lambda: None
