"""Choosing by measured numbers, against a simulation and what must hold for any numbers."""

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from lightning_opt.strategies.compression.choosing.cost_model import (
    LATE_MARGIN,
    MARGIN,
    Line,
    Option,
    exchange_seconds,
    fit_line,
    gentlest_that_pays,
)

relaxed = settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.filter_too_much]
)

MB = 10**6
RATES = [1e-11 * 10 ** (step / 4) for step in range(25)]
"""Seconds a byte: from 100 GB/s to 100 kB/s."""


def option(name, share, before=0.0, after=0.0, sizes=(25 * MB, 25 * MB), rounds=1):
    """One that sends a share of the bytes, and works that many seconds a byte on them."""
    return Option(
        name,
        [round(share * size) for size in sizes],
        [before * size for size in sizes],
        [after * size for size in sizes],
        rounds,
    )


def choose(ready, options, link, compute):
    """The seconds of a step with each option, and the one that is taken."""
    seconds = [compute + exchange_seconds(ready, option, link) for option in options]
    return seconds, gentlest_that_pays(seconds, [option.margin for option in options])


@st.composite
def situations(draw):
    """Buckets and the usual options, of any cost."""
    sizes = draw(st.lists(st.integers(1000, 30 * MB), min_size=1, max_size=6))
    gaps = draw(st.lists(st.floats(0, 0.2), min_size=len(sizes), max_size=len(sizes)))
    ready = list(itertools.accumulate([0.0, *gaps[1:]]))
    cost = st.floats(0, 2e-8)
    options = [
        option("dense", 1.0, sizes=sizes),
        option("bf16", 0.5, draw(cost), draw(cost), sizes),
        option("int8", 0.25, draw(cost), draw(cost), sizes, draw(st.sampled_from([1, 2]))),
        option("topk", draw(st.floats(0.001, 0.2)), draw(cost), draw(cost), sizes),
    ]
    return ready, options, draw(st.floats(0, 2.0)), draw(st.floats(0, 0.002))


# --- a line through measurements ------------------------------------------------------------------


@relaxed
@given(fixed=st.floats(0, 0.01), slope=st.floats(1e-11, 1e-6))
def test_a_line_is_found_again(fixed, slope):
    line = fit_line([(n, fixed + slope * n) for n in (4096, 32768, 262144, 2097152)])
    assert line.fixed == pytest.approx(fixed, rel=1e-3, abs=1e-6)
    assert line.slope == pytest.approx(slope, rel=1e-3)


@pytest.mark.parametrize("rate", [1e-7, 1e-8, 1e-9])
def test_a_noisy_network_is_found_within_a_tenth(rate):
    noise = random.Random(0)
    for _ in range(20):
        samples = [
            (n, (3e-4 + rate * n) * noise.uniform(1.0, 1.15))
            for n in (4096 * 8**i for i in range(5))
        ]
        line = fit_line(samples)
        assert line.slope == pytest.approx(1.07 * rate, rel=0.1)
        assert line.fixed < 1e-3


def test_a_burst_let_through_at_once_hides_little_of_the_rate():
    rate, burst = 8e-8, 65536  # 100 Mbit/s

    def seconds(n):
        return 3e-4 + rate * max(n - burst, 0)

    line = fit_line([(n, seconds(n)) for n in (4096, 32768, 262144, 2097152)])
    assert line.slope == pytest.approx(rate, rel=0.15)


def test_neither_part_of_a_line_is_below_zero():
    assert fit_line([(100, 2.0), (200, 1.0)]).slope == 0.0
    assert 1.0 < fit_line([(100, 2.0), (200, 1.0)]).fixed < 2.0
    assert fit_line([(100, 1.0), (200, 3.0)]).fixed == 0.0
    assert 0.01 < fit_line([(100, 1.0), (200, 3.0)]).slope < 0.015
    assert fit_line([(100, 2.0)])(1000) == 2.0


# --- what an exchange adds to a step --------------------------------------------------------------


def test_what_travels_during_the_backward_pass_costs_nothing():
    dense = option("dense", 1.0)
    link = Line(0.0, 1e-9)  # 25 ms a bucket
    assert exchange_seconds([0.0, 0.1], dense, link) == pytest.approx(0.025)
    assert exchange_seconds([0.0, 0.01], dense, link) == pytest.approx(0.040)
    assert exchange_seconds([0.0, 0.0], dense, link) == pytest.approx(0.050)


def test_the_processors_work_is_never_hidden():
    link = Line(0.001, 0.0)
    busy = option("busy", 0.1, before=1e-9, after=2e-9)
    # 25 ms and 50 ms of work a bucket; the second travels for 1 ms in between.
    assert exchange_seconds([0.0, 1.0], busy, link) == pytest.approx(0.150)
    assert exchange_seconds([0.0, 0.0], busy, link) == pytest.approx(0.150)


def test_two_stages_pay_for_two_collectives():
    link = Line(0.001, 0.0)
    assert exchange_seconds([0.0], option("a", 1, sizes=[MB], rounds=2), link) == 0.002


@relaxed
@given(situations(), st.sampled_from(RATES))
def test_an_exchange_is_between_its_bounds(situation, rate):
    ready, options, _, latency = situation
    link = Line(latency, rate)
    for own in options:
        seconds = exchange_seconds(ready, own, link)
        work = sum(own.before) + sum(own.after)
        wires = [own.rounds * latency + rate * sent for sent in own.sent]
        assert work + 1e-12 >= 0
        assert seconds >= max(work, wires[-1]) - 1e-9
        assert seconds <= work + sum(wires) + 1e-9


# --- the choice -----------------------------------------------------------------------------------


USUAL = [
    option("dense", 1.0),
    option("bf16", 0.5, 1e-10, 1e-10),
    option("int8", 0.25, 3e-10, 3e-10),
    option("topk", 1 / 160, 1e-9, 2e-10),
]


@pytest.mark.parametrize(
    ("gbits", "compute", "name"),
    [
        (100, 0.1, "dense"),
        (25, 1.0, "dense"),  # little to win of a long step
        (8, 0.02, "bf16"),
        (3, 0.02, "int8"),
        (0.1, 0.1, "topk"),
        (0.1, 1000.0, "dense"),
    ],
)
def test_the_network_and_the_step_decide(gbits, compute, name):
    link = Line(1e-4, 8e-9 / gbits)
    seconds, best = choose([0.0, 0.0], USUAL, link, compute)
    assert USUAL[best].name == name
    assert seconds[0] == pytest.approx(compute + 50 * MB * 8e-9 / gbits + 2e-4)


@relaxed
@given(situations(), st.sampled_from(RATES))
def test_what_is_chosen_is_never_slower_than_dense(situation, rate):
    ready, options, compute, latency = situation
    seconds, best = choose(ready, options, Line(latency, rate), compute)
    if best > 0:
        assert seconds[best] < seconds[0]
        assert min(seconds) < (1 - MARGIN) * seconds[0]


@relaxed
@given(situations())
def test_a_slower_network_never_gets_more_to_carry(situation):
    ready, options, compute, latency = situation
    # Where a harsher way takes less of the processor too, a long exchange makes that a smaller
    # share, and the gentler one may come within the margin. Latency does the same.
    work = [sum(own.before) + sum(own.after) for own in options]
    assume(work == sorted(work) and (latency == 0 or all(own.rounds == 1 for own in options)))
    best = [choose(ready, options, Line(latency, rate), compute)[1] for rate in RATES]
    assert best == sorted(best)


@relaxed
@given(situations())
def test_a_free_network_carries_everything_and_a_hopeless_one_the_least(situation):
    ready, options, _, _ = situation
    seconds, best = choose(ready, options, Line(0.0, 0.0), 0.1)
    assert best == 0
    assert seconds[0] == pytest.approx(0.1)
    assert choose(ready, options, Line(0.0, 1.0), 0.1)[1] == 3


def test_what_comes_late_must_save_more():
    sizes = (25 * MB,)
    gentle = option("int4", 0.2, sizes=sizes)
    for margin, best in ((MARGIN, 1), (LATE_MARGIN, 0)):
        late = replace(option("topk", 0.16, sizes=sizes), margin=margin)
        assert choose([0.0], [gentle, late], Line(0.0, 1e-8), 0.0)[1] == best
