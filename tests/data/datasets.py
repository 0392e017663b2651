"""Datasets at the top level of a module, so that they can be pickled for workers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset


class Counting(Dataset[Any]):
    """Nested items that depend only on the index; counts the fetches of this process."""

    def __init__(self, length: int = 24, width: int = 8) -> None:
        self.length, self.width, self.fetches = length, width, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        index = range(self.length)[index]
        self.fetches += 1
        return {
            "x": torch.arange(self.width, dtype=torch.float32) + index,
            "y": (np.full(3, index), f"item {index}", [index, True, 1.5]),
        }


class Batched(Counting):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.batches = [*getattr(self, "batches", []), list(indices)]
        return [self[index] for index in indices]


class Numbers(Dataset[torch.Tensor]):
    """Index ``i`` gives the number ``i``."""

    def __init__(self, length: int = 24) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class Noisy(Numbers):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index + self.draw()])


class Lazy(Numbers):
    """Opens a handle at the first fetch; it must not be open when workers are forked."""

    handle: Any = None

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.handle is None:
            self.handle = object()
        return super().__getitem__(index)


class Eager:
    """A sampler that draws when ``__iter__`` is called."""

    def __init__(self, length: int = 24) -> None:
        self.length = length

    def __iter__(self) -> Any:
        return iter(torch.randperm(self.length).tolist())

    def __len__(self) -> int:
        return self.length


class Counted(Eager):
    epoch = 0

    def __iter__(self) -> Any:
        self.epoch += 1
        return iter(range(self.length))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))
