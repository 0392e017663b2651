"""Runs features on the models of the zoo, and says what each does to the weights.

A cell works (``identical``, ``close`` or ``changed`` beside the same run without the feature), is
``refused`` before the first step, or ``fails``, which is a bug.
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
from tests.matrix.outcomes import Weights, describe_error, largest_difference
from tests.matrix.subjects import CHANGES, ROUNDS, Subject, find_subjects
from tests.zoo.models import MODELS, Learner, make

FILE = Path(__file__).parents[2] / "docs" / "zoo.json"
AGAIN = "Run `python -m tests.zoo`, look at what changed, and commit docs/zoo.json."

ROUNDING = 1e-3
"""Largest difference to count as rounding, of the distance that training moves the weights."""

MORE_CHANGES = {
    "DynamicLossScale": "float16",
    "MicroBatching": "losses that are no mean over samples, and dropout masks drawn in parts",
}
"""Beside ``CHANGES`` of the matrix: what may change weights of these models."""

Cells = dict[str, str]


def subjects(processes: int = 1) -> list[Subject]:
    """Return what is tried on one process (all but strategies), or on two (strategies)."""
    on_ranks = processes > 1
    return [subject for subject in find_subjects() if (subject.kind == "strategy") is on_ranks]


def fit(model: Learner, subject: Subject | None, processes: int) -> Weights:
    """Train for the model's batches, and return its weights."""
    settings = subject.trainer_settings() if subject else {}
    if processes > 1:
        settings = {"strategy": "ddp", **settings, "devices": processes}
    torch.manual_seed(0)
    quiet_trainer(limit_val_batches=0, **settings).fit(model)
    return weights_of(model)


def weights_of(model: Learner) -> Weights:
    """Return copies of the weights and buffers, by name."""
    return {
        name.replace("_orig_mod.", ""): value.detach().clone()
        for name, value in model.state_dict().items()
        if value.is_floating_point()
    }


class Row:
    """One model with every feature.

    Args:
        name: Of the model.
        processes: Of the run: with several, under DDP.
    """

    def __init__(self, name: str, processes: int) -> None:
        self.name, self.processes = name, processes
        self.start = weights_of(make(name))
        self.plain = fit(make(name), None, processes)
        self.moved = largest_difference(self.plain, self.start)
        if not self.moved > 0.0:
            raise RuntimeError(f"{name} learns nothing by itself.")

    def cell(self, subject: Subject) -> str:
        """Return what the feature does to the model."""
        model = make(self.name)
        try:
            weights = fit(model, subject, self.processes)
            distance = largest_difference(weights, self.plain)
        except Exception as error:  # noqa: BLE001 - what a cell may raise is what is asked here
            return describe_error(error, model.begun)
        # Whether these add up in another order is measured anew, or up to the processor.
        if distance == 0.0 and subject.name not in ROUNDS:
            return "identical"
        if distance <= ROUNDING * self.moved:
            return "close"
        if subject.name in CHANGES.keys() | MORE_CHANGES.keys():
            finite = all(torch.isfinite(weights[name]).all() for name in _finite(self.plain))
            return "changed" if finite else "fails: the weights are not finite"
        return f"fails: it changes the weights; by {distance / self.moved:.2g} of the way"


def _finite(weights: Weights) -> list[str]:
    return [name for name, value in weights.items() if torch.isfinite(value).all()]


def run_row(name: str, wanted: Sequence[Subject], processes: int = 1) -> Cells:
    """Return the cells of a model by the label of the feature, in this process (of several)."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.chdir(folder)  # some write files of their own
        try:
            row = Row(name, processes)
            return {subject.label: row.cell(subject) for subject in wanted}
        finally:
            os.chdir(before)


def run_rows_on_ranks(names: Sequence[str]) -> dict[str, Cells]:
    """Return the cells of the strategies, two processes for all of them."""
    return launch(_rows_of_strategies, list(names), processes=2, timeout=300.0)[0]


def _rows_of_strategies(names: list[str]) -> dict[str, Cells]:
    return {name: run_row(name, subjects(2), processes=2) for name in names}


def content() -> dict[str, Any]:
    """Return the record: versions, and cells by model and by feature."""
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def read() -> dict[str, Cells]:
    """Return the recorded cells, by model and by feature."""
    rows: dict[str, Cells] = content()["rows"]
    return rows


def write(rows: dict[str, Cells]) -> None:
    """Record what was found, with the versions of the libraries."""
    from importlib.metadata import version

    names = ("torch", "lightning", "transformers", "peft", "diffusers", "torch_geometric")
    versions = {name: version(name).partition("+")[0] for name in names}
    FILE.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")


ON_RANKS = ("GPT-2", "Llama", "T5", "BERT", "ViT", "ConvNeXt", "UNet", "torch LSTM")
"""Models on which strategies are tried: those of which DDP reaches every parameter."""


def known_models() -> list[str]:
    """Return the names of the rows."""
    return list(MODELS)
