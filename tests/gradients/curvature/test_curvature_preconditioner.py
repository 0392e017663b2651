"""CurvaturePreconditioner compared with a manual loop and autograd's Hessian."""

import math
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention
from torch.nn.utils import prune
from torch.utils.data import DataLoader

import lightning_opt as lo
from lightning_opt.gradients.curvature import curvature_preconditioner
from lightning_opt.gradients.curvature.curvature_preconditioner import DiagonalPreconditioner
from lightning_opt.gradients.curvature.hessian import random_signs
from tests.gradients.curvature.test_hessian import flat, hessian_of
from tests.helpers.models import SmallNet, assert_same_weights, loader_of
from tests.helpers.processes import launch
from tests.helpers.trainers import MemoryLogger, quiet_trainer

EVERY, BETA, POWER, DAMPING, CLIP, LR = 3, 0.5, 0.7, 1e-2, 0.5, 0.05


def fit(model: SmallNet, *callbacks: Any, batches: int = 12, **settings: Any) -> SmallNet:
    quiet_trainer(callbacks=list(callbacks), **settings).fit(model, loader_of(batches))
    return model


def preconditioner(**settings: Any) -> lo.CurvaturePreconditioner:
    defaults = {"every_n_steps": EVERY, "beta": BETA, "power": POWER, "damping": DAMPING}
    return lo.CurvaturePreconditioner(**{**defaults, "clip": CLIP, "fraction": 1.0, **settings})


def manual_loop(world: int = 1, fraction: float = 1.0, accumulate: int = 1) -> SmallNet:
    """Train in float64; simulate ``world`` ranks that split each batch."""
    model = SmallNet(lr=LR).double()
    net, params = model.layer, list(model.parameters())
    average, weight_sum, step = torch.zeros(flat(params).numel(), dtype=torch.float64), 0.0, 0
    for number, (x, y) in enumerate(loader_of(12)):
        x, y = x.double(), y.double()
        mse_loss(net(x), y).div(accumulate).backward()
        if (number + 1) % accumulate:
            continue
        if step % EVERY == 0:
            estimates = []
            for rank in range(world):
                seed = step // EVERY * world + rank
                generator = torch.Generator().manual_seed(seed)
                z = flat([random_signs(p.float(), generator) for p in params]).double()
                xs, ys = x[rank::world], y[rank::world]
                count = int(len(xs) * fraction)
                estimates.append(z * (hessian_of(net, xs[:count], ys[:count]) @ z))
            average = BETA * average + (1 - BETA) * torch.stack(estimates).mean(0)
            weight_sum = BETA * weight_sum + (1 - BETA)
        step += 1
        divisor = (average / weight_sum).abs() ** POWER + DAMPING
        update = (flat(p.grad for p in params) / divisor).clamp(-CLIP, CLIP)
        with torch.no_grad():
            for p, part in zip(params, update.split([p.numel() for p in params]), strict=True):
                p -= LR * part.view_as(p)
                p.grad = None
    return model.float()


@pytest.mark.parametrize(("fraction", "accumulate"), [(1.0, 1), (0.5, 2)])
def test_steps_match_a_manual_loop(fraction, accumulate):
    callback = preconditioner(fraction=fraction)
    model = fit(SmallNet(lr=LR), callback, accumulate_grad_batches=accumulate)
    expected = manual_loop(fraction=fraction, accumulate=accumulate)
    assert_same_weights(model, expected, atol=1e-5)


def train_on_ranks() -> Any:
    model = fit(SmallNet(lr=LR), preconditioner(), devices=2, strategy="ddp")
    return [p.detach() for p in model.parameters()]


@pytest.mark.distributed
@pytest.mark.slow
def test_two_ranks_average_their_estimates():
    ours, theirs = launch(train_on_ranks)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    expected = manual_loop(world=2)
    for a, b in zip(ours, expected.parameters(), strict=True):
        torch.testing.assert_close(a, b.detach(), atol=1e-5, rtol=0)


class Stateful(SmallNet):
    """BatchNorm, dropout, a metric and logs, which a second pass could change."""

    def __init__(self) -> None:
        super().__init__(lr=0.02)
        self.layer = nn.Sequential(
            nn.Linear(self.layer[0].in_features, 6), nn.BatchNorm1d(6), nn.Dropout(0.3),
            nn.Tanh(), nn.Linear(6, 1),
        )  # fmt: skip
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        loss = super().training_step(batch, batch_idx)
        self.log("calls", float(self.calls), on_step=True, on_epoch=True)
        return loss


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_estimates_have_no_side_effects(precision):
    """With a power of zero gradients are divided by one, so weights must be bit-identical."""
    loggers, models = [], []
    neutral = preconditioner(power=0.0, damping=1e-30, clip=None, fraction=0.5, every_n_steps=1)
    for callbacks in ([], [neutral]):
        torch.manual_seed(0)
        loggers.append(MemoryLogger())
        settings = {"logger": loggers[-1], "precision": precision, "log_every_n_steps": 1}
        models.append(fit(Stateful(), *callbacks, **settings))
    assert_same_weights(models[1], models[0])
    assert models[1].calls == models[0].calls == 12
    assert loggers[1].series("calls_step") == loggers[0].series("calls_step")
    for ours, theirs in zip(models[1].buffers(), models[0].buffers(), strict=True):
        assert torch.equal(ours, theirs)


def test_curvature_is_measured_in_float32_at_any_precision():
    averages = []
    for precision in ("32-true", "bf16-mixed"):
        callback = preconditioner()
        fit(SmallNet(lr=LR), callback, precision=precision, max_steps=1)
        averages.append(callback.state_dict()["average"])
    for name, average in averages[0].items():
        assert torch.equal(averages[1][name], average)
        assert average.dtype == torch.float32


class Attending(SmallNet):
    """Attention over the features, with torch's default kernel."""

    def __init__(self) -> None:
        super().__init__(lr=LR)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        q = (x[:, None, :, None] * self.scale).contiguous()
        return self.layer(scaled_dot_product_attention(q, q, q)[:, 0, :, 0])  # type: ignore[no-any-return]


def test_attention_uses_a_kernel_with_a_second_derivative():
    callback = preconditioner()
    fit(Attending(), callback)
    assert callback.state_dict()["average"]["scale"].all()


def test_compiled_module_gives_the_same_steps():
    model = SmallNet(lr=LR)
    model.layer.compile(backend="aot_eager")
    fit(model, preconditioner())
    assert_same_weights(model, fit(SmallNet(lr=LR), preconditioner()), atol=1e-5)
    torch.compiler.reset()


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad.clone()


def test_operator_without_second_derivative_raises():
    """torch would silently omit its part."""

    class OnceDifferentiableNet(SmallNet):
        def forward(self, x: Tensor) -> Tensor:
            return Once.apply(self.layer(x))  # type: ignore[no-any-return]

    with pytest.raises(RuntimeError, match=r"could not differentiate the loss twice.*once_differ"):
        fit(OnceDifferentiableNet(), preconditioner())


def test_out_of_memory_is_not_called_a_missing_derivative(monkeypatch):
    def raise_out_of_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(curvature_preconditioner, "sample_diagonal", raise_out_of_memory)
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory$"):
        fit(SmallNet(), preconditioner())


def test_logged_values_match_the_average():
    logger, callback = MemoryLogger(), preconditioner(log_every_n_steps=4)
    fit(SmallNet(lr=LR), callback, logger=logger)
    averages = flat(callback._preconditioner.average().values())
    assert logger.series("precondition/curvature")[-1] == pytest.approx(
        averages.abs().mean().item()
    )
    assert logger.series("precondition/negative")[-1] == pytest.approx(
        (averages < 0).float().mean().item()
    )
    assert len(logger.series("precondition/clipped")) == 3
    assert all(0 <= share <= 1 for share in logger.series("precondition/clipped"))
    row = callback.report().rows[0]
    assert (row["steps"], row["estimates"]) == (12, 4)


# --- DiagonalPreconditioner ---------------------------------------------------------------------


def test_nonfinite_gradients_stay_and_nonfinite_estimates_are_ignored():
    rule = DiagonalPreconditioner(0.5, 1.0, 1e-8, 0.5)
    rule.update({"w": torch.tensor([2.0, math.nan])})
    gradient = torch.tensor([0.3, -0.2])
    rule.apply(["w"], [gradient])  # without an estimate only the bound applies
    assert gradient.tolist() == pytest.approx([0.3, -0.2])
    rule.update({"w": torch.tensor([2.0, 4.0])})
    rule.update({"w": torch.tensor([math.inf, 4.0])})
    assert rule.average()["w"].tolist() == [2.0, 4.0]
    gradient = torch.tensor([math.inf, math.nan])
    rule.apply(["w"], [gradient])
    assert not torch.isfinite(gradient).any()


# --- errors and unusual runs --------------------------------------------------------------------


class Manual(SmallNet):
    automatic_optimization = False


class IteratorNet(SmallNet):
    """Makes Lightning fetch batches in the step."""

    def training_step(self, dataloader_iter: Any) -> Any:
        return super().training_step(next(dataloader_iter)[0], 0)


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter` step flavor")
@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (Manual, {}, "does not work with manual optimisation"),
        (IteratorNet, {}, "with dataloader_iter there is no batch"),
        (SmallNet, {"precision": "bf16-true"}, "needs weights in float32"),
        (lambda: SmallNet("LBFGS"), {}, "LBFGS"),
    ],
)
def test_unsupported_runs_raise(make, settings, message):
    with pytest.raises(ValueError, match=message):
        quiet_trainer(callbacks=[preconditioner()], **settings).fit(make(), loader_of(2))


def test_sharded_parameters_raise_in_setup():
    trainer = quiet_trainer(strategy=ModelParallelStrategy())
    with pytest.raises(ValueError, match="does not work with ModelParallelStrategy"):
        preconditioner().setup(trainer, SmallNet(), "fit")


class DictBatchNet(SmallNet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch["rows"], batch_idx)


class NormNet(SmallNet):
    """Its step fails with a single sample."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch["rows"]
        return super().training_step((nn.functional.batch_norm(x, None, None, training=True), y), 0)


@pytest.mark.parametrize(("net", "odd"), [(DictBatchNet, 3), (NormNet, 4)])
def test_batch_whose_part_cannot_be_used_is_used_whole(net, odd):
    def collate(rows: Any) -> Any:
        x, y = torch.utils.data.default_collate(rows)
        return {"rows": (x, y), "odd": torch.zeros(odd)}

    loader = DataLoader(loader_of(4).dataset, batch_size=4, collate_fn=collate)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        quiet_trainer(callbacks=[preconditioner(fraction=0.25)]).fit(part := net(), loader)
    assert sum("uses whole batches" in str(warning.message) for warning in caught) == 1
    quiet_trainer(callbacks=[preconditioner()]).fit(full := net(), loader)
    assert_same_weights(part, full)


class LossOfOddBatches(SmallNet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if batch_idx % 2 else None


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_batch_without_loss_is_no_estimate_of_zero():
    callback = preconditioner(every_n_steps=1)
    fit(LossOfOddBatches(), callback, batches=3, accumulate_grad_batches=3)  # the last has none
    assert list(callback.state_dict()["mass"].values()) == [0.0] * 4


def test_parameters_that_pruning_renames_keep_their_estimates():
    class Prunes(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                prune.identity(pl_module.layer[0], "weight")

    model, callback = SmallNet(), preconditioner(every_n_steps=1)
    fit(model, callback, Prunes(), max_epochs=2)
    assert hasattr(model.layer[0], "weight_orig")
    assert callback.state_dict()["average"].keys() == dict(SmallNet().named_parameters()).keys()


class ChangesBatch(SmallNet):
    """Takes the targets out of its batch, and scales the inputs in place."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        y = batch.pop("y")
        return super().training_step((batch["x"].mul_(0.5), y), batch_idx)


class Halved(SmallNet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((batch["x"] * 0.5, batch["y"]), batch_idx)


@pytest.mark.parametrize("kind", [lo.CurvaturePreconditioner, lo.CurvatureMonitor])
def test_batch_may_be_changed_by_the_step(kind):
    def collate(rows: Any) -> Any:
        return dict(zip("xy", torch.utils.data.default_collate(rows), strict=True))

    nets = []
    for net in (ChangesBatch(), Halved()):
        loader = DataLoader(loader_of(6).dataset, batch_size=4, collate_fn=collate)
        quiet_trainer(callbacks=[kind(every_n_steps=2, fraction=0.5)]).fit(net, loader)
        nets.append(net)
    assert_same_weights(*nets)


def test_double_precision_creates_tensors_in_float64():
    class Shifted(SmallNet):
        def step(self, batch: Any) -> Tensor:
            dtypes.add(torch.zeros(1).dtype)
            return super().step(batch)

    dtypes: set[torch.dtype] = set()
    fit(Shifted(), preconditioner(), precision="64-true")
    assert dtypes == {torch.float64}


@pytest.mark.parametrize("fused", [False, True])
def test_loss_scaler_does_not_change_the_steps(fused):
    """Curvature is measured in float32, and the scaler skips steps that overflow."""
    models = []
    for scale in (None, 1024.0, 2.0**40):
        plugins = [] if scale is None else [lo.DynamicLossScale(scale, growth_interval=1000)]
        models.append(fit(SmallNet("SGD", lr=LR, fused=fused), preconditioner(), plugins=plugins))
    assert_same_weights(models[1], models[0], atol=0.02)  # float16 forward and backward
    assert all(p.isfinite().all() for p in models[2].parameters())


@pytest.mark.parametrize("kind", [lo.CurvaturePreconditioner, lo.CurvatureMonitor])
@pytest.mark.parametrize(
    ("part", "error"),
    [
        (lambda: nn.Embedding(6, 1, sparse=True), "needs dense gradients, and those of 'part'"),
        (
            lambda: nn.Linear(2, 1, dtype=torch.complex64),
            "needs real parameters, and 'part.weight'",
        ),
    ],
)
def test_sparse_and_complex_gradients_raise_before_the_first_step(kind, part, error):
    model = SmallNet("SGD")
    model.part = part()
    with pytest.raises(ValueError, match=error):
        quiet_trainer(callbacks=[kind()]).fit(model, loader_of(2))
