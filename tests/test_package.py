"""The cost of importing the package, and its exports."""

import ast
import json
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import lightning_opt as lo

ROOT = Path(lo.__file__).parent

OPTIONAL = {"IPython", "jsonargparse", "matplotlib", "pandas", "pynvml", "tensorboard"}

# Lightning may have imported some of the optional packages already; afterwards their import fails.
READ_IMPORTS = f"""
import json, sys
import lightning.pytorch, lightning.pytorch.strategies, pytorch_lightning
before = set(sys.modules)
for name in before | {OPTIONAL}:
    if name.partition(".")[0] in {OPTIONAL}:
        sys.modules[name] = None
import lightning_opt
known = "ddp_topk" in lightning.pytorch.strategies.StrategyRegistry
for name in lightning_opt.__all__:
    getattr(lightning_opt, name)
print(json.dumps([known, *sorted(set(sys.modules) - before - {OPTIONAL})]))
"""

# Nothing of the package is used between its import and the Trainer.
OURS_FIRST = """
import sys
import lightning_opt
assert "torch" not in sys.modules, "importing the package imports torch"
assert {"preset", "TopK"} <= set(dir(lightning_opt)) and lightning_opt.__version__
print(sorted({name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names))
from lightning.pytorch.strategies import StrategyRegistry
import lightning
trainer = lightning.Trainer(strategy="ddp_topk", accelerator="cpu", logger=False)
print(type(trainer.strategy) is lightning_opt.CompressedDDPStrategy, "ddp_fp16" in StrategyRegistry)
"""


def run(program: str) -> list[str]:
    """Return the lines that a new interpreter prints."""
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(
        command, cwd=ROOT.parent, check=True, capture_output=True, text=True, timeout=300
    )
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def imported() -> set[str]:
    """The modules that the exports import besides those of Lightning."""
    registered, *modules = json.loads(run(READ_IMPORTS)[-1])
    assert registered, "Lightning was there, and the strategy strings were not registered"
    return set(modules)


@pytest.mark.slow
def test_import_adds_no_third_party_package_to_those_of_lightning(imported):
    packages = {name.partition(".")[0] for name in imported}
    allowed = {"lazy_loader", "lightning_opt"}
    assert packages - sys.stdlib_module_names - {"torch"} == allowed
    heavy = ("torch._dynamo", "torch._inductor", "torch.onnx", "torch.utils.tensorboard")
    assert not [name for name in imported if name.startswith(heavy)]


@pytest.mark.slow
def test_import_before_lightning_does_not_import_torch_and_registers_the_strategies():
    packages, *_, trained = run(OURS_FIRST)
    loaded = set(ast.literal_eval(packages)) - {"sitecustomize", "__main__"}
    assert {name for name in loaded if not name.startswith("_")} == {
        "lazy_loader",
        "lightning_opt",
    }
    assert trained == "True True"


def test_every_public_name_is_exported_and_can_be_pickled():
    public = {
        name
        for name, value in vars(lo).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert public <= set(lo.__all__) == set(dir(lo))
    assert lo.__all__ == sorted(set(lo.__all__))
    for name in lo.__all__:
        export = getattr(lo, name)
        assert export.__name__ == name
        assert export.__module__.startswith("lightning_opt.")
        assert pickle.loads(pickle.dumps(export)) is export
