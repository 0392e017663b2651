"""Loader settings: which loaders may be changed, and how."""

import random

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    WeightedRandomSampler,
)

from lightning_opt.data.pipeline.loaders import (
    LoaderSettings,
    attributes_for,
    endless_indices,
    reason_to_skip,
)
from tests.data.datasets import Counted, Eager, Numbers, Stream


class DrawsPerBatch(Eager):
    def __iter__(self):
        for _ in range(self.length):
            yield random.randrange(self.length)


@pytest.mark.parametrize(
    "settings",
    [
        {"sampler": RandomSampler(range(24), replacement=True)},
        {"sampler": WeightedRandomSampler([1.0] * 24, 24)},
        {"sampler": Eager(), "batch_size": 3},  # the batch sampler iterates it at the first batch
        {"batch_sampler": BatchSampler(RandomSampler(range(24)), 3, False)},
        {"batch_size": None},
    ],
)
def test_tunable_loaders_have_no_reason_to_skip(settings):
    state = torch.get_rng_state()
    assert reason_to_skip(DataLoader(Numbers(), **settings)) is None
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        ([1, 2], "not a torch DataLoader"),
        (DataLoader(Stream()), "iterable"),
        (DataLoader(Numbers(), sampler=Eager(), batch_size=None), "calls it twice"),
        (DataLoader(Numbers(), sampler=Counted(), batch_size=None), "calls it twice"),
        (DataLoader(Numbers(), sampler=DrawsPerBatch(), batch_size=3), "batch by batch"),
        (DataLoader(Numbers(), shuffle=True, generator=torch.Generator()), "its own generator"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_loaders_have_a_reason_to_skip(loader, reason):
    counted = getattr(loader, "sampler", None)
    assert reason in reason_to_skip(loader)
    assert getattr(counted, "epoch", 0) == 0


def test_loader_with_running_workers_is_skipped():
    loader = DataLoader(Numbers(), num_workers=1, persistent_workers=True)
    iterator = iter(loader)
    assert "already running" in reason_to_skip(loader)
    del iterator
    vars(loader)["_iterator"] = None


def test_loader_without_workers_has_no_timeout():
    loader = DataLoader(Numbers(), batch_size=3, num_workers=1, timeout=9, prefetch_factor=5)
    vars(loader).update(attributes_for(loader, LoaderSettings()))
    assert loader.timeout == 0  # as torch requires
    assert [int(number) for batch in loader for number in batch] == list(range(24))


def test_indices_are_drawn_from_a_copy_of_the_sampler():
    sampler = Counted(5)
    loader = DataLoader(Numbers(5), sampler=sampler, batch_size=2)
    indices = endless_indices(loader)
    assert [next(indices) for _ in range(4)] == [[0, 1], [2, 3], [4], [0, 1]]
    assert sampler.epoch == 0
    with pytest.raises(ValueError, match="nothing"):
        next(endless_indices(DataLoader(Numbers(5), sampler=Eager(0))))
