"""Functions of scalars that are floats or 0-dimensional tensors."""

import math

import pytest
import torch
from torch import Tensor

from lightning_opt.core.numerics import scalars
from tests.helpers.syncs import SyncCounter


def tensor(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


@pytest.mark.parametrize("x", [0.0, 1.0, -700.0, 709.0, 710.0, math.inf, -math.inf, math.nan])
def test_exp_overflows_as_on_a_device(x: float) -> None:
    expected = tensor(x).exp().item()
    assert scalars.exp(x) == pytest.approx(expected, rel=1e-14, abs=0.0, nan_ok=True)


def test_stacked_scalars_are_float64() -> None:
    stacked = scalars.stack_scalars([0.1, torch.tensor(1, dtype=torch.int32), tensor(0.2)])
    assert stacked.dtype is torch.float64
    assert stacked.tolist() == [0.1, 1.0, 0.2]
    assert scalars.stack_scalars([0.1, 0.2]).tolist() == [0.1, 0.2]
    assert scalars.read_scalars([0.1, tensor(0.2)]) == [0.1, 0.2]
    assert scalars.constant([[0.1], [0.2]], torch.device("cpu")).tolist() == [[0.1], [0.2]]


def test_wide_dtype_is_float64_except_on_mps() -> None:
    assert scalars.wide_dtype(torch.device("cpu")) is torch.float64
    assert scalars.wide_dtype(torch.device("cuda")) is torch.float64
    assert scalars.wide_dtype(torch.device("mps")) is torch.float32


def test_to_plain_reads_all_numbers_of_a_dict_at_once() -> None:
    numbers = {str(number): torch.tensor(number / 3) for number in range(9)}
    state = {**numbers, "flag": torch.tensor(True), "count": torch.tensor(2**60 + 1)}
    expected = {key: value.item() for key, value in state.items()}
    assert repr(scalars.to_plain(state)) == repr(expected)
    with SyncCounter() as syncs:
        scalars.to_plain(numbers)
    assert syncs.total == 1


def test_to_plain_copies_tensors_and_omits_device_caches() -> None:
    state = {"a": tensor(0.5), "b": [torch.tensor(3), "x", None], "c": {"d": (torch.ones(2), 1)}}
    state["e"] = scalars.DeviceCache(torch.device("cpu"), table=[1.0])
    plain = scalars.to_plain(state)
    copied = plain["c"]["d"].pop(0)
    assert plain == {"a": 0.5, "b": [3, "x", None], "c": {"d": [1]}}
    assert isinstance(plain["b"][0], int)
    copied.zero_()
    assert torch.equal(state["c"]["d"][0], torch.ones(2)), "a copy"  # type: ignore[index]
