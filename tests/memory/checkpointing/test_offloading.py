"""Saved tensors on the host: exactness, savings and incompatible settings."""

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_opt.memory.checkpointing.activation_checkpointing import ActivationCheckpointing
from lightning_opt.memory.checkpointing.forward import Offload
from tests.helpers.trainers import MemoryLogger, quiet_trainer, warnings_of
from tests.memory.architectures import Architecture, Transformer, assert_identical, train


class Large(Architecture):
    """Blocks whose saved tensors are all float32 activations of one size."""

    blocks = 6

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(32, 32), nn.Tanh())

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(3)
        return DataLoader(torch.randn(2**17, 32, generator=generator), batch_size=2**16)


def test_offload_without_cuda_warns_and_changes_nothing() -> None:
    callback = ActivationCheckpointing("every_layer", offload=True)
    model, warned = warnings_of(lambda: train("Transformer", callback), "needs a CUDA device")
    assert warned
    assert_identical(model, train("Transformer", None))


def test_only_activations_are_moved() -> None:
    model, batch = nn.Linear(3, 5), torch.randn(2, 3)
    offload = Offload()

    def step(x: Tensor) -> Tensor:
        hidden = model(x).exp()
        return (hidden.sin() + hidden.sum().expand(1000).cos().sum()).sum()

    expected = torch.autograd.grad(step(batch), list(model.parameters()))
    actual = torch.autograd.grad(offload.around(model, step)(batch), list(model.parameters()))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert offload.nbytes == 2 * 2 * 5 * 4, "the inputs of exp's and sin's derivatives"


def test_sparse_tensors_stay() -> None:
    adjacency, weight = torch.eye(3).to_sparse(), torch.randn(3, 2, requires_grad=True)
    step = Offload().around(nn.Linear(1, 1), lambda: torch.sparse.mm(adjacency, weight).sum())
    step().backward()
    assert torch.equal(weight.grad, torch.ones(3, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["none", "every_layer", "block"])
def test_offload_is_bit_identical_and_saves_memory(policy: str) -> None:
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


def test_offload_raises_with_sharded_and_compiled_models() -> None:
    trainer = quiet_trainer()
    trainer.strategy.__class__ = FSDPStrategy
    trainer.strategy._activation_checkpointing_kwargs = None
    with pytest.raises(ValueError, match="does not work with sharded parameters"):
        ActivationCheckpointing("none", offload=True).setup(trainer, Transformer(), "fit")
    compiled = Transformer()
    compiled.layers[0].compile(backend="eager")
    with pytest.raises(ValueError, match=r"(?s)layers\.0 is compiled.*activation_memory_budget"):
        quiet_trainer(callbacks=[ActivationCheckpointing("none", offload=True)]).fit(compiled)
