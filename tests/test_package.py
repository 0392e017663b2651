"""The cost of importing the package, and its exports."""

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

# Lightning may import some of the optional packages; afterwards their import fails.
PROGRAM = f"""
import json, sys
import lightning_opt
assert "torch" not in sys.modules, "importing the package imports torch"
assert {{"preset", "TopK"}} <= set(dir(lightning_opt)) and lightning_opt.__version__
packages = {{name.partition(".")[0] for name in sys.modules}}
from lightning.pytorch.strategies import StrategyRegistry
import lightning, pytorch_lightning
lightning.Trainer(accelerator="cpu", logger=False)  # imports more
before = set(sys.modules)
for name in before | {OPTIONAL}:
    if name.partition(".")[0] in {OPTIONAL}:
        sys.modules[name] = None
trainer = lightning.Trainer(strategy="ddp_topk", accelerator="cpu", logger=False)
assert type(trainer.strategy) is lightning_opt.CompressedDDPStrategy
assert "ddp_fp16" in StrategyRegistry
for name in lightning_opt.__all__:
    getattr(lightning_opt, name)
print(json.dumps([sorted(packages), sorted(set(sys.modules) - before - {OPTIONAL})]))
"""


@pytest.mark.slow
def test_import_needs_no_torch_and_exports_no_package_besides_those_of_lightning():
    """The strategy strings are registered although Lightning is imported later."""
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(
        command, cwd=ROOT.parent, check=True, capture_output=True, text=True, timeout=300
    )
    first, exports = json.loads(done.stdout.splitlines()[-1])
    loaded = set(first) - sys.stdlib_module_names - {"sitecustomize", "__main__"}
    allowed = {"lazy_loader", "lightning_opt"}
    assert {name for name in loaded if not name.startswith("_")} == allowed
    packages = {name.partition(".")[0] for name in exports}
    assert packages - sys.stdlib_module_names - {"torch"} == {"lightning_opt"}
    heavy = ("torch._dynamo", "torch._inductor", "torch.onnx", "torch.utils.tensorboard")
    assert not [name for name in exports if name.startswith(heavy)]


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
