"""What importing the package costs and offers."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import lightning_opt as lo

ROOT = Path(lo.__file__).parent

OPTIONAL = {"IPython", "jsonargparse", "matplotlib", "pandas", "pynvml", "rich", "tensorboard"}

# Lightning and what it imports may have loaded some of the optional packages already, so they are
# made to be missing: an import of one of them fails.
READ_IMPORTS = f"""
import json, sys
import lightning.pytorch, lightning.pytorch.strategies
before = set(sys.modules)
for name in before | {OPTIONAL}:
    if name.partition(".")[0] in {OPTIONAL}:
        sys.modules[name] = None
import lightning_opt
print(json.dumps(sorted(set(sys.modules) - before - {OPTIONAL})))
"""


@pytest.fixture(scope="module")
def imported() -> set[str]:
    """The modules that ``import lightning_opt`` adds to those of Lightning."""
    command = [sys.executable, "-W", "ignore", "-c", READ_IMPORTS]
    output = subprocess.run(
        command, cwd=ROOT.parent, check=True, capture_output=True, text=True, timeout=120
    ).stdout
    return set(ast.literal_eval(output.splitlines()[-1]))


def test_import_brings_nothing_that_lightning_has_not(imported):
    """Heavy and optional packages are imported where they are used."""
    packages = {name.partition(".")[0] for name in imported}
    assert packages - sys.stdlib_module_names - {"torch"} == {"lightning_opt"}


def test_import_leaves_torchs_optional_parts_alone(imported):
    heavy = ("torch._dynamo", "torch._inductor", "torch.onnx", "torch.utils.tensorboard")
    assert not [name for name in imported if name.startswith(heavy)]


def test_exports_are_sorted_and_exist():
    assert lo.__all__ == sorted(set(lo.__all__))
    for name in lo.__all__:
        assert getattr(lo, name).__name__ == name


def test_nothing_public_is_left_out_of_the_exports():
    public = {
        name
        for name, value in vars(lo).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert public == set(lo.__all__)


def test_exports_belong_to_the_package():
    for name in lo.__all__:
        assert getattr(lo, name).__module__.startswith("lightning_opt.")


def test_version_is_written_as_pep_440_wants():
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", lo.__version__)


def test_package_is_typed():
    assert (ROOT / "py.typed").exists()
