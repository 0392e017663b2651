"""Running statistics equal numpy's, for floats and for tensors."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_opt.core.numerics.statistics import DeviceBands, LogBand, Window

search = settings(max_examples=50)
values = st.lists(
    st.floats(-1e6, 1e6, allow_subnormal=False)
    | st.floats(1e-3, 1e6)
    | st.sampled_from([math.nan, math.inf, -math.inf, 0.0]),
    max_size=150,
)


def feed(statistic: Any, numbers: list[float], kind: str) -> dict[str, Any]:
    """Add the numbers; a state "moved" is resumed on the host in the middle."""
    state: dict[str, Any] = statistic.init()
    for index, number in enumerate(numbers):
        on_device = kind == "tensor" or (kind == "moved" and index < len(numbers) // 2)
        statistic.update(state, torch.tensor(number, dtype=torch.float64) if on_device else number)
    return state


def close(ours: Any, expected: Any, scale: float = 1.0) -> bool:
    """Compare to 1e-9 of the numbers that went in; a deviation near 0 is a difference of them."""
    return bool(float(ours) == pytest.approx(float(expected), rel=1e-9, abs=1e-9 * scale))


def valid(numbers: list[float]) -> np.ndarray:
    return np.array([number for number in numbers if 0.0 < number < math.inf])


@pytest.mark.parametrize("kind", ["float", "tensor", "moved"])
@pytest.mark.parametrize("size", [2, 64, None])
@search
@given(numbers=values, q=st.floats(0.0, 1.0))
def test_window_statistics_equal_numpy(
    size: int | None, kind: str, numbers: list[float], q: float
) -> None:
    window = Window(size)
    state = feed(window, numbers, kind)
    held = valid(numbers)[-size:] if size else valid(numbers)
    mean, upper = window.mean_plus_std(state, 0.0), window.mean_plus_std(state, 2.0)
    quantile = window.quantile(state, q)
    assert int(state["count"]) == len(valid(numbers))
    if len(held) == 0:
        assert (float(mean), float(upper), float(quantile)) == (0.0, 0.0, math.inf)
        return
    scale = float(np.abs(held).max())
    assert close(mean, held.mean(), scale)
    assert close(upper, held.mean() + 2.0 * held.std(), scale)
    assert close(quantile, np.quantile(held, q), scale)


@pytest.mark.parametrize("kind", ["float", "tensor"])
@pytest.mark.parametrize("q", [0.0, 0.05, 0.5, 0.999, 1.0])
def test_quantile_of_a_long_history_is_exact(kind: str, q: float) -> None:
    """In float32 the position of a quantile would be off by whole values."""
    rng = np.random.default_rng(0)
    held = rng.lognormal(size=3_001)
    state: dict[str, Any] = {"count": 3_001, "pushed": 3_001, "values": sorted(held.tolist())}
    window = Window(None)
    if kind == "tensor":
        window.place(state, torch.zeros((), dtype=torch.float64))
    assert float(window.quantile(state, q)) == pytest.approx(np.quantile(held, q), rel=1e-14)


def test_deviation_of_huge_values_does_not_overflow() -> None:
    state = feed(Window(4), [1e200, 3e200], "float")
    assert Window(4).mean_plus_std(state, 1.0) == pytest.approx(3e200)


def test_each_band_of_a_device_continues_its_own_series() -> None:
    band, rng = LogBand(), np.random.default_rng(0)
    series = rng.lognormal((0.0, 3.0), size=(40, 2))
    on_host = [band.init(), band.init()]
    for row in series[:20]:
        limits = [band.limit(float(x), state) for x, state in zip(row, on_host, strict=True)]
    bands = DeviceBands(band, [dict(state) for state in on_host], torch.device("cpu"))
    for row in series[20:]:
        found = bands.thresholds()
        limits = [band.limit(float(x), state) for x, state in zip(row, on_host, strict=True)]
        assert found.tolist() == pytest.approx(limits, rel=1e-4)
        bands.advance(torch.tensor(row).log())
