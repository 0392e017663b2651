"""Small models, each with a property that a recomputation may break, and comparisons of runs."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader

from tests.helpers.models import weights_of, whole
from tests.helpers.trainers import quiet_trainer

WIDTH = 8


class Architecture(LightningModule):
    """A model that stores the gradients of every backward pass.

    Attributes:
        gradients: One list per backward pass, with ``None`` for parameters without gradient.
        layers: The repeated blocks.
    """

    blocks = 4

    def __init__(self) -> None:
        super().__init__()
        self.gradients: list[list[Tensor | None]] = []
        self.build()

    def build(self) -> None:
        self.layers = nn.ModuleList(self.block() for _ in range(self.blocks))

    def block(self) -> nn.Module:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self(batch).float().square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self(batch)

    def on_after_backward(self) -> None:
        self.gradients.append(
            [None if p.grad is None else whole(p.grad).clone() for p in self.parameters()]
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(3)
        return DataLoader(torch.randn(6, 4, WIDTH, generator=generator), batch_size=2)

    val_dataloader = train_dataloader


class Transformer(Architecture):
    """Dropout in attention and outside of it, also between blocks."""

    def block(self) -> nn.Module:
        return nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 1:
                x = F.dropout(x, 0.3)
        return x


class Recurrent(Architecture):
    """Stacked LSTMs: a tuple in a tuple as output."""

    def block(self) -> nn.Module:
        return nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for layer in self.layers:
            x, state = layer(x, state)
        return x


class Adversarial(Architecture):
    """Manual optimization of two networks; the discriminator runs twice before its backward."""

    def build(self) -> None:
        self.automatic_optimization = False
        self.generator = nn.Sequential(*(self.block() for _ in range(3)))
        self.discriminator = nn.Sequential(*(self.block() for _ in range(3)))
        self.layers = nn.ModuleList([*self.generator, *self.discriminator])

    def block(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        generator, discriminator = self.optimizers()
        fake = self.generator(torch.randn_like(batch))
        self.toggle_optimizer(discriminator)
        loss = F.softplus(-self.discriminator(batch)) + F.softplus(
            self.discriminator(fake.detach())
        )
        discriminator.zero_grad()
        self.manual_backward(loss.mean())
        discriminator.step()
        self.untoggle_optimizer(discriminator)
        self.toggle_optimizer(generator)
        generator.zero_grad()
        self.manual_backward(F.softplus(-self.discriminator(fake)).mean())
        generator.step()
        self.untoggle_optimizer(generator)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.discriminator(batch)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(net.parameters(), lr=0.1)
            for net in (self.generator, self.discriminator)
        ]


class Residual(Architecture):
    """BatchNorm and in-place ReLUs."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv1d(4, 4, 3, padding=1)
            self.second = nn.Conv1d(4, 4, 3, padding=1)
            self.norms = nn.ModuleList([nn.BatchNorm1d(4), nn.BatchNorm1d(4, momentum=None)])
            self.activation = nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.activation(self.norms[0](self.first(x)))
            return self.activation(x + self.norms[1](self.second(hidden)))

    def block(self) -> nn.Module:
        return self.Block()


class SharedBlock(Transformer):
    """One block for all depths, as in ALBERT."""

    def build(self) -> None:
        self.layers = nn.ModuleList([self.block()] * self.blocks)


class Nested(Architecture):
    """Keyword inputs, and a dict of tuples as input and output, a part of which is used elsewhere.

    The keys are not sorted.
    """

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(
            self, state: dict[str, Any], *, mask: Tensor | None = None, options: dict[str, Any]
        ) -> dict[str, Any]:
            left, right = state["pair"]
            left, right = torch.tanh(self.left(right)), torch.sigmoid(self.right(left))
            left = F.dropout(left, options["p"]) * options["scale"]
            left = left if mask is None else left * mask
            return {"pair": (left, right), "count": state["count"] + 1, "extra": [left * right]}

    def block(self) -> nn.Module:
        return self.Block()

    def forward(self, x: Tensor) -> Tensor:
        state: dict[str, Any] = {"pair": (x, x), "count": 0}
        options = {"scale": x.mean().exp(), "p": 0.25}
        extras = []
        for index, layer in enumerate(self.layers):
            state = layer(state, mask=(x > -1).float() if index % 2 else None, options=options)
            extras += state["extra"]
        return torch.stack([*state["pair"], *extras]).sum(0) / state["count"]


class Autocast(Transformer):
    """bf16 autocast inside the model."""

    def block(self) -> nn.Module:
        # For two heads, torch 2.5 takes a fast path in validation, which fails under autocast.
        return nn.TransformerEncoderLayer(WIDTH, 1, 16, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)


class UNet(Architecture):
    """Skip connections between encoder and decoder."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv1d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)

        def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
            return torch.relu(self.norm(self.conv(x if skip is None else x + skip)))

    def block(self) -> nn.Module:
        return self.Block()

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.layers[: self.blocks // 2]:
            skips.append(x)
            x = layer(x)
        for layer in self.layers[self.blocks // 2 :]:
            x = layer(x, skip=skips.pop())
        return x


class EncoderDecoder(Architecture):
    """Two stacks; every block of the second takes the output of the first."""

    def build(self) -> None:
        settings = {"dim_feedforward": 16, "dropout": 0.1, "batch_first": True}
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, **settings) for _ in range(3)
        )
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(WIDTH, 2, **settings) for _ in range(3)
        )
        self.layers = nn.ModuleList([*self.encoder, *self.decoder])

    def forward(self, x: Tensor) -> Tensor:
        memory = x
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            x = layer(x, memory=memory)
        return x


class SpectralNorm(Architecture):
    """A buffer that every forward pass reads and writes."""

    def block(self) -> nn.Module:
        return nn.Sequential(spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), nn.Dropout(0.1))


class GradientPenalty(Architecture):
    """A gradient penalty: two passes through each block's graph, and a second derivative."""

    def block(self) -> nn.Module:
        hidden = nn.Sequential(nn.Tanh(), nn.Dropout(0.2))
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), hidden, nn.Linear(WIDTH, WIDTH))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        batch = batch.requires_grad_()
        output = self(batch)
        (gradient,) = torch.autograd.grad(output.sum(), batch, create_graph=True)
        return output.square().mean() + (gradient.norm(dim=-1) - 1).square().mean()


class MetaLearning(GradientPenalty):
    """The second call uses other parameters, made of gradients of the first (MAML)."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        def loss(parameters: dict[str, Tensor], samples: Tensor) -> Tensor:
            return (functional_call(self, parameters, (samples,)) - 1).square().mean()

        own = dict(self.named_parameters())
        first = loss(own, batch[:1])
        gradients = torch.autograd.grad(first, list(own.values()), create_graph=True)
        steps = zip(own.items(), gradients, strict=True)
        return loss({name: p - gradient for (name, p), gradient in steps}, batch[1:])


class Hypernetwork(Architecture):
    """Each call uses other parameters, and other buffers that the blocks write."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            return x + self.linear(x).tanh() * self.count.clone()

    def block(self) -> nn.Module:
        return self.Block()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = batch.new_zeros(())
        for factor in (0.5, 2.0):
            own = (*self.named_parameters(), *self.named_buffers())
            tensors = {name: tensor * factor + 0.1 for name, tensor in own}
            loss = loss + functional_call(self, tensors, (batch,)).square().mean()
        return loss


class InputGradients(GradientPenalty):
    """The blocks run inside ``torch.func.vmap`` and ``torch.func.grad``."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        def total(sample: Tensor) -> Tensor:
            return functional_call(self, own, (sample,)).sum()

        own = dict(self.named_parameters())
        return (vmap(grad(total), randomness="same")(batch).norm(dim=-1) - 1).square().mean()


class StochasticDepth(Transformer):
    """Blocks that are skipped at random. The first half is frozen, and a later block in part."""

    def build(self) -> None:
        super().build()
        for layer in list(self.layers)[: self.blocks // 2]:
            layer.requires_grad_(False)
        self.layers[-1].linear1.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand(()) > 0.3:
                x = layer(x)
        return x


class PlainLayers(Architecture):
    """Blocks that are repeated layers of one Sequential."""

    blocks = 5

    def build(self) -> None:
        layers = [
            layer
            for _ in range(self.blocks)
            for layer in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.1), nn.GELU())
        ]
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers, nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


ARCHITECTURES: dict[str, Callable[[], Architecture]] = {
    name: kind
    for name, kind in list(globals().items())
    if isinstance(kind, type) and issubclass(kind, Architecture) and kind is not Architecture
}


def train(name: str, callback: Callback | None, **settings: Any) -> Architecture:
    """Train for three steps and validate, from a fixed seed; store a draw of the generator."""
    torch.manual_seed(5)
    model = ARCHITECTURES[name]()
    torch.manual_seed(6)
    settings = {"limit_val_batches": 1, **settings}
    quiet_trainer(callbacks=[] if callback is None else [callback], **settings).fit(model)
    model.drawn = torch.rand(3)
    return model


def evidence(model: Architecture) -> dict[str, Any]:
    """Return gradients, state and random numbers, which checkpointing must not change."""
    return {"gradients": model.gradients, "state": weights_of(model), "drawn": model.drawn}


def assert_identical(actual: Architecture, expected: Architecture) -> None:
    """Compare gradients of each backward pass, weights, buffers and random numbers bit by bit."""
    assert actual.gradients
    torch.testing.assert_close(evidence(actual), evidence(expected), rtol=0.0, atol=0.0)
