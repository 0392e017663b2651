"""All planted faults are found, and the guarded run equals a run without the bad batches."""

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import lightning_opt as lo
from tests.gradients.faulty import FaultyNet, Lion
from tests.helpers.models import assert_same_weights
from tests.helpers.trainers import quiet_trainer

STEPS = 120


class LogGate(nn.Module):
    """Scales by the logarithm of positive values."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * (inputs.abs().mean(dim=-1, keepdim=True) + 1).log()


class UnsafeLogGate(LogGate):
    """A ``LogGate`` that takes the logarithm of negative values."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * (inputs.mean(dim=-1, keepdim=True) - 10).log()


class Classifier(LightningModule):
    """A network on synthetic data with planted faults.

    Args:
        network: ``"transformer"`` or ``"convnet"``.
        faults: The fault of each batch number: ``"corrupt"`` (NaN in the data), ``"log"`` (the
            logarithm of a negative number), ``"overflow"`` (activations beyond float16 or
            float32), ``"spike"`` (the loss a thousand times too large) or ``"weight"`` (a weight
            turns NaN, as a flipped bit would make it).
        leave_out: Batches that are missing.
    """

    def __init__(self, network: str, faults: dict[int, str], leave_out: Any = ()) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.faults, self.leave_out = faults, set(leave_out)
        self.images = network == "convnet"
        self.gate, self.unsafe_gate = LogGate(), UnsafeLogGate()
        if self.images:
            self.body: nn.Module = nn.Sequential(
                nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
                nn.Flatten(), nn.Linear(256, 16), nn.ReLU(),
            )  # fmt: skip
            width = 16
        else:
            layer = nn.TransformerEncoderLayer(
                32, 4, 64, dropout=0.0, batch_first=True, norm_first=True
            )
            self.embedding = nn.Linear(8, 32)
            self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            width = 32
        self.head = nn.Linear(width, 4)
        self.centres = torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(5))

    def make_batch(self, number: int, rows: int = 32) -> tuple[int, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 + number)
        labels = torch.randint(4, (rows,), generator=generator)
        inputs = self.centres[labels] + 0.5 * torch.randn(rows, 8, 8, generator=generator)
        # One label in five is random, so that the loss converges to a level above 0.
        anew = torch.rand(rows, generator=generator) < 0.2
        labels = torch.where(anew, torch.randint(4, (rows,), generator=generator), labels)
        return number, inputs, labels

    def logits(self, inputs: Tensor, fault: str | None = None) -> Tensor:
        if self.images:
            hidden = self.body(inputs[:, None])
        else:
            hidden = self.body(self.embedding(inputs)).mean(1)
        hidden = (self.unsafe_gate if fault == "log" else self.gate)(hidden)
        if fault == "overflow":
            hidden = hidden * 1e30 * 1e30
        return self.head(hidden)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        number, inputs, labels = batch
        # A schedule by batch number does not depend on missing batches.
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = 6e-3 * (1 - number / STEPS)
        fault = self.faults.get(number)
        if fault == "corrupt":
            inputs = inputs.clone()
            inputs[3, 2, 1] = float("nan")
        if fault == "weight":
            with torch.no_grad():
                self.head.weight[1, 2] = float("nan")
        loss = nn.functional.cross_entropy(self.logits(inputs, fault), labels)
        return 1000 * loss if fault == "spike" else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> Any:
        return DataLoader(Stream(self), batch_size=None)

    @torch.no_grad()
    def evaluate(self) -> float:
        self.eval()
        losses = [
            nn.functional.cross_entropy(self.logits(inputs), labels).item()
            for _, inputs, labels in (self.make_batch(number, 200) for number in range(9000, 9010))
        ]
        return sum(losses) / len(losses)


class Stream(IterableDataset[Any]):
    def __init__(self, model: Classifier) -> None:
        self.model = model

    def __iter__(self) -> Iterator[Any]:
        return (
            self.model.make_batch(number)
            for number in range(STEPS)
            if number not in self.model.leave_out
        )


def train(model: Any, *callbacks: Any, **settings: Any) -> Any:
    quiet_trainer(callbacks=list(callbacks), **settings).fit(model)
    return model


def plant(seed: int, kinds: list[str], first: int = 30) -> dict[int, str]:
    """Return each kind of fault twice, at random steps."""
    wanted = [*kinds, *kinds]
    return dict(
        zip(random.Random(seed).sample(range(first, STEPS), len(wanted)), wanted, strict=True)
    )


@pytest.mark.parametrize("network", ["transformer", "convnet"])
class TestWholeRuns:
    def test_skipped_faults_leave_no_trace(self, network: str) -> None:
        faults = plant(1, ["corrupt", "log", "overflow", "spike"])
        guard = lo.NonFiniteGuard(spike=6.0)
        guarded = train(Classifier(network, faults), guard)
        assert {event["batch_idx"]: event["kind"] for event in guard.events} == {
            number: "loss_spike" if kind == "spike" else "nonfinite_loss"
            for number, kind in sorted(faults.items())
        }
        clean = train(Classifier(network, {}, leave_out=faults))
        assert_same_weights(guarded, clean)
        assert clean.evaluate() < 0.7 * math.log(4)

    def test_nan_weight_is_rolled_back(self, network: str) -> None:
        faults = plant(2, ["corrupt", "weight"])
        guard = lo.NonFiniteGuard("rollback", snapshot_every_n_steps=10)
        guarded = train(Classifier(network, faults), guard)
        assert {event["batch_idx"]: event["kind"] for event in guard.events} == {
            number: "nonfinite_weight" if kind == "weight" else "nonfinite_loss"
            for number, kind in sorted(faults.items())
        }
        assert all(
            event["parameters"] == ["head.weight"]
            for event in guard.events
            if event["kind"] == "nonfinite_weight"
        )
        # The batches between snapshot and fault are lost in both runs.
        lost = undone_batches(faults, every=10)
        clean = train(Classifier(network, {}, leave_out=lost))
        assert guarded.evaluate() == pytest.approx(clean.evaluate(), rel=0.02)
        whole = train(Classifier(network, {}, leave_out=faults))
        assert guarded.evaluate() == pytest.approx(whole.evaluate(), rel=0.02)

    def test_overflows_of_the_loss_scaler_are_not_faults(self, network: str) -> None:
        """The growing loss scale overflows gradients, and some data overflows the loss."""

        def precision() -> MixedPrecision:
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=10)
            return MixedPrecision("16-mixed", "cpu", scaler)

        faults = plant(3, ["corrupt", "overflow"])
        guard = lo.NonFiniteGuard()
        guarded = train(Classifier(network, faults), guard, plugins=precision())
        assert [event["batch_idx"] for event in guard.events] == sorted(faults)
        assert int(guard.report().notes[-1].split("overflows ")[1].split(",")[0]) >= 2
        clean = train(Classifier(network, {}, leave_out=faults), plugins=precision())
        # The scaler halves its scale at faults as well, so rounding differs.
        assert guarded.evaluate() == pytest.approx(clean.evaluate(), rel=0.02)


def undone_batches(faults: dict[int, str], every: int) -> set[int]:
    """Return the batches that do not contribute to the weights."""
    lost, since_snapshot = set(), []
    for number in range(STEPS):
        kind = faults.get(number)
        if kind == "weight":
            lost |= {number, *since_snapshot}
            since_snapshot = []
        elif kind is not None:
            lost.add(number)
        else:
            since_snapshot.append(number)
            if len(since_snapshot) == every:
                since_snapshot = []
    return lost


KINDS = {
    "nan": "nonfinite_loss",
    "log": "nonfinite_loss",
    "inf": "nonfinite_loss",
    "root": "nonfinite_gradient",
}


@pytest.mark.parametrize("chunk", range(10))
def test_random_faults_leave_no_trace(chunk: int) -> None:
    """Bit-identical to a run without the bad windows, for random combinations."""
    for seed in range(20 * chunk, 20 * chunk + 20):
        draw = random.Random(seed)
        window = draw.choice([1, 1, 2, 4])
        optimizer, settings = draw.choice(
            [
                (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "fused": draw.random() < 0.5}),
                (torch.optim.AdamW, {"lr": 0.01, "fused": draw.random() < 0.5}),
                (torch.optim.RMSprop, {"lr": 1e-3}),
                (torch.optim.NAdam, {"lr": 0.01}),
                (Lion, {"lr": 0.01}),
            ]
        )
        numbers = draw.sample(range(24), draw.randint(1, 5))
        faults = {number: draw.choice(list(KINDS)) for number in sorted(numbers)}
        guard = lo.NonFiniteGuard(max_consecutive=100, lr_backoff=1.0)
        accumulation = {"accumulate_grad_batches": window}
        guarded = train(FaultyNet(faults, optimizer, settings, batches=24), guard, **accumulation)
        bad_windows = {number // window for number in faults}
        lost = [number for number in range(24) if number // window in bad_windows]
        clean = train(
            FaultyNet({}, optimizer, settings, batches=24, leave_out=lost), **accumulation
        )
        assert_same_weights(guarded, clean)
        assert [event["step"] for event in guard.events] == sorted(bad_windows), seed
        for event in guard.events:
            inside = {n: k for n, k in faults.items() if n // window == event["step"]}
            in_loss = [n for n, kind in inside.items() if KINDS[kind] == "nonfinite_loss"]
            if in_loss:
                assert (event["kind"], event["batch_idx"]) == ("nonfinite_loss", in_loss[0])
            else:
                assert event["kind"] == "nonfinite_gradient"
                assert event["parameters"] == ["head.bias"]
