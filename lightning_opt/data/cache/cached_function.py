"""Results of a function that are computed once and kept within a bound."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lightning_opt.data.cache.caching import Caching, Storage
from lightning_opt.data.cache.fingerprint import fingerprint
from lightning_opt.data.cache.store import Policy
from lightning_opt.data.encoding import decode, digest, encode


class cached(Caching):  # noqa: N801 - called as a function is
    """Wrap a function in a limited cache of its results, such as distances of pairs.

    Arguments are compared by value, of tensors and arrays too, and by type: ``f(1)`` and ``f(1.0)``
    are two results. Results are new objects at each call. An error is not cached.

    Args:
        fn: A function of its arguments and of nothing else. To send it to spawned workers, give the
            cached one another name than the function's.
        max_bytes: The bound on the results that are cached.
        symmetric: ``fn(a, b)`` equals ``fn(b, a)``: compute one of them.
        policy: As of :class:`CachedDataset`.
        storage: As of :class:`CachedDataset`.
        key: As of :class:`CachedDataset`; the fingerprint is that of the function's code,
            with what this refers to.
        folder: As of :class:`CachedDataset`.

    Raises:
        TypeError: For what is not callable; in a call, for arguments or results that cannot be
            pickled, and for a symmetric function without exactly two positional arguments.
        ValueError: For arguments out of range.

    Example:
        >>> import lightning_opt as lo
        >>> def slow_distance(a, b):
        ...     return abs(a - b)
        >>> distance = lo.cached(slow_distance, max_bytes=2**20, symmetric=True)
        >>> distance(2, 5), distance(5, 2)
        (3, 3)
        >>> distance.statistics()["hits"]
        1
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        max_bytes: int,
        symmetric: bool = False,
        policy: Policy = "lru",
        storage: Storage = "memory",
        key: str | None = None,
        folder: str | None = None,
    ) -> None:
        if not callable(fn):
            raise TypeError(f"fn must be callable, got {fn!r}.")
        self._fn, self._symmetric = fn, symmetric
        version = functools.partial(fingerprint, fn) if key is None else lambda: key
        self._open(max_bytes, policy, storage, folder, version)
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result for these arguments, which are compared by value."""
        if self._symmetric and len(args) != 2:
            raise TypeError(
                f"A symmetric function takes two positional arguments, got {len(args)}."
            )
        parts = [digest(arg) for arg in args]
        if self._symmetric:
            parts.sort()
        named = sorted((name, digest(value)) for name, value in kwargs.items())
        key = digest(parts, named).hex()
        data = self._look_up(key)
        if data is None:
            data = encode(self._fn(*args, **kwargs))
            self._keep(key, data)
        return decode(data)

    def __repr__(self) -> str:
        return f"cached({getattr(self._fn, '__qualname__', self._fn)})"
