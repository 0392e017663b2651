"""Trains models of the zoo with each feature, and compares the weights with a run without it.

Outcomes are as in the matrix: ``identical``, ``close``, ``changed``, ``refused`` or ``fails``.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.helpers.processes import launch
from tests.helpers.trainers import quiet_trainer
from tests.matrix.outcomes import Cells, Weights, describe_error, largest_difference
from tests.matrix.subjects import CHANGES, ROUNDS, Subject, find_subjects
from tests.zoo.models import MODELS, Learner, make

FILE = Path(__file__).parents[2] / "docs" / "zoo.json"
AGAIN = "Run `python -m tests.zoo`, check the changes, and commit docs/zoo.json."

ROUNDING = 1e-3
"""Largest difference that counts as rounding, as a share of the change by training."""

MORE_CHANGES = {
    "DynamicLossScale": "float16",
    "MicroBatching": "losses that are no mean over samples, and dropout masks drawn in parts",
}
"""Features that may change the weights of these models, besides ``CHANGES`` of the matrix."""

ON_RANKS = ("GPT-2", "Llama", "T5", "BERT", "ViT", "ConvNeXt", "UNet", "torch LSTM")
"""Models for strategies: those whose parameters all get gradients, as DDP requires."""


def subjects(processes: int = 1) -> list[Subject]:
    """Return the strategies for several processes, all other features for one."""
    on_ranks = processes > 1
    return [subject for subject in find_subjects() if (subject.kind == "strategy") is on_ranks]


def fit(model: Learner, subject: Subject | None, processes: int) -> Weights:
    settings = subject.trainer_settings() if subject else {}
    if processes > 1:
        settings = {"strategy": "ddp", **settings, "devices": processes}
    torch.manual_seed(0)
    quiet_trainer(limit_val_batches=0, **settings).fit(model)
    return weights_of(model)


def weights_of(model: torch.nn.Module) -> Weights:
    """Return copies of the floating-point weights and buffers, by name."""
    return {
        name.replace("_orig_mod.", ""): value.detach().clone()
        for name, value in model.state_dict().items()
        if value.is_floating_point()
    }


class Row:
    """A model, its weights after training without a feature, and its cells.

    Args:
        name: The model.
        processes: More than one trains under DDP.
    """

    def __init__(self, name: str, processes: int) -> None:
        self.name, self.processes = name, processes
        self.plain = fit(make(name), None, processes)
        self.moved = largest_difference(self.plain, weights_of(make(name)))
        if not self.moved > 0.0:
            raise RuntimeError(f"Training {name} without a feature does not change its weights.")

    def cell(self, subject: Subject) -> str:
        model = make(self.name)
        try:
            weights = fit(model, subject, self.processes)
            distance = largest_difference(weights, self.plain)
        except Exception as error:  # noqa: BLE001 - any error is an outcome
            return describe_error(error, model.begun)
        # Where the order of summation changes, equality depends on the processor.
        if distance == 0.0 and subject.name not in ROUNDS:
            return "identical"
        if distance <= ROUNDING * self.moved:
            return "close"
        if subject.name in CHANGES | MORE_CHANGES.keys():
            is_finite = all(
                torch.isfinite(weights[name]).all()
                for name, value in self.plain.items()
                if torch.isfinite(value).all()
            )
            return "changed" if is_finite else "fails: the weights are not finite"
        share = distance / self.moved
        return f"fails: it changes the weights by {share:.2g} of the change by training"


def run_row(name: str, wanted: Sequence[Subject], processes: int = 1) -> Cells:
    """Return the cells of a model by the label of the feature; each process calls this."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.chdir(folder)  # some features write files
        try:
            row = Row(name, processes)
            return {subject.label: row.cell(subject) for subject in wanted}
        finally:
            os.chdir(before)


def run_rows_on_ranks(names: Sequence[str]) -> dict[str, Cells]:
    """Return the cells of all strategies by model, run in two processes."""
    return launch(_strategy_rows, list(names), processes=2, timeout=900.0)[0]


def _strategy_rows(names: list[str]) -> dict[str, Cells]:
    return {name: run_row(name, subjects(2), processes=2) for name in names}


def content() -> dict[str, Any]:
    """Return the record: versions, and cells by model and feature."""
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def read() -> dict[str, Cells]:
    rows: dict[str, Cells] = content()["rows"]
    return rows


def write(rows: dict[str, Cells]) -> None:
    """Record cells in the order of the models, with the versions of the libraries."""
    from importlib.metadata import version

    libraries = ("torch", "lightning", "transformers", "peft", "diffusers", "torch_geometric")
    versions = {name: version(name).partition("+")[0] for name in libraries}
    ordered = {name: rows[name] for name in MODELS if name in rows}
    FILE.write_text(json.dumps({"versions": versions, "rows": ordered}, indent=1) + "\n")
