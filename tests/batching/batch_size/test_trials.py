"""Trials of batch sizes: results under real limits, and no side effects."""

import gc
import random
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch import callbacks as lightnings
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, TensorDataset

import lightning_opt as lo
from lightning_opt.batching.batch_size import search
from lightning_opt.batching.batch_size.trials import TrialCallback, Trials
from lightning_opt.core.measure.exhaustion import is_out_of_memory, recover_memory
from lightning_opt.core.measure.memory import MB
from tests.batching.nets import run_out
from tests.helpers.footprint import model_footprint, process_footprint
from tests.helpers.models import assert_same_weights
from tests.helpers.processes import launch
from tests.helpers.trainers import MemoryLogger, quiet_trainer

pytestmark = pytest.mark.usefixtures("brief_trials")

WIDTH = 64


class Wide(LightningModule):
    """Uses about a quarter of a MB per sample, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, 1)
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        hidden = self.norm(self.first(batch[0]) + torch.rand(()))
        wide = hidden.repeat(1, 256).relu().square()
        self.log("loss", wide.mean())
        return self.last(hidden).mean() + 1e-6 * wide.mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def loader_of(count: int = 4000) -> DataLoader[Any]:
    generator, own = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    data = TensorDataset(torch.randn(count, 8, generator=generator))
    sampler = RandomSampler(data, generator=own)
    return DataLoader(data, batch_size=8, sampler=sampler, generator=generator)


class Writer(Callback):
    """A user's callback that writes a file in each hook, and holds a lock."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lock = folder, threading.Lock()

    def write(self, *args: Any, **kwargs: Any) -> None:
        (self.folder / "written").touch()

    setup = on_train_start = on_train_batch_end = on_train_epoch_end = on_exception = write
    teardown = write


class Counting(Wide):
    """Its hooks close over the model: a trial's copy calls the hooks of the original."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.scale = nn.Buffer(torch.zeros(WIDTH)), nn.Parameter(torch.ones(()))

        def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            self.calls += 1
            self.mean.add_(output.detach().mean(0))
            return output * self.scale

        self.first.register_forward_hook(hook)


def test_search_has_no_side_effects(tmp_path, request):
    class Callbacks(Counting):
        def configure_callbacks(self) -> Any:
            return [
                EarlyStopping("of validation"),
                ModelCheckpoint(tmp_path, every_n_train_steps=1),
            ]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert isinstance(self.logger, MemoryLogger)
            self.logger.experiment.add_image("batch", batch)
            return super().training_step(batch, batch_idx)

    model, logger, loader = Callbacks(), MemoryLogger(), loader_of(64)
    callbacks: list[Any] = [Writer(tmp_path), lo.AdaptiveClipping(), lo.GradientHealth()]
    plugin = lo.DynamicLossScale(2.0**40)  # the losses of trials overflow, which lowers the scale
    trainer = quiet_trainer(
        logger=logger, callbacks=callbacks, plugins=[plugin], enable_model_summary=True
    )
    model.first.weight.grad = torch.ones_like(model.first.weight)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    callbacks = list(trainer.callbacks)
    states = [part.state_dict() for part in (*callbacks, plugin)]
    before = (model_footprint(model)["tensors"], torch.get_rng_state(), random.getstate())
    gc.unfreeze()
    request.addfinalizer(gc.freeze)  # as for the other tests
    process = process_footprint()
    generators = loader.generator, loader.sampler.generator  # type: ignore[attr-defined]
    positions = [generator.get_state() for generator in generators]
    loops = trainer.fit_loop.state_dict()

    found = lo.find_batch_size(trainer, model, loader, budget_mb=10**6)
    assert found.largest == 64
    assert model_footprint(model)["tensors"] == before[0]
    assert "teardown" not in vars(model)
    assert process_footprint() == process
    assert not trainer.callback_metrics
    assert torch.equal(torch.get_rng_state(), before[1])
    assert random.getstate() == before[2]
    for generator, position in zip(generators, positions, strict=True):
        assert torch.equal(generator.get_state(), position)
    assert loader.batch_size == loader.batch_sampler.batch_size == 8  # type: ignore[union-attr]
    assert_same_weights(model, weights)
    assert model.first.weight.grad.eq(1).all()
    assert model.calls == 0
    assert model.scale.grad is None
    assert trainer.callbacks == callbacks
    assert [part.state_dict() for part in (*callbacks, plugin)] == states
    assert logger.records == logger.images == []
    assert list(tmp_path.iterdir()) == []
    assert trainer.fit_loop.state_dict() == loops
    assert trainer.global_step == 0


class OwnOrder(Sampler[int]):
    """Shuffles by its own count of epochs and its own generator."""

    def __init__(self) -> None:
        self.epochs, self.random = 0, np.random.default_rng(0)

    def __len__(self) -> int:
        return 64

    def __iter__(self) -> Any:
        self.epochs += 1
        return iter(self.random.permutation(64).tolist())


class Augmented(Dataset[Tensor]):
    """Draws noise from its own generator, keeps a cache, and raises its level with each item."""

    def __init__(self) -> None:
        self.items, self.random, self.level = loader_of(64).dataset, random.Random(0), 0
        self.cache = torch.zeros(17 * 2**20)  # 68 MiB

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        self.level += 1
        self.cache[index] = 1.0
        item = self.items[index]
        return [item[0] + self.random.random() + self.level, *item[1:]]


def test_samplers_and_datasets_stay_as_they_were():
    sampler, dataset = OwnOrder(), Augmented()
    generators = sampler.random.bit_generator.state, dataset.random.getstate()

    lo.find_batch_size(quiet_trainer(), Wide(), DataLoader(dataset, 8, sampler=sampler), max_size=8)

    assert (sampler.epochs, dataset.level) == (0, 0)
    assert (sampler.random.bit_generator.state, dataset.random.getstate()) == generators


class Uncopyable(Wide):
    """Has attributes that cannot be copied, its own and in a list of a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.first.settings = [{"lock": threading.Lock(), "seen": []}]  # type: ignore[assignment]
        self.words = (word for word in ["a"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (settings,) = self.first.settings
        with settings["lock"]:
            settings["seen"].append(next(self.words, ""))
        return super().training_step(batch, batch_idx)


class WholeRun(Wide):
    """Needs its setup, a validation after each epoch, and a schedule that ends after 8 steps."""

    def setup(self, stage: str) -> None:
        self.resource = object()

    def teardown(self, stage: str) -> None:
        del self.resource

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("lr", self.lr_schedulers()[0].get_last_lr()[0])  # type: ignore[index]
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer, schedules = super().configure_optimizers(), torch.optim.lr_scheduler
        cycle = {
            "scheduler": schedules.OneCycleLR(optimizer, 0.1, total_steps=8),
            "interval": "step",
        }
        plateau = {"scheduler": schedules.ReduceLROnPlateau(optimizer), "monitor": "val/loss"}
        return [optimizer], [cycle, plateau]

    def on_train_epoch_end(self) -> None:
        assert "val/loss" in self.trainer.callback_metrics

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", 1.0)

    def val_dataloader(self) -> Any:
        return DataLoader(loader_of(8).dataset)


class ManualRun(WholeRun):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        self.lr_schedulers()[0].step()  # type: ignore[index]


def test_objects_that_cannot_be_copied_are_shared_and_named():
    model = Uncopyable()
    with pytest.warns(UserWarning, match="may change them: lock[.]"):
        found = lo.find_batch_size(quiet_trainer(), model, loader_of(64), max_size=16)
    assert found.largest == 16
    assert model.first.settings[0]["seen"] == []  # type: ignore[index]
    assert list(model.words) == ["a"]


@pytest.mark.parametrize("kind", [WholeRun, ManualRun])
@pytest.mark.filterwarnings("ignore:The lr scheduler dict contains the key")  # for ManualRun
def test_models_that_depend_on_a_whole_run_can_be_tried(kind):
    settings = {"budget_mb": 10**6, "max_size": 16}
    trainer, model = quiet_trainer(), kind()
    data = LightningDataModule()
    for owner in (data, model):
        owner.train_dataloader = lambda: loader_of(64)
    data.val_dataloader = model.val_dataloader
    for given in (data, None):
        found = lo.find_batch_size(trainer, model, given, mode="fastest", **settings)
        assert found.largest == 16
        assert trainer.fit_loop._data_source.instance is (given or model)
        assert trainer.strategy.optimizers == []
        assert not {"setup", "teardown"} & vars(data).keys()
    callback = lo.DynamicBatchSize(scale_lr="linear", **settings)
    trainer = quiet_trainer(callbacks=[callback], max_epochs=2)
    trainer.fit(kind(), loader_of(64))
    assert (callback.size, trainer.global_step) == (16, 8)


@pytest.mark.skipif(not hasattr(lightnings, "EMAWeightAveraging"), reason="needs Lightning 2.6")
def test_trials_average_weights_and_do_not_retry_batches(monkeypatch):
    """MicroBatching retries batches in training, but must not in trials."""
    updates: list[bool] = []
    average = lightnings.EMAWeightAveraging()
    monkeypatch.setattr(average, "should_update", lambda **_: not updates.append(True))
    trainer = quiet_trainer(callbacks=[average, lo.MicroBatching("auto")])
    found = lo.find_batch_size(trainer, Lengths(), loader_of(400), budget_mb=10**6)
    assert found.largest in range(120, 126)  # 125 samples of 8 are 1000 elements
    assert updates


class Unlogged(Wide):
    """`self.log` cannot be compiled."""

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(self.norm(self.first(rows)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).mean()


def compile_model(model: Unlogged) -> Any:
    return torch.compile(model, backend="eager")


def compile_call(model: Unlogged) -> Any:
    model.compile(backend="eager")
    return model


def compile_layer(model: Unlogged) -> Any:
    model.first = torch.compile(model.first, backend="eager")
    return model


@pytest.mark.parametrize("compiles", [compile_model, compile_call, compile_layer])
def test_trials_train_the_copy_of_a_compiled_model(compiles, monkeypatch):
    """And so the memory of its gradients and of the optimizer's state counts."""
    original, steps = Unlogged(), []

    def end(probe: TrialCallback, trainer: Any, copied: Any, *args: Any) -> None:
        steps.append(all(p.grad is not None for p in copied.parameters()))
        assert all(p.grad is None for p in original.parameters())
        on_train_batch_end(probe, trainer, copied, *args)

    on_train_batch_end = TrialCallback.on_train_batch_end
    monkeypatch.setattr(TrialCallback, "on_train_batch_end", end)
    callback = lo.DynamicBatchSize(budget_mb=10**6, max_size=16, scale_lr="linear")
    trainer = quiet_trainer(callbacks=[callback], max_epochs=1)
    trainer.fit(compiles(original), loader_of(64))
    assert steps
    assert all(steps)
    assert (callback.size, trainer.global_step) == (16, 4)


def longest(samples: int) -> list[Tensor]:
    return [torch.ones(samples, 40)]


class Lengths(Wide):
    """Runs out of memory at 1000 elements, and records the shapes of its batches."""

    shapes: list[tuple[int, ...]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.shapes.append(tuple(batch[0].shape))
        if batch[0].numel() > 1000:
            raise torch.OutOfMemoryError("planted")
        return super().training_step([batch[0][:, :8]], batch_idx)


def test_memory_is_measured_on_worst_batch_and_time_on_loader_batches(monkeypatch):
    Lengths.shapes.clear()
    assert gc.get_freeze_count()
    calls: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: calls.append("unfreeze"))
    settings = {"mode": "fastest", "worst_batch": longest, "budget_mb": 10**6}
    found = lo.find_batch_size(quiet_trainer(), Lengths(), loader_of(400), **settings)
    assert found.largest in range(24, 26)  # 25 samples of 40
    lengths = [shape[1] for shape in Lengths.shapes]
    assert lengths == sorted(lengths, reverse=True)
    assert set(lengths) == {40, 8}
    assert calls == []  # objects are frozen already


def test_another_error_than_out_of_memory_is_raised_with_a_note():
    class Broken(Wide):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug") as error:
        lo.find_batch_size(quiet_trainer(), Broken(), loader_of(400))
    if sys.version_info >= (3, 11):
        assert "trains a copy of the model" in "".join(error.value.__notes__)


def scripted() -> nn.Module:
    module = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()))
    next(module.parameters()).requires_grad_(False)
    return module


@pytest.mark.parametrize("part", [scripted, lambda: nn.LazyBatchNorm1d()])
@pytest.mark.filterwarnings("ignore:Lazy modules", "ignore:.*torch.jit", "error:Trials of batch")
def test_parts_that_torch_copies_badly_train_as_without_trials(part):
    models = [Wide(), Wide()]
    for model, callbacks in zip(
        models, ([], [lo.DynamicBatchSize(keep_effective=8, max_size=8)]), strict=True
    ):
        torch.manual_seed(0)
        model.first = nn.Sequential(part(), model.first)
        torch.manual_seed(0)
        quiet_trainer(callbacks=callbacks).fit(model, loader_of(64))
    assert_same_weights(*models)


def test_short_last_batch_is_skipped():
    # 25 samples in batches of 12 leave one, on which BatchNorm fails.
    loader = DataLoader(TensorDataset(torch.randn(25, 8)), batch_size=5)
    settings = {"budget_mb": 10**6, "max_size": 12}
    assert lo.find_batch_size(quiet_trainer(), Wide(), loader, **settings).largest == 12
    assert loader.batch_sampler.drop_last is loader.drop_last is False  # type: ignore[union-attr]


def limit_memory(room: float) -> int:
    """Limit the address space to ``room`` MB more than in use, and return the limit."""
    import resource

    # Large blocks are unmapped when freed, as in trials, and leave no gaps in the heap.
    recover_memory(torch.device("cpu"))
    # Threads, kernels and the first search allocate memory once.
    lo.find_batch_size(quiet_trainer(), Wide(), loader_of(64), max_size=16)
    recover_memory(torch.device("cpu"))
    limit = psutil.Process().memory_info().vms + int(room * MB)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return limit


def find_under_a_limit(room: float) -> dict[str, Any]:
    limit_memory(room)
    found = lo.find_batch_size(quiet_trainer(), Wide(), loader_of(), target=1.0)
    return {"found": found.largest, "trials": len(found.trials), "rows": found.report().rows}


def fits(room: float, size: int) -> bool:
    """Return whether training in this process, under the limit, succeeds."""
    loader = DataLoader(loader_of().dataset, batch_size=size)
    limit_memory(room)
    try:
        quiet_trainer(max_steps=4, max_epochs=-1).fit(Wide(), loader)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


@pytest.mark.distributed
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs RLIMIT_AS")
def test_largest_size_fits_and_a_larger_one_does_not():
    (result,) = launch(find_under_a_limit, 120.0, processes=1)
    assert result["trials"] <= 12
    size = result["found"]
    # The search is exact to 3%, and processes differ by another 3%.
    assert launch(fits, 120.0, int(0.94 * size), processes=1) == [True]
    assert launch(fits, 120.0, int(1.06 * size) + 1, processes=1) == [False]


def find_if_one_rank_runs_out() -> dict[str, Any]:
    """Search while only rank 1 runs out of memory, at different points of a step."""
    search.FINALISTS_BY_ROUND = (3,)
    results = {}
    for where in ("forward", "backward", "update", "fastest", "guarded"):

        class Unequal(Wide):
            def training_step(self, batch: Any, batch_idx: int, where: str = where) -> Tensor:
                loss = super().training_step(batch, batch_idx)
                if self.global_rank == 1 and len(batch[0]) > 10:
                    if where in ("forward", "guarded"):
                        raise torch.OutOfMemoryError("planted")
                    if where == "backward":
                        loss.register_hook(run_out)
                self.log("mean", loss, sync_dist=True)
                return loss

            def on_before_optimizer_step(self, optimizer: Any, where: str = where) -> None:
                if where == "update" and self.global_rank == 1 and self.rows > 10:
                    raise torch.OutOfMemoryError("planted")

            def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
                self.rows = len(batch[0])

        callbacks = [lo.MicroBatching("auto"), lo.NonFiniteGuard()] if where == "guarded" else []
        trainer = quiet_trainer(
            devices=2, strategy="ddp", use_distributed_sampler=True, callbacks=callbacks
        )
        mode, most = ("fastest", 4) if where == "fastest" else ("largest", 12)
        results[where] = lo.find_batch_size(
            trainer, Unequal(), loader_of(400), mode=mode, max_size=most, budget_mb=10**6
        )
    callback = lo.DynamicBatchSize(budget_mb=10**6, max_size=60, scale_lr="linear")
    model = Wide()
    trainer = quiet_trainer(
        devices=2, strategy="ddp", use_distributed_sampler=True, callbacks=[callback]
    )
    trainer.fit(model, loader_of(400))
    results["trained"] = (callback.size, trainer.global_step)
    return results


@pytest.mark.distributed
def test_ranks_find_the_same_size_if_one_runs_out_of_memory():
    first, second = launch(find_if_one_rank_runs_out)
    assert first == second  # also the memory and the speed of each trial
    for where in ("forward", "backward", "update", "guarded"):
        assert first[where].largest == 10
    assert 2 <= first["fastest"].fastest <= 4
    assert first["trained"] == (60, 4)


def test_incompatible_settings_raise():
    with pytest.raises(ValueError, match="mode must be"):
        lo.find_batch_size(quiet_trainer(), Wide(), loader_of(), mode="best")
    with pytest.raises(ValueError, match="not a torch DataLoader"):
        lo.find_batch_size(quiet_trainer(), Wide(), [[torch.randn(4, 8)]])
    with pytest.raises(ValueError, match=r"that DDPStrategy starts.*DynamicBatchSize"):
        lo.find_batch_size(quiet_trainer(strategy="ddp_spawn"), Wide(), loader_of())
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    trainer = SimpleNamespace(world_size=2, strategy=strategy)
    with pytest.raises(ValueError, match=r"ModelParallelStrategy.*strategy='ddp'"):
        Trials(trainer, Wide(), [], 0.9, None)  # type: ignore[arg-type]
    model = Wide()
    model.norm = nn.Identity()  # type: ignore[assignment]  # accepts one sample
    trainer = quiet_trainer(callbacks=[lo.DynamicBatchSize(budget_mb=1.0)])
    with pytest.raises(MemoryError, match="Not even a batch of one sample"):
        trainer.fit(model, loader_of(64))
