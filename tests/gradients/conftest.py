"""Host and device path, on one machine."""

import pytest

from tests.helpers.syncs import take_device_path


@pytest.fixture
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Take the path of the parameter: ``"host"``, or ``"device"`` with tensors of the CPU."""
    if request.param == "device":
        take_device_path(monkeypatch)
    return str(request.param)
