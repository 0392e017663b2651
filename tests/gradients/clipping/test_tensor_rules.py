"""Rules per tensor, unit and element, against torch and independent references."""

import math
from collections import UserList
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_opt.gradients.clipping.gradient_clipper import GradientClipper
from lightning_opt.gradients.clipping.tensor_rules import FixedValue, PerParameter, UnitWise
from tests.gradients import references
from tests.gradients.cases import Net, set_gradients


def gradients_of(module: nn.Module) -> dict[str, np.ndarray]:
    return {
        name: parameter.grad.double().numpy().copy()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


# --- FixedValue ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fixed_value_equals_torch(path: str, dtype: torch.dtype) -> None:
    ours, theirs = Net().to(dtype), Net().to(dtype)
    for seed, norm in enumerate((0.1, 3.0, 40.0)):
        set_gradients(ours, norm, seed)
        set_gradients(theirs, norm, seed)
        GradientClipper(ours, FixedValue(0.25)).clip()
        torch.nn.utils.clip_grad_value_(theirs.parameters(), 0.25)
        for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(own.grad, other.grad)


def test_fixed_value_counts_clipped_tensors(path: str) -> None:
    net = Net()
    for index, parameter in enumerate(net.parameters()):
        parameter.grad = torch.full_like(parameter, 1.0 if index < 2 else -0.1)
    clipper = GradientClipper(net, FixedValue(0.5))
    clipper.clip()
    assert clipper._tally.read()["fraction"] == pytest.approx(2 / 5)


# --- UnitWise -----------------------------------------------------------------------------------

LAYERS: dict[str, tuple[nn.Module, dict[str, int | None]]] = {
    "linear": (nn.Linear(5, 4), {"weight": 0, "bias": None}),
    "conv2d": (nn.Conv2d(3, 4, 2), {"weight": 0, "bias": None}),
    "conv3d": (nn.Conv3d(2, 3, 2), {"weight": 0, "bias": None}),
    "transposed": (nn.ConvTranspose2d(3, 4, 2), {"weight": 1, "bias": None}),
    "embedding": (nn.Embedding(7, 3), {"weight": 0}),
    "norm": (nn.LayerNorm(6), {"weight": None, "bias": None}),
    "column": (nn.Linear(1, 64), {"weight": None, "bias": None}),
    "scalar": (nn.ParameterDict({"gain": nn.Parameter(torch.tensor(0.7))}), {"gain": None}),
    "recurrent": (
        nn.LSTM(3, 2),
        {"weight_ih_l0": 0, "weight_hh_l0": 0, "bias_ih_l0": None, "bias_hh_l0": None},
    ),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_unit_wise_equals_the_reference(layer: str, path: str) -> None:
    module, axes = LAYERS[layer]
    for norm, deviation in ((1e-3, 1.0), (0.1, 1.0), (30.0, 1.0), (5.0, 0.0)):
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=deviation)
        set_gradients(module, norm, seed=1)
        weights = {name: p.detach().numpy() for name, p in module.named_parameters()}
        expected = {
            name: references.unit_wise(weights[name], gradient, axes[name], 0.02, 1e-3)
            for name, gradient in gradients_of(module).items()
        }
        GradientClipper(module, UnitWise(0.02, exclude=None)).clip()
        for name, gradient in gradients_of(module).items():
            np.testing.assert_allclose(gradient, expected[name], rtol=1e-5, err_msg=name)


def test_unit_wise_counts_units(path: str) -> None:
    module = nn.Linear(2, 4)
    nn.init.ones_(module.weight)
    nn.init.ones_(module.bias)
    module.weight.grad = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [1e-4, 0.0]])
    module.bias.grad = torch.zeros(4)
    clipper = GradientClipper(module, UnitWise(0.01, exclude=None))
    smallest = clipper.clip()["coefficient"]
    assert clipper._tally.read()["fraction"] == pytest.approx(2 / 5)
    assert float(smallest) == pytest.approx(0.01)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_unit_wise_measures_half_precision_in_float32(path: str, dtype: torch.dtype) -> None:
    """Squares of 300 overflow float16, those of 1e-4 vanish in it."""
    module = nn.Linear(8, 2, bias=False, dtype=dtype)
    nn.init.constant_(module.weight, 10.0)
    module.weight.grad = torch.tensor([[300.0], [1e-4]], dtype=dtype).repeat(1, 8)
    GradientClipper(module, UnitWise(0.01, exclude=None)).clip()
    np.testing.assert_allclose(gradients_of(module)["weight"][0], 0.1, rtol=0.01)
    np.testing.assert_allclose(gradients_of(module)["weight"][1], 1e-4, rtol=0.01)


class Tokens(nn.Module):
    """An embedding, two linear layers and a head. The head may be tied to the embedding."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.head = nn.Linear(4, 6)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(tokens)))  # type: ignore[no-any-return]


def clipped_names(model: nn.Module, rule: UnitWise, trained: Any = None) -> set[str]:
    """Clip the gradients of one step and return the parameters whose gradients have changed."""
    clipper = GradientClipper(model, rule, trained)
    model(torch.arange(6)).square().sum().mul(100.0).backward()
    before = gradients_of(model)
    clipper.clip()
    return {
        name for name, after in gradients_of(model).items() if not (after == before[name]).all()
    }


BODY = {"embedding.weight", "body.0.weight", "body.0.bias", "body.2.weight", "body.2.bias"}


def test_last_linear_layer_of_the_optimizer_is_excluded() -> None:
    assert clipped_names(Tokens(), UnitWise()) == BODY
    assert clipped_names(Tokens(tied=True), UnitWise()) == BODY - {"embedding.weight"}
    model = Tokens()
    compiled: Any = torch.compile(model, backend="eager")
    assert clipped_names(compiled, UnitWise()) == {f"_orig_mod.{name}" for name in BODY}
    model = Tokens()
    names = clipped_names(model, UnitWise(), model.body.parameters())
    assert names == {"body.0.weight", "body.0.bias"}


def test_exclude_takes_patterns() -> None:
    head = {"head.weight", "head.bias"}
    assert clipped_names(Tokens(), UnitWise(exclude=None)) == BODY | head
    assert clipped_names(Tokens(), UnitWise(exclude=[])) == BODY | head
    patterns = ["body.*", "*.bias"]
    for kind in (list, tuple, UserList):  # the last like OmegaConf's, no `list`
        rule = UnitWise(exclude=kind(patterns))
        assert clipped_names(Tokens(), rule) == {"embedding.weight", "head.weight"}
    with pytest.raises(ValueError, match=r"no parameter name matches 'haed\.\*'.*head\.weight"):
        GradientClipper(Tokens(), UnitWise(exclude=["haed.*"]))
    for wrong in ("head.*", [1], 3, True):
        with pytest.raises(ValueError, match=r"exclude must be 'final_linear', a list of patterns"):
            UnitWise(exclude=wrong)  # type: ignore[arg-type]


def test_unit_wise_skips_sparse_gradients() -> None:
    module = nn.Embedding(6, 3, sparse=True)
    module(torch.tensor([1, 4])).sum().backward()
    GradientClipper(module, UnitWise(exclude=None)).clip()
    assert module.weight.grad.to_dense().sum() == 6.0


# --- PerParameter -------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1e-8], ids=["unit", "tiny"])
def test_per_parameter_equals_the_reference(scale: float, path: str) -> None:
    """Some tensors lack a gradient at times, appear late, or are zero for a while."""
    settings: dict[str, Any] = {
        "factor": 1.05,
        "decay": 0.9,
        "warmup": 10,
        "warmup_norm": scale,
    }
    names = "abcde"
    module = nn.ParameterDict({n: nn.Parameter(torch.zeros(3, 2).double()) for n in names})
    clipper = GradientClipper(module, PerParameter(**settings))
    reference = references.AdaGC(**settings)
    rng = np.random.default_rng(0)
    for step in range(200):
        gradients = {}
        for name in names:
            absent = (name == "c" and step % 3 == 1) or (name == "d" and step < 40)
            if not absent:
                spike = 50.0 if rng.random() < 0.05 else 1.0
                gradients[name] = scale * spike * rng.standard_normal((3, 2))
                if name == "e" and (step < 5 or step % 7 == 0):
                    gradients[name] *= 0.0
        if step in (4, 60):
            gradients["a"][0, 0] = math.nan
        for name in names:
            present = name in gradients
            module[name].grad = torch.from_numpy(gradients[name].copy()) if present else None
        clipper.clip()
        for name, expected in reference.clip(gradients).items():
            np.testing.assert_allclose(module[name].grad.numpy(), expected, rtol=1e-9)
    averages = clipper.state_dict()["rule"]["averages"]
    assert averages == pytest.approx(reference.averages, rel=1e-9)


def test_per_parameter_reports_share_and_smallest_coefficient(path: str) -> None:
    module = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(4)])
    clipper = GradientClipper(module, PerParameter(warmup=1, warmup_norm=100.0, factor=1.0))
    for norms in ([1.0, 1.0, 1.0, 1.0], [4.0, 1.0, 0.5, 2.0]):
        for parameter, norm in zip(module, norms, strict=True):
            parameter.grad = torch.tensor([norm])
        smallest = clipper.clip()["coefficient"]
    assert float(smallest) == pytest.approx(0.25)
    assert clipper.state_dict()["clipped"] == pytest.approx(0.5)
