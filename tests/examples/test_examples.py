"""Notebooks, the demo and the scripts run, and their data and measures are correct."""

import importlib
import json
import math
import multiprocessing
import os
import re
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.image
import nbformat
import pytest
import torch
from ipykernel.kernelapp import IPKernelApp
from jupyter_client.manager import AsyncKernelManager

from examples.byte_gpt import ByteGPT, SourceBatches
from tests.examples.conftest import EXAMPLES, Load, run_script
from tests.helpers.fork_server import share_fork_server, use_fork_server
from tests.helpers.processes import launch

SHORTER = {
    "01_fit_into_half_the_memory.ipynb": {"steps=16": "steps=8"},
    "02_stabilise_training.ipynb": {
        "SourceData(steps=300)": "SourceData(steps=20)",
        "ByteGPT()": "ByteGPT(depth=1)",
    },
    "03_make_it_faster.ipynb": {
        "[:256]": "[:128]",
        "lo.CompileModel()": 'lo.CompileModel(backend="eager")',
        "rounds=4": "rounds=1",
        "seconds=5": "seconds=1",
    },
    "04_slow_networks.ipynb": {
        "STEPS = 60": "STEPS = 44",
        "import subprocess": f"from {__name__} import run_in_forks",
        "subprocess.run": "run_in_forks",
    },
    "05_let_the_tuner_decide.ipynb": {
        '["fused", "one_thread"]': '["fused"]',
        '"checkpointing",': "",
        "text =": "from lightning_opt.tuner import trials; trials.MAX_ROUNDS = 2\ntext =",
        'budget="15s"': "budget=1",
        'budget="2m"': 'budget="1h"',
    },
    "06_curvature.ipynb": {"[3.0, 1.0, 0.3]": "[1.0]", "[0.3, 0.1, 0.03]": "[0.1]"},
}
"""Replacements in the source of notebooks that make them run faster."""


TABLES = {"01_fit_into_half_the_memory.ipynb", "05_let_the_tuner_decide.ipynb"}
"""Notebooks that show a table; the others draw a picture."""


def run_in_forks(command: list[str], **_: Any) -> SimpleNamespace:
    """Run a script with two processes, which Lightning would start as new interpreters."""
    _, script, *words = command
    vars(sys.modules["__main__"]).setdefault("__spec__", None)  # the kernel's lacks it
    output, _ = launch(run_script, script.removesuffix(".py"), *words)
    return SimpleNamespace(returncode=0, stdout=output)


class ForkedKernel(AsyncKernelManager):
    """Connects to a kernel in a fork of a process that has imported torch and Lightning."""

    has_kernel = True


def serve(connection_file: str, environment: dict[str, str], server: dict[str, Any]) -> None:
    """Run a kernel in this process; the fork server also starts the processes of notebooks."""
    use_fork_server(server)
    os.environ |= environment
    os.chdir(EXAMPLES)
    sys.path.insert(0, str(EXAMPLES))
    # A package that torchmetrics imports, if installed, needs another for its progress bar.
    warnings.filterwarnings("ignore", "IProgress not found")
    parent = f"--IPKernelApp.parent_handle={os.getppid()}"  # the kernel ends with it
    IPKernelApp.launch_instance(["-f", connection_file, "--quiet", parent])


@pytest.fixture(scope="module")
def kernel(environment: dict[str, str]) -> Iterator[AsyncKernelManager]:
    """One kernel for all notebooks."""
    importlib.import_module("matplotlib.font_manager")  # its cache is made once, with a warning
    manager = ForkedKernel(owns_kernel=False)
    manager.write_connection_file()
    arguments = manager.connection_file, environment, share_fork_server()
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=serve, args=arguments)
    process.start()
    yield manager
    process.kill()
    process.join()
    manager.cleanup_connection_file()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.name)
def test_notebook_runs_and_shows_the_committed_kinds_of_output(
    path: Path, kernel: AsyncKernelManager, load: Load
) -> None:
    committed = nbformat.read(path, as_version=4)
    # The first cell also removes the variables of the notebook before.
    replacements = {"REPOSITORY = ": "%reset -f\nREPOSITORY = ", **SHORTER.get(path.name, {})}
    source = "\n".join(cell.source for cell in committed.cells)
    assert all(old in source for old in replacements)
    run_notebooks = load("run_notebooks")

    notebook = run_notebooks.execute(path, replacements, kernel)

    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = "text/markdown" if path.name in TABLES else "image/png"
    assert any(shown in output.get("data", {}) for output in outputs), f"no {shown} is shown"
    assert [output["text"] for output in outputs if output.get("name") == "stderr"] == []
    pairs = zip(committed.cells, notebook.cells, strict=True)
    differ = [cell.source for cell, run in pairs if kinds_of(cell) != kinds_of(run)]
    assert differ == [], "run: make notebooks"


def kinds_of(cell: nbformat.NotebookNode) -> list[object]:
    """Return the types of a cell's outputs."""
    kinds: list[object] = []
    for output in cell.get("outputs", []):
        shown = {name for name in output.get("data", {}) if name != "text/plain"}
        kinds.append(sorted(shown) or output.get("name") or output.output_type)
    return kinds


@pytest.mark.slow
def test_clipping_script_prints_a_table_and_draws_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: Load, capsys: pytest.CaptureFixture[str]
) -> None:
    clipping, gpt = load("clipping"), load("byte_gpt")

    def smaller(*args: object, batch_size: int = 8, **settings: object) -> SourceBatches:
        return SourceBatches(*args, batch_size=min(batch_size, 16), **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(gpt, "SourceBatches", smaller)
    monkeypatch.setattr(clipping, "ByteGPT", partial(ByteGPT, depth=1))
    arguments = ["clipping.py", "--steps", "20", "--out", str(tmp_path / "new/loss.png")]
    monkeypatch.setattr("sys.argv", arguments)
    monkeypatch.setattr(clipping, "silence_advice", lambda: None)  # lasts beyond the test
    clipping.main()
    output = capsys.readouterr().out

    table = output[output.index("A byte-level GPT") :].splitlines()
    assert table[1].split()[:3] == ["run", "val", "loss"]
    rows = [line.split() for line in table[3:6]]
    assert [row[0] for row in rows] == ["plain", "AdaptiveClipping()", "gradient_clip_val=1.0"]
    for row in rows:
        assert 0.0 < float(row[1]) < math.log(256), "worse than a uniform guess"
    assert rows[0][6] == "0.0%"  # run, val loss, best, spikes, excursion, worst, steps clipped
    assert rows[1][-1].endswith("%")
    assert str(tmp_path / "new/loss.png") in output
    assert matplotlib.image.imread(tmp_path / "new/loss.png").std() > 0.1  # not blank


@pytest.mark.slow
def test_demo_survives_a_memory_limit_and_draws_the_act(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: Load, capsys: pytest.CaptureFixture[str]
) -> None:
    demo = load("demo")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["demo.py", "--act", "2", "--quick", "--out", "new/a.png"])

    demo.main()

    output = capsys.readouterr().out
    assert re.search(r"plain: +dies at step 1$", output, re.M)
    same = re.search(r"MicroBatching: +all 1 steps; losses and weights within (\S+)", output)
    assert float(same[1]) < 1e-5
    assert matplotlib.image.imread(tmp_path / "new/a.png").std() > 0.1
    assert {path.name for path in tmp_path.iterdir()} == {"new"}, "other files remain"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*have no `val_dataloader")
def test_demo_acts_on_a_bad_batch_and_on_memory_end_as_expected(
    monkeypatch: pytest.MonkeyPatch, load: Load
) -> None:
    """Acts 1 and 3. Tests of the strategies cover act 4, which creates networks."""
    demo, acts = load("demo"), load("demo_acts")
    monkeypatch.setattr(acts, "SPIKE", 30)
    monkeypatch.setattr(acts, "NAN", 40)
    make = acts.trainer
    monkeypatch.setattr(acts, "trainer", lambda callbacks, steps: make(callbacks, 50))
    bad_batch = {side: acts.bad_batch(side, quick=True) for side in ("plain", "ours")}
    outcomes = demo.outcomes(1, bad_batch)
    assert re.fullmatch(r"all [\d,]+ weights lost", outcomes["plain"])
    assert re.fullmatch(r"goes on, to a validation loss of [\d.]+", outcomes["NonFiniteGuard"])
    outcome = demo.outcomes(3, acts.half_the_memory("all", quick=True))["auto"]
    assert re.fullmatch(r"\d+ MiB, [\d.]+ of the memory for [\d.]+ of the time", outcome)


def test_demo_draws_recorded_acts_without_network_namespaces(
    monkeypatch: pytest.MonkeyPatch, load: Load, capsys: pytest.CaptureFixture[str]
) -> None:
    demo = load("demo")
    monkeypatch.setattr("benchmarks.strategies.compression.why_not", lambda: "tc not found")
    acts = {int(act): run for act, run in json.loads(demo.RECORD.read_text())["acts"].items()}
    acts |= demo.run([4], quick=True)
    printed = capsys.readouterr().out
    assert "RECORDED, not run: no slow link can be made here (tc not found)" in printed
    assert "ddp_topk" in printed
    axes = demo.draw(acts).axes
    assert len(axes) == 4
    assert any("a recorded run" in text.get_text() for text in axes[3].texts)
    assert demo.outcomes(1, acts[1])["plain"].endswith("weights lost")
    assert demo.outcomes(2, acts[2])["plain"] == "dies at step 1"
    assert demo.largest_difference(acts[2]["ours"], acts[2]["reference"]) < 1e-5


def test_model_is_causal_and_initial_loss_is_uniform() -> None:
    model = ByteGPT(width=48, depth=2, heads=4, window=16).eval()
    tokens = torch.randint(256, (2, 16))
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])
    assert model.loss(torch.randint(256, (8, 17))).item() == pytest.approx(math.log(256), abs=0.1)
