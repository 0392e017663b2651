"""State that replicas have of their own between synchronizations, and how it is combined."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import lightning_opt as lo
from lightning_opt.strategies.diloco.exchange import average_states
from tests.helpers.models import WholeBatchNet, loader_of
from tests.helpers.processes import launch
from tests.helpers.trainers import logged_warnings
from tests.strategies.diloco.reference import assert_equals_simulation
from tests.strategies.runs import fit, of_all_ranks, same_on_all_ranks

pytestmark = pytest.mark.distributed

STEPS = 16

PLAIN: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0, "compression": "float32"}

WINDOW = {"steps": STEPS, "sync_every": 4, "outer_lr": 1.0, "outer_momentum": 0}
"""The settings of ``DiLoCoStrategy(4, **PLAIN)`` for the simulation."""


class Net(WholeBatchNet):
    """Each rank has its own batches. Rank 1 lacks some, and its ``bad`` ones give a NaN."""

    def __init__(self, bad: tuple[int, ...] = (), fewer: int = 0, **settings: Any) -> None:
        super().__init__(**{"widths": (7, 5), **settings})
        self.bad, self.fewer = bad, fewer

    def train_dataloader(self) -> Any:
        return loader_of(STEPS - self.fewer * self.global_rank, 4, seed=self.global_rank)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.step(batch)
        return loss * torch.nan if self.global_rank == 1 and batch_idx in self.bad else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.step(batch), sync_dist=True)


def loss_of(model: nn.Module, step: int, replica: int) -> Tensor:
    inputs, targets = loader_of(STEPS, 4, seed=replica).dataset.tensors  # type: ignore[attr-defined]
    rows = slice(4 * step, 4 * (step + 1))
    return nn.functional.mse_loss(model.layer(inputs[rows].double()), targets[rows].double())  # type: ignore[operator]


def flat(model: nn.Module) -> Tensor:
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


class ClippedAndDecayed(torch.optim.SGD):
    """Clips like ``Trainer(gradient_clip_val=0.1)``; its rate falls with each step."""

    taken = 0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = 0.5 / (1 + self.taken)
            torch.nn.utils.clip_grad_norm_(group["params"], 0.1)
        self.taken += 1
        return super().step(closure)


def _clipping() -> None:
    """A replica clips its own gradient, and its schedule counts its own steps."""

    class Scheduled(Net):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def make(one: nn.Module) -> torch.optim.Optimizer:
        return ClippedAndDecayed(one.parameters(), lr=0.5)

    model = Scheduled(lr=0.5)
    fit(model, lo.DiLoCoStrategy(4, **PLAIN), precision="64-true", gradient_clip_val=0.1)
    assert_equals_simulation(model, Net(), loss_of, make, **WINDOW)


def _guarded() -> None:
    """A bad batch of one replica does not affect the other."""
    guard, model = lo.NonFiniteGuard(), Net(bad=(5, 6))
    with logged_warnings() as messages:
        fit(model, lo.DiLoCoStrategy(4, **PLAIN), callbacks=[guard], precision="64-true")
    assert len(messages) == dist.get_rank()  # the first fault of a replica
    own = [(event["step"], event["ranks"]) for event in guard.events]
    assert own == ([(5, [1]), (6, [1])] if dist.get_rank() == 1 else [])

    class Skips(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            finite = all(p.grad.isfinite().all() for p in self.param_groups[0]["params"])
            return super().step(closure) if finite else None

    def spoiled(one: nn.Module, step: int, replica: int) -> Tensor:
        loss = loss_of(one, step, replica)
        return loss * torch.nan if replica == 1 and step in (5, 6) else loss

    def make(one: nn.Module) -> torch.optim.Optimizer:
        return Skips(one.parameters(), lr=0.02)

    assert_equals_simulation(model, Net(), spoiled, make, **WINDOW)


class Weights(Callback):
    """Records this replica's weights after each step, and whether they equal the shared ones."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.shared: list[bool] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.seen.append(flat(module).clone())
        parts = [one.parts(one.outer) for one in trainer.strategy._replica._fragments]
        self.shared.append(all(torch.equal(*pair) for part in parts for pair in part))


def _rolled_back() -> None:
    """A replica that rolls back takes the shared weights; the others are not affected."""
    bad = (5, 6)
    guard = lo.NonFiniteGuard(
        "rollback", rollback_after=2, backoff_after=1, max_consecutive=9, snapshot_every_n_steps=2
    )
    before, after, model = Weights(), Weights(), Net(bad=bad)
    settings = {"fragments": 2, "delay": 1}
    fit(model, lo.DiLoCoStrategy(4, **settings, **PLAIN), callbacks=[before, guard, after])
    same = [torch.equal(a, b) for a, b in zip(before.seen, after.seen, strict=True)]
    if dist.get_rank() == 0:
        assert all(same)
        assert not guard.events
    else:
        assert same == [step != 6 for step in range(STEPS)]
        assert after.shared[6]
        assert not before.shared[6]
        assert [event["action"] for event in guard.events] == ["backoff", "rollback"]
    assert same_on_all_ranks(model)


def _stop_early(folder: str) -> None:
    """Early stopping, checkpoints and tests use the same model on all ranks."""
    path = f"{folder}/best.ckpt"

    def save(trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == 6:  # within a window
            before = flat(module).clone()
            trainer.save_checkpoint(path)
            saved = torch.load(path, weights_only=True)["state_dict"]
            for name, weight in module.state_dict().items():
                assert torch.equal(weight, saved[name])
            mean = sum(of_all_ranks(before)) / 2
            torch.testing.assert_close(flat(module), mean)  # type: ignore[arg-type]
            assert not torch.equal(before, flat(module))

    model = Net(lr=1e-4)  # no improvement of 1: rank 0 stops both
    patience = 1 if dist.get_rank() == 0 else 5
    trainer = fit(
        model,
        lo.DiLoCoStrategy(4),
        callbacks=[
            LambdaCallback(on_train_batch_end=save),
            EarlyStopping("val", patience=patience, min_delta=1.0),
        ],
        val_check_interval=5,
        limit_val_batches=2,
        max_epochs=3,
    )
    assert trainer.global_step == 10
    assert same_on_all_ranks(model)


def _unfrozen() -> None:
    """A layer that is unfrozen within a window is exchanged from then on.

    The other one keeps its outer momentum, although it is frozen for that step.
    """

    class Thaws(Callback):
        def __init__(self) -> None:
            self.same: dict[int, bool] = {}
            self.momentum: list[float] = []

        def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            module.layer[0].requires_grad_(trainer.global_step >= 5)
            module.layer[2].requires_grad_(trainer.global_step != 5)

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            weights = of_all_ranks(module.layer[0].weight.detach())
            self.same[trainer.global_step] = torch.equal(*weights)
            momentum = trainer.strategy._replica.state_dict()["momentum"]
            self.momentum.append(float(momentum["layer.2.weight"].norm()))

    thaws = Thaws()
    model = Net(lr=0.1)
    model.layer[0].requires_grad_(False)  # type: ignore[index]
    fit(model, lo.DiLoCoStrategy(4, outer_momentum=0.5), callbacks=[thaws])
    assert thaws.momentum[4] == thaws.momentum[5] == thaws.momentum[6] > 0
    expected = {step: step <= 5 or step % 4 == 0 for step in range(1, STEPS + 1)}
    assert thaws.same == expected


def _same_start_and_buffers() -> None:
    """All start from the state of the first; a buffer that changes only on rank 1 is averaged.

    A NaN of rank 1 does not count. Batch statistics are those of one replica.
    """

    def check(trainer: Any, module: Any) -> None:
        assert same_on_all_ranks(module)
        assert float(module.shift) == 2.0
        assert module.synced.process_group.size() == 1

    def change(trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            module.late = torch.tensor(rank + 1.0)
            module.table = torch.ones(2 + rank)  # as long as the longest sequence of a replica
            if rank == 1:
                module.shift.fill_(4.0)
                module.queue.copy_(module.queue.roll(1))
                module.assigned = torch.tensor(4.0)
                module.alone = torch.tensor(4.0)
                module.odd.fill_(torch.nan)
                module.spoiled[1] = 4.0

    model, rank = Net(), dist.get_rank()
    model.register_buffer("shift", torch.tensor(2.0 + rank))
    model.register_buffer("queue", torch.arange(4.0))
    model.register_buffer("odd", torch.tensor(5.0))
    model.register_buffer("spoiled", torch.tensor([torch.nan, 2.0]))
    model.register_buffer("assigned", torch.tensor(2.0))
    for name in ("late", "table", "alone"):
        model.register_buffer(name, None)
    model.synced = nn.SyncBatchNorm(4)
    model.layer[0].weight.data += rank  # type: ignore[index, operator]
    callback = LambdaCallback(on_train_start=check, on_train_batch_end=change)
    fit(model, lo.DiLoCoStrategy(4), callbacks=[callback])
    assert (float(model.shift), float(model.assigned), float(model.odd)) == (3.0, 3.0, 5.0)
    assert float(model.late) == 1.5
    assert repr(model.spoiled.tolist()) == "[nan, 3.0]"
    assert model.queue.tolist() == [1.5, 0.5, 1.5, 2.5]
    assert (len(model.table), model.alone is None) == (2 + rank, rank == 0)
    assert model.synced.process_group is None


def _averaged_optimizer_states() -> None:
    """Except for quantized states and where only one replica has a state; NaN is reset."""
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer, rank = torch.optim.SGD(parameters), dist.get_rank()
    for number, values in enumerate(([1.0, 3.0], [2.0, torch.nan], [5.0])):
        if rank < len(values):
            state = {"momentum_buffer": torch.full((2,), values[rank])}
            optimizer.state[parameters[number]] = state
    scale, codes = torch.full((1,), 1.0 + rank), torch.full((2,), rank, dtype=torch.uint8)
    quantized = {"scale": scale, "codes": codes}
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    optimizer.state[optimizer.param_groups[1]["params"][0]] = quantized
    average_states(optimizer)
    assert float(scale) == 1.0 + rank
    means = [
        optimizer.state[p]["momentum_buffer"].tolist() for p in parameters if p in optimizer.state
    ]
    assert means == [[2.0, 2.0], [1.0, 1.0], [5.0, 5.0]][: 3 - rank]
    weight = nn.Parameter(torch.ones(1, dtype=torch.complex64))
    optimizer = torch.optim.SGD([weight])
    optimizer.state[weight] = {"momentum_buffer": torch.full((1,), complex(rank, 1.0))}
    average_states(optimizer)
    assert optimizer.state[weight]["momentum_buffer"].tolist() == [0.5 + 1j]
    optimizer.state[weight]["momentum_buffer"].fill_(torch.nan)
    average_states(optimizer)
    assert optimizer.state[weight]["momentum_buffer"].tolist() == [0j]


def _unequal_batches() -> None:
    with pytest.raises(ValueError, match="as many batches on every process, got from 14 to 16"):
        fit(Net(fewer=2), lo.DiLoCoStrategy(4))


class Stream(IterableDataset[Any]):
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


class StreamNet(Net):
    def train_dataloader(self) -> Any:
        return DataLoader(Stream(list(super().train_dataloader())), batch_size=None)


def _streams_of_different_lengths(folder: str) -> None:
    """All ranks raise at the exchange, a checkpoint or the end, whatever the shorter one waits for.

    Between two of these, replicas may be at different epochs.
    """
    for settings in ({}, {"enable_checkpointing": True, "default_root_dir": folder}):
        for fewer in (7, -7):  # either rank ends first
            with pytest.raises(RuntimeError, match="data of one replica ended while another"):
                fit(StreamNet(fewer=fewer), lo.DiLoCoStrategy(4), **settings)
    model = StreamNet(fewer=7)
    settings = {"max_epochs": -1, "max_steps": 2 * STEPS, "num_sanity_val_steps": 1}
    fit(model, lo.DiLoCoStrategy(4), **settings)  # validates before and after it knows of streams
    assert same_on_all_ranks(model)


class ReloadedNet(StreamNet):
    """Rank 1 lacks 7 batches from the second epoch on, in which batches may come from a stream."""

    def __init__(self, later: type[Net]) -> None:
        super().__init__()
        self.later = later

    def train_dataloader(self) -> Any:
        if self.current_epoch == 0:
            return Net.train_dataloader(self)
        self.fewer = 7
        return self.later.train_dataloader(self)


def _unequal_batches_after_a_reload() -> None:
    later = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}
    with pytest.raises(ValueError, match="as many batches on every process, got from 9 to 16"):
        fit(ReloadedNet(Net), lo.DiLoCoStrategy(4), **later)
    with pytest.raises(RuntimeError, match="data of one replica ended while another"):
        fit(ReloadedNet(StreamNet), lo.DiLoCoStrategy(4, delay=2), **later)


class Spectral(Net):
    """A model with complex weights and a complex buffer, or with pairs of real numbers instead."""

    def __init__(self, as_pairs: bool) -> None:
        super().__init__(optimizer="Adam")
        generator = torch.Generator().manual_seed(0)
        pairs, zeros = torch.randn(6, 3, 2, generator=generator), torch.zeros(2, 2)
        self.as_pairs = as_pairs
        self.weight = nn.Parameter(pairs if as_pairs else torch.view_as_complex(pairs))
        self.register_buffer("phase", zeros if as_pairs else torch.view_as_complex(zeros))

    def pairs(self) -> list[Tensor]:
        own = [self.weight.detach(), self.phase]
        return own if self.as_pairs else [torch.view_as_real(one) for one in own]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight = torch.view_as_complex(self.weight) if self.as_pairs else self.weight
        self.pairs()[1].fill_(self.global_rank)
        products = batch[0].to(weight.dtype) @ weight
        return super().training_step(batch, batch_idx) + products.abs().square().mean()


def _complex_weights() -> None:
    """Complex weights are trained like pairs of real ones."""
    models = Spectral(True), Spectral(False)
    for model in models:
        fit(model, lo.DiLoCoStrategy(4, fragments=2, delay=1, outer_momentum=0.5))
    for pairs, others in zip(models[0].pairs(), models[1].pairs(), strict=True):
        assert torch.equal(pairs, others)
        assert all(torch.equal(pairs, one) for one in of_all_ranks(pairs))
    assert models[1].phase.tolist() == [0.5 + 0.5j] * 2


def _nothing_to_train() -> None:
    with pytest.raises(ValueError, match="DiLoCo needs a parameter with requires_grad=True"):
        fit(Net().requires_grad_(False), lo.DiLoCoStrategy(4))
    model = Net()
    model.lazy = nn.LazyLinear(3)
    with pytest.raises(ValueError, match=r"DiLoCo needs the shapes.*example batch"):
        fit(model, lo.DiLoCoStrategy(4))


def _run_all(folder: str) -> None:
    _clipping()
    _guarded()
    _rolled_back()
    _stop_early(folder)
    _unfrozen()
    _same_start_and_buffers()
    _unequal_batches()
    _streams_of_different_lengths(folder)
    _unequal_batches_after_a_reload()
    _complex_weights()
    _nothing_to_train()
    _averaged_optimizer_states()


def test_own_and_shared_state_of_replicas(tmp_path: Path) -> None:
    launch(_run_all, str(tmp_path))
