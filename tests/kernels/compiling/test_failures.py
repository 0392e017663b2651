"""Failed compilation: training continues as without CompileModel, with one warning."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

from lightning_opt.batching.micro_batching.micro_batching import MicroBatching
from lightning_opt.core.measure.exhaustion import is_out_of_memory
from lightning_opt.kernels.compiling.compile_model import CompileModel
from tests.helpers.models import assert_same_weights
from tests.helpers.processes import launch
from tests.helpers.trainers import quiet_trainer
from tests.kernels.compiling.runs import (
    QUIET,
    Breaking,
    FailsLater,
    Net,
    Varying,
    assert_same,
    breaks_in_backward,
    fails,
    fails_in_backward,
    messages_of,
    out_of_memory,
    train,
)

pytestmark = QUIET

SHORT = {"max_epochs": 1, "limit_val_batches": 1}


def compare(backend: Any, make: Any = Net, **settings: Any) -> tuple[str, CompileModel]:
    """Train with a failing backend, compare with a run without it, and return the warning."""
    arguments = {key: settings.pop(key) for key in ("scope", "fullgraph") if key in settings}
    arguments.setdefault("dynamic", False)
    settings = {**SHORT, **settings}
    callback = CompileModel(backend=backend, **arguments)
    actual, messages = messages_of(lambda: train(callback, model=make(), **settings))
    assert_same(actual, train(model=make(), **settings))
    [message] = messages
    assert "no batch is lost" in message
    for module in actual["model"].modules():
        assert "forward" not in vars(module)
    return message, callback


@pytest.mark.parametrize(("scope", "backend"), [("model", fails_in_backward), ("regions", fails)])
def test_failed_compilation_falls_back_to_uncompiled_code(scope: str, backend: Any) -> None:
    message, callback = compare(backend, scope=scope, num_sanity_val_steps=1)
    assert "RuntimeError: planted in the compiler" in message
    assert "runs uncompiled from now on" in message
    assert ("forward (Net)" if scope == "model" else "blocks.0 (Block)") in message
    assert "eager" in {row["mode"] for row in callback.report().rows}
    assert "planted in the compiler" in str(callback.report())
    _, messages = messages_of(lambda: train(callback, model=Net(), **SHORT))
    assert messages == [message]  # once for each model


def test_error_of_a_compiled_backward_pass_is_raised() -> None:
    model = Net()
    with pytest.raises(RuntimeError, match="planted in compiled code"):
        train(CompileModel(backend=breaks_in_backward), model=model, **SHORT)
    for module in model.modules():
        assert "forward" not in vars(module)


def test_failure_for_a_later_shape_falls_back() -> None:
    message, callback = compare(
        FailsLater(2), lambda: Varying(batch_size=8), limit_val_batches=0, scope="regions"
    )
    assert "planted in the compiler" in message
    assert [row["mode"] for row in callback.report().rows] == ["eager"]


class CompiledAgain(Breaking):
    """The second graph is compiled again in each step."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.calls


@pytest.mark.parametrize("graphs", [1, 2])
def test_failure_after_an_earlier_graph_has_run_rolls_back(graphs: int) -> None:
    message, _ = compare(FailsLater(graphs), CompiledAgain, limit_val_batches=0)
    assert "That call ran uncompiled" in message


class OverwritesInput(Net):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        torch._dynamo.graph_break()
        return self.head(x)


def test_step_that_overwrites_its_input_is_not_repeated() -> None:
    callback = CompileModel(backend=FailsLater(1))
    with pytest.raises(BackendCompilerFailed, match="planted in the compiler"):
        train(callback, model=OverwritesInput(), **SHORT)


class DataDependent(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)  # random numbers and buffers before the branch
        x = x + 1 if x.sum() > 0 else x - 1
        return self.head(self.blocks[1](x))


def test_data_dependent_control_flow_with_fullgraph_falls_back() -> None:
    message, _ = compare("eager", DataDependent, fullgraph=True)
    assert "forward (DataDependent)" in message
    assert "data-dependent" in message.lower()


class Linear(Net):
    """A model without BatchNorm, whose statistics depend on micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.norm = nn.Identity()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.calls = 0  # MicroBatching warns of state that changes with each call
        return loss

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[0].dropout(self.stem(x)))


class GraphBreakLinear(Linear):
    """Draws random numbers before a graph break."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0].dropout(self.stem(x))
        torch._dynamo.graph_break()
        return self.head(x)


def test_check_of_micro_batching_does_not_count_as_a_compiled_call() -> None:
    """The check runs uncompiled, with the shapes of the first micro-batch."""
    both = [MicroBatching(2), CompileModel(backend=FailsLater(1))]
    actual, messages = messages_of(lambda: train(*both, model=GraphBreakLinear(), **SHORT))
    assert len(messages) == 1
    assert_same(actual, train(MicroBatching(2), model=GraphBreakLinear(), **SHORT))


class RunsOutOfMemory(Linear):
    """Runs out of memory for more than two samples."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return super().forward(x)


def test_fallback_works_while_micro_batching_searches_for_its_size() -> None:
    settings = {"max_epochs": 1, "limit_val_batches": 0}
    expected = train(MicroBatching("auto"), model=RunsOutOfMemory(), **settings)
    compiling, splitting = CompileModel(backend=fails_in_backward), MicroBatching("auto")
    actual, messages = messages_of(
        lambda: train(compiling, splitting, model=RunsOutOfMemory(), **settings)
    )
    assert_same(actual, expected)
    assert sum("could not be compiled" in message for message in messages) == 1
    assert compiling.report().rows[0]["mode"] == "eager"
    assert [event["size"] for event in splitting.events] == [2]


# --- errors of the model ------------------------------------------------------------------------


class Raising(Net):
    """Raises in the second step."""

    kind = "raise"

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks[0](x)
        if self.calls == 2 and self.kind == "raise":
            raise KeyError("planted")
        if self.calls == 2 and self.kind == "shape":
            y = y @ torch.ones(5, 5)
        if self.kind == "index":
            index = (y[:, 0].abs() * 0).long() + (9 if self.calls == 2 else 0)
            return nn.functional.embedding(index, self.head.weight.T)
        return self.head(y)


@pytest.mark.parametrize(
    ("kind", "fullgraph"), [("raise", False), ("shape", True), ("index", False)]
)
def test_errors_of_the_model_are_raised_unchanged(
    kind: str, fullgraph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Raising, "kind", kind)

    def error_of(*callbacks: Any) -> Any:
        model = Raising()
        torch.manual_seed(0)
        with pytest.raises((KeyError, RuntimeError, IndexError)) as caught:
            quiet_trainer(callbacks=list(callbacks), limit_val_batches=0).fit(model)
        assert not [m for m in model.modules() if "forward" in vars(m)]
        return caught.value, model

    expected, plain = error_of()
    callback = CompileModel(backend="aot_eager", fullgraph=fullgraph)
    (actual, model), messages = messages_of(lambda: error_of(callback))
    assert (type(actual), str(actual)) == (type(expected), str(expected))
    assert actual.__context__ is None
    assert messages == []
    # A repeated step writes the same buffers. An IndexError of code that ran before is the model's:
    # it is raised without a repetition, perhaps before buffers are written.
    if kind == "index":
        assert_same_weights(dict(model.named_parameters()), dict(plain.named_parameters()))
    else:
        assert_same_weights(model, plain)


def test_out_of_memory_while_compiling_is_raised() -> None:
    callback = CompileModel(backend=out_of_memory)
    with pytest.raises(RuntimeError) as caught:
        quiet_trainer(callbacks=[callback]).fit(Net())
    assert is_out_of_memory(caught.value)


# --- the real compiler --------------------------------------------------------------------------


def without_compiler(folder: str) -> tuple[list[str], list[Any]]:
    import os

    from torch._inductor import config

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    config.cpp.cxx = (None, "/nowhere/c++")  # CXX was read at import
    settings = {"max_epochs": 1, "limit_val_batches": 0}
    callback = CompileModel()
    actual, messages = messages_of(
        lambda: train(callback, model=Net(blocks=1, steps=1), **settings)
    )
    assert_same(actual, train(model=Net(blocks=1, steps=1), **settings))
    return messages, [row["mode"] for row in callback.report().rows]


@pytest.mark.slow
def test_missing_compiler_falls_back_and_is_named_in_the_warning(tmp_path: Path) -> None:
    [(messages, modes)] = launch(without_compiler, str(tmp_path), processes=1)
    [message] = messages
    assert "/nowhere/c++" in message
    assert "no batch is lost" in message
    assert modes[0] == "eager"
