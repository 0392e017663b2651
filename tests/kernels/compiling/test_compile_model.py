"""Successful compilation: identical training, shared graphs, and complete undo."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.testing import CompileCounterWithBackend

from lightning_opt.core.modules.compiling import CLOCK
from lightning_opt.kernels.channels_last.channels_last import ChannelsLast
from lightning_opt.kernels.compiling.compile_model import CompileModel
from lightning_opt.kernels.compiling.setup import modes_for
from lightning_opt.memory.checkpointing.activation_checkpointing import ActivationCheckpointing
from tests.helpers.trainers import SaveAt, quiet_trainer
from tests.kernels.compiling.runs import QUIET, Breaking, Net, Varying, assert_same, train
from tests.kernels.convnets import ConvNet

pytestmark = QUIET


@pytest.mark.parametrize("scope", ["model", "regions"])
def test_training_and_checkpoints_with_aot_eager_are_identical(scope: str, tmp_path: Any) -> None:
    callback, file = CompileModel(scope=scope, backend="aot_eager"), tmp_path / "some.ckpt"
    actual = train(callback, SaveAt(file, 1), num_sanity_val_steps=1)
    assert_same(actual, train(num_sanity_val_steps=1))
    assert {row["mode"] for row in callback.report().rows} == {"default"}
    assert sum(row["graphs"] for row in callback.report().rows) == 2  # training and validation
    assert list(torch.load(file, weights_only=True)["state_dict"]) == list(actual["weights"])


def test_blocks_of_one_structure_share_one_compilation() -> None:
    counter = CompileCounterWithBackend("eager")
    callback = CompileModel(scope="regions", backend=counter)
    train(callback, model=Net(blocks=5), limit_val_batches=0)
    assert counter.frame_count == 1
    [row] = callback.report().rows
    assert (row["region"], row["modules"], row["graphs"]) == ("blocks.0", 5, 1)
    assert (row["graph breaks"], row["recompilations"]) == (0, 0)


class Layers(Net):
    """Many layers of torch, each called by the training step."""

    def __init__(self) -> None:
        super().__init__(blocks=0, steps=2)
        self.layers = nn.ModuleList(nn.Linear(6, 6, bias=bias) for bias in [True, False] * 6)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(x[:, :1], batch[1])


def test_torch_layers_do_not_share_a_recompilation_limit() -> None:
    """torch recompiles one code object at most eight times."""
    counter = CompileCounterWithBackend("eager")
    settings = {"max_epochs": 1, "limit_val_batches": 0}
    actual = train(CompileModel(backend=counter), model=Layers(), **settings)
    assert counter.frame_count == 12
    assert_same(actual, train(model=Layers(), **settings))


class Mixed(Net):
    """Blocks of two structures, and a stack of plain layers."""

    def __init__(self) -> None:
        super().__init__(blocks=3)
        self.other = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6)) for _ in range(2)
        )
        self.stack = nn.Sequential(*(layer for _ in range(4) for layer in self._layer()))

    def _layer(self) -> tuple[nn.Module, nn.Module]:
        return nn.Linear(6, 6), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.other, self.stack):
            x = block(x)
        return super().forward(x)


def test_each_structure_gets_one_region() -> None:
    callback = CompileModel(scope="regions", backend="eager")
    assert_same(train(callback, model=Mixed()), train(model=Mixed()))
    found = {row["region"]: row["modules"] for row in callback.report().rows}
    assert found == {"blocks.0": 3, "other.0": 2, "stack": 1}


@pytest.mark.parametrize(("dynamic", "again"), [(False, 4), (True, 0)])
def test_recompilations_are_counted(dynamic: bool, again: int) -> None:
    callback = CompileModel(backend="eager", dynamic=dynamic)
    settings = {"limit_val_batches": 0, "max_epochs": 1}
    actual = train(callback, model=Varying(blocks=1, steps=5, batch_size=8), **settings)
    assert sum(row["recompilations"] for row in callback.report().rows) == again
    assert_same(actual, train(model=Varying(blocks=1, steps=5, batch_size=8), **settings))


def test_compilation_and_graph_breaks_are_logged_and_the_clock_stops() -> None:
    actual = train(CompileModel(backend="eager"), model=Breaking(), limit_val_batches=0)
    assert_same(actual, train(model=Breaking(), limit_val_batches=0))
    found = actual["logger"]
    assert found.series("compile/graphs") == [2.0]  # logged once, when it changed
    assert found.series("compile/graph_breaks") == [1.0]
    assert found.series("compile/uncompiled") == [0.0]
    [seconds] = found.series("compile/seconds")
    assert 0 < seconds <= CLOCK.seconds
    counted = CLOCK.compilations
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert CLOCK.compilations == counted  # the clock is stopped


@pytest.mark.parametrize(("scope", "first"), [("model", "compile"), ("regions", "checkpointing")])
def test_training_with_checkpointing_in_any_order_is_identical(scope: str, first: str) -> None:
    def callbacks() -> list[Any]:
        both = [CompileModel(scope=scope, backend="eager"), ActivationCheckpointing("every_layer")]
        return both if first == "compile" else both[::-1]

    model, settings = Net(blocks=2, steps=2), {"max_epochs": 1, "limit_val_batches": 0}
    actual = train(*callbacks(), model=model, **settings)
    # BatchNorm's blocks run uncompiled under checkpointing, and break the graph.
    assert_same(actual, train(model=Net(blocks=2, steps=2), **settings))
    for module in model.modules():
        assert "forward" not in vars(module)


def test_model_is_compiled_once_for_channels_last() -> None:
    seen = []

    def backend(graph: Any, inputs: Any) -> Any:
        weights = [i for i in inputs if isinstance(i, nn.Parameter) and i.ndim == 4]
        assert weights
        seen.append(all(w.is_contiguous(memory_format=torch.channels_last) for w in weights))
        return aot_eager(graph, inputs)

    both = [CompileModel(backend=backend), ChannelsLast("always")]
    actual = train(*both, model=ConvNet(), num_sanity_val_steps=1)
    assert seen == [True, True]  # one graph in training, one in validation
    expected = train(ChannelsLast("always"), model=ConvNet(), num_sanity_val_steps=1)
    # Gradients may have another memory format inside a compiled graph.
    assert_same(actual, expected, rtol=1e-3, atol=1e-5)


class TwoLosses(Net):
    """Keeps the graph of its forward pass for a second loss."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        output, optimizer = self(batch[0]), self.optimizers()
        optimizer.zero_grad()
        self.manual_backward((output - batch[1]).abs().mean(), retain_graph=True)
        self.manual_backward(output.square().mean())
        optimizer.step()


class BackwardTwice(Net):
    def backward(self, loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.backward()


@pytest.mark.parametrize("kind", [TwoLosses, BackwardTwice])
def test_graph_may_be_kept_for_a_second_backward_pass(kind: type[Net]) -> None:
    actual = train(CompileModel(backend="aot_eager"), model=kind())
    assert_same(actual, train(model=kind()))
    assert torch._functorch.config.donated_buffer


def test_modes_depend_on_the_device() -> None:
    assert modes_for("auto", "cpu") == ("default",)
    assert modes_for("max-autotune", "cpu") == ("max-autotune", "default")
    assert modes_for("max-autotune", "cuda") == ("max-autotune", "reduce-overhead", "default")


# --- refusals -----------------------------------------------------------------------------------


def error_of(*callbacks: Any, model: Any = None) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the callers compare the message
        quiet_trainer(callbacks=list(callbacks)).fit(Net() if model is None else model)
    return str(caught.value)


def test_incompatible_models_and_callbacks_raise_in_setup() -> None:
    assert "backend must be one of" in error_of(CompileModel(backend="indoctor"))
    assert "individual operators" in error_of(CompileModel(), ActivationCheckpointing("auto"))
    assert "individual operators" in error_of(ActivationCheckpointing("selective"), CompileModel())
    compiled = torch.compile(Net(), backend="eager")
    assert "twice" in error_of(CompileModel(), model=compiled)

    class Empty(Net):
        forward = LightningModule.forward

        def __init__(self) -> None:
            super().__init__()
            del self.stem, self.blocks, self.head
            self.weight = nn.Parameter(torch.ones(6))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return (self.weight * batch[0]).sum()

    assert "nothing to compile" in error_of(CompileModel(), model=Empty())


# --- the real compiler --------------------------------------------------------------------------


@pytest.mark.slow
def test_inductor_gives_the_same_weights_after_100_steps() -> None:
    """Without dropout, whose random numbers differ under inductor; the rest is rounding."""

    def model() -> Net:
        net = Net(steps=100)
        for block in net.blocks:
            block.dropout.p = 0.0
            # The gradient of a bias before BatchNorm is rounding noise, which AdamW scales up.
            block.linear.bias = None
        return net

    callback = CompileModel(scope="regions")
    settings = {"max_epochs": 1, "limit_val_batches": 0}
    actual = train(callback, model=model(), **settings)
    expected = train(model=model(), **settings)
    assert {row["mode"] for row in callback.report().rows} == {"default"}
    assert_same(actual, expected, rtol=1e-3, atol=1e-4)
