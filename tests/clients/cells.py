"""Trains projects of others with each feature, and compares the weights with a run without it."""

from __future__ import annotations

import os
import re
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import lightning_opt as lo
from lightning_opt.trainer.run_callback import RunCallback
from tests.clients.projects import PROJECTS, STEPS
from tests.helpers.processes import launch
from tests.matrix.outcomes import Cells, Weights, describe_error, largest_difference
from tests.matrix.subjects import CHANGES, ROUNDS, find_subjects
from tests.zoo.cells import MORE_CHANGES, ROUNDING, weights_of

FILE = Path(__file__).parents[2] / "docs" / "clients.json"
PAGE = FILE.with_suffix(".md")
AGAIN = "Run `make clients`, check the changes, and commit docs/clients.json."

HEAD = """# In other projects

Every feature in trainings of packages that build on Lightning, as their users write them, with tiny
models and data. Each cell compares the weights after a short training on a CPU with the same
training without the feature, and the model predicts afterwards. `resume` interrupts a training with
three callbacks and resumes it; neuralforecast cannot resume. Strategies run on two processes, for
scvi-tools and GAN with `find_unused_parameters=True`, which plain DDP needs as well. neuralforecast
and darts import `pytorch_lightning`, the others `lightning`. `make clients` runs all cells and
writes this page; `make test` runs a sample. {count}

{signs}

Versions: {versions}.
"""

STRATEGIES = ("ddp_int8", "diloco")
UNUSED_PARAMETERS = ("scvi-tools", "GAN")


class Begun(RunCallback):
    """Records whether a gradient has been computed."""

    begun = False

    def on_after_backward(self, *_: Any) -> None:
        self.begun = True


def train(project: str, settings: dict[str, Any]) -> Weights:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        np.random.seed(0)  # noqa: NPY002 - GluonTS draws batches by the global generator
        torch.manual_seed(0)
        return weights_of(PROJECTS[project][0](settings))


NO_HALF_LSTM = ("pytorch-forecasting", "DynamicLossScale")
"""torch has no float16 LSTM for CPUs without AVX512-FP16."""


def outcome(project: str, name: str, settings: dict[str, Any], plain: Weights, moved: float) -> str:
    """Return the outcome of training with a feature, as in the matrix."""
    begun = Begun()
    settings = {**settings, "callbacks": [*settings.get("callbacks", []), begun]}
    try:
        weights = train(project, settings)
        distance = largest_difference(weights, plain)
    except Exception as error:  # noqa: BLE001 - any error is an outcome
        if (project, name) == NO_HALF_LSTM and "LSTM" in str(error):
            return "refused: torch has no float16 LSTM on this CPU"
        found = describe_error(error, begun.begun)
        if type(error).__name__ == "MisconfigurationException" and not begun.begun:
            found = f"refused: {' '.join(str(error).split())}"  # by the project
        return re.sub(r"<[\w.]*?(\w+) object at \w+>", r"\1(...)", found)
    if distance == 0.0 and name not in ROUNDS:
        return "identical"
    # With Adam's usual epsilon, the rounding of gradients near zero gives other full steps.
    if distance <= (0.05 if name in ROUNDS else ROUNDING) * moved:
        return "close"
    if name in CHANGES | MORE_CHANGES.keys():
        is_finite = all(value.isfinite().all() for value in weights.values())
        return "changed" if is_finite else "fails: the weights are not finite"
    return f"fails: it changes the weights by {distance / moved:.2g} of the change by training"


def row(project: str, features: Sequence[str] | None = None) -> Cells:
    """Return the cells for one process: every feature or some, and a resumed training."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # some projects and features write files
        try:
            return _cells(project, features)
        finally:
            os.chdir(before)


def _cells(project: str, features: Sequence[str] | None) -> Cells:
    plain = train(project, {})
    moved = largest_difference(plain, train(project, {"limit_train_batches": 0}))
    cells = {}
    for subject in find_subjects():
        if subject.kind != "strategy" and (features is None or subject.label in features):
            settings = subject.trainer_settings()
            cells[subject.label] = outcome(project, subject.name, settings, plain, moved)
    if features is None and project != "neuralforecast":
        cells["resume"] = resumed(project, moved)
    return cells


class SaveAtEnd(RunCallback):
    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.file)


def resumed(project: str, moved: float) -> str:
    """Compare a training that is interrupted and resumed with callbacks to one without."""

    def callbacks() -> list[Any]:
        return [lo.GradientHealth(every_n_steps=2), lo.NonFiniteGuard(), lo.LeakDetector()]

    def interrupt(*more: Any) -> None:
        half = {"max_steps": STEPS // 2, "callbacks": [*more, SaveAtEnd(file)]}
        train(project, half)

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "last.ckpt")
        interrupt()
        plain = train(project, {"resume": str(file)})
        interrupt(*callbacks())
        settings = {"callbacks": callbacks(), "resume": str(file)}
        return outcome(project, "", settings, plain, moved)


def row_on_ranks(project: str) -> Cells:
    """Return the cells of the strategies, run in two processes."""
    with tempfile.TemporaryDirectory() as folder:
        return launch(_strategy_cells, project, folder, processes=2, timeout=600.0)[0]


def _strategy_cells(project: str, folder: str) -> Cells:
    os.chdir(folder)
    unused = project in UNUSED_PARAMETERS
    ddp = {"devices": 2, "strategy": "ddp_find_unused_parameters_true" if unused else "ddp"}
    plain = train(project, ddp)
    moved = largest_difference(plain, train(project, {**ddp, "limit_train_batches": 0}))
    cells = {}
    for subject in find_subjects():
        if subject.strategy in STRATEGIES:
            subject = replace(subject, settings={"find_unused_parameters": True} if unused else {})
            settings = {"devices": 2, **subject.trainer_settings()}
            cells[subject.label] = outcome(project, subject.name, settings, plain, moved)
    return cells
