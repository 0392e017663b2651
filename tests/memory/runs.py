"""Training an architecture with and without checkpointing, and comparing bit by bit."""

from typing import Any

import torch
from lightning.pytorch import Callback

from tests.helpers.models import weights_of
from tests.helpers.trainers import quiet_trainer
from tests.memory.architectures import ARCHITECTURES, Architecture


def train(name: str, callback: Callback | None, **settings: Any) -> Architecture:
    """Train for three steps and validate, from a fixed seed; store a draw of the generator."""
    torch.manual_seed(5)
    model = ARCHITECTURES[name]()
    torch.manual_seed(6)
    settings = {"limit_val_batches": 1, **settings}
    quiet_trainer(callbacks=[] if callback is None else [callback], **settings).fit(model)
    model.drawn = torch.rand(3)
    return model


def evidence(model: Architecture) -> dict[str, Any]:
    """Return gradients, state and random numbers, which checkpointing must not change."""
    return {"gradients": model.gradients, "state": weights_of(model), "drawn": model.drawn}


def assert_identical(actual: Architecture, expected: Architecture) -> None:
    """Compare gradients of each backward pass, weights, buffers and random numbers bit by bit."""
    assert actual.gradients
    torch.testing.assert_close(evidence(actual), evidence(expected), rtol=0.0, atol=0.0)
