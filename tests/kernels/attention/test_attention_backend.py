"""AttentionBackend: its report against the kernels that torch runs, and complete undo."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

import lightning_opt as lo
from lightning_opt.kernels.attention import self_attention
from tests.helpers.models import SmallNet, assert_same_weights
from tests.helpers.trainers import quiet_trainer, warnings_of

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")

LENGTH, WIDTH = 6, 8
# Under another name, since the callback replaces the function in modules that have its name.
ORIGINAL = functional.scaled_dot_product_attention
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@pytest.fixture(autouse=True)
def _function_is_restored() -> Iterator[None]:
    yield
    assert functional.scaled_dot_product_attention is ORIGINAL
    assert self_attention.scaled_dot_product_attention is ORIGINAL


class Net(SmallNet):
    """Attention between two linear layers.

    Args:
        kind: ``"plain"``, ``"bias"`` (a learned one, added to the scores), ``"module"``
            (SelfAttention) or ``"layer"`` (torch's encoder layer).
        dropout: Dropout of the attention.
    """

    def __init__(self, kind: str = "plain", dropout: float = 0.0) -> None:
        super().__init__(lr=0.1)
        torch.manual_seed(0)
        self.kind, self.dropout = kind, dropout
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if kind == "bias":
            self.bias = nn.Parameter(torch.zeros(LENGTH, LENGTH))
        elif kind == "module":
            self.attention = lo.SelfAttention(WIDTH, 2, causal=True, dropout=dropout)
        elif kind == "layer":
            self.attention = nn.TransformerEncoderLayer(
                WIDTH, 2, WIDTH, dropout=dropout, batch_first=True
            )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.kind in ("module", "layer"):
            x = self.attention(x)
        else:
            heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
            x = functional.scaled_dot_product_attention(
                heads,
                heads,
                heads,
                attn_mask=self.bias if self.kind == "bias" else None,
                dropout_p=self.dropout,
            )
            x = x.transpose(1, 2).flatten(2)
        return self.last(x)

    def step(self, batch: Tensor) -> Tensor:
        return self(batch).square().mean()

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    return DataLoader(torch.randn(12, LENGTH, WIDTH, generator=generator), batch_size=4)


def fit(net: Net, *callbacks: Callback, **settings: Any) -> Net:
    torch.manual_seed(5)  # of dropout
    settings = {"limit_val_batches": 0, **settings}
    quiet_trainer(callbacks=list(callbacks), **settings).fit(net, data(), data())
    return net


class See(Callback):
    """Records whether the function is replaced in each step."""

    def __init__(self) -> None:
        self.replaced: list[bool] = []

    def on_before_backward(self, *args: Any) -> None:
        self.replaced.append(functional.scaled_dot_product_attention is not ORIGINAL)


class Operations(TorchDispatchMode):
    flash = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.flash += func.overloadpacket is FLASH
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["plain", "module", "layer"])
def test_report_names_the_kernel_that_torch_runs(kind):
    attention, operations, see = lo.AttentionBackend(), Operations(), See()
    net = Net(kind)
    with operations:
        fit(net, attention, see, max_epochs=2)
    assert operations.flash == 6
    assert see.replaced == [True] + [False] * 5  # in the first batch only
    (row,) = attention.report().rows
    assert row == {
        "backend": "flash",
        "calls": 1,
        "device": "cpu",
        "dtype": "float32",
        "query": "(4, 2, 6, 4)",
        "key": "(4, 2, 6, 4)",
        "mask": "none",
        "causal": kind == "module",
        "dropout": 0.0,
        "better ones": "",
    }
    assert_same_weights(net, fit(Net(kind), max_epochs=2))


def row_served_by_math(net: Net, attention: lo.AttentionBackend, message: str) -> dict[str, Any]:
    """Train, check for one warning, and compare with a run without the callback."""
    expected = fit(Net(net.kind, net.dropout))
    with Operations() as operations:
        _, (warned,) = warnings_of(lambda: fit(net, attention), "AttentionBackend")
    assert message in warned
    assert operations.flash == 0
    assert_same_weights(net, expected)
    (row,) = attention.report().rows
    assert row["backend"] == "math"
    return row


def test_math_serves_dropout_and_warns_once():
    row = row_served_by_math(Net("layer", 0.2), lo.AttentionBackend(), "dropout 0.2")
    assert row["better ones"] == (
        "flash: Both fused kernels do not support non-zero dropout.; "
        "cudnn: not for CPUs; efficient: not for CPUs"
    )


def test_first_batch_of_training_is_recorded_not_the_sanity_check():
    attention = lo.AttentionBackend()
    with pytest.warns(UserWarning, match="dropout 0.2"):
        fit(Net("module", 0.2), attention, num_sanity_val_steps=1, limit_val_batches=1)
    assert [row["dropout"] for row in attention.report().rows] == [0.2]


def test_math_serves_a_learned_mask_and_warns_once():
    row = row_served_by_math(Net("bias"), lo.AttentionBackend(), "mask float32 (6, 6), dropout 0")
    assert row["mask"] == "float32 (6, 6)"
    assert "flash: torch gives no reason" in row["better ones"]


def test_each_shape_of_the_first_batch_gets_a_row_with_its_dtype_under_autocast():
    class Twice(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + super().forward(x[:, :3]).sum() + super().forward(x).sum()

    attention = lo.AttentionBackend()
    fit(Twice(), attention, precision="bf16-mixed")
    assert {row["dtype"] for row in attention.report().rows} == {"bfloat16"}
    found = [(row["query"], row["calls"]) for row in attention.report().rows]
    assert found == [("(4, 2, 6, 4)", 2), ("(4, 2, 3, 4)", 1)]
    fit(Net(), attention)  # a second fit
    assert [(row["dtype"], row["calls"]) for row in attention.report().rows] == [("float32", 1)]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested|AttentionBackend:UserWarning")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_strided_nested_tensors_train_as_without_it(precision):
    class Nested(Net):
        def forward(self, x: Tensor) -> Tensor:
            heads = self.first(x).unflatten(-1, (2, -1)).transpose(1, 2)
            nested = torch.nested.as_nested_tensor([heads[0], heads[1, :, :3]])
            return functional.scaled_dot_product_attention(nested, nested, nested).values()

    attention = lo.AttentionBackend()
    nets = [fit(Nested(), *callbacks, precision=precision) for callbacks in ([], [attention])]
    assert_same_weights(*nets)
    (row,) = attention.report().rows
    assert row["query"] == row["key"] == "nested"


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_report_without_training(stage):
    attention = lo.AttentionBackend()
    getattr(quiet_trainer(callbacks=[attention]), stage)(Net(), data())
    assert [row["backend"] for row in attention.report().rows] == ["flash"]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compile_model_compiles_no_more_graphs():
    def graphs(*callbacks: Callback) -> float:
        trainer = quiet_trainer(callbacks=[*callbacks, lo.CompileModel(backend="aot_eager")])
        trainer.fit(Net("module"), data(), data())
        torch._dynamo.reset()
        return float(trainer.callback_metrics["compile/graphs"])

    attention = lo.AttentionBackend()
    assert graphs(attention) == graphs() > 0
    assert "compiled" in attention.report().notes[0]


@pytest.mark.gpu
def test_report_contains_a_fused_backend_or_torchs_reason_on_gpu():
    for kind in ("module", "bias"):
        attention = lo.AttentionBackend()
        trainer = quiet_trainer(callbacks=[attention], accelerator="gpu", precision="bf16-mixed")
        warnings_of(partial(trainer.fit, Net(kind), data(), data()))
        (row,) = attention.report().rows
        assert (
            row["backend"] != "math" if kind == "module" else "mask" in row["better ones"].lower()
        )
