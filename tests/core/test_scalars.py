"""Every function of scalars gives the same number for floats and for 0-dimensional tensors."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_opt.core import scalars
from tests.helpers.syncs import SyncCounter

search = settings(max_examples=200, deadline=None, derandomize=True, database=None)
# Subnormal numbers aside: a device may flush them to zero.
numbers = st.floats(allow_subnormal=False) | st.sampled_from([0.0, 1.0, math.inf, math.nan])


def tensor(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def same(host: Any, device: Any) -> bool:
    assert isinstance(device, Tensor), "one tensor among the arguments makes the result a tensor"
    assert device.dtype in (torch.float64, torch.bool)
    return bool(host == pytest.approx(device.item(), rel=1e-14, abs=0.0, nan_ok=True))


UNARY: dict[str, Callable[[Any], Any]] = {
    "isfinite": scalars.isfinite,
    "log": scalars.log,
    "exp": scalars.exp,
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "minimum": scalars.minimum,
    "maximum": scalars.maximum,
    "logical_and": lambda a, b: scalars.logical_and(a > 0, b > 0),
    "where": lambda a, b: scalars.where(a > b, a, b),
}


@pytest.mark.parametrize("function", UNARY.values(), ids=list(UNARY))
@search
@given(x=numbers)
def test_functions_of_one(function: Callable[[Any], Any], x: float) -> None:
    assert same(function(x), function(tensor(x)))


@search
@given(x=numbers.filter(lambda x: not x < 0))
def test_square_root(x: float) -> None:
    assert same(scalars.sqrt(x), scalars.sqrt(tensor(x)))


@pytest.mark.parametrize("function", BINARY.values(), ids=list(BINARY))
@search
@given(a=numbers, b=numbers)
def test_functions_of_two(function: Callable[[Any, Any], Any], a: float, b: float) -> None:
    host = function(a, b)
    assert same(host, function(tensor(a), tensor(b)))
    assert same(host, function(tensor(a), b))
    assert same(host, function(a, tensor(b)))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (scalars.log(0.0), -math.inf),
        (scalars.log(-1.0), math.nan),
        (scalars.exp(1e9), math.inf),
        (scalars.minimum(math.nan, 2.0), 2.0),
        (scalars.maximum(math.nan, 2.0), 2.0),
        (scalars.minimum(1.0, 2.0), 1.0),
        (scalars.maximum(1.0, 2.0), 2.0),
    ],
)
def test_on_the_host(value: float, expected: float) -> None:
    assert value == pytest.approx(expected, nan_ok=True)


def test_a_choice_between_numbers_keeps_their_digits() -> None:
    chosen = scalars.where(torch.tensor(True), 0.1, 0.2)
    assert isinstance(chosen, Tensor)
    assert chosen.item() == 0.1, "and not 0.1 of float32"


def test_as_kind_of() -> None:
    assert scalars.as_kind_of(1.0, 0.1) == 0.1
    assert isinstance(scalars.as_kind_of(1.0, 0.1), float)
    assert same(0.1, scalars.as_kind_of(tensor(1.0), 0.1))
    already = tensor(0.1)
    assert scalars.as_kind_of(tensor(1.0), already) is already


def test_wide_dtype() -> None:
    assert scalars.wide_dtype(torch.device("cpu")) is torch.float64
    assert scalars.wide_dtype(torch.device("cuda")) is torch.float64
    assert scalars.wide_dtype(torch.device("mps")) is torch.float32


def test_nothing_is_read() -> None:
    x, y = tensor(2.0), tensor(3.0)
    with SyncCounter() as syncs:
        for one in UNARY.values():
            one(x)
        for two in BINARY.values():
            two(x, y), two(x, 1.0), two(1.0, y)
        scalars.sqrt(x)
        scalars.where(x > y, 1, 0)
        scalars.as_kind_of(x, 0.5)
    assert not syncs.where


def test_to_plain() -> None:
    state = {"a": tensor(0.5), "b": [torch.tensor(3), "x", None], "c": {"d": (torch.ones(2), 1)}}
    plain = scalars.to_plain(state)
    copied = plain["c"]["d"].pop(0)
    assert plain == {"a": 0.5, "b": [3, "x", None], "c": {"d": [1]}}
    assert isinstance(plain["b"][0], int)
    copied.zero_()
    assert torch.equal(state["c"]["d"][0], torch.ones(2)), "a copy"  # type: ignore[index]
