"""Real out-of-memory: trainings in processes of their own with a limited address space."""

import gc
import sys
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_opt as lo
from lightning_opt.core.exhaustion import is_out_of_memory
from lightning_opt.core.memory import MB, process_memory
from tests.helpers.processes import launch
from tests.helpers.trainers import quiet_trainer

WIDTH = 64


class Squander(torch.autograd.Function):
    """An identity that takes memory for each element while it passes, forward or backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: int, backward: int) -> Tensor:
        ctx.backward = backward
        torch.ones(x.numel() * forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        torch.ones(gradient.numel() * ctx.backward)
        return gradient, None, None


class Greedy(LightningModule):
    """Sequences of random lengths, and a peak of memory in one place of the step."""

    def __init__(self, seed: int, where: str) -> None:
        super().__init__()
        self.where = where
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += batch["id"].tolist()
        hidden = self.layers[:2](batch["x"])
        need = {"forward": (240, 0), "backward": (0, 240), "loss": (0, 0)}[self.where]
        hidden = Squander.apply(hidden, *need)
        if self.where == "loss":
            torch.ones(240 * hidden.numel())
        loss = self.layers[2](hidden).square().mean(dim=(1, 2)).mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.5)


def batches(seed: int) -> list[dict[str, Tensor]]:
    """Return batches of 8 to 24 samples, of lengths that differ by a factor of eight."""
    generator = torch.Generator().manual_seed(seed)
    found, number = [], 0
    for length in (16, 128, 32, 16, 64, 128, 16):
        count = int(torch.randint(8, 25, (), generator=generator))
        x = torch.randn(count, length, WIDTH, generator=generator)
        found.append({"id": torch.arange(number, number + count), "x": x})
        number += count
    return found


class Limit(Callback):
    """Limits the address space once a batch has warmed everything up."""

    def __init__(self, room: float) -> None:
        self.room = room

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        import resource

        if batch_idx == 0:
            gc.collect()
            limit = process_memory().virtual + int(self.room * MB)
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def train(seed: int, where: str, room: float | None, size: Any = None) -> dict[str, Any]:
    """Train under a limit of ``room`` MB more than what there is, and say how it ended."""
    warm_up = Greedy(seed, where)
    quiet_trainer(limit_train_batches=1).fit(warm_up, DataLoader(batches(seed), batch_size=None))
    model = Greedy(seed, where)
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
@pytest.mark.parametrize(
    ("seed", "where", "room"), [(0, "forward", 48.0), (1, "loss", 40.0), (3, "backward", 44.0)]
)
def test_survives_a_limit_that_kills_the_bare_run(seed, where, room):
    (bare,) = launch(train, seed, where, room, processes=1)
    assert bare["end"] != "completed"
    (free,) = launch(train, seed, where, None, processes=1)
    (run,) = launch(train, seed, where, room, "auto", processes=1)
    assert run["end"] == "completed"
    assert run["retries"] >= 1
    assert run["seen"] == free["seen"]  # none lost, none twice
    torch.testing.assert_close(run["weights"], free["weights"], rtol=0.0, atol=1e-6)
    assert run["loss"] == pytest.approx(free["loss"], rel=1e-5)


@pytest.mark.distributed
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs RLIMIT_AS")
def test_ends_with_one_clear_error_where_one_sample_does_not_fit():
    (run,) = launch(train, 0, "forward", 4.0, "auto", processes=1)
    assert "Even one sample does not fit" in run["end"]
