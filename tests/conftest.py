"""What holds for every test: one thread, a fixed seed, a quiet Lightning, what is skipped where."""

import logging
from collections.abc import Iterable

import lightning.pytorch  # sets the level of its logger, which is then set anew
import pytest
import torch

SKIPS = {
    "gpu": (torch.cuda.is_available(), "needs a CUDA device"),
    "distributed": (
        torch.distributed.is_available() and torch.distributed.is_gloo_available(),
        "needs torch.distributed with gloo",
    ),
}


def pytest_configure() -> None:
    torch.set_num_threads(1)  # workers of pytest-xdist share the cores
    logging.getLogger(lightning.pytorch.__name__).setLevel(logging.WARNING)


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    for item in items:
        for mark, (possible, reason) in SKIPS.items():
            if not possible and item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
