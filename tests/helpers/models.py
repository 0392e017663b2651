"""Small models, data whose gradient norms vary, and comparisons of weights and states."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import MappingKey, tree_flatten, tree_flatten_with_path, tree_map
from torch.utils.data import DataLoader, TensorDataset

FEATURES = 6


def batches_of(steps: int, batch_size: int = 4, seed: int = 0) -> TensorDataset:
    """Return inputs of shape ``(steps * batch_size, 6)`` and targets of shape ``(..., 1)``.

    Each batch has its own lognormal scale with a sigma of 1, so some gradient norms are spikes.
    """
    generator = torch.Generator().manual_seed(seed)
    scale = torch.randn(steps, 1, 1, generator=generator).exp()
    inputs = scale * torch.randn(steps, batch_size, FEATURES, generator=generator)
    targets = scale * torch.randn(steps, batch_size, 1, generator=generator)
    return TensorDataset(inputs.flatten(0, 1), targets.flatten(0, 1))


def loader_of(steps: int, batch_size: int = 4, seed: int = 0) -> "ResumableLoader":
    """Return a loader of :func:`batches_of` in order."""
    return ResumableLoader(batches_of(steps, batch_size, seed), batch_size=batch_size)


def shard(module: LightningModule, *parts: nn.Module) -> None:
    """Shard ``parts`` of a module, and then the module, with FSDP2."""
    from torch.distributed.fsdp import fully_shard

    for part in (*parts, module):
        fully_shard(part, mesh=module.device_mesh["data_parallel"])  # type: ignore[index]


class ResumableLoader(DataLoader[Any]):
    """A loader whose state is its position in the epoch.

    Lightning restarts a plain DataLoader on resume, so the resumed run would see other data.
    """

    served = 0
    skip = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        skip, self.skip = self.skip, 0
        for index, batch in enumerate(super().__iter__()):
            if index >= skip:
                self.served = (index + 1) % len(self)
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"served": self.served}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skip = state["served"]


class SmallNet(BoringModel):
    """A BoringModel with hidden layers for :func:`batches_of`, and an optimizer by name.

    Several processes split the rows of each batch; together they train on the same batch as one.

    Args:
        optimizer: The name of a class in :mod:`torch.optim`.
        lr: Its learning rate.
        fused: Use its fused implementation.
        widths: Units of the hidden layers.
        fail_at: Raise an error in this training step.
    """

    def __init__(
        self,
        optimizer: str = "SGD",
        lr: float = 0.02,
        fused: bool = False,
        widths: tuple[int, ...] = (5,),
        fail_at: int | None = None,
    ) -> None:
        super().__init__()
        self.optimizer, self.lr, self.fused, self.fail_at = optimizer, lr, fused, fail_at
        generator_state = torch.get_rng_state()
        torch.manual_seed(1)
        layers: list[nn.Module] = []
        for fan_in, fan_out in zip((FEATURES, *widths), (*widths, 1), strict=True):
            layers += [nn.Linear(fan_in, fan_out), nn.Tanh()]
        self.layer = nn.Sequential(*layers[:-1])  # type: ignore[assignment]
        torch.set_rng_state(generator_state)

    def loss(self, preds: Tensor, labels: Tensor | None = None) -> Tensor:
        assert labels is not None
        return nn.functional.mse_loss(preds, labels)

    def step(self, batch: Any) -> Tensor:
        inputs, targets = (rows[self.global_rank :: self.trainer.world_size] for rows in batch)
        return self.loss(self(inputs), targets)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == self.fail_at:
            raise ArithmeticError("planted")
        return super().training_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Optimizer:  # type: ignore[override]
        optimizer: type[Optimizer] = getattr(torch.optim, self.optimizer)
        return optimizer(self.parameters(), lr=self.lr, **({"fused": True} if self.fused else {}))  # type: ignore[call-arg]

    def train_dataloader(self) -> DataLoader[Any]:
        return loader_of(12)

    def val_dataloader(self) -> DataLoader[Any]:
        return loader_of(2, seed=1)

    test_dataloader = predict_dataloader = val_dataloader


def train_with_loss_scale(
    model: SmallNet, init_scale: float, max_norm: float = math.inf
) -> tuple[list[float], list[float]]:
    """Train by torch's recipe for clipping under a loss scaler; return norms and scales."""
    norms, scales = [], []
    optimizer = model.configure_optimizers()
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=4)
    for inputs, targets in loader_of(12):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(model.layer(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return norms, scales


class TwoOptimizersNet(SmallNet):
    """Two optimizers step every other parameter in turn, so no backward pass uses all of them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.step(batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        weights = list(self.layer.parameters())
        return [torch.optim.SGD(weights[number::2], lr=0.05) for number in (0, 1)]


class WholeBatchNet(SmallNet):
    """A SmallNet whose processes do not split their batches."""

    def step(self, batch: Any) -> Tensor:
        return self.loss(self(batch[0]), batch[1])


class AdversarialNet(LightningModule):
    """A GAN with manual optimization of two optimizers.

    The discriminator's loss also leaves gradients in the generator.

    Args:
        generator_every: Batches per step of the generator; the discriminator steps at each.
    """

    def __init__(self, generator_every: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator_every = generator_every
        generator_state = torch.get_rng_state()
        torch.manual_seed(2)
        self.generator = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, FEATURES))
        self.discriminator = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1))
        torch.set_rng_state(generator_state)

    def generator_loss(self, batch: Any) -> Tensor:
        scores = self.discriminator(self.generator(batch[0]))
        return 10 * batch[0].std() * nn.functional.softplus(-scores).mean()

    def discriminator_loss(self, batch: Any) -> Tensor:
        real, fake = self.discriminator(batch[0]), self.discriminator(self.generator(batch[0]))
        return nn.functional.softplus(torch.cat([-real, fake])).mul(10).mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generator, discriminator = self.optimizers()  # type: ignore[attr-defined]
        discriminator.zero_grad()
        self.manual_backward(self.discriminator_loss(batch))
        discriminator.step()
        if batch_idx % self.generator_every == 0:
            generator.zero_grad()
            self.manual_backward(self.generator_loss(batch))
            generator.step()

    def configure_optimizers(self) -> list[Optimizer]:  # type: ignore[override]
        return [
            torch.optim.SGD(self.generator.parameters(), lr=0.1),
            torch.optim.SGD(self.discriminator.parameters(), lr=0.1),
        ]

    def train_dataloader(self) -> DataLoader[Any]:
        return loader_of(12)


def whole(tensor: Tensor) -> Tensor:
    """Return the tensor, gathered from all ranks if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the module's state; sharded tensors are gathered from all ranks."""
    return {name: whole(value).detach().clone() for name, value in module.state_dict().items()}


def assert_same_weights(
    actual: nn.Module | dict[str, Tensor],
    expected: nn.Module | dict[str, Tensor],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> None:
    """Compare two states, bit-exactly unless tolerances are given; NaN equals nothing."""
    torch.testing.assert_close(
        actual.state_dict() if isinstance(actual, nn.Module) else actual,
        expected.state_dict() if isinstance(expected, nn.Module) else expected,
        rtol=rtol,
        atol=atol,
    )


def assert_same_state(actual: Any, expected: Any) -> None:
    """Compare structure, types and values of two callback states, bit-exactly."""
    leaves, spec = tree_flatten_with_path(actual)
    expected_leaves, expected_spec = tree_flatten(expected)
    assert spec == expected_spec
    for (path, leaf), other in zip(leaves, expected_leaves, strict=True):
        assert type(leaf) is type(other)
        if isinstance(leaf, Tensor):
            filled = path[-1:] == (MappingKey("values"),)  # a window on a device, padded with NaN
            torch.testing.assert_close(leaf, other, rtol=0.0, atol=0.0, equal_nan=filled)
        else:
            assert repr(leaf) == repr(other)  # NaN is NaN


def load_changed_state(owner: Any) -> Any:
    """Change every number of an object's state, load that, check it is all there, return it."""

    def change(leaf: Any) -> Any:
        if isinstance(leaf, bool):
            return not leaf
        return leaf + 1 if isinstance(leaf, int | float | Tensor) else leaf

    state = tree_map(change, owner.state_dict())
    owner.load_state_dict(state)
    assert_same_state(owner.state_dict(), state)
    return state
