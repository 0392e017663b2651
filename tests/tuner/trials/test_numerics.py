"""What rounding and other seeds explain is accepted; what changes learning is not."""

import math
import random

import pytest

from lightning_opt.tuner.trials.numerics import FLOOR, compare, seed_tolerances, still, windows


def trajectory(seed: int, steps: int = 24, speed: float = 0.15, batches: int = 0) -> list[float]:
    """Return losses that fall from 5.5, with noise of the batches and of the weights' start."""
    weights, order = random.Random(seed), random.Random(batches)
    start = 5.5 + weights.gauss(0, 0.02)
    return [
        2.5 + (start - 2.5) * math.exp(-speed * step) + order.gauss(0, 0.08)
        for step in range(steps)
    ]


BASELINE = trajectory(0)
OTHERS = [trajectory(1, batches=1), trajectory(2, batches=2)]


def rounded(losses: list[float], share: float, seed: int = 5) -> list[float]:
    """Return losses with an error that grows from step to step, as that of rounding does."""
    noise = random.Random(seed)
    error = 0.0
    found = []
    for loss in losses:
        error = 1.05 * error + noise.gauss(0, share) * loss
        found.append(loss + error)
    return found


def test_the_same_losses_need_no_seed() -> None:
    agreement = compare(BASELINE, BASELINE)
    assert agreement.accepted
    assert agreement.by_floor
    assert agreement.difference == 0


@pytest.mark.parametrize("seed", range(20))
def test_rounding_is_accepted(seed: int) -> None:
    assert compare(rounded(BASELINE, 1e-5, seed), BASELINE).by_floor
    # Up to four percent of the loss after 24 steps, some twenty times what the floor allows.
    assert compare(rounded(BASELINE, 1e-3, seed), BASELINE, OTHERS).accepted


def test_a_run_of_another_seed_is_accepted() -> None:
    """It is what the tolerance is made from: of 200 seeds nearly all are within it."""
    wide = [trajectory(seed, batches=seed) for seed in range(1, 5)]
    accepted = sum(
        compare(trajectory(seed, batches=seed), BASELINE, wide).accepted for seed in range(10, 210)
    )
    assert accepted >= 190


@pytest.mark.parametrize(
    "broken",
    [
        trajectory(0, speed=0.08),  # learns half as fast
        [5.5 for _ in BASELINE],  # does not learn at all
        [*BASELINE[:16], *(loss + 0.9 for loss in BASELINE[16:])],  # goes wrong late
        [loss - 1.0 for loss in BASELINE],  # better than it can be: another loss
    ],
)
def test_what_changes_learning_is_rejected(broken: list[float]) -> None:
    agreement = compare(broken, BASELINE, OTHERS)
    assert not agreement.accepted
    assert "its loss differs by" in agreement.why


def test_seeds_that_differ_much_admit_no_loss_of_progress() -> None:
    """Other batches make other losses, but the candidate has the same batches."""
    noisy = [trajectory(seed, batches=seed) for seed in (1, 2)]
    noisy = [[loss + shift for loss in run] for run, shift in zip(noisy, (0.5, -0.4), strict=True)]
    tolerances = seed_tolerances([BASELINE, *noisy], 24)
    assert max(tolerances) < 1.1  # the spread of the seeds themselves
    stuck = [max(loss, 4.4) for loss in BASELINE]
    assert not compare(stuck, BASELINE, noisy).accepted


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_rejected(value: float) -> None:
    losses = [*BASELINE[:7], value, *BASELINE[8:]]
    assert compare(losses, BASELINE).why == (
        f"its loss is {value} at step 7, and the baseline's is not"
    )
    assert "the baseline's own loss is not finite" in compare(BASELINE, losses).why


def test_a_share_of_the_user_replaces_the_seeds() -> None:
    worse = [1.01 * loss for loss in BASELINE]
    assert compare(worse, BASELINE, tolerance=0.02).accepted
    assert not compare(worse, BASELINE, OTHERS, tolerance=0.005).accepted


def test_a_loss_near_zero_may_still_be_rounded() -> None:
    falling = [math.exp(-step) for step in range(30)]
    other = [loss + 1e-4 for loss in falling]
    assert compare(other, falling).accepted
    assert FLOOR * falling[-1] < 1e-4


def test_windows_are_thirds_of_the_compared_steps() -> None:
    assert windows([1, 1, 2, 2, 3, 3, 99], 6) == [1, 2, 3]
    assert windows([4.0, 6.0], 2) == [4.0, 6.0]
    assert compare([], BASELINE).why == "no step was taken"


def test_a_parameter_that_no_longer_moves_is_named() -> None:
    reference = {2: ["a"], 4: ["a", "b"], 8: ["a", "b", "c"]}
    assert still({2: ["a"], 4: ["a", "b"]}, reference) == ""
    assert "after 4 steps it has not changed b," in still({2: ["a"], 4: ["a"]}, reference)
    assert still({2: [], 4: []}, reference) == "", "a loss scale may still be being found"
    assert still({}, reference) == ""
    many = {4: [*"abcdef"]}
    assert "b, c, d and 2 more" in still({4: ["a"]}, many)
