"""The search for the best setting, on simulated machines whose best setting is known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_opt.data.pipeline.loaders import LoaderSettings
from lightning_opt.data.pipeline.search import MAX_WAIT, TRIVIAL_SECONDS, Measured, Search


class Machine:
    """Fetching takes ``fetch``, of which ``busy`` needs one of ``cores``; a step takes ``step``."""

    def __init__(self, fetch, step, cores=2, busy=1.0, overhead=1e-4, stops=None):
        self.fetch, self.step, self.cores, self.busy = fetch, step, cores, busy
        self.overhead, self.left = overhead, stops
        self.measured = []

    def seconds(self, settings):
        if not settings.workers:
            return self.fetch + self.step
        loader = self.fetch / settings.workers
        cores = (self.fetch * self.busy + self.step) / self.cores
        quick = 0.9 if settings.prefetch == 4 else 1.0
        return max(loader * quick, cores, self.step) + self.overhead

    def __call__(self, settings):
        if self.left is not None and len(self.measured) >= self.left:
            return None
        self.measured.append(settings)
        seconds = self.seconds(settings)
        return Measured(settings, seconds, max(0.0, 1 - self.step / seconds))


def run(machine, **settings):
    search = Search(machine, **{"max_workers": 2, **settings})
    return search, search.run(machine.fetch, machine.step)


@pytest.mark.parametrize(("fetch", "step"), [(TRIVIAL_SECONDS / 2, 1e-5), (0.001, 0.1)])
def test_trivial_loader_and_one_that_is_not_the_bottleneck_get_no_workers(fetch, step):
    machine = Machine(fetch, step)
    search, chosen = run(machine)
    assert chosen.workers == 0
    assert machine.measured == []
    assert [one.settings.workers for one in search.tried] == [0]


def test_fewest_workers_that_keep_up_with_the_step_are_chosen():
    machine = Machine(0.03, 0.02, cores=64)
    search, chosen = run(machine, max_workers=32)
    assert chosen.workers == 2
    assert len(machine.measured) <= 3
    assert search.reason == "the loader is not the bottleneck"


def test_waiting_items_get_more_workers_and_a_bottleneck_larger_prefetch():
    assert run(Machine(0.04, 0.001, busy=0.0), max_workers=8)[1] == LoaderSettings(8, 4)
    assert run(Machine(0.03, 0.02, cores=64), max_workers=8)[1].prefetch == 2


def test_too_small_a_gain_gives_no_workers():
    assert run(Machine(0.002, 0.01, overhead=0.0019))[1].workers == 0


def test_slow_moment_of_the_machine_is_measured_again():
    class SlowAtFirst(Machine):
        def seconds(self, settings):
            return super().seconds(settings) * (2.0 if len(self.measured) <= 3 else 1.0)

    machine = SlowAtFirst(0.02, 0.001)
    search, chosen = run(machine)
    assert [one.seconds > 0.02 for one in search.tried[1:]] == [True] * 3 + [False]
    assert chosen.workers == 2


def test_min_workers_is_kept():
    machine = Machine(1e-5, 1e-4)
    assert run(machine, min_workers=1)[1].workers == 1


@pytest.mark.parametrize("stops", range(3))
def test_best_so_far_is_chosen_when_the_time_is_up(stops):
    machine = Machine(0.04, 0.001, busy=0.0, stops=stops)
    search, chosen = run(machine, max_workers=8)
    assert chosen == min(search.tried, key=lambda one: one.seconds).settings
    assert search.reason == "the time was up"


@given(
    fetch=st.floats(1e-5, 0.5),
    step=st.floats(1e-5, 0.5),
    cores=st.integers(1, 16),
    busy=st.floats(0, 1),
    most=st.integers(0, 16),
)
def test_choice_is_close_to_the_best_of_a_grid(fetch, step, cores, busy, most):
    machine = Machine(fetch, step, cores, busy)
    _, chosen = run(machine, max_workers=most)
    grid = [LoaderSettings()] + [
        LoaderSettings(workers, prefetch) for workers in range(1, most + 1) for prefetch in (2, 4)
    ]
    best = min(machine.seconds(settings) for settings in grid)
    # Halving and doubling may miss the best number by the rest of a bottleneck.
    assert machine.seconds(chosen) <= max(
        1.12 * best, best + TRIVIAL_SECONDS, best / (1 - 2 * MAX_WAIT)
    )
    assert len(machine.measured) <= 8
