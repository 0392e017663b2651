"""Saved tensors in fewer bits or on the host: what is packed, what is not, and how it is said."""

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_opt.memory.checkpointing.activation_checkpointing import ActivationCheckpointing
from lightning_opt.memory.checkpointing.methods.packers import OnHost, Packer, Rounded, held
from lightning_opt.memory.checkpointing.methods.segments import Segment
from lightning_opt.memory.meters import StorageMeter
from tests.helpers.trainers import MemoryLogger, quiet_trainer
from tests.memory.architectures import Adversarial, Architecture, Transformer
from tests.memory.runs import assert_identical, train


class Deep(Architecture):
    """Blocks whose saved tensors are all float32 activations of one size."""

    blocks = 6

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(32, 32), nn.Tanh())

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(3)
        return DataLoader(torch.randn(256, 32, generator=generator), batch_size=128)

    val_dataloader = train_dataloader


def relative(rough: list[Tensor], exact: list[Tensor]) -> float:
    """Return the norm of the difference as a share, in float64."""
    a = torch.cat([g.double().flatten() for g in rough])
    b = torch.cat([g.double().flatten() for g in exact])
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("policy", ["none", "every_layer", "block"])
def test_gradients_are_off_by_what_is_logged(policy: str) -> None:
    logger = MemoryLogger()
    settings: dict[str, Any] = {"limit_val_batches": 0, "max_steps": 1}

    def fit(*callbacks: Any, **more: Any) -> Deep:
        torch.manual_seed(0)
        model = Deep()
        quiet_trainer(callbacks=list(callbacks), **settings, **more).fit(model)
        return model

    callback = ActivationCheckpointing(policy, compress_saved="bf16")
    rough, exact = fit(callback, logger=logger), fit()
    error = relative(rough.gradients[0], exact.gradients[0])
    assert 0 < error < 0.01
    assert logger.series("checkpointing/gradient_error") == [pytest.approx(error, rel=1e-6)]
    packed = logger.series("checkpointing/packed_mb")[0]
    assert logger.series("checkpointing/packed_to_mb") == [packed / 2]
    # The output of each block, which is the next one's input, once; of segments of three, what
    # they begin with. The batch is no activation.
    kept = {"none": 6, "every_layer": 6, "block": 2}[policy]
    assert packed * 2**20 == pytest.approx(128 * 32 * 4 * kept)
    assert "gradients are off by" in callback.describe().notes[-1]
    assert "training_step" not in vars(rough)


def test_memory_is_halved() -> None:
    model, batch = Deep(), torch.randn(4096, 32)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def live(packer: Packer | None) -> int:
        with StorageMeter() as meter:
            if packer is None:
                loss = model.training_step(batch, 0)
            else:
                with packer.packing(model, batch):
                    loss = model.training_step(batch, 0)
            held_now = meter.live()
        loss.backward()
        return held_now

    whole, half = live(None), live(Packer(Rounded))
    assert half == pytest.approx(whole / 2, rel=0.01)


def test_what_is_not_packed() -> None:
    packer, large = Packer(Rounded), torch.randn(64, 64)
    layer = nn.Linear(64, 64)
    batch = torch.randn(64, 64)
    with packer.packing(layer, {"x": batch}):
        for left_alone in (
            layer.weight,
            layer.weight.t(),
            batch[3:],
            torch.randn(64, 64, dtype=torch.float64),
            torch.zeros(64, 64, dtype=torch.long),
            torch.randn(1, 64).expand(64, 64),
        ):
            assert packer.pack(left_alone).get() is left_alone
        packed = packer.pack(large)
        assert packed is packer.pack(large.view(64, 64))
        assert packed is not packer.pack(large.t())
        torch.testing.assert_close(packed.get(), large, rtol=2**-8, atol=0)
        assert packed.get().dtype == torch.float32
        small = large[0, :64].clone()
        assert packer.pack(small).get() is small
        assert isinstance(held(large, ""), Rounded)
    assert not isinstance(held(large, ""), Rounded)


def test_a_change_in_place_is_noticed_or_harmless() -> None:
    """Autograd itself checks nothing that went through hooks."""
    weight = torch.randn(64, 64, requires_grad=True)
    for size, changed in ((64, False), (1, True)):
        packer = Packer(Rounded)
        with packer.packing(nn.Module(), None):
            first = weight * 2
            ((first + 1).sin().sum()).detach()
            hidden = first[:size] * 1
            output = hidden.sin().sum()
        with torch.no_grad():
            hidden.add_(1)
        if changed:
            with pytest.raises(RuntimeError, match="needs was changed in place"):
                output.backward()
        else:
            (gradient,) = torch.autograd.grad(output, weight)
            torch.testing.assert_close(gradient, 2 * (2 * weight).cos(), rtol=0.05, atol=0.05)


def test_manual_steps_and_segments() -> None:
    callback = ActivationCheckpointing("block", interval=3, compress_saved="bf16")
    quiet_trainer(callbacks=[callback], max_steps=2, limit_val_batches=0).fit(Adversarial())
    assert callback.packing.error is not None
    packer, weight = Packer(Rounded), torch.randn(64, requires_grad=True)
    segment, x = Segment(), torch.randn(64, 64)
    with packer.packing(nn.Module(), None):
        output = segment.run(lambda value: (value * weight).sin(), (x,), {})
    output.sum().backward()
    expected = (x.bfloat16().float() * (x.bfloat16().float() * weight).cos()).sum(0)
    torch.testing.assert_close(weight.grad, expected)


def test_offloading_without_a_device_to_offload_says_so_and_changes_nothing() -> None:
    callback = ActivationCheckpointing("every_layer", offload=True)
    assert_identical(train("Transformer", callback), train("Transformer", None))
    assert "needs a CUDA device" in callback.describe().notes[-1]


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["none", "every_layer", "block"])
def test_offloading_is_exact_and_saves_memory(policy: str) -> None:
    class Large(Deep):
        def train_dataloader(self) -> DataLoader[Any]:
            generator = torch.Generator().manual_seed(3)
            return DataLoader(torch.randn(2**17, 32, generator=generator), batch_size=2**16)

    def fit(offload: bool) -> tuple[Large, int, Any]:
        torch.manual_seed(0)
        model = Large()
        callback = ActivationCheckpointing(policy, offload=offload)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        trainer = quiet_trainer(
            callbacks=[callback], accelerator="gpu", devices=1, limit_val_batches=0, max_steps=2
        )
        trainer.fit(model)
        return model, torch.cuda.max_memory_allocated(), callback

    plain, peak, _ = fit(False)
    offloaded, lower, callback = fit(True)
    for mine, theirs in zip(offloaded.gradients, plain.gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert callback.packing.packer.original_bytes > 0
    if policy == "none":
        assert lower < 0.8 * peak


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "none", "compress_saved": "fp8"}, "compress_saved must be 'bf16' or None"),
        ({"policy": "none", "compress_saved": "bf16", "offload": True}, "Give one"),
        ({"compress_saved": "bf16"}, "changes what the plan of policy='auto'"),
        ({"offload": True, "budget": 0.5}, "changes what the plan of policy='auto'"),
    ],
)
def test_arguments_are_checked_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ActivationCheckpointing(**arguments)


def test_refusals() -> None:
    trainer = quiet_trainer()
    trainer.strategy.__class__ = FSDPStrategy
    trainer.strategy._activation_checkpointing_kwargs = None
    with pytest.raises(ValueError, match="does not work with sharded parameters"):
        ActivationCheckpointing("none", offload=True).setup(trainer, Transformer(), "fit")
    compiled = Transformer()
    compiled.layers[0].compile(backend="eager")
    with pytest.raises(ValueError, match=r"layers\.0 is compiled"):
        quiet_trainer(callbacks=[ActivationCheckpointing("none", compress_saved="bf16")]).fit(
            compiled
        )


def test_training_step_is_put_back_after_an_exception() -> None:
    class Failing(Transformer):
        def training_step(self, batch: Tensor) -> Any:
            raise ArithmeticError("planted")

    model = Failing()
    with pytest.raises(ArithmeticError):
        quiet_trainer(callbacks=[ActivationCheckpointing("none", compress_saved="bf16")]).fit(model)
    assert "training_step" not in vars(model)


def test_the_host_takes_nothing_of_a_cpu() -> None:
    packer, tensor = Packer(OnHost), torch.randn(64, 64)
    with packer.packing(nn.Module(), None):
        assert packer.pack(tensor).get() is tensor
    assert packer.original_bytes == 0
