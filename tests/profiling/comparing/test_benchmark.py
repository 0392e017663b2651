"""Functions timed in turns, with a simulated clock and once with the real one."""

import gc
import random

import pytest
import torch

import lightning_opt as lo
from lightning_opt.core.measure import timing
from tests.profiling.clock import Clock


class NoisyClock(Clock):
    """Functions advance it, with relative noise.

    Attributes:
        calls: The names of the called functions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.noise, self.random = 0.0, random.Random(0)
        self.calls: list[str] = []

    def takes(self, name: str, seconds: float):
        def function() -> None:
            self.calls.append(name)
            self.spend(seconds * (1 + self.noise * self.random.random()))

        return function


@pytest.fixture
def clock(monkeypatch) -> NoisyClock:
    clock = NoisyClock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


def test_ratios_and_seconds_follow_the_clock(clock):
    result = lo.benchmark(
        {"one": clock.takes("one", 0.01), "three": clock.takes("three", 0.03)}, rounds=5
    )
    assert result.ratios["three"].value == pytest.approx(3.0)
    assert [row["ratio"] for row in result.report.rows] == [1.0, 3.0]
    assert result.report.rows[1]["verdict"] == result.ratios["three"].verdict == "slower"
    assert result.report.rows[1]["median"] == "30 ms"
    assert result.seconds["three"] == pytest.approx([0.03] * 5)
    assert "| three |" in result._repr_markdown_()


def test_functions_take_turns_whose_order_rotates(clock):
    functions = {name: clock.takes(name, 1.0) for name in "abc"}
    lo.benchmark(functions, warmup=1, rounds=3)
    warm, found, rounds = clock.calls[:3], clock.calls[3:9], clock.calls[9:]
    assert "".join(warm) + "".join(found) == "abc" + "aabbcc"  # the number of calls is found first
    assert "".join(rounds) == "cab" + "abc" + "bca" + "cab"


def test_calls_per_timing_take_min_seconds(clock):
    functions = {"short": clock.takes("short", 1e-6), "long": clock.takes("long", 1.0)}
    result = lo.benchmark(functions, min_seconds=0.002, rounds=2)
    assert 2000 <= result.calls["short"] <= 4000
    assert result.calls["long"] == 1
    assert result.seconds["short"] == pytest.approx([1e-6] * 2, rel=1e-3)


def test_equal_functions_show_no_difference(clock):
    clock.noise = 0.05
    functions = {"a": clock.takes("a", 1.0), "b": clock.takes("b", 1.0)}
    result = lo.benchmark(functions)
    assert result.ratios["b"].verdict == "no difference"
    assert "cannot be detected" in str(result)
    clock.noise = 1.0
    assert str(lo.benchmark(functions, rounds=2)).endswith("too few turns. Measure longer.")


def test_one_function_has_no_ratio(clock):
    result = lo.benchmark(clock.takes("f", 0.5), rounds=3)
    (row,) = result.report.rows
    assert row["function"] == "function"
    assert "ratio" not in row
    assert result.ratios == {}


def test_real_difference_is_found_and_garbage_collection_is_restored():
    x = torch.randn(48, 48)

    def often() -> None:
        for _ in range(100):  # a factor of 4 was once lost in the noise of a busy machine
            _ = x @ x

    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            result = lo.benchmark(
                {"once": lambda: x @ x, "often": often}, min_seconds=0.001, rounds=10
            )
            with pytest.raises(ZeroDivisionError):
                lo.benchmark(lambda: 1 / 0)
            assert gc.isenabled() is enabled
        finally:
            gc.enable()
        assert result.ratios["often"].value > 1.5


@pytest.mark.parametrize(
    ("functions", "settings", "error", "message"),
    [
        ({}, {}, TypeError, "by name"),
        ({"a": 3}, {}, TypeError, "by name"),
        (print, {"rounds": 1}, ValueError, "rounds"),
        (print, {"min_seconds": 0}, ValueError, "min_seconds"),
    ],
)
def test_invalid_arguments_raise(functions, settings, error, message):
    with pytest.raises(error, match=message):
        lo.benchmark(functions, **settings)
