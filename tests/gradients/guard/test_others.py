"""The guard with unusual buffers, several optimizers, optimizers of others and complex weights."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook

import lightning_opt as lo
from tests.gradients.faulty import SAM, BareLookahead, FaultyNet, Lookahead, all_finite, fit
from tests.helpers.models import AdversarialNet, assert_same_weights


@pytest.mark.parametrize(
    ("optimizer", "scaled"),
    [(Lookahead, False), (Lookahead, True), (BareLookahead, False), (SAM, False)],
)
def test_skipped_steps_leave_no_trace_in_optimizers_of_others(
    optimizer: type[Optimizer], scaled: bool
) -> None:
    # With a loss scale a finite loss with a bad gradient counts as an overflow.
    faults = {0: "nan", 5: "nan" if scaled else "root", 6: "constant"}
    guard = lo.NonFiniteGuard(lr_backoff=1.0)
    plugins = [[lo.DynamicLossScale(init_scale=1.0)] if scaled else [] for _ in range(2)]
    guarded = fit(FaultyNet(faults, optimizer, {}, batches=16), guard, plugins=plugins[0])
    clean = fit(FaultyNet({}, optimizer, {}, batches=16, leave_out=faults), plugins=plugins[1])
    assert [event["batch_idx"] for event in guard.events] == list(faults)
    assert_same_weights(guarded, clean)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_warning_if_the_optimizer_has_moved_weights_before_a_bad_evaluation() -> None:
    class BadAgain(FaultyNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.evaluations = getattr(self, "evaluations", 0) + 1
            return loss * float("nan") if self.evaluations == 4 else loss

    with pytest.warns(UserWarning, match="skips a step of SAM, which had changed the weights"):
        model = fit(BadAgain({}, SAM, {}), lo.NonFiniteGuard())
    assert all_finite(model)


def test_schedulers_step_and_post_hooks_run_at_a_skipped_step() -> None:
    seen: list[Any] = []

    class Scheduled(FaultyNet):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
            optimizer.register_step_post_hook(
                lambda own, *_: seen.append(own.param_groups[0]["params"][0].grad is not None)
            )
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "interval": "step"},
            }

    of_all = register_optimizer_step_post_hook(lambda *_: seen.append("global"))
    try:
        model = fit(Scheduled({0: "nan"}, batches=2), lo.NonFiniteGuard())
    finally:
        of_all.remove()
    assert seen == ["pre", False, "global", "pre", True, "global"]
    assert model.trainer.optimizers[0].param_groups[0]["lr"] == 0.02 * 0.25


class Lazy(FaultyNet):
    """A model whose first forward pass creates weights and running statistics."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.encoder, self.norm = nn.LazyLinear(5), nn.LazyBatchNorm1d()


def test_layers_that_are_lazy_at_the_start_are_guarded() -> None:
    models = []
    for policy, settings in (("skip", {"faults": {5: "nan"}}), (None, {"leave_out": {5}})):
        torch.manual_seed(0)
        guards = [lo.NonFiniteGuard(policy, lr_backoff=1.0)] if policy else []
        models.append(fit(Lazy(**settings), *guards))
    assert_same_weights(*models)
    rolling = lo.NonFiniteGuard("rollback")
    assert all_finite(fit(Lazy({5: "weight"}), rolling))
    assert rolling.escalation.rollbacks == 1


class Masked(FaultyNet):
    """A model with a mask of -inf from the start and one from the forward pass."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))
        self.register_buffer("late", None)
        self.register_buffer("average", torch.zeros(2**17))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.late = torch.full((8, 8), float("-inf"))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_mask_of_minus_infinity_is_not_damage(policy: Any) -> None:
    guard = lo.NonFiniteGuard(policy, snapshot_every_n_steps=3)
    other = Masked({5: "nan"})
    other.mask.zero_()
    fit(other, guard)
    guarded = fit(Masked({5: "nan"}), guard)
    assert [event["kind"] for event in guard.events] == ["nonfinite_loss"]
    clean = fit(Masked({}, leave_out=[5]))
    assert_same_weights(guarded.head, clean.head)


def test_buffer_that_becomes_infinite_is_damage() -> None:
    class Damaged(Masked):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 5:
                self.average[0] = float("inf")
            return super().training_step(batch, batch_idx)

    with pytest.raises(FloatingPointError, match=r"\(average\)"):
        fit(Damaged({5: "nan"}), lo.NonFiniteGuard())


def test_bad_loss_skips_every_later_step_of_its_batch() -> None:
    class Bad(AdversarialNet):
        def discriminator_loss(self, batch: Any) -> Tensor:
            loss = super().discriminator_loss(batch)  # infinite, but with a finite gradient
            return loss + float("inf") if self.trainer.fit_loop.batch_idx == 4 else loss

    guard = lo.NonFiniteGuard()
    model = fit(Bad(), guard)
    assert all_finite(model)
    assert [(event["optimizer"], event["batch_idx"]) for event in guard.events] == [(1, 4), (0, 4)]


class Complex(FaultyNet):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.filter = nn.Parameter(torch.ones(6, dtype=torch.complex64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        number, inputs, targets = batch
        return super().training_step((number, inputs * self.filter.abs(), targets), batch_idx)


def test_complex_weights_are_guarded() -> None:
    guard = lo.NonFiniteGuard("rollback", snapshot_every_n_steps=2, spike=6.0)
    model = fit(Complex({5: "nan"}, torch.optim.Adam), guard)
    assert [event["batch_idx"] for event in guard.events] == [5]
    assert bool(torch.isfinite(torch.view_as_real(model.filter)).all())


def test_rollback_keeps_a_group_that_is_newer_than_the_snapshot() -> None:
    class Unfrozen(FaultyNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 4:
                self.added = nn.Parameter(torch.ones(()))
                self.trainer.optimizers[0].add_param_group({"params": [self.added], "lr": 0.5})
            loss = super().training_step(batch, batch_idx)
            return loss * self.added if batch_idx >= 4 else loss

    guard = lo.NonFiniteGuard("rollback", rollback_after=1, lr_backoff=1.0)
    model = fit(Unfrozen({6: "nan"}), guard)
    assert [event["action"] for event in guard.events] == ["rollback"]
    assert [group["lr"] for group in model.trainer.optimizers[0].param_groups] == [0.02, 0.5]
    assert all_finite(model)
    assert model.added != 1.0


@pytest.mark.parametrize("has_scheduler", [False, True])
def test_rollback_keeps_rates_of_a_scheduler_that_is_newer_than_the_snapshot(
    has_scheduler: bool,
) -> None:
    class Scheduled(FaultyNet):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.02)
            return [optimizer], [StepLR(optimizer, 1)] if has_scheduler else []

        def fault_of(self, number: int) -> str | None:
            return super().fault_of(number) if self.current_epoch == 2 else None

        def on_train_batch_end(self, *_: Any) -> None:
            rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    found = []
    for faults in ({}, {1: "nan"}):
        rates: list[float] = []
        guard = lo.NonFiniteGuard(
            "rollback", rollback_after=1, lr_backoff=1.0, snapshot_every_n_steps=100
        )
        averaging = StochasticWeightAveraging(0.05, swa_epoch_start=2, annealing_epochs=4)
        model = fit(Scheduled(faults), guard, averaging, max_epochs=5)
        found.append(rates)
        assert [event["action"] for event in guard.events] == ["rollback"] * len(faults)
        assert all_finite(model)
    assert found[0] == found[1]


class Quantized(Tensor):
    """A tensor of int8 values that claims to be float32, with the fewest operators."""

    @staticmethod
    def __new__(cls, values: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, values: Tensor) -> None:
        self.values = values

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values)
        raise NotImplementedError(func)


def test_quantized_weights_and_expanded_buffers_are_skipped() -> None:
    """As the frozen weights of QLoRA, and masks that torch does not write to."""
    guard = lo.NonFiniteGuard("rollback", rollback_after=1, lr_backoff=1.0)
    model = FaultyNet({5: "nan"})
    values = torch.ones(4, dtype=torch.int8)
    model.frozen = nn.Parameter(Quantized(values), requires_grad=False)
    model.register_buffer("mask", torch.ones(4).expand(3, 4))
    model.configure_optimizers = lambda: torch.optim.SGD(model.head.parameters())
    fit(model, guard)
    assert [event["batch_idx"] for event in guard.events] == [5]
    assert model.frozen.data.values is values


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_and_float8_buffers_are_kept() -> None:
    """As the adjacency matrix of a graph. Snapshots contain them."""
    dense, guarded = torch.eye(4), FaultyNet({5: "nan"})
    guarded.register_buffer("coo", dense.to_sparse_coo())
    guarded.register_buffer("csr", dense.to_sparse_csr())
    guarded.register_buffer("float8", dense.to(torch.float8_e4m3fn))
    guard = lo.NonFiniteGuard("rollback", snapshot_every_n_steps=3)
    fit(guarded, guard)
    assert [event["batch_idx"] for event in guard.events] == [5]
    for buffer in (guarded.coo, guarded.csr, guarded.float8):
        assert torch.equal(buffer.to_dense().float(), dense)
    assert_same_weights(guarded.head, fit(FaultyNet({}, leave_out=[5])).head)


class NewOptimizer(Callback):
    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 3:
            trainer.strategy.optimizers = [torch.optim.AdamW(pl_module.parameters(), lr=0.02)]


def test_optimizer_that_replaces_another_during_the_fit_is_guarded() -> None:
    guarded = fit(FaultyNet({5: "nan"}), NewOptimizer(), lo.NonFiniteGuard(lr_backoff=1.0))
    clean = fit(FaultyNet({}, leave_out=[5]), NewOptimizer())
    assert_same_weights(guarded, clean)
    faults = dict.fromkeys(range(4, 7), "nan")
    guard = lo.NonFiniteGuard("rollback", backoff_after=1, rollback_after=2)
    assert all_finite(fit(FaultyNet(faults), NewOptimizer(), guard))
    assert guard.escalation.rollbacks == 1


def test_buffer_changed_between_two_steps_keeps_its_value_at_a_fault() -> None:
    class Averaged(FaultyNet):
        def __init__(self, faults: Any) -> None:
            super().__init__(faults)
            self.register_buffer("averaged", torch.tensor(0))

        def on_train_batch_end(self, *_: Any) -> None:
            self.averaged += 1

    assert fit(Averaged({5: "nan"}), lo.NonFiniteGuard()).averaged == 12
