"""Every test here runs on fake CUDA tensors: reading one or mixing devices is an error."""

from collections.abc import Iterator

import pytest

from tests.helpers.fake_cuda import fake_cuda


@pytest.fixture(autouse=True)
def _cuda() -> Iterator[None]:
    with fake_cuda():
        yield
