"""What torch.compile does in this process: when it compiles, for how long, and how often."""

from __future__ import annotations

import contextlib
import time
from typing import Any


class CompileClock:
    """Counts compilations and their seconds, of forward and backward graphs, whoever wanted them.

    Whoever measures a step can take the difference of :attr:`seconds` off, so that the first step
    does not count as a slow one. It runs as long as someone has started it.

    Attributes:
        compilations: How often something was compiled while it ran; one call that compiles several
            graphs counts several times.
        seconds: Of wall time.
    """

    def __init__(self) -> None:
        self.compilations = 0
        self.seconds = 0.0
        self._users = 0
        self._since: float | None = None

    def start(self) -> None:
        """Begin to count; each start wants a stop."""
        self._users += 1
        if self._users == 1:
            handler = _handler()
            if handler is not None:
                handler.register_start_callback(self._begin)
                handler.register_end_callback(self._end)

    def stop(self) -> None:
        """Stop counting when all have stopped."""
        self._users -= 1
        if self._users == 0:
            self._since = None
            handler = _handler()
            if handler is not None:
                with contextlib.suppress(ValueError):  # `torch._dynamo.reset` has forgotten it
                    handler.remove_start_callback(self._begin)
                    handler.remove_end_callback(self._end)

    def _begin(self, *args: Any) -> None:  # torch 2.5 passes nothing
        self.compilations += 1
        self._since = time.perf_counter()

    def _end(self, *args: Any) -> None:
        if self._since is not None:
            self.seconds += time.perf_counter() - self._since
            self._since = None


CLOCK = CompileClock()
"""That of this process."""


def _handler() -> Any:
    """Return torch's registry of callbacks; ``None`` where it has none."""
    try:
        from torch._dynamo.callback import callback_handler
    except ImportError:
        return None
    return callback_handler
