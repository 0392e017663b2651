"""The host path and the device path, both with tensors of the CPU."""

import pytest

from tests.helpers.syncs import take_device_path


@pytest.fixture(params=[False, True], ids=["host", "device"])
def device_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run the test on the host path and on the device path."""
    if request.param:
        take_device_path(monkeypatch)
    return bool(request.param)


@pytest.fixture(params=["host", "device"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Like ``device_path``, with the name of the path."""
    if request.param == "device":
        take_device_path(monkeypatch)
    return str(request.param)
