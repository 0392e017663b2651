"""Every shape of batch is trained exactly, or with a warning or an error before the first step."""

import functools
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

import lightning_opt as lo
from tests.batching.shapes import SHAPES, Shape, Step
from tests.helpers.trainers import quiet_trainer

PAGE = Path(__file__).parents[2] / "docs" / "batching" / "micro_batching.md"
SAMPLES = 32
COLUMNS: list[Callable[[Shape], tuple[Callback, int, int]]] = [
    lambda shape: (lo.MicroBatching(3, **shape.settings), 8, 10**9),
    lambda shape: (lo.MicroBatching("auto", **shape.settings), 8, 5),
    lambda shape: (lo.Accumulation(2, **accumulation(shape)), 16, 10**9),
]
"""For each column the callback, the batch that it stands for, and the most samples that fit."""


def accumulation(shape: Shape) -> dict[str, Any]:
    if "count" not in shape.settings:
        return {}
    return {"normalize": "tokens", "count": shape.settings["count"]}


def expected_outcomes() -> dict[str, list[str]]:
    table = PAGE.read_text().partition("| batch or step |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", table, re.MULTILINE)
    return {name: outcomes for name, *outcomes in rows}


class FirstStep(Callback):
    """Keeps the warnings before the first update."""

    def __init__(self, caught: list[Any]) -> None:
        self.caught = caught
        self.warnings: list[str] | None = None

    def on_before_optimizer_step(self, *args: Any) -> None:
        if self.warnings is None:
            self.warnings = ours(self.caught)


def ours(caught: list[Any]) -> list[str]:
    messages = [str(warning.message) for warning in caught]
    return [text for text in messages if text.startswith(("MicroBatching:", "Accumulation:"))]


def fit(shape: Shape, batch: int, *callbacks: Callback, fits: int = 10**9) -> tuple[Step, str]:
    """Return the trained model and the error, which begins with the step that it ends."""
    model, error = shape.step(fits), ""
    loader = DataLoader(shape.samples(SAMPLES), batch_size=batch, collate_fn=shape.collate)
    trainer = quiet_trainer(callbacks=list(callbacks))
    torch.manual_seed(4)
    try:
        trainer.fit(model, loader)
    except (RuntimeError, ValueError, MemoryError) as problem:
        error = f"{trainer.global_step}: {problem}"
    return model, error


def weights(model: Step) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@functools.lru_cache(2)
def weights_after_whole_batches(name: str, batch: int) -> torch.Tensor:
    return weights(fit(SHAPES[name], batch)[0])


def outcome(name: str, column: Any) -> str:
    """Return how a run differs from one with whole batches."""
    shape = SHAPES[name]
    callback, whole, fits = column(shape)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = FirstStep(caught)
        model, error = fit(shape, 8, callback, first, fits=fits)
        if first.warnings or (error.startswith("0") and ours(caught)):
            return "warned"
        if error:
            return "refused" if error.startswith("0") else "silent"
        late = ours(caught)
        expected = weights_after_whole_batches(name, whole)
    moved = expected - weights(shape.step())
    difference = (weights(model) - expected).norm() / moved.norm()
    return "silent" if difference > 1e-4 or late else "exact"


@pytest.mark.parametrize("name", SHAPES)
def test_outcomes_are_those_of_the_page(name):
    assert [outcome(name, column) for column in COLUMNS] == expected_outcomes()[name]


def test_page_lists_all_shapes():
    assert list(expected_outcomes()) == list(SHAPES)
    assert {word for row in expected_outcomes().values() for word in row} == {
        "exact",
        "warned",
        "refused",
    }
