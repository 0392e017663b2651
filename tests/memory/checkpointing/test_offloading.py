"""Saved tensors on the host: what is moved, what is refused, and how it is said."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_opt.memory.checkpointing.activation_checkpointing import ActivationCheckpointing
from lightning_opt.memory.checkpointing.methods import offloading
from tests.helpers.trainers import MemoryLogger, quiet_trainer
from tests.memory.architectures import Architecture, Transformer
from tests.memory.runs import assert_identical, train, warnings_of


class Deep(Architecture):
    """Blocks whose saved tensors are all float32 activations of one size."""

    blocks = 6

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(32, 32), nn.Tanh())

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(3)
        return DataLoader(torch.randn(256, 32, generator=generator), batch_size=128)

    val_dataloader = train_dataloader


def test_offloading_without_a_device_to_offload_says_so_and_changes_nothing() -> None:
    callback = ActivationCheckpointing("every_layer", offload=True)
    trained = []
    said = warnings_of(lambda: trained.append(train("Transformer", callback)))
    assert "needs a CUDA device" in said
    assert_identical(trained[0], train("Transformer", None))


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
        logger = MemoryLogger()
        trainer = quiet_trainer(
            callbacks=[callback], accelerator="gpu", limit_val_batches=0, max_steps=2, logger=logger
        )
        trainer.fit(model)
        return model, torch.cuda.max_memory_allocated(), logger

    plain, peak, _ = fit(False)
    offloaded, lower, logger = fit(True)
    for mine, theirs in zip(offloaded.gradients, plain.gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert logger.series("checkpointing/offloaded_mb")[0] > 0
    assert "training_step" not in vars(offloaded)
    if policy == "none":
        assert lower < 0.8 * peak


class SlowLink:
    """Copies that end when somebody waits for them, pretended where there is no CUDA."""

    def __init__(self) -> None:
        self.under_way: list[int] = []
        self.most = 0

    def on_host(self, tensor: Tensor, stream: Any, order: list[Any]) -> Any:
        self.under_way.append(tensor.nbytes)
        self.most = max(self.most, sum(self.under_way))
        return SimpleNamespaceWithRef(SimpleNamespace(synchronize=lambda: self.under_way.pop(0)))


class SimpleNamespaceWithRef:
    def __init__(self, copied: Any) -> None:
        self.copied = copied


@pytest.mark.parametrize(("sizes", "most"), [([100] * 12, 400), ([100, 1000, 100], 1100)])
def test_copies_under_way_are_bounded(
    sizes: list[int], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link slower than the computation: what is not copied yet fills the device as well."""
    link = SlowLink()
    monkeypatch.setattr(offloading, "OnHost", link.on_host)
    monkeypatch.setattr(offloading, "IN_FLIGHT", 300)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda self: True))
    offload = offloading.Offload(torch.device("cuda"))
    kept = [offload.pack(torch.empty(size, dtype=torch.uint8)) for size in sizes]
    assert link.most == most
    assert offload.nbytes == sum(sizes)
    assert len(kept) == len(sizes)


def test_arguments_are_checked_at_once() -> None:
    with pytest.raises(ValueError, match="changes what the plan of policy='auto'"):
        ActivationCheckpointing(offload=True, budget=0.5)


def test_refusals() -> None:
    trainer = quiet_trainer()
    trainer.strategy.__class__ = FSDPStrategy
    trainer.strategy._activation_checkpointing_kwargs = None
    with pytest.raises(ValueError, match="does not work with sharded parameters"):
        ActivationCheckpointing("none", offload=True).setup(trainer, Transformer(), "fit")
    compiled = Transformer()
    compiled.layers[0].compile(backend="eager")
    with pytest.raises(ValueError, match=r"(?s)layers\.0 is compiled.*activation_memory_budget"):
        quiet_trainer(callbacks=[ActivationCheckpointing("none", offload=True)]).fit(compiled)
