"""Skipped, clipped and rolled back steps leave no trace in the residuals."""

import math
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateFinder
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_opt as lo
from lightning_opt.strategies.compression.compressed_ddp import CompressedDDPStrategy
from lightning_opt.strategies.compressors import Quantize, Threshold, TopK
from tests.helpers.processes import launch
from tests.strategies.runs import (
    SIZES,
    Ledger,
    LedgerByHand,
    SaveAtEnd,
    State,
    assert_nothing_is_lost,
    compressed,
    dist_world,
    expected,
    fit,
    gradient,
)

pytestmark = pytest.mark.distributed

STEPS, SKIPPED = range(16), (5, 9, 10)


APPLIED = [step for step in STEPS if step not in SKIPPED]


# --- skipped ------------------------------------------------------------------------------------


class DropGradients(Callback):
    """Removes the gradients of some steps, as a user's guard may do."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step in SKIPPED:
            for parameter in pl_module.parameters():
                parameter.grad = None


class FlagOverflow(Callback):
    """Sets ``found_inf``, as a loss scaler does for a fused optimizer."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        optimizer.found_inf = torch.tensor(float(trainer.global_step in SKIPPED))

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        for optimizer in trainer.optimizers:
            del optimizer.found_inf


class Fused(Ledger):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0, fused=True)


def _skip() -> None:
    runs = [
        (compressor, Ledger(), DropGradients())
        for compressor in (TopK(0.05), Threshold(3.0), Quantize(8), Quantize(4))
    ]
    runs += [(TopK(0.05), Fused(), FlagOverflow()), (Quantize(4), Fused(), FlagOverflow())]
    for compressor, model, callback in runs:
        strategy = compressed(compressor)
        fit(model, strategy, STEPS, callbacks=[callback])
        accounts = expected(APPLIED, dist_world(), model)
        assert_nothing_is_lost(model, strategy, accounts)


class TwoByTurns(LedgerByHand):
    """Two optimizers over one backward pass; one of them skips some steps."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(Ledger.training_step(self, batch, batch_idx))
        if int(batch) in SKIPPED:
            for weight in list(self.weights)[1::2]:
                weight.grad = None
        for optimizer in optimizers:
            optimizer.step()


def _by_turns() -> None:
    model, strategy = TwoByTurns(), compressed(bucket_cap_mb=25)
    fit(model, strategy, STEPS)
    whole, skipped = (expected(steps, dist_world(), model) for steps in (STEPS, APPLIED))
    accounts = [(skipped if index % 2 else whole)[index] for index in range(len(whole))]
    assert_nothing_is_lost(model, strategy, accounts)


def _two_processes() -> None:
    _skip()
    _by_turns()


def test_skipped_step_leaves_no_residual():
    launch(_two_processes)
    launch(_skip, processes=3)


# --- clipping -----------------------------------------------------------------------------------


class ClipsByHand(Ledger):
    """Clips reduced gradients in Lightning's hook."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1)


def _clip() -> None:
    for compressor in (TopK(0.05), Threshold()):
        with pytest.raises(ValueError, match=r"ClipsByHand.configure_gradient_clipping clips"):
            fit(ClipsByHand(), compressed(compressor), range(3))
        with pytest.raises(ValueError, match=r"AdaptiveClipping clips .*gradient_clip_val"):
            fit(Ledger(), compressed(compressor), range(3), callbacks=[lo.AdaptiveClipping()])
    fit(Ledger(), compressed(Quantize(8)), range(12), callbacks=[lo.AdaptiveClipping()])
    fit(ClipsByHand(), compressed(Quantize(8)), range(12))
    # A rank's gradient is clipped before it enters the residual; the fourth step compresses.
    each = [torch.cat([gradient(3, rank, numel) for numel in SIZES]) for rank in (0, 1)]
    by_value = sum(own.clamp(-0.01, 0.01) for own in each) / 2
    by_norm = sum(own * (0.01 / math.sqrt(2) / own.norm()) for own in each) / 2
    for algorithm, clipped, plugins in (
        ("value", by_value, []),
        ("norm", by_norm, []),
        ("value", by_value, [lo.DynamicLossScale(init_scale=1024.0)]),
    ):
        strategy = compressed(bucket_cap_mb=25)
        clip = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm}
        fit(Ledger(), strategy, range(4), plugins=plugins, **clip)
        rest = torch.cat(list(strategy.kept.values()))
        assert 0.88 < torch.isclose(rest, clipped).double().mean() < 1  # each rank has sent 5%


def test_clipping_reduced_gradients_raises_with_late_compressors():
    launch(_clip)


# --- restored during a run ----------------------------------------------------------------------


def _size_of_residuals(state: dict[str, Any]) -> float:
    return sum(rest.abs().sum().item() for rest in state["residuals"].values())


class Searched(Ledger):
    lr = 1.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def _finder() -> None:
    finder = LearningRateFinder(num_training_steps=20, update_attr=False)
    start = State()
    fit(Searched(), compressed(), range(30), callbacks=[finder, start])
    assert start.state["step"] == -1
    assert _size_of_residuals(start.state) == 0


def _rollback() -> None:
    guard = lo.NonFiniteGuard(policy="rollback", rollback_after=1, snapshot_every_n_steps=5)
    after = State(12)
    fit(Ledger(bad=(12, 1, 3)), compressed(), range(14), callbacks=[guard, after])
    assert guard.report() is None or after.state["step"] == 12
    assert _size_of_residuals(after.state) == 0


def _second_fit(path: str) -> None:
    auto = Threshold("auto")
    trainer = fit(Ledger(), compressed(auto), range(20), callbacks=[SaveAtEnd(path)])
    strategy = trainer.strategy
    assert _size_of_residuals(strategy.state) > 0
    loader = DataLoader([0, 1], batch_size=None)
    model = Ledger()
    model.validation_step = lambda *args: None  # type: ignore[method-assign, assignment]
    trainer.validate(model, loader, ckpt_path=path, verbose=False)
    saved = torch.load(path, weights_only=True)[CompressedDDPStrategy.checkpoint_key]
    for settings, residuals in (({}, saved["residuals"]), ({"error_feedback": False}, {})):
        loaded, own = State(), compressed(auto, **settings)
        fit(Ledger(), own, range(20), callbacks=[loaded], ckpt_path=path, max_epochs=2)
        torch.testing.assert_close(loaded.state["residuals"], residuals)
        assert loaded.state["bounds"] == saved["bounds"] != {}
    trainer.fit(Ledger(), loader, ckpt_path=path)  # nothing is left to train
    trainer.fit_loop.epoch_progress.reset()
    trainer.fit_loop.max_epochs = 2
    start = State()
    trainer.callbacks.append(start)  # type: ignore[attr-defined]
    trainer.fit(Ledger(), DataLoader(range(20), batch_size=None))
    assert _size_of_residuals(start.state) == 0
    assert (start.state["step"], start.state["ramped"]) == (-1, 0)


def _restored(path: str) -> None:
    _finder()
    _rollback()
    _second_fit(path)


def test_finder_rollback_validation_and_second_fit_leave_no_residual(tmp_path):
    launch(_restored, str(tmp_path / "first.ckpt"))
