"""Reading from a device without waiting for it: the host takes each value a few steps later."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Note = TypeVar("Note")


class DelayedReads(Generic[Note]):
    """A queue of small tensors whose values reach the host ``delay`` steps after they were pushed.

    A host runs ahead of its device by a few steps. Reading a value of the present step makes it
    stop until the device has caught up, and the device then idles until the host has queued new
    work. A copy that is started now and looked at ``delay`` steps later stops neither.

    What is due depends on how often :meth:`push` was called and on nothing else, so all ranks of a
    distributed run learn of the same step at the same step.

    Args:
        delay: Steps from push to read, at least 1.
    """

    def __init__(self, delay: int = 2) -> None:
        self.delay = delay
        self._queue: deque[tuple[Tensor, Any, Note]] = deque()

    def push(self, values: Tensor, note: Note) -> None:
        """Start copying ``values`` (1-dimensional) to the host; ``note`` comes back with them."""
        copied = None
        if values.is_cuda:
            # A copy from CUDA that does not block lands in pinned memory; the event says when. It
            # runs on a stream of the values' device, which need not be the current one.
            stream = torch.cuda.current_stream(values.device)
            values = values.to("cpu", non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(stream)
        self._queue.append((values, copied, note))

    def due(self) -> Iterator[tuple[list[float], Note]]:
        """Take out what was pushed more than ``delay`` pushes ago, oldest first."""
        while len(self._queue) > self.delay:
            yield self._take()

    def flush(self) -> Iterator[tuple[list[float], Note]]:
        """Take out everything, oldest first. This waits for the device."""
        while self._queue:
            yield self._take()

    def clear(self) -> None:
        """Forget everything unread."""
        self._queue.clear()

    def _take(self) -> tuple[list[float], Note]:
        values, copied, note = self._queue.popleft()
        if copied is not None:
            copied.synchronize()
        return values.tolist(), note
