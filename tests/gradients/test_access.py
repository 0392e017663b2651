"""The seam between Lightning and the gradients, by its parts."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn

from lightning_opt.core.norms import norm_cache
from lightning_opt.gradients.access import GradientAccess, grad_scale
from tests.helpers.models import AdversarialNet, SmallNet
from tests.helpers.trainers import quiet_trainer

SCALE = 2.0**10


def trainer_with(plugin: Precision) -> Any:
    return SimpleNamespace(precision_plugin=plugin)


def scaled(optimizer_name: str, *, fused: bool, enabled: bool = True) -> Any:
    """An optimizer after a scaled backward, with the Trainer and the scaler that did it."""
    layer = nn.Linear(2, 1)
    optimizer = getattr(torch.optim, optimizer_name)(layer.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=enabled)
    scaler.scale(layer(torch.ones(1, 2)).sum()).backward()
    return optimizer, trainer_with(MixedPrecision("16-mixed", "cpu", scaler)), scaler, layer


@pytest.mark.parametrize("optimizer_name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_scale_of_a_fused_optimizer(optimizer_name):
    optimizer, trainer, scaler, layer = scaled(optimizer_name, fused=True)
    assert layer.bias.grad == SCALE
    assert float(grad_scale(trainer, optimizer)) == SCALE
    scaler.unscale_(optimizer)  # by the user, under manual optimisation
    assert layer.bias.grad == 1.0
    assert grad_scale(trainer, optimizer) == 1.0


def test_scale_where_lightning_unscales():
    optimizer, trainer, scaler, layer = scaled("SGD", fused=False)
    scaler.unscale_(optimizer)  # as MixedPrecision does before the hook
    assert layer.bias.grad == 1.0
    assert grad_scale(trainer, optimizer) == 1.0


def test_scale_without_a_scaler():
    optimizer, trainer, _, layer = scaled("SGD", fused=True, enabled=False)
    assert layer.bias.grad == 1.0
    assert grad_scale(trainer, optimizer) == 1.0
    for plugin in (Precision(), MixedPrecision("bf16-mixed", "cpu")):
        assert grad_scale(trainer_with(plugin), optimizer) == 1.0


def test_scale_before_the_first_loss():
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), fused=True)
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    assert grad_scale(trainer_with(plugin), optimizer) == 1.0


def test_asking_for_the_scale_adds_nothing_to_the_scaler():
    optimizer, trainer, scaler, _ = scaled("SGD", fused=True)
    grad_scale(trainer, optimizer)
    assert not scaler._per_optimizer_states


def started(model: Any) -> tuple[GradientAccess, Any]:
    """An access in the middle of a fit, with the gradients of one batch."""
    trainer = quiet_trainer()
    trainer.strategy.connect(model)
    trainer.strategy._lightning_module = model
    configured = model.configure_optimizers()
    trainer.strategy.optimizers = configured if isinstance(configured, list) else [configured]
    access = GradientAccess("Tested")
    access.start(trainer, model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return access, trainer


def test_optimizers_are_told_by_their_index():
    model = AdversarialNet()
    access, trainer = started(model)
    generator, discriminator = trainer.optimizers
    index, step = access.measure(trainer, model, discriminator)
    assert index == 1
    assert step.gradients.parameters == list(model.discriminator.parameters())
    elements = sum(p.numel() for p in model.discriminator.parameters())
    assert step.norms.total == pytest.approx(elements**0.5)
    assert access.measure(trainer, model, generator)[0] == 0


def test_names_leave_out_what_fsdp1_puts_in():
    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self._fsdp_wrapped_module = inner

    model = SmallNet()
    expected = [name for name, _ in model.named_parameters()]
    model.layer[0] = Wrapped(model.layer[0])
    access, _ = started(model)
    assert list(access.names.values()) == expected


def test_a_parameter_that_only_an_optimizer_holds_has_a_name():
    class Foreign(SmallNet):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([*self.parameters(), foreign], lr=0.1)

    foreign = nn.Parameter(torch.ones(1))
    access, _ = started(Foreign())
    assert access.names[foreign] == "optimizer_0.4"


def test_each_step_is_measured_anew():
    """Also where tensors are the same ones with the same count of writes."""
    model = SmallNet()
    access, trainer = started(model)
    (optimizer,) = trainer.optimizers
    first = access.measure(trainer, model, optimizer)[1].norms.total
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    assert access.measure(trainer, model, optimizer)[1].norms.total == pytest.approx(2 * first)


def test_what_was_measured_in_another_run_is_forgotten():
    model = SmallNet()
    access, trainer = started(model)
    (optimizer,) = trainer.optimizers
    first = access.measure(trainer, model, optimizer)[1].norms.total
    access.stop()
    access.start(trainer, model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    assert access.measure(trainer, model, optimizer)[1].norms.total == pytest.approx(2 * first)


def test_lets_go_of_the_model():
    model = SmallNet()
    access, trainer = started(model)
    access.measure(trainer, model, trainer.optimizers[0])
    access.stop()
    kept = weakref.ref(model.layer[0].weight)
    del model, trainer
    gc.collect()
    assert kept() is None
    assert not norm_cache._last


def test_refusals_name_the_callback():
    access, trainer = started(SmallNet())
    trainer.strategy.optimizers = [torch.optim.LBFGS(nn.Linear(2, 1).parameters())]
    with pytest.raises(ValueError, match=r"^Tested does not work with torch\.optim\.LBFGS"):
        access.start(trainer, trainer.lightning_module)
    strategy = object.__new__(DeepSpeedStrategy)
    with pytest.raises(ValueError, match=r"^Tested does not work with the DeepSpeed strategy"):
        access.check_trainer(SimpleNamespace(strategy=strategy))
