"""Ending a process with all that it has started."""

from __future__ import annotations

import contextlib
import os
import signal


def kill_tree(pid: int) -> None:
    """Kill a process that leads a group of its own, the group, and whatever else descends from it.

    Args:
        pid: Of the leader, which may have ended but not have been waited for.
    """
    import psutil

    others = []
    with contextlib.suppress(psutil.Error):
        others = psutil.Process(pid).children(recursive=True)  # some lead sessions of their own
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    for other in others:
        with contextlib.suppress(psutil.Error):
            other.kill()
    if not hasattr(os, "killpg"):
        with contextlib.suppress(psutil.Error):
            psutil.Process(pid).kill()
