"""Accepted and rejected values of each check."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from lightning_opt.core.arguments import (
    check_at_least,
    check_between,
    check_fraction,
    check_positive,
)

NO_NUMBERS = [math.nan, math.inf, True, False, "1", None, [1]]
CHECKS: dict[str, tuple[Callable[[Any], Any], list[Any], list[Any]]] = {
    "positive": (lambda x: check_positive("x", x), [1, 0.5, 1e300], [0, -1.0]),
    "fraction": (lambda x: check_fraction("x", x), [0, 0.0, 0.999], [1, 1.0, -0.1]),
    "between": (lambda x: check_between("x", x, -1, 2), [-1, 2.0, 0], [-1.1, 3]),
    "at_least": (lambda x: check_at_least("x", x, 2), [2, 10**9], [1, -2, 2.0, 2.5]),
}


@pytest.mark.parametrize(("check", "right", "wrong"), CHECKS.values(), ids=list(CHECKS))
def test_check_accepts_and_rejects(
    check: Callable[[Any], Any], right: list[Any], wrong: list[Any]
) -> None:
    for value in right:
        assert check(value) is value
    for value in [*wrong, *NO_NUMBERS]:
        with pytest.raises(ValueError, match=r"^x must be a .*, got .*\.$") as raised:
            check(value)
        assert repr(value) in str(raised.value)
