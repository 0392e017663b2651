"""CurvatureMonitor compared with autograd's Hessian."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

import lightning_opt as lo
from lightning_opt.gradients.curvature.curvature_monitor import edge_of
from lightning_opt.gradients.curvature.differentiable_loss import check_run
from tests.gradients.curvature.test_hessian import hessian_of
from tests.helpers.models import SmallNet, loader_of
from tests.helpers.processes import launch
from tests.helpers.trainers import MemoryLogger, quiet_trainer

LR = 0.05


def monitor(**settings: Any) -> lo.CurvatureMonitor:
    defaults = {"every_n_steps": 3, "fraction": 1.0, "max_iterations": 60, "tolerance": 1e-4}
    return lo.CurvatureMonitor(**{**defaults, "n_samples": 100, **settings})


def hessians(every: int = 3, batches: int = 12) -> list[torch.Tensor]:
    """Return the Hessian before each ``every``-th step of a manual loop."""
    model, found = SmallNet(lr=LR).double(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for number, (x, y) in enumerate(loader_of(batches)):
        if number % every == 0:
            found.append(hessian_of(model.layer, x.double(), y.double()))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model.layer(x.double()), y.double()).backward()
        optimizer.step()
    return found


def check(history: list[dict[str, float]]) -> None:
    expected = hessians()
    assert [entry["step"] for entry in history] == [0, 3, 6, 9]
    for entry, hessian in zip(history, expected, strict=True):
        top = torch.linalg.eigvalsh(hessian)[-1].item()
        assert entry["sharpness"] == pytest.approx(top, rel=1e-3)
        assert entry["residual"] <= 1e-3 * top
        assert abs(entry["trace"] - hessian.trace().item()) < 4 * entry["trace_error"]
        assert 0 < entry["trace_error"] < 0.2 * hessian.trace().abs().item()
        assert entry["edge"] == pytest.approx(top * LR / 2, rel=1e-3)


def test_measurements_match_the_hessian():
    logger, callback = MemoryLogger(), monitor()
    quiet_trainer(callbacks=[callback], logger=logger).fit(SmallNet(lr=LR), loader_of(12))
    check(callback.history)
    for key in ("sharpness", "residual", "trace", "trace_error", "edge"):
        assert logger.series(f"curvature/{key}") == [entry[key] for entry in callback.history]
    assert callback.report().rows == callback.history


@pytest.mark.parametrize(("size", "fraction", "samples"), [(10, 0.4, 4), (4, 0.8, 3), (1, 0.25, 1)])
def test_fraction_of_the_samples_is_measured(size, fraction, samples):
    model, callback = SmallNet(lr=LR), monitor(fraction=fraction, n_samples=2)
    x, y = next(iter(loader_of(1, size)))
    hessian = hessian_of(model.layer, x[:samples], y[:samples])
    quiet_trainer(callbacks=[callback]).fit(model, loader_of(1, size))
    top = torch.linalg.eigvalsh(hessian)[-1].item()
    assert callback.history[0]["sharpness"] == pytest.approx(top, rel=1e-3)


def measure_on_ranks() -> list[dict[str, float]]:
    callback = monitor()
    trainer = quiet_trainer(callbacks=[callback], devices=2, strategy="ddp")
    trainer.fit(SmallNet(lr=LR), loader_of(12))
    return callback.history


@pytest.mark.distributed
@pytest.mark.slow
def test_two_ranks_measure_their_joint_hessian():
    ours, theirs = launch(measure_on_ranks)
    assert ours == theirs
    check(ours)


class LossOnSome(SmallNet):
    """The first ``ranks`` ranks have a loss."""

    ranks = 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if self.global_rank < self.ranks else None


class Compare(Callback):
    """Computes the sharpness of this rank's batch, and ends the run before its first step."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        loss, params = module.step(batch), list(module.parameters())
        self.sharpness = lo.top_eigenvalue(loss, params, 60, 1e-4).value
        raise ArithmeticError("enough")


def measure_with_losses_on_one_and_no_rank() -> tuple[list[list[float]], float]:
    found = []
    for ranks in (1, 0):
        callback, compare, model = monitor(n_samples=2), Compare(), LossOnSome()
        trainer = quiet_trainer(callbacks=[callback, compare], devices=2, strategy="ddp")
        model.ranks = ranks
        with pytest.raises(ArithmeticError, match="enough"):
            trainer.fit(model, loader_of(2))
        found.append([entry["sharpness"] for entry in callback.history])
    return found, compare.sharpness


@pytest.mark.distributed
def test_rank_without_a_loss_counts_as_zero_unless_no_rank_has_one():
    (ours, of_batch), (theirs, _) = launch(measure_with_losses_on_one_and_no_rank)
    assert ours == theirs == [[pytest.approx(of_batch / 2, rel=1e-3)], []]


def test_lazy_layer_without_weights_raises():
    model = SmallNet()
    model.lazy = torch.nn.LazyLinear(3)
    with pytest.raises(ValueError, match=r"CurvatureMonitor needs the shapes.*example batch"):
        quiet_trainer(callbacks=[monitor()]).fit(model, loader_of(2))


def test_half_precision_of_transformer_engine_raises():
    trainer = SimpleNamespace(strategy=None, precision="transformer-engine-float16")
    with pytest.raises(ValueError, match="needs weights in float32"):
        check_run("CurvatureMonitor", trainer, SmallNet())  # type: ignore[arg-type]


def test_one_measurement_per_step_under_accumulation():
    callback = monitor(every_n_steps=2, n_samples=2)
    trainer = quiet_trainer(callbacks=[callback], accumulate_grad_batches=3)
    trainer.fit(SmallNet(lr=LR), loader_of(12))
    assert [entry["step"] for entry in callback.history] == [0, 2]


@pytest.mark.parametrize(
    ("settings", "factor"),
    [
        ({}, 2.0),
        ({"momentum": 0.9}, 2 * 1.9),
        ({"momentum": 0.9, "dampening": 0.5}, 2 * 1.9 / 0.5),
    ],
)
def test_descent_on_a_parabola_diverges_above_the_edge(settings, factor):
    lr, ends = 0.1, []
    for share in (0.99, 1.01):
        x = torch.ones((), dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.SGD([x], lr=lr, **settings)
        curvature = share * factor / lr
        for _ in range(700):
            optimizer.zero_grad()
            (0.5 * curvature * x * x).backward()
            optimizer.step()
        ends.append(x.abs().item())
        assert edge_of(curvature, optimizer)["edge"] == (pytest.approx(share))
    assert ends[0] < 1e-3
    assert ends[1] > 1e3


@pytest.mark.filterwarnings("ignore:.*this fit will run with no optimizer")
@pytest.mark.parametrize("has_optimizer", [True, False])
def test_adaptive_optimizer_has_no_edge(has_optimizer, monkeypatch):
    if not has_optimizer:
        monkeypatch.setattr(SmallNet, "configure_optimizers", lambda _: None)
    callback = monitor(n_samples=2)
    quiet_trainer(callbacks=[callback]).fit(SmallNet("Adam", lr=LR), loader_of(4))
    assert "edge" not in callback.history[0]
