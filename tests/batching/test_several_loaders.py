"""Batches of several loaders, one of which ends with fewer samples."""

from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import lightning_opt as lo
from tests.batching.nets import LinearNet
from tests.helpers.models import assert_same_weights
from tests.helpers.trainers import quiet_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*. it was not possible to check"),
    pytest.mark.filterwarnings("ignore:MicroBatching. each training_step changes len.shapes"),
]

CLOSE = {"rtol": 0.0, "atol": 1e-6}


class Two(LinearNet):
    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []
        self.fits = 10**9

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batches = list(batch.values()) if isinstance(batch, dict) else batch
        batches = [entry for entry in batches if entry is not None]  # None for a finished loader
        self.shapes.append(tuple(len(x) for (x,) in batches))
        if sum(self.shapes[-1]) > self.fits:
            raise torch.OutOfMemoryError("planted")
        return sum(self.layer(x).square().mean() for (x,) in batches)


def loaders(kind: type, mode: Any = "max_size_cycle") -> CombinedLoader:
    """Return batches of 8 and 8 samples, then 8 and 3, and 8 and 8 again or 8 alone."""
    generator = torch.Generator().manual_seed(1)
    both = [
        DataLoader(TensorDataset(torch.randn(count, 4, generator=generator)), batch_size=8)
        for count in (24, 11)
    ]
    iterables = dict(zip("ab", both, strict=True)) if kind is dict else both
    return CombinedLoader(iterables, mode)


@pytest.mark.parametrize(("kind", "size"), [(list, 4), (dict, "auto")])
@pytest.mark.filterwarnings("ignore:MicroBatching does not split batches of several loaders")
def test_batch_of_unequal_loaders_runs_whole(kind, size):
    nets = [Two(), Two()]
    quiet_trainer().fit(nets[0], loaders(kind))
    if size == "auto":
        nets[1].fits = 12
    quiet_trainer(callbacks=[lo.MicroBatching(size)]).fit(nets[1], loaders(kind))
    assert_same_weights(nets[1], nets[0], **CLOSE)
    assert (4, 4) in nets[1].shapes
    assert nets[0].shapes == [(8, 8), (8, 3), (8, 8)]


@pytest.mark.parametrize(
    ("kind", "mode", "last"),
    [(list, "max_size_cycle", (8, 8)), (dict, "max_size", (8,)), (list, "min_size", None)],
)
def test_accumulation_counts_the_samples_of_all_loaders(kind, mode, last):
    net, expected = Two(), Two().double()
    quiet_trainer(callbacks=[lo.Accumulation(3)]).fit(net, loaders(kind, mode))
    batches = [
        [entry for entry in batch if entry is not None] for batch, _, _ in loaders(list, mode)
    ]
    counts = [sum(len(x) for (x,) in batch) for batch in batches]
    loss = sum(
        count * sum(expected.layer(x.double()).square().mean() for (x,) in batch)
        for count, batch in zip(counts, batches, strict=True)
    )
    (loss / sum(counts)).backward()
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter -= 0.1 * parameter.grad
    assert net.shapes == [(8, 8), (8, 3), *([last] if last else [])]
    for parameter, other in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter.double(), other, **CLOSE)
