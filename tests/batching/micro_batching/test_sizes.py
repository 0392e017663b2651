"""Learned sizes, batch by batch."""

from lightning_opt.batching.micro_batching.sizes import LearnedSizes, PassedBatches


def shrink(sizes: LearnedSizes, shape: str, elements: int, failed: int) -> int:
    return sizes.record_failure(0, shape, elements, samples=64, failed=failed)


def test_size_applies_to_larger_samples_only():
    sizes = LearnedSizes(100)
    assert sizes.size_for("a", 10) is None
    assert shrink(sizes, "a", 10, 8) == 4
    assert [sizes.size_for(*shape) for shape in (("a", 10), ("b", 9), ("c", 11))] == [4, None, 4]
    assert shrink(sizes, "c", 11, 4) == 2
    assert [sizes.size_for(*shape) for shape in (("a", 10), ("d", 20))] == [4, 2]


def grown(sizes: LearnedSizes, batches: int) -> list[int]:
    found = []
    for number in range(1, batches + 1):
        events = len(sizes.events)
        sizes.record_success(0)
        found += [number] if len(sizes.events) > events else []
    return found


def test_failed_growth_doubles_the_wait():
    sizes = LearnedSizes(5)
    shrink(sizes, "a", 10, 64)
    shrink(sizes, "a", 10, 32)
    assert grown(sizes, 5) == [5]
    assert sizes.size_for("a", 10) == 32
    assert shrink(sizes, "a", 10, 32) == 16
    assert grown(sizes, 10) == [10]
    assert shrink(sizes, "a", 10, 32) == 16  # now it waits for 20 batches
    resumed = LearnedSizes(5)
    resumed.load_state_dict(sizes.state_dict())
    for again in (sizes, resumed):
        assert grown(again, 45) == [20, 40]
        assert again.shapes == {}  # no more splits
        assert grown(again, 25) == []


def test_smaller_micro_batches_than_passed_ones_are_covered():
    passed = PassedBatches()
    passed.add("a", 10, 8)
    assert passed.covers("a", 10, 8)
    assert passed.covers("a", 3, 8)
    assert not passed.covers("a", 11, 1)
    assert not passed.covers("a", 1, 9)
    assert not passed.covers("b", 10, 8)
