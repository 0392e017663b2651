"""Fingerprints: what changes them and what does not."""

import functools
import os
import subprocess
import sys

import pytest
import torch

from lightning_opt.tuner.fingerprint import fingerprint


def scaled(factor):
    return lambda x: factor * x


class Settings:
    def __init__(self, value, **more):
        self.value, self.more = value, more


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Settings(1), Settings(2)),
        (Settings(1, a=1), Settings(1, a=2)),
        (Settings(torch.arange(3.0)), Settings(torch.arange(3.0) + 1)),
        (Settings(torch.arange(3.0)), Settings(torch.arange(3.0).double())),
        (Settings(lambda x: x + 1), Settings(lambda x: x + 2)),
        (Settings(lambda x: [y + 1 for y in x]), Settings(lambda x: [y + 2 for y in x])),
        (Settings(scaled(1)), Settings(scaled(2))),
        (functools.partial(scaled, 1), functools.partial(scaled, 2)),
        (Settings, Settings(1)),
    ],
)
def test_different_values_have_different_fingerprints(first, second):
    assert fingerprint(first) != fingerprint(second)
    assert fingerprint(first) == fingerprint(first)


def test_unpicklable_attribute_raises():
    with pytest.raises(ValueError, match="cannot be pickled"):
        fingerprint(Settings(__import__("threading").Lock()))


SCRIPT = """
import functools, mine
from lightning_opt.tuner.fingerprint import fingerprint
class Model:
    def __init__(self, width): self.width = width
print(fingerprint([functools.partial(Model, 3), lambda: mine.helper(4)]))
"""


def run(folder) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    command = [sys.executable, str(folder / "script.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return result.stdout


def test_fingerprint_is_equal_in_another_process_until_the_code_changes(tmp_path):
    """Also the code of a module that an imported module of the user imports."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "mine.py").write_text("import deep\ndef helper(x): return deep.deeper(x)\n")
    (tmp_path / "deep.py").write_text("def deeper(x): return x\n")
    before = run(tmp_path)
    assert run(tmp_path) == before
    (tmp_path / "deep.py").write_text("def deeper(x): return -x\n")
    assert run(tmp_path) != before
