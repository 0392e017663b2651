"""Reads device values on the host: on a schedule, and some steps late so that nothing waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from lightning_opt.core.arguments import check_at_least

Note = TypeVar("Note")


class Schedule:
    """A report is due at every ``every_n_steps``-th step, counted from 1."""

    def __init__(self, every_n_steps: int) -> None:
        self.every_n_steps = check_at_least("every_n_steps", every_n_steps, 1)

    def is_due(self, step: int) -> bool:
        return step % self.every_n_steps == 0


class DelayedReads(Generic[Note]):
    """A queue of small tensors that are read on the host ``delay`` steps after they were pushed.

    Reading a value of the current step would make the host wait for the GPU, and the GPU would then
    idle until new work is queued. Reading a copy some steps later avoids both.

    The number of calls of :meth:`push` alone determines which values are due, so all ranks read the
    same step at the same time.
    """

    def __init__(self, delay: int = 2) -> None:
        self.delay = delay
        self._queue: deque[tuple[Tensor, Any, Note]] = deque()

    def push(self, values: Tensor, note: Note) -> None:
        """Start copying ``values`` (1-dimensional) to the host; ``note`` is returned with them."""
        copied = None
        if values.is_cuda:
            # The copy lands in pinned memory, and the event marks its end. It runs on a stream of
            # the values' device, which is not necessarily the current device.
            stream = torch.cuda.current_stream(values.device)
            values = values.to("cpu", non_blocking=True)
            copied = stream.record_event()
        self._queue.append((values, copied, note))

    def due(self) -> Iterator[tuple[list[float], Note]]:
        """Remove and yield the values pushed more than ``delay`` pushes ago, oldest first."""
        while len(self._queue) > self.delay:
            yield _read(*self._queue.popleft())

    def flush(self) -> Iterator[tuple[list[float], Note]]:
        """Remove and yield all values, oldest first. This waits for the device."""
        while self._queue:
            yield _read(*self._queue.popleft())

    def peek(self) -> Iterator[tuple[list[float], Note]]:
        """Yield all values, oldest first, and keep them. This waits for the device."""
        return (_read(*entry) for entry in tuple(self._queue))

    def clear(self) -> None:
        self._queue.clear()


def _read(values: Tensor, copied: Any, note: Note) -> tuple[list[float], Note]:
    if copied is not None:
        copied.synchronize()
    return values.tolist(), note
