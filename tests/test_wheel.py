"""The wheel of ``python -m build``, installed and used in an environment without the checkout."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import lightning_opt as lo

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_opt"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

USE = """
import pathlib, sys
import lightning as L
import lightning_opt as lo
from lightning.pytorch.demos.boring_classes import BoringModel

here = pathlib.Path(lo.__file__)
assert here.is_relative_to(sys.prefix), here
clipping = lo.AdaptiveClipping()
quiet = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)
trainer = L.Trainer(
    accelerator="cpu", max_steps=3, limit_val_batches=0, callbacks=[clipping], **quiet
)
trainer.fit(BoringModel())
from lightning_opt.cli import main
assert main(["presets"]) == 0
print(lo.__version__, clipping.report().rows[0]["steps"])
"""


def run(*command: object, cwd: Path, check: bool = True) -> str:
    """Run a command without the variables of the checkout, and return its output."""
    variables = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_REQUIRE_VIRTUALENV"}
    environment = {key: value for key, value in os.environ.items() if key not in variables}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment | {"OMP_NUM_THREADS": "1", "PIP_NO_INDEX": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 or not check, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    assert (out / f"lightning_opt-{lo.__version__}.tar.gz").exists()
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    """A new environment with the wheel and the installed dependencies, without the checkout."""
    environment = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=environment)
    python = environment / "bin" / "python"
    where = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=ROOT)
    # Python ignores .pth files in such a folder, so the editable install stays hidden.
    dependencies = Path(torch.__file__).parents[1]
    (Path(where.strip()) / "dependencies.pth").write_text(f"{dependencies}\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps"]
    run(*pip, "--force-reinstall", wheel, cwd=environment)
    return python


def test_wheel_contains_exactly_the_package(wheel):
    assert wheel.name == f"lightning_opt-{lo.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"lightning_opt-{lo.__version__}.dist-info"
        metadata = archive.read(f"{info}/METADATA").decode()
        commands = archive.read(f"{info}/entry_points.txt").decode()
    own = {
        str(file.relative_to(ROOT))
        for file in PACKAGE.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert {name for name in names if not name.startswith(info)} == own
    assert "lightning_opt/py.typed" in own
    assert f"{info}/licenses/LICENSE" in names
    assert "Requires-Python: >=3.10" in metadata.splitlines()
    assert "lightning-opt = lightning_opt.cli:main" in commands


def test_installed_package_trains_and_runs_its_command(python, tmp_path):
    *presets, last = run(python, "-c", USE, cwd=tmp_path).splitlines()
    assert {"basic", "advanced", "ultra"} <= set(re.findall(r"\w+", " ".join(presets)))
    assert last == f"{lo.__version__} 3"
    assert lo.__version__ in run(python.with_name("lightning-opt"), "--version", cwd=tmp_path)
