"""A batch size found before training: steps keep their samples, and everything is restored."""

import functools
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, OnExceptionCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

import lightning_opt as lo
from tests.batching.nets import LinearNet
from tests.helpers.models import assert_same_weights
from tests.helpers.processes import launch
from tests.helpers.trainers import MemoryLogger, quiet_trainer

pytestmark = pytest.mark.usefixtures("brief_trials")

PLENTY = 10.0**6
"""MB of a budget that everything fits."""


class Numbered(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.x = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, self.x[index]


class Net(LinearNet):
    """Runs out of memory above ``fits`` samples, and records the samples of each epoch."""

    def __init__(self, fits: int = 10**9) -> None:
        super().__init__(lr=0.01)
        self.fits = fits
        self.epochs: list[list[list[int]]] = []
        self.steps: list[int] = []

    def on_train_epoch_start(self) -> None:
        self.epochs.append([])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, x = batch
        if len(x) > self.fits:
            raise torch.OutOfMemoryError("planted")
        self.epochs[-1].append(ids.tolist())
        return self.layer(x).square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.steps.append(sum(map(len, self.epochs[-1])))

    @property
    def samples_per_step(self) -> list[int]:
        """Of the last epoch."""
        ends = self.steps[-self.steps[::-1].index(min(self.steps)) - 1 :]
        return [b - a for a, b in zip([0, *ends], ends, strict=False)]


def loader_of(count: int = 60, size: int = 5, **settings: Any) -> DataLoader[Any]:
    return DataLoader(Numbered(count), **{"batch_size": size, "shuffle": True, **settings})


def fit(net: LightningModule, callback: lo.DynamicBatchSize, loader: Any, **settings: Any) -> Any:
    trainer = quiet_trainer(**{"callbacks": [callback], **settings})
    trainer.fit(net, loader)
    return trainer


def all_of(epoch: list[list[int]]) -> list[int]:
    return [sample for batch in epoch for sample in batch]


class FromHooks(Net):
    batch_size = 5

    def train_dataloader(self) -> Any:
        return loader_of()


class Data(LightningDataModule):
    requests = 0

    def train_dataloader(self) -> Any:
        self.requests += 1
        return loader_of()


class OwnTrainer(Trainer):
    def _run(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return super()._run(model, *args, **kwargs)


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
def test_every_kind_of_loader_gets_the_size_and_serves_each_sample_once(source):
    net, data = sources()[source]
    loader, logger = data.get("train_dataloaders"), MemoryLogger()
    callback = lo.DynamicBatchSize(budget_mb=PLENTY, max_size=12, scale_lr="sqrt")
    trainer = quiet_trainer(
        callbacks=[callback], max_epochs=2, logger=logger, reload_dataloaders_every_n_epochs=1
    )
    trainer.__class__ = OwnTrainer
    trainer.fit(net, **data)
    assert getattr(data.get("datamodule"), "requests", 2) == 2  # trials do not count
    assert [[len(batch) for batch in epoch] for epoch in net.epochs] == [[12] * 5] * 2
    assert all(sorted(all_of(epoch)) == list(range(60)) for epoch in net.epochs)
    assert callback.size == 12
    assert logger.series("batch_size/size") == [12]
    assert [row["batch size"] for row in callback.report().rows][-1] == 12
    if loader is not None:  # the user's, restored
        assert loader.batch_sampler.batch_size == 5
        assert loader.batch_size == (None if source == "batch sampler" else 5)


@pytest.mark.parametrize(
    ("accumulate", "keep", "fits", "size"),
    [
        (1, None, 10**9, 6),  # the loader's own size, though 36 would fit
        (3, None, 10, 9),
        (1, 12, 10**9, 12),
        (1, 12, 5, 4),
    ],
)
def test_step_keeps_its_samples(accumulate, keep, fits, size):
    samples = keep or 6 * accumulate
    net, reference = Net(fits), Net()
    callback = lo.DynamicBatchSize(budget_mb=PLENTY, keep_effective=keep)
    trainer = fit(
        net, callback, loader_of(36, 6, shuffle=False), accumulate_grad_batches=accumulate
    )
    assert net.samples_per_step == [samples] * (36 // samples)
    assert len(net.epochs[0][0]) == callback.size == size
    assert trainer.accumulate_grad_batches == accumulate  # restored
    quiet_trainer().fit(reference, loader_of(36, samples, shuffle=False))
    assert_same_weights(net, reference, rtol=0.0, atol=1e-6)
    fit(Net(3), callback, loader_of(36, 6), accumulate_grad_batches=accumulate)
    assert callback.size == 3  # found for the other model


def test_second_fit_keeps_the_samples_of_its_own_loader_and_accumulation():
    net, callback = Net(), lo.DynamicBatchSize(budget_mb=PLENTY)
    for size, accumulate in ((6, 1), (12, 1), (6, 3)):
        net.steps.clear()
        fit(net, callback, loader_of(36, size), accumulate_grad_batches=accumulate)
        assert net.samples_per_step == [size * accumulate] * (36 // size // accumulate)


def test_accumulation_averages_short_windows_exactly():
    net, reference = Net(fits=6), Net().double()
    callbacks = [lo.DynamicBatchSize(budget_mb=PLENTY, keep_effective=20), lo.Accumulation()]
    quiet_trainer(callbacks=callbacks, max_epochs=2).fit(net, loader_of(50, size=4))
    optimizer, data = reference.configure_optimizers(), Numbered(50).x.double()
    for epoch in net.epochs:
        for window in torch.tensor(all_of(epoch)).split(20):
            optimizer.zero_grad()
            reference.layer(data[window]).square().mean().backward()
            optimizer.step()
    assert len(net.epochs[0][0]) == 5
    weight = net.layer.weight.double()
    torch.testing.assert_close(weight, reference.layer.weight, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0)])
def test_learning_rates_follow_the_size(rule, factor):
    moved: list[float] = []

    class Line(Net):
        """The gradient of its only weight that matters is 1, so a step shows the rate."""

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.layer.bias.sum()

        def configure_optimizers(self) -> Any:
            groups = [{"params": [parameter]} for parameter in self.parameters()]
            return torch.optim.SGD(groups, lr=0.01)

        def on_train_batch_end(self, *args: Any) -> None:
            moved.append(self.layer.bias.item())

    net = Line()
    before = net.layer.bias.item()
    callback = lo.DynamicBatchSize(budget_mb=PLENTY, max_size=20, scale_lr=rule)
    trainer = fit(net, callback, loader_of())
    steps = [a - b for a, b in zip([before, *moved[-3:]], moved[-3:], strict=False)]
    assert steps == pytest.approx([0.01 * factor] * 3, rel=1e-3)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.01
    assert not trainer.optimizers[0]._optimizer_step_pre_hooks


def test_learning_rate_is_scaled_once_after_a_step_that_raises():
    rates: list[float] = []

    class Raising(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            rates.append(self.param_groups[0]["lr"])
            raise OSError

    class Catching(Net):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            with suppress(OSError):
                self.optimizers().step()

        def configure_optimizers(self) -> Any:
            return Raising(self.parameters(), lr=0.01)

    callback = lo.DynamicBatchSize(budget_mb=PLENTY, max_size=20, scale_lr="linear")
    fit(Catching(), callback, loader_of())
    assert rates[-3:] == pytest.approx([0.04] * 3)


@pytest.mark.parametrize(
    ("limit", "rule"),
    [
        ({"max_steps": 20, "max_epochs": -1}, {"keep_effective": 20}),
        ({"max_epochs": 4}, {"keep_effective": 20}),
        ({"max_epochs": 4}, {"scale_lr": "sqrt", "max_size": 20}),
    ],
)
def test_schedules_end_with_the_training(limit, rule):

    class Scheduled(Net):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            self.planned = int(self.trainer.estimated_stepping_batches)
            line = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=self.planned)
            return [optimizer], [{"scheduler": line, "interval": "step"}]

    net = Scheduled()
    trainer = fit(net, lo.DynamicBatchSize(budget_mb=PLENTY, **rule), loader_of(size=10), **limit)
    assert trainer.global_step == net.planned == limit.get("max_steps", 4 * 3)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-6)


def test_limits_in_batches_span_the_same_samples_in_each_epoch():
    class Validated(Net):
        seen: list[int] = []

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.seen.append(sum(map(len, self.epochs[-1])))

    net, callback = Validated(), lo.DynamicBatchSize(budget_mb=PLENTY, keep_effective=20)
    settings = {"limit_train_batches": 8, "val_check_interval": 4}
    trainer = quiet_trainer(
        callbacks=[callback], max_epochs=2, reload_dataloaders_every_n_epochs=1, **settings
    )
    trainer.fit(net, loader_of(), loader_of(3, size=3, shuffle=False))
    assert [[len(batch) for batch in epoch] for epoch in net.epochs] == [[20, 20]] * 2
    assert net.seen == [20, 40] * 2
    assert {name: getattr(trainer, name) for name in settings} == settings


def test_limit_within_a_window_keeps_the_number_of_steps():
    settings = {"limit_train_batches": 5, "accumulate_grad_batches": 4}
    trainer = fit(Net(), lo.DynamicBatchSize(budget_mb=PLENTY), loader_of(), **settings)
    assert trainer.global_step == 2


class Planned(Net):
    """Creates the loader early."""

    def setup(self, stage: str) -> None:
        assert self.trainer.estimated_stepping_batches


def train(folder: Path, ranks: int) -> tuple[int | None, int, list[list[int]], list[Tensor]]:
    """Train an epoch, from the folder's checkpoint if there is one, and save one."""
    last = folder / "last.ckpt"
    net, callback = Planned(fits=7), lo.DynamicBatchSize(budget_mb=PLENTY)
    trainer = quiet_trainer(
        callbacks=[callback],
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_epochs=2 if last.exists() else 1,
        accumulate_grad_batches=4,
        use_distributed_sampler=True,
    )
    again = {"ckpt_path": last, "weights_only": True} if last.exists() else {}
    trainer.fit(net, loader_of(72, size=3), **again)
    if not again:
        trainer.save_checkpoint(last)
    searched = callback.found is not None
    assert searched is (not again)
    if ranks == 3:
        other = lo.DynamicBatchSize(budget_mb=PLENTY, keep_effective=20)
        with pytest.raises(ValueError, match=r"20 samples per step.* 3 ranks"):
            quiet_trainer(callbacks=[other], devices=3, strategy="ddp").fit(Net(), loader_of(72))
    return callback.size, trainer.global_step, net.epochs[0], [*net.state_dict().values()]


@pytest.mark.distributed
def test_step_keeps_its_samples_when_resumed_on_other_numbers_of_ranks(tmp_path):
    run = functools.partial(train, tmp_path)
    runs = {ranks: launch(run, ranks, processes=ranks) for ranks in (2, 3)}
    runs[1] = [run(1)]
    sizes = {ranks: results[0][0] for ranks, results in runs.items()}
    assert sizes == {2: 6, 3: 4, 1: 6}  # 12, 8 and 24 samples of a rank, of which at most 7 fit
    for ranks, results in runs.items():
        steps = 72 // 24
        assert {result[1] for result in results} == {steps if ranks == 2 else 2 * steps}
        seen = [sample for result in results for sample in all_of(result[2])]
        assert sorted(seen) == list(range(72))
        for result in results[1:]:
            assert all(map(torch.equal, result[3], results[0][3]))


def test_keep_effective_replaces_that_of_the_checkpoint(tmp_path):
    first, second = (lo.DynamicBatchSize(budget_mb=PLENTY, keep_effective=n) for n in (12, 6))
    fit(Net(), first, loader_of(36, 6)).save_checkpoint(tmp_path / "12.ckpt")
    trainer, net = quiet_trainer(callbacks=[second], max_epochs=2), Net()
    trainer.fit(net, loader_of(36, 6), ckpt_path=tmp_path / "12.ckpt", weights_only=True)
    assert net.samples_per_step == [6] * 6


def test_resume_from_a_checkpoint_without_it_warns(tmp_path):
    trainer = quiet_trainer()
    trainer.fit(Net(), loader_of())
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    net = Net()
    with pytest.warns(UserWarning, match="keeps the loader's batch size"):
        quiet_trainer(callbacks=[lo.DynamicBatchSize(scale_lr="sqrt")], max_epochs=2).fit(
            net, loader_of(), ckpt_path=tmp_path / "plain.ckpt", weights_only=True
        )
    assert len(net.epochs[0][0]) == 5


@pytest.mark.filterwarnings("ignore:.*ckpt_path")
def test_resume_searches_again_if_the_search_had_failed(tmp_path):
    class Broken(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise ArithmeticError("planted")

    saving = OnExceptionCheckpoint(tmp_path)
    settings: Any = {"keep_effective": 20, "budget_mb": PLENTY}
    callbacks = [lo.DynamicBatchSize(**settings), saving]
    with pytest.raises(ArithmeticError):
        quiet_trainer(callbacks=callbacks, enable_checkpointing=True).fit(Broken(), loader_of())
    net, callback = Net(fits=10), lo.DynamicBatchSize(**settings)
    trainer = quiet_trainer(callbacks=[callback])
    trainer.fit(net, loader_of(), ckpt_path=saving.ckpt_path)
    assert callback.size == 10
    assert set(net.samples_per_step) == {20}
    assert trainer.ckpt_path == saving.ckpt_path
    straight = Net(fits=10)
    fit(straight, lo.DynamicBatchSize(**settings), loader_of())
    assert net.epochs == straight.epochs
    assert_same_weights(net, straight)


class Frozen(list[Any]):
    """Batches that are created once, whatever the batch size is then."""

    batch_size = 5


class ReadOnly(list[Any]):
    batch_size = property(lambda self: 5)


@pytest.mark.parametrize("limit", ["max_steps", "max_epochs", "limit_train_batches"])
def test_run_without_steps_searches_nothing(limit):
    callback = lo.DynamicBatchSize(budget_mb=PLENTY, max_size=8)
    assert fit(Net(), callback, loader_of(), **{limit: 0}).global_step == 0
    assert callback.found is None


def test_incompatible_settings_raise():
    batches = [[torch.arange(2), torch.randn(2, 4)]]
    free, keeps = {"budget_mb": PLENTY, "scale_lr": "sqrt"}, {"keep_effective": 10}
    for settings, loader, words in (
        (free, batches, "not a torch DataLoader"),
        (free, DataLoader(batches, batch_size=None), "its dataset makes the batches"),
        (free, DataLoader(Numbered(60), batch_sampler=Frozen(range(12))), "ignores batch_size"),
        (free, DataLoader(Numbered(60), batch_sampler=ReadOnly(range(12))), "ignores batch_size"),
        (free, DataLoader(Numbered(0), batch_size=5), "no samples"),
        (free, CombinedLoader({"a": loader_of(), "b": loader_of()}), "one training loader"),
    ):
        with pytest.raises(ValueError, match=words):
            fit(Net(), lo.DynamicBatchSize(**settings), loader)
    with pytest.raises(ValueError, match="sets accumulate_grad_batches itself"):
        fit(Net(), lo.DynamicBatchSize(**keeps), loader_of(), accumulate_grad_batches=2)
    for window, rule in (
        ({"schedule": {0: 1, 2: 4}}, {}),
        ({"effective_batch": 20}, {"scale_lr": "sqrt"}),
    ):
        for order in (1, -1):
            both = [lo.Accumulation(**window), lo.DynamicBatchSize(**rule)][::order]
            with pytest.raises(ValueError, match="both set the samples"):
                quiet_trainer(callbacks=both).fit(Net(), loader_of())
    for finder in (BatchSizeFinder(), LearningRateFinder()):
        both = [lo.DynamicBatchSize(**free), finder]
        with pytest.raises(ValueError, match=type(finder).__name__):
            quiet_trainer(callbacks=both).fit(FromHooks())
    both = [lo.Accumulation(2), lo.DynamicBatchSize(**free)]
    quiet_trainer(callbacks=both).fit(Net(), loader_of())
