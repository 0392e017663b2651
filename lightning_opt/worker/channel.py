"""Messages between a process and the training that it has started: pickles, each after its length.

Both ends run the same installation and belong to one user, so pickle is safe between them.
"""

from __future__ import annotations

import pickle
from typing import IO, Any

_LENGTH = 8
"""Bytes of the number in front of a message."""


def send(stream: IO[bytes], message: Any) -> None:
    """Write a message, and see to it that it leaves."""
    data = pickle.dumps(message)
    stream.write(len(data).to_bytes(_LENGTH, "big") + data)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """Wait for a message and return it.

    Raises:
        EOFError: If the other end is closed, or closes in the middle of a message.
    """
    return pickle.loads(_exactly(stream, int.from_bytes(_exactly(stream, _LENGTH), "big")))


def _exactly(stream: IO[bytes], size: int) -> bytes:
    parts = []
    while size > 0:
        part = stream.read(size)
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
