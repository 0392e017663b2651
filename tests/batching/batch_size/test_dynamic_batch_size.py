"""Batch sizes that change between epochs: each sample once per epoch, everything restored."""

import functools
import math
import operator
import sys
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler

import lightning_opt as lo
from lightning_opt.batching import peaks
from lightning_opt.core.measure.memory import Usage, resident_memory
from tests.helpers.models import SmallNet, assert_same_weights
from tests.helpers.processes import launch
from tests.helpers.trainers import MemoryLogger, quiet_trainer

PLENTY = 10.0**6
TINY = 1.0
"""MB of a budget that everything fits, and of one that nothing fits."""


class Numbered(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.x = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, self.x[index]


class Net(LightningModule):
    """Records the samples of each epoch, batch by batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.epochs: list[list[list[int]]] = []
        self.validated: list[int] = []
        self.rates: list[float] = []

    def on_train_epoch_start(self) -> None:
        self.epochs.append([])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, x = batch
        self.epochs[-1].append(ids.tolist())
        return self.layer(x).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    @property
    def sizes(self) -> list[int]:
        return [len(epoch[0]) for epoch in self.epochs]


class Validated(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.validated.append(len(batch[0]))


def loader_of(count: int = 60, size: int = 5, **settings: Any) -> DataLoader[Any]:
    return DataLoader(Numbered(count), **{"batch_size": size, "shuffle": True, **settings})


def check_epochs(net: Net, count: int = 60) -> None:
    """Check that each epoch has each sample once, and that only its last batch is shorter."""
    for epoch in net.epochs:
        assert sorted(functools.reduce(operator.iadd, epoch, [])) == list(range(count))
        assert len({len(batch) for batch in epoch[:-1]}) <= 1


class FromHooks(Net):
    def train_dataloader(self) -> Any:
        return loader_of()


class Data(LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader_of()


class ByAttribute(BatchSampler):
    """A user's batch sampler, which reads its attribute."""

    def __init__(self, count: int, batch_size: int) -> None:
        super().__init__(RandomSampler(range(count)), batch_size, drop_last=False)


def sources() -> dict[str, Any]:
    sampler = DataLoader(Numbered(60), batch_sampler=ByAttribute(60, 5))
    workers = loader_of(num_workers=1, persistent_workers=True)
    return {
        "loader": (Net(), {"train_dataloaders": loader_of()}),
        "hook": (FromHooks(), {}),
        "datamodule": (Net(), {"datamodule": Data()}),
        "batch sampler": (Net(), {"train_dataloaders": sampler}),
        "workers": (Net(), {"train_dataloaders": workers}),
    }


@pytest.mark.parametrize("source", list(sources()))
def test_size_grows_between_epochs_with_each_sample_once(source):
    net, data = sources()[source]
    loader = data.get("train_dataloaders")
    logger = MemoryLogger()
    callback = lo.DynamicBatchSize(budget_mb=PLENTY, grow=1.5, max_size=12, scale_lr="sqrt")
    trainer = quiet_trainer(callbacks=[callback], max_epochs=5, logger=logger)
    trainer.fit(net, **data)
    check_epochs(net)
    assert net.sizes == [5, 7, 10, 12, 12]
    assert callback.size == 12
    assert logger.series("batch_size/size") == [7, 10, 12]
    assert [row["to"] for row in callback.report().rows] == [7, 10, 12]
    assert trainer.reload_dataloaders_every_n_epochs == 0
    if loader is not None:  # the user's, restored
        assert loader.batch_sampler.batch_size == 5
        assert loader.batch_size == (None if source == "batch sampler" else 5)


def test_size_that_was_too_large_is_not_used_again():
    net = Net()
    callback = lo.DynamicBatchSize(budget_mb=TINY, scale_lr="sqrt")
    quiet_trainer(callbacks=[callback], max_epochs=5).fit(net, loader_of(size=20))
    check_epochs(net)
    assert net.sizes[0] == 20
    assert net.sizes[1] <= 16  # by the factor or to the predicted size
    assert net.sizes == sorted(net.sizes, reverse=True)
    assert callback.state_dict()["ceiling"] == net.sizes[-1]


def test_samples_and_validation_interval_limit_growth():
    net = FromHooks()
    callback = lo.DynamicBatchSize(budget_mb=PLENTY, grow=100.0, scale_lr="sqrt")
    quiet_trainer(callbacks=[callback], max_epochs=3).fit(net, loader_of(drop_last=True))
    assert net.sizes == [5, 60, 60]
    net = Validated()
    callback = lo.DynamicBatchSize(budget_mb=PLENTY, grow=100.0, scale_lr="sqrt")
    trainer = quiet_trainer(callbacks=[callback], max_epochs=3, val_check_interval=4)
    trainer.fit(net, loader_of(), loader_of(10, shuffle=False))
    assert net.sizes == [5, 15, 15]
    check_epochs(net)


def test_validation_keeps_its_batch_size():
    net = Validated()
    callback = lo.DynamicBatchSize(budget_mb=PLENTY, grow=2.0, max_size=20, scale_lr="sqrt")
    quiet_trainer(callbacks=[callback], max_epochs=3, num_sanity_val_steps=1).fit(
        net, loader_of(), loader_of(40, size=3, shuffle=False)
    )
    assert net.sizes == [5, 10, 20]
    assert net.validated == [3, 3, 3, 3]


@pytest.mark.parametrize(
    ("accumulate", "budget", "sizes"),
    [(1, PLENTY, [6, 6, 6]), (3, PLENTY, [6, 9, 18]), (1, TINY, [6, 3, 2])],  # at most
)
def test_step_keeps_its_initial_samples(accumulate, budget, sizes):
    net = Net()
    callback = lo.DynamicBatchSize(budget_mb=budget, grow=2.0)
    trainer = quiet_trainer(callbacks=[callback], max_epochs=3, accumulate_grad_batches=accumulate)
    trainer.fit(net, loader_of(36, size=6))
    check_epochs(net, 36)
    if budget == TINY:  # the step down depends on other memory of the process
        assert all(size <= most for size, most in zip(net.sizes, sizes, strict=True))
    else:
        assert net.sizes[:2] == sizes[:2]
        assert net.sizes[2] <= sizes[2]
    assert trainer.global_step == 3 * 36 // (6 * accumulate)
    assert trainer.accumulate_grad_batches == accumulate


def test_step_keeps_the_effective_batch():
    steps: list[int] = []

    class Count(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            steps.append(trainer.global_step)

    net = Net()
    callback = lo.DynamicBatchSize(budget_mb=PLENTY, grow=1.2, keep_effective=20)
    trainer = quiet_trainer(callbacks=[callback, Count()], max_epochs=4)
    trainer.fit(net, loader_of(size=3))
    check_epochs(net)
    assert net.sizes == [2, 4, 5, 10]  # divisors of 20, from below 3 on
    assert trainer.global_step == 4 * 3
    assert trainer.accumulate_grad_batches == 1  # restored
    assert steps[29] == 3  # 30 batches of 2 made 3 steps


def test_accumulation_averages_exactly_at_all_sizes():
    net = Net()
    torch.manual_seed(0)
    start = {name: value.double() for name, value in net.state_dict().items()}
    callbacks = [lo.DynamicBatchSize(budget_mb=PLENTY, keep_effective=20), lo.Accumulation()]
    quiet_trainer(callbacks=callbacks, max_epochs=3).fit(net, loader_of(50, size=4))
    model = nn.Linear(4, 1).double()
    model.load_state_dict({name.removeprefix("layer."): value for name, value in start.items()})
    data = Numbered(50).x.double()
    for epoch in net.epochs:
        order = functools.reduce(operator.iadd, epoch, [])
        for begin in (0, 20, 40):
            model.zero_grad()
            model(data[order[begin : begin + 20]]).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * parameter.grad
    torch.testing.assert_close(net.layer.weight.double(), model.weight, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0)])
def test_learning_rates_follow_the_size(rule, factor):
    moved: list[float] = []

    class Line(Net):
        """The gradient of its only weight that matters is 1, so a step shows the rate."""

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            super().training_step(batch, batch_idx)
            return self.layer.bias.sum()

        def on_train_batch_end(self, *args: Any) -> None:
            moved.append(self.layer.bias.item())

    net = Line()
    before = net.layer.bias.item()
    callback = lo.DynamicBatchSize(budget_mb=PLENTY, grow=4.0, max_size=20, scale_lr=rule)
    trainer = quiet_trainer(callbacks=[callback], max_epochs=2)
    trainer.fit(net, loader_of())
    steps = [a - b for a, b in zip([before, *moved], moved, strict=False)]
    assert steps[:12] == pytest.approx([0.01] * 12, rel=1e-3)
    assert steps[12:] == pytest.approx([0.01 * factor] * 3, rel=1e-3)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.01
    assert not trainer.optimizers[0]._optimizer_step_pre_hooks


@pytest.mark.parametrize("budget", [PLENTY, TINY], ids=["fewer steps", "more steps"])
def test_schedules_advance_as_planned(budget):
    """OneCycleLR raises when it is stepped too often, and ends early otherwise."""
    rates: list[float] = []

    class Cycled(Net):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            steps = self.trainer.estimated_stepping_batches
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

        def on_train_epoch_end(self) -> None:
            rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    net = Cycled()
    callback = lo.DynamicBatchSize(budget_mb=budget, grow=1.5, scale_lr="sqrt")
    trainer = quiet_trainer(callbacks=[callback], max_epochs=4)
    trainer.fit(net, loader_of(size=10))
    check_epochs(net)
    changed, rates[:] = list(rates), []
    plain = Cycled()
    quiet_trainer(max_epochs=4).fit(plain, loader_of(size=10))
    assert len({len(epoch) for epoch in net.epochs}) > 1
    assert changed == pytest.approx(rates)  # the planned rate at the end of each epoch


class Stop(Callback):
    def __init__(self, folder: Any, epoch: int) -> None:
        self.folder, self.epoch = folder, epoch

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.folder / "end.ckpt")


def test_resume_keeps_size_and_measurements(tmp_path):
    def callback() -> lo.DynamicBatchSize:
        return lo.DynamicBatchSize(
            budget_mb=PLENTY, grow=1.5, max_size=20, scale_lr="linear", find=False
        )

    def loader() -> Any:
        return loader_of(shuffle=False)

    torch.manual_seed(0)
    whole, first = Net(), callback()
    state = {name: value.clone() for name, value in whole.state_dict().items()}
    quiet_trainer(callbacks=[first, Stop(tmp_path, 1)], max_epochs=4).fit(whole, loader())
    resumed, second = Net(), callback()
    resumed.load_state_dict(state)
    quiet_trainer(callbacks=[second], max_epochs=4).fit(
        resumed, loader(), ckpt_path=tmp_path / "end.ckpt", weights_only=True
    )
    assert resumed.sizes == whole.sizes[2:] == [10, 15]
    assert_same_weights(resumed, whole)
    assert second.state_dict() == first.state_dict()


def test_effective_batch_survives_resume_on_another_number_of_ranks(tmp_path, monkeypatch):
    def callback() -> lo.DynamicBatchSize:
        return lo.DynamicBatchSize(budget_mb=PLENTY, grow=1.5)

    module = sys.modules[lo.DynamicBatchSize.__module__]
    with monkeypatch.context() as two_ranks:
        two_ranks.setattr(module, "data_ranks", lambda trainer: 2)
        callbacks = [callback(), Stop(tmp_path, 0)]
        quiet_trainer(callbacks=callbacks, accumulate_grad_batches=2).fit(Net(), loader_of())
    seen: list[int] = []

    class Count(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            seen.append(trainer.accumulate_grad_batches * pl_module.sizes[-1])

    trainer = quiet_trainer(callbacks=[callback(), Count()], max_epochs=3)
    trainer.fit(Net(), loader_of(), ckpt_path=tmp_path / "end.ckpt", weights_only=True)
    assert seen == [20, 20]  # 5 samples, 2 batches, 2 ranks
    monkeypatch.setattr(module, "data_ranks", lambda trainer: 3)
    with pytest.raises(ValueError, match="20 samples per step, which 3 ranks cannot share"):
        quiet_trainer(callbacks=[callback()], max_epochs=3).fit(
            Net(), loader_of(), ckpt_path=tmp_path / "end.ckpt", weights_only=True
        )


def test_exception_restores_the_loader():
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.current_epoch == 1:
                raise ArithmeticError("planted")
            return super().training_step(batch, batch_idx)

    loader = loader_of()
    trainer = quiet_trainer(
        callbacks=[lo.DynamicBatchSize(budget_mb=PLENTY, grow=2.0, scale_lr="sqrt")], max_epochs=3
    )
    with pytest.raises(ArithmeticError):
        trainer.fit(Fails(), loader)
    assert loader.batch_size == loader.batch_sampler.batch_size == 5
    assert trainer.reload_dataloaders_every_n_epochs == 0
    assert "process_dataloader" not in vars(trainer.strategy)


class Frozen(BatchSampler):
    """Creates its batches once."""

    def __init__(self) -> None:
        super().__init__(SequentialSampler(range(60)), 5, drop_last=False)
        self.batches = list(super().__iter__())

    def __iter__(self) -> Any:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def test_incompatible_settings_raise():
    with pytest.raises(ValueError, match="target"):
        lo.DynamicBatchSize(target=1.5)
    with pytest.raises(ValueError, match="grow must be above 1"):
        lo.DynamicBatchSize(grow=0.9)
    with pytest.raises(ValueError, match="scale_lr"):
        lo.DynamicBatchSize(scale_lr="cubic")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Give one of them"):
        lo.DynamicBatchSize(scale_lr="sqrt", keep_effective=8)
    with pytest.raises(ValueError, match="find"):
        lo.DynamicBatchSize(find="best")  # type: ignore[arg-type]

    def fit(loader: Any, callback: Any = None, **settings: Any) -> None:
        callback = callback or lo.DynamicBatchSize(budget_mb=PLENTY, scale_lr="sqrt")
        quiet_trainer(callbacks=[callback], max_epochs=2, **settings).fit(Net(), loader)

    with pytest.raises(ValueError, match="not a torch DataLoader"):
        fit([[torch.arange(2), torch.randn(2, 4)]])
    with pytest.raises(ValueError, match="its dataset makes the batches"):
        fit(DataLoader([[torch.arange(2), torch.randn(2, 4)]], batch_size=None))
    with pytest.raises(ValueError, match="ignores it"):
        fit(DataLoader(Numbered(60), batch_sampler=Frozen()))
    with pytest.raises(ValueError, match="one training loader"):
        fit({"a": loader_of(), "b": loader_of()})
    with pytest.raises(ValueError, match="sets accumulate_grad_batches itself"):
        fit(loader_of(), lo.DynamicBatchSize(keep_effective=10), accumulate_grad_batches=2)
    for window, settings in (
        ({"schedule": {0: 1, 2: 4}}, {}),
        ({"effective_batch": 20}, {}),
        ({"effective_batch": 20}, {"scale_lr": "sqrt"}),
    ):
        for order in (1, -1):
            both = [lo.Accumulation(**window), lo.DynamicBatchSize(**settings)][::order]
            with pytest.raises(ValueError, match="both set the samples"):
                quiet_trainer(callbacks=both).fit(Net(), loader_of())
    both = [lo.Accumulation(2), lo.DynamicBatchSize(scale_lr="sqrt", budget_mb=PLENTY)]
    quiet_trainer(callbacks=both, max_epochs=2).fit(Net(), loader_of())


class Limits:
    """A limit of 100 units, of which one is in use."""

    unit = 10**15

    def __init__(self, device: torch.device, host: bool = True) -> None:
        pass

    def read(self) -> list[Usage]:
        return [Usage("pretended", self.unit, 100 * self.unit)]


class Peaks:
    """A peak of ``units`` more."""

    units, samples = 0, False

    def __init__(self, device: torch.device, fragments: bool) -> None:
        pass

    def start(self) -> None:
        pass

    def sample(self) -> None:
        pass

    def read(self) -> int:
        return resident_memory() + Peaks.units * Limits.unit


class Squeeze(Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        near = trainer.current_epoch == 2 and trainer.global_rank == 1
        Peaks.units = 98 if near else 0


def train_on_two_ranks(keep: int | None) -> tuple[Any, ...]:
    net = Net()
    peaks.MemoryLimits, peaks.PeakMeter = Limits, Peaks  # type: ignore[misc,assignment]
    rule = {"scale_lr": "sqrt"} if keep is None else {"keep_effective": keep}
    callback = lo.DynamicBatchSize(grow=1.5, max_size=12, **rule)  # type: ignore[arg-type]
    trainer = quiet_trainer(
        callbacks=[Squeeze(), callback],
        devices=2,
        strategy="ddp",
        max_epochs=4,
        use_distributed_sampler=True,
    )
    trainer.fit(net, loader_of())
    return net.epochs, trainer.global_step, [p.detach().clone() for p in net.parameters()]


@pytest.mark.distributed
@pytest.mark.parametrize("keep", [None, 20])
def test_ranks_change_size_together(keep):
    first, second = launch(train_on_two_ranks, keep)
    for own, other in zip(first[0], second[0], strict=True):
        assert [len(batch) for batch in own] == [len(batch) for batch in other]
        assert sorted(functools.reduce(operator.iadd, own + other, [])) == list(range(60))
    sizes = [len(epoch[0]) for epoch in first[0]]
    assert sizes == ([5, 7, 10, 8] if keep is None else [5, 10, 10, 5])
    assert first[1] == second[1]
    if keep:
        assert first[1] == 4 * math.ceil(60 / 20)
    for a, b in zip(first[2], second[2], strict=True):
        assert torch.equal(a, b)


def test_first_epoch_is_bit_identical():
    with_it, without = SmallNet(), SmallNet()
    quiet_trainer(callbacks=[lo.DynamicBatchSize(budget_mb=PLENTY)]).fit(with_it)
    quiet_trainer().fit(without)
    assert_same_weights(with_it, without)
