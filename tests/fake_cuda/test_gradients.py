"""Clipping, guard, health, loss scaler and preconditioner read nothing and mix no devices."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from lightning_opt import AdaptiveClipping, GradientClipper, GradientHealth, NonFiniteGuard
from lightning_opt.core.measure.reading import DelayedReads
from lightning_opt.core.numerics.norms import collect_gradients, measure_norms
from lightning_opt.core.numerics.scalars import stack_scalars
from lightning_opt.gradients.clipping.gradient_clipper import RULES
from lightning_opt.gradients.curvature.curvature_preconditioner import DiagonalPreconditioner
from tests.gradients.cases import Net, every_rule
from tests.helpers.fake_cuda import (
    Copies,
    Stage,
    fake_gradients,
    on_fake_cuda,
)


class Odd(nn.Module):
    """Half-precision and empty weights, a convolution and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.half = nn.Linear(4, 5, dtype=torch.bfloat16)
        self.scalar = nn.Parameter(torch.zeros(()))
        self.empty = nn.Parameter(torch.zeros(0))
        self.up = nn.ConvTranspose2d(2, 3, 2)
        self.norm = nn.BatchNorm1d(4)


class Complex(Odd):
    """With complex weights, which fused optimizers do not support."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.zeros(3, 4, dtype=torch.complex64))


def cuda_scalar(value: float = 1.0) -> Tensor:
    return torch.full((), value, device="cuda")


# `float()` and `int()` need a device first.
READ = (DataDependentOutputException, RuntimeError)


@every_rule
@pytest.mark.parametrize("net", [Net, Complex])
def test_every_rule_clips_without_reading(make: Any, net: type[nn.Module]) -> None:
    """test_launches.py does so with many parameters of the same shape."""
    module = on_fake_cuda(net())
    clipper = GradientClipper(module, make())
    names = [name for name, _ in module.named_parameters()]
    for step in range(3):
        fake_gradients(module, but=names[:1] if step == 1 else ())
        values = clipper.clip()
        assert all(
            not isinstance(value, Tensor) or value.device.type == "cuda"
            for value in values.values()
        )


def together(rule: str = "robust") -> list[Any]:
    return [
        GradientHealth(every_n_steps=10**9, activations=True),
        NonFiniteGuard(policy="rollback", spike=6.0, every_n_steps=10**9),
        AdaptiveClipping(rule, every_n_steps=10**9),
    ]


@pytest.mark.parametrize("rule", RULES)
def test_guard_health_and_clipping_together(rule: str) -> None:
    stage = Stage(together(rule), Odd(), fused=True)
    for _ in range(3):
        stage.step([cuda_scalar(), cuda_scalar()])


def test_guard_reads_the_flag_if_the_optimizer_is_not_fused() -> None:
    with pytest.raises(READ):
        Stage(together(), Odd()).step()


def test_skip_flag_stays_on_device_and_is_removed_after_the_update() -> None:
    guard = NonFiniteGuard(every_n_steps=10**9)
    stage = Stage([guard, AdaptiveClipping(every_n_steps=10**9)], Odd(), fused=True)
    fake_gradients(stage.module)
    stage.call("on_before_backward", cuda_scalar())
    stage.call("on_after_backward")
    stage.call("on_before_optimizer_step", stage.optimizer)
    barrier = guard.barriers[0]
    assert isinstance(barrier, Tensor)
    assert barrier.device.type == "cuda"
    stage.optimizer.step()
    assert not hasattr(stage.optimizer, "found_inf")


def test_guard_reads_nothing_under_a_loss_scaler() -> None:
    scaler = torch.amp.GradScaler("cuda")
    scaler.scale(cuda_scalar())
    callbacks = [NonFiniteGuard(spike=6.0), AdaptiveClipping()]
    stage = Stage(callbacks, Odd(), scaler=scaler, fused=True)
    stage.step([scaler.scale(cuda_scalar())], update=False)


def test_preconditioner_reads_nothing() -> None:
    rule = DiagonalPreconditioner(0.9, 0.5, 1e-3, 1.0)
    for _ in range(2):
        rule.update({"a": torch.empty(3, device="cuda"), "b": torch.empty(2, 2, device="cuda")})
        rule.apply(["a", "new"], [torch.empty(3, device="cuda") for _ in range(2)], cuda_scalar())


# --- devices side by side -----------------------------------------------------------------------


class Split(nn.Module):
    """Weights on two devices: the embedding is on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.table = nn.Embedding(5, 3)


def split() -> nn.Module:
    model = Split()
    on_fake_cuda(model.layer)
    model.table.weight = nn.Parameter(torch.empty(5, 3))
    fake_gradients(model)
    return model


@pytest.mark.parametrize("rule", RULES)
def test_host_waits_for_the_scale_before_using_it(rule: str) -> None:
    with Copies() as copies:
        GradientClipper(split(), rule).clip()
    assert copies.to_host
    assert all(copy.waited for copy in copies.to_host)


def test_loss_on_host_is_copied_to_the_device_of_the_norm() -> None:
    with Copies() as copies:
        both = stack_scalars([torch.empty(()), cuda_scalar(), 0.5])
    assert both.device.type == "cuda"
    assert not copies.to_host


def test_norm_of_gradients_on_two_devices_is_on_the_device() -> None:
    norms = measure_norms(collect_gradients(split().parameters()))
    assert isinstance(norms.total, Tensor)
    assert norms.total.device.type == "cuda"


def test_delayed_read_waits_for_the_stream_of_its_values() -> None:
    reads: DelayedReads[str] = DelayedReads()
    reads.push(torch.empty(2, device="cuda:1"), "note")
    (_, event, _) = reads._queue[0]
    assert [stream.device for stream in event.recorded] == [torch.device("cuda:1")]
