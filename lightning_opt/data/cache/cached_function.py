"""A function whose results are computed once and cached within a byte limit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lightning_opt.data.cache.caching import Caching, Storage
from lightning_opt.data.encoding import MISSING, Policy, decode, digest, encode


class cached(Caching):  # noqa: N801 - it is called like a function
    """Cache the results of a function within a byte limit, such as distances of pairs.

    Arguments are compared by type and value, tensors and arrays too: ``f(1)`` and ``f(1.0)`` are
    two results. Each call returns a new object. Errors are not cached.

    Args:
        fn: A function that depends only on its arguments. To send the cached function to spawned
            workers, assign it to a different name.
        max_bytes: The limit on all cached results.
        symmetric: Whether ``fn(a, b)`` equals ``fn(b, a)``, so that only one is computed.
        policy: See :class:`CachedDataset`.
        storage: See :class:`CachedDataset`.
        key: See :class:`CachedDataset`, with the function's name instead of the class's.
        folder: See :class:`CachedDataset`.

    Raises:
        TypeError: If ``fn`` is not callable; in a call, for arguments or results that cannot be
            pickled, and for a symmetric function without exactly two positional arguments.
        ValueError: For the same reasons as :class:`CachedDataset`.

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
        name = getattr(fn, "__qualname__", type(fn).__qualname__)
        self._open(max_bytes, policy, storage, key, folder, name)
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the cached or computed result for these arguments."""
        if self._symmetric and len(args) != 2:
            raise TypeError(
                f"A symmetric function takes two positional arguments, got {len(args)}."
            )
        parts = [digest(arg) for arg in args]
        if self._symmetric:
            parts.sort()
        named = sorted((name, digest(value)) for name, value in kwargs.items())
        name = digest(parts, named).hex()
        found = self._look_up(name)
        if found is MISSING:
            data = encode(self._fn(*args, **kwargs))
            self._put({name: data})
            found = decode(data)
        return found

    def __repr__(self) -> str:
        return f"cached({getattr(self._fn, '__qualname__', self._fn)})"
