"""torch.compile before and after checkpointing, around the model and around blocks."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_opt.core.modules.blocks import find_blocks
from lightning_opt.memory.checkpointing.activation_checkpointing import ActivationCheckpointing
from lightning_opt.memory.checkpointing.policies import AppliedPlan, every_layer, square_root
from tests.helpers.trainers import quiet_trainer
from tests.memory.architectures import Architecture

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
]


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), norm

    def forward(self, x: Tensor, *, scale: float) -> Tensor:
        return x + scale * torch.tanh(self.norm(self.linear(x)))


class Model(nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(norm(8)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return x


def results(model: Model, run: Any, batch: Tensor) -> list[Tensor]:
    loss = run(batch).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters()), *model.buffers()]


@pytest.mark.parametrize(
    ("where", "plan", "norm"),
    [
        ("model", every_layer, nn.BatchNorm1d),
        ("model", square_root, nn.LayerNorm),
        ("blocks", every_layer, nn.BatchNorm1d),
        ("blocks wrapped", square_root, nn.LayerNorm),
        ("blocks afterwards", every_layer, nn.BatchNorm1d),
    ],
)
def test_gradients_equal_those_without_checkpointing(where: str, plan: Any, norm: Any) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    expected, model, batch = Model(norm), Model(norm), torch.randn(4, 8)
    model.load_state_dict(expected.state_dict())
    run: Any = model
    if where == "model":
        run = torch.compile(model, backend="aot_eager")
    if where == "blocks":
        for layer in model.layers:
            layer.compile(backend="aot_eager")
    if where == "blocks wrapped":
        model.layers = nn.ModuleList(
            torch.compile(layer, backend="aot_eager") for layer in model.layers
        )
    applied = AppliedPlan(plan(find_blocks(model)))
    if where == "blocks afterwards":
        for layer in model.layers:
            layer.compile(backend="aot_eager")
    try:
        torch.testing.assert_close(
            results(model, run, batch), results(expected, expected, batch), rtol=1e-6, atol=1e-7
        )
    finally:
        applied.undo()
        torch._dynamo.reset()


class Masked(nn.Module):
    """A norm with a buffer that is only read, or with a number in its place."""

    def __init__(self, width: int, has_buffer: bool = True) -> None:
        super().__init__()
        self.mask = nn.Buffer(torch.ones(width)) if has_buffer else 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


class Compiled(Architecture):
    def __init__(self, norm: Any, where: str, backend: Any) -> None:
        super().__init__()
        self.net = Model(norm)
        for module in [self.net] if where == "model" else self.net.layers:
            if backend is not None:
                module.compile(backend=backend)

    def build(self) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.ones(12, 8), batch_size=4)


def fit(norm: Any, where: str, backend: Any) -> Compiled:
    """Train a checkpointed model, or a plain one without a backend."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Compiled(norm, where, backend)
    callbacks = [ActivationCheckpointing("custom", modules=[Block])] if backend else []
    quiet_trainer(callbacks=callbacks, max_steps=3, limit_val_batches=0).fit(model)
    torch._dynamo.reset()
    return model


def unregistered(graph: Any, inputs: Any) -> Any:
    return graph


@pytest.mark.parametrize("backend", ["eager", "aot_eager", unregistered])
@pytest.mark.parametrize("where", ["model", "blocks"])
def test_dropout_repeats_its_mask_whatever_the_backend(where: str, backend: Any) -> None:
    plain = fit(lambda width: nn.Dropout(0.5), where, None)
    compiled = fit(lambda width: nn.Dropout(0.5), where, backend)
    torch.testing.assert_close(compiled.state_dict(), plain.state_dict(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("where", ["model", "blocks"])
def test_reading_a_mask_changes_no_graph(where: str) -> None:
    from torch._dynamo.backends.debugging import aot_eager

    sizes: list[int] = []

    def aot_counting(graph: Any, inputs: Any) -> Any:
        sizes.append(len(graph.graph.nodes))
        return aot_eager(graph, inputs)

    fit(partial(Masked, has_buffer=False), where, aot_counting)
    plain = sizes.copy()
    sizes.clear()
    fit(Masked, where, aot_counting)
    # A buffer is one more input, for each block of the graph.
    assert len(plain) == len(sizes) == (1 if where == "model" else len(plain)) > 0
    assert sizes == [size + (3 if where == "model" else 1) for size in plain]


def test_trial_step_before_compilation_writes_no_buffer() -> None:
    model = fit(nn.BatchNorm1d, "model", "eager")
    counts = [value for name, value in model.named_buffers() if "num_batches" in name]
    assert counts == [3] * 3
