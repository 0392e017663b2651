"""Compares accumulated gradients with float64 gradients of the whole window."""

import copy
from collections import UserDict
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.rank_zero import WarningCache
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
)
from lightning.pytorch.loops.optimization.automatic import Closure
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lightning_opt as lo
from lightning_opt.batching.accumulation.counting import batches_for
from tests.batching.nets import SharpnessAware
from tests.helpers.models import (
    AdversarialNet,
    SmallNet,
    assert_same_weights,
    load_changed_state,
)
from tests.helpers.trainers import GradientSpy, MemoryLogger, loss_scaling, quiet_trainer

FEATURES = 5


class Texts(Dataset[Any]):
    """Sequences of different lengths, padded to the longest."""

    def __init__(self, count: int, longest: int = 7) -> None:
        generator = torch.Generator().manual_seed(11)
        self.x = torch.randn(count, longest, FEATURES, generator=generator)
        self.y = torch.randn(count, longest, generator=generator)
        lengths = torch.randint(1, longest + 1, (count, 1), generator=generator)
        self.mask = torch.arange(longest) < lengths

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"id": torch.tensor(index), **{k: v[index] for k, v in self.fields().items()}}

    def fields(self) -> dict[str, Tensor]:
        return {"x": self.x, "y": self.y, "mask": self.mask}


def count_tokens(batch: dict[str, Tensor]) -> Tensor:
    return batch["mask"].sum()


class TextNet(LightningModule):
    """The loss is a mean over samples, or over tokens."""

    def __init__(self, per: str = "samples") -> None:
        super().__init__()
        self.per = per
        torch.manual_seed(2)
        self.layers = nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, 1))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        dtype = next(self.parameters()).dtype
        errors = (self.layers(batch["x"].to(dtype)).squeeze(2) - batch["y"].to(dtype)).square()
        if self.per == "tokens":
            return errors[batch["mask"]].mean()
        return errors.mean(dim=1).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Windows(Callback):
    """Records the samples of each optimizer step."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self.open: list[int] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.open += batch["id"].tolist()
        if trainer.global_step > len(self.steps):
            self.steps.append(self.open)
            self.open = []


def reference(model: TextNet, data: Texts, steps: list[list[int]]) -> dict[str, Tensor]:
    model = copy.deepcopy(model).double()
    optimizer = model.configure_optimizers()
    for ids in steps:
        optimizer.zero_grad()
        model.loss({name: value[ids] for name, value in data.fields().items()}).backward()
        optimizer.step()
    return model.state_dict()


def train(
    callback: lo.Accumulation | None, per: str = "samples", count: int = 29, **settings: Any
) -> tuple[TextNet, list[list[int]], MemoryLogger]:
    model, windows, logger = TextNet(per), Windows(), MemoryLogger()
    callbacks: list[Any] = [*([] if callback is None else [callback]), windows]
    callbacks += settings.pop("callbacks", [])
    trainer = quiet_trainer(
        **{"max_epochs": 3, "logger": logger, **settings},
        callbacks=callbacks,
    )
    trainer.fit(model, DataLoader(Texts(count), batch_size=4))
    assert not windows.open
    return model, windows.steps, logger


def max_difference(model: TextNet, expected: dict[str, Tensor]) -> float:
    return max(float((p.double() - expected[n]).abs().max()) for n, p in model.state_dict().items())


class Unfreeze(Callback):
    """Gives the optimizer the parameters of the first layer after the first step."""

    def on_fit_start(self, trainer, pl_module):
        [group] = trainer.optimizers[0].param_groups
        self.later, group["params"] = group["params"][:2], group["params"][2:]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if len(trainer.optimizers[0].param_groups) == 1 and trainer.global_step == 1:
            trainer.optimizers[0].add_param_group({"params": self.later})


def test_parameters_added_to_the_optimizer_are_averaged():
    """The last window of an epoch has a batch of four samples and one of one."""
    model, steps, _ = train(lo.Accumulation(3), callbacks=[Unfreeze()], max_epochs=1)
    expected = TextNet().double()
    first, rest = list(expected.layers[0].parameters()), list(expected.layers[2].parameters())
    optimizer, data = torch.optim.SGD(rest, lr=0.05, momentum=0.9), Texts(29)
    for ids in steps:
        expected.zero_grad()
        expected.loss({name: value[ids] for name, value in data.fields().items()}).backward()
        optimizer.step()
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": first})
    assert max_difference(model, expected.state_dict()) < 1e-6


def test_outputs_have_the_loss_of_their_own_batch():
    class Losses(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen.append(float(outputs["loss"]) * trainer.accumulate_grad_batches)
            logged.append(float(trainer.callback_metrics["loss"]))

    seen, logged = list[float](), list[float]()
    train(lo.Accumulation(3), callbacks=[Losses()], max_epochs=1)
    assert len(seen) == 8
    assert seen == pytest.approx(logged)


@pytest.mark.parametrize("per", ["samples", "tokens"])
@pytest.mark.parametrize("batches", [1, 3])
def test_weights_equal_training_on_whole_windows_in_float64(per, batches):
    """29 samples in batches of 4: the last batch of an epoch has 1, the last window 2 batches."""
    count = count_tokens if per == "tokens" else None
    model, steps, _ = train(lo.Accumulation(batches, normalize=per, count=count), per)
    assert [len(ids) for ids in steps[:3]] == ([4, 4, 4] if batches == 1 else [12, 12, 5])
    assert max_difference(model, reference(TextNet(per), Texts(29), steps)) < 1e-6


def test_short_window_averages_over_its_own_batches():
    """Two batches of equal size in windows of three: Lightning divides by three."""
    model, steps, _ = train(lo.Accumulation(3, normalize="batches"), count=20)
    assert [len(ids) for ids in steps] == [12, 8] * 3
    assert max_difference(model, reference(TextNet(), Texts(20), steps)) < 1e-6


def test_equal_batches_give_weights_bit_identical_to_lightning():
    model, steps, _ = train(lo.Accumulation(), count=24, accumulate_grad_batches=3)
    other, expected, _ = train(None, count=24, accumulate_grad_batches=3)
    assert steps == expected
    assert_same_weights(model, other)


def test_schedule_changes_windows_within_an_epoch():
    callback = lo.Accumulation(UserDict({"0": 1, "9": 2, "10": 4}))  # keys as from a YAML file
    model, steps, logger = train(callback, count=61, max_epochs=2)
    sizes = [len(ids) for ids in steps]
    # 16 batches per epoch, the last with one sample.
    assert sizes == [4] * 9 + [8, 16, 1, 16, 16, 16, 13]
    assert max_difference(model, reference(TextNet(), Texts(61), steps)) < 1e-6
    assert logger.series("accumulation/batches") == [2, 4]


def test_effective_batch_sets_window_length_and_estimated_steps():
    estimates = []

    class Planning(TextNet):
        def configure_optimizers(self) -> Any:
            estimates.append(self.trainer.estimated_stepping_batches)
            return super().configure_optimizers()

    model, windows = Planning(), Windows()
    trainer = quiet_trainer(callbacks=[lo.Accumulation(effective_batch=12), windows], max_epochs=2)
    trainer.fit(model, DataLoader(Texts(29), batch_size=4))
    assert [len(ids) for ids in windows.steps] == [12, 12, 5] * 2
    assert estimates == [6] == [trainer.global_step]
    assert trainer.accumulate_grad_batches == 1  # restored


def test_rounding_of_effective_batch_warns():
    with pytest.warns(UserWarning, match="not a multiple of the 4 samples"):
        _, steps, _ = train(lo.Accumulation(effective_batch=11))
    assert len(steps[0]) == 12
    assert batches_for(24, DataLoader(Texts(29), batch_size=4), ranks=3) == 2


def test_micro_batches_keep_the_gradient_of_the_window():
    model, steps, _ = train(lo.Accumulation(3), callbacks=[lo.MicroBatching(3)])
    assert max_difference(model, reference(TextNet(), Texts(29), steps)) < 1e-6
    callback = lo.Accumulation(3, normalize="tokens", count=count_tokens)
    micro = lo.MicroBatching(1, loss="mean_over_tokens", count=count_tokens)
    model, steps, _ = train(callback, "tokens", callbacks=[micro])
    assert max_difference(model, reference(TextNet("tokens"), Texts(29), steps)) < 1e-6


@pytest.mark.parametrize("first", [True, False])
def test_later_hooks_see_averaged_gradients(first):
    spy, callback = GradientSpy(), lo.Accumulation(3)
    model, windows = TextNet(), Windows()
    callbacks = [callback, spy] if first else [spy, callback]
    quiet_trainer(callbacks=[*callbacks, windows]).fit(model, DataLoader(Texts(29), batch_size=4))
    fresh = TextNet().double()
    fresh.loss({k: v[windows.steps[0]] for k, v in Texts(29).fields().items()}).backward()
    norm = torch.cat([p.grad.flatten() for p in fresh.parameters()]).norm().item()
    assert spy.norms[0][0] == pytest.approx(norm, rel=1e-5)


def test_gradients_are_averaged_if_the_last_loss_is_none(monkeypatch):
    monkeypatch.setattr(Closure, "warning_cache", WarningCache())  # warns once per process

    class Skips(TextNet):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 2 else loss  # the last of the first window

    model = Skips()
    trainer = quiet_trainer(callbacks=[lo.Accumulation(3)], limit_train_batches=3)
    with pytest.warns(UserWarning, match="returned `None`"):
        trainer.fit(model, DataLoader(Texts(29), batch_size=4))
    assert max_difference(model, reference(TextNet(), Texts(29), [list(range(8))])) < 1e-6


def test_loss_scaler_does_not_change_gradients():
    spies = [GradientSpy(), GradientSpy()]
    for spy, plugins in zip(spies, ([], [loss_scaling(1024.0)]), strict=True):
        train(lo.Accumulation(3), callbacks=[spy], plugins=plugins, max_epochs=1)
    assert spies[1].norms[0] == pytest.approx(spies[0].norms[0], rel=0.02)


class Sharp(TextNet):
    def configure_optimizers(self) -> Any:
        return SharpnessAware(self.parameters(), lr=0.05)


def test_gradients_are_averaged_once_per_evaluation_of_the_closure():
    nets = [Sharp(), Sharp()]
    for net, callbacks in zip(nets, ([], [lo.Accumulation()]), strict=True):
        quiet_trainer(callbacks=callbacks).fit(net, DataLoader(Texts(24), batch_size=4))
    assert_same_weights(nets[1], nets[0])
    with pytest.raises(RuntimeError, match="evaluates the loss several times"):
        quiet_trainer(callbacks=[lo.Accumulation(2)]).fit(Sharp(), DataLoader(Texts(24), 4))


def test_every_value_within_a_window_is_loaded():
    """That resumed runs continue is a contract of all callbacks."""

    class Look(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 4:
                loaded.append(lo.Accumulation(3))
                loaded[-1].load_state_dict(trainer.callbacks[0].state_dict())
                load_changed_state(loaded[-1])

    loaded: list[lo.Accumulation] = []
    train(lo.Accumulation(3), callbacks=[Look()])
    assert loaded


@pytest.mark.filterwarnings("ignore:Accumulation. BatchNorm")
def test_schedule_is_ignored_in_the_last_epoch_of_weight_averaging():
    """That epoch only measures BatchNorm's statistics and must not step once per window."""

    class Normalized(TextNet):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(1)

        def loss(self, batch: dict[str, Tensor]) -> Tensor:
            outputs = self.norm(self.layers(batch["x"]).transpose(1, 2)).squeeze(1)
            return (outputs - batch["y"]).square().mean()

    results = []
    for scheduled in (True, False):
        net, callbacks = Normalized(), [StochasticWeightAveraging(0.05, swa_epoch_start=2)]
        if scheduled:
            callbacks.append(lo.Accumulation(2))
        settings = {} if scheduled else {"accumulate_grad_batches": 2}
        trainer = quiet_trainer(callbacks=callbacks, max_epochs=3, **settings)
        trainer.fit(net, DataLoader(Texts(24), batch_size=4))
        results.append((net, trainer.global_step))
    assert_same_weights(results[0][0], results[1][0])
    assert results[0][1] == results[1][1] == 3 * 3 + 1  # Lightning counts one step without effect


class HolderNet(TextNet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch.batch)


@pytest.mark.filterwarnings("ignore:Accumulation. it was not possible to check")
def test_uncountable_batch_raises_with_advice():
    class Holder:
        def __init__(self, batch: Any) -> None:
            self.batch = batch

    batches = [Holder(batch) for batch in DataLoader(Texts(8), batch_size=4)]
    loader = DataLoader(batches, batch_size=None)
    with pytest.raises(lo.UnsplittableBatchError, match="Accumulation\\(count="):
        quiet_trainer(callbacks=[lo.Accumulation(count=None)]).fit(HolderNet(), loader)
    counted = lo.Accumulation(count=lambda batch: len(batch.batch["x"]))
    quiet_trainer(callbacks=[counted]).fit(HolderNet(), loader)


def test_negative_count_raises():
    with pytest.raises(ValueError, match="negative"):
        quiet_trainer(callbacks=[lo.Accumulation(2, count=lambda batch: -1)]).fit(SmallNet())


def test_incompatible_settings_raise():
    for settings, words in (
        ({"schedule": 2, "effective_batch": 8}, "not both"),
        ({"normalize": "rows"}, "normalize must be one of"),
        ({"schedule": 2, "normalize": "batches", "count": len}, "has no use"),
        ({"normalize": "tokens"}, "needs count"),
        ({"schedule": {}}, "schedule"),
        ({"schedule": 0}, "schedule"),
    ):
        with pytest.raises(ValueError, match=words):
            lo.Accumulation(**settings)
    scheduler = GradientAccumulationScheduler({0: 2})
    for net, callbacks, settings, words in (
        (AdversarialNet(), [lo.Accumulation()], {}, "GradientAccumulator"),
        (SmallNet(), [lo.Accumulation(2)], {"accumulate_grad_batches": 2}, "both set the number"),
        (SmallNet(), [scheduler, lo.Accumulation(2)], {}, "both set the number"),
        (SmallNet("LBFGS"), [lo.Accumulation()], {}, "LBFGS"),
    ):
        with pytest.raises(ValueError, match=words):
            quiet_trainer(callbacks=callbacks, **settings).fit(net)


# --- hand-written loops -------------------------------------------------------------------------


def test_accumulator_gradient_equals_the_whole_batch():
    data, model = Texts(20), TextNet("tokens")
    accumulator = lo.GradientAccumulator(model)
    for _ in range(2):  # windows
        model.zero_grad()
        for ids in (range(9), range(9, 10), range(10, 20)):
            batch = {name: value[list(ids)] for name, value in data.fields().items()}
            accumulator.backward(model.loss(batch), weight=count_tokens(batch))
        assert float(accumulator.average()) == float(data.mask.sum())
    whole = copy.deepcopy(model).double()
    whole.zero_grad()
    whole.loss(data.fields()).backward()
    for parameter, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.double(), other.grad, rtol=0.0, atol=1e-6)


def test_accumulator_sums_low_precision_in_float32():
    """In bfloat16 alone, a sum of a thousand gradients of 0.1 stops growing early."""
    weight = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    module = nn.Module()
    module.weight = weight
    accumulator = lo.GradientAccumulator(module)
    gradient = torch.tensor([0.1, 1.0, 3.0], dtype=torch.bfloat16)
    for _ in range(1000):
        accumulator.backward((weight * gradient).sum())
    accumulator.average()
    assert weight.grad.dtype is torch.bfloat16
    torch.testing.assert_close(weight.grad, gradient, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accumulator_resume_is_bit_identical(dtype):
    def run(stop: bool) -> list[Tensor]:
        torch.manual_seed(0)
        module = nn.Linear(4, 2).to(dtype)
        accumulator, batches = lo.GradientAccumulator(module), torch.randn(5, 3, 4).to(dtype)
        for number, batch in enumerate(batches):
            if stop and number == 3:
                state = accumulator.state_dict()
                accumulator.backward(module(batch).sum())  # does not change the state
                module.zero_grad()
                accumulator = lo.GradientAccumulator(module)
                accumulator.load_state_dict(state)
                load_changed_state(accumulator)
                accumulator.load_state_dict(state)
            accumulator.backward(module(batch).square().mean(), weight=1 + number)
        accumulator.average()
        assert not accumulator.state_dict()["gradients"]  # the next window starts from zero
        return [parameter.grad.clone() for parameter in module.parameters()]

    for a, b in zip(run(True), run(False), strict=True):
        assert torch.equal(a, b)


def test_accumulator_gradients_stay_finite_if_tensor_weights_sum_to_zero():
    module = nn.Linear(2, 1)
    accumulator = lo.GradientAccumulator(module)
    accumulator.backward(module(torch.ones(1, 2)).mean(), weight=torch.tensor(0.0))
    assert accumulator.average() == 0.0
    assert not module.weight.grad.any()


def test_accumulator_wrong_arguments_raise():
    with pytest.raises(ValueError, match="dtype"):
        lo.GradientAccumulator(nn.Linear(2, 2), dtype=torch.bfloat16)
    accumulator = lo.GradientAccumulator(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="nothing to average"):
        accumulator.average()
    with pytest.raises(ValueError, match="negative"):
        accumulator.backward(torch.ones(()), weight=-1)
