"""Real out-of-memory: runs in their own processes with a limited address space."""

import sys
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_opt as lo
from benchmarks.batching.hog import Limit, Sequences
from lightning_opt.core.measure.exhaustion import is_out_of_memory
from tests.helpers.processes import launch
from tests.helpers.trainers import quiet_trainer


def batches(seed: int) -> list[dict[str, Tensor]]:
    """Return batches of 8 to 24 samples, of lengths that differ by a factor of eight."""
    generator = torch.Generator().manual_seed(seed)
    found, number = [], 0
    for length in (16, 128, 32, 16, 64, 128, 16):
        count = int(torch.randint(8, 25, (), generator=generator))
        x = torch.randn(count, length, 64, generator=generator)
        found.append({"id": torch.arange(number, number + count), "x": x})
        number += count
    return found


def train(seed: int, where: str, room: float | None, size: Any = None) -> dict[str, Any]:
    """Train with ``room`` MB of memory more than in use, and return how the run ended."""
    warm_up = Sequences(batches(seed), where, 240)
    quiet_trainer(limit_train_batches=1).fit(warm_up, DataLoader(batches(seed), batch_size=None))
    model = Sequences(batches(seed), where, 240)
    callbacks: list[Callback] = [] if room is None else [Limit(room)]
    micro = None
    if size is not None:
        micro = lo.MicroBatching(size)
        callbacks.append(micro)
    trainer = quiet_trainer(callbacks=callbacks, accumulate_grad_batches=1 + seed % 2)
    end = "completed"
    try:
        trainer.fit(model, DataLoader(batches(seed), batch_size=None))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        end = str(error)
    return {
        "end": end,
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "seen": sorted(model.seen),
        "loss": float(trainer.callback_metrics.get("loss", 0.0)),
        "retries": 0 if micro is None else micro.state_dict()["retries"],
    }


@pytest.mark.distributed
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs RLIMIT_AS")
@pytest.mark.parametrize(("seed", "where", "room"), [(0, "forward", 48.0), (3, "backward", 44.0)])
def test_run_survives_a_limit_that_ends_the_bare_run(seed, where, room):
    (bare,) = launch(train, seed, where, room, processes=1)
    assert bare["end"] != "completed"
    free = train(seed, where, None)
    (run,) = launch(train, seed, where, room, "auto", processes=1)
    assert run["end"] == "completed"
    assert run["retries"] >= 1
    assert run["seen"] == free["seen"]  # each once
    torch.testing.assert_close(run["weights"], free["weights"], rtol=0.0, atol=1e-6)
    assert run["loss"] == pytest.approx(free["loss"], rel=1e-5)
