"""Counted FLOPs against formulas, and the peaks of GPUs against Lightning's table."""

import copy
from contextlib import nullcontext

import pytest
import torch
from lightning.fabric.utilities.throughput import _CUDA_FLOPS
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_opt.profiling.flops import FlopCount, Flops, count_flops, peak_flops
from tests.helpers.models import assert_same_weights, weights_of

VOCABULARY, WIDTH, LAYERS, HEADS, CONTEXT = 50257, 768, 12, 12, 1024


class GPT2(nn.Module):
    """GPT-2 small; its head shares the embedding's weight."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.ModuleList(copy.deepcopy(layer) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places.weight[: words.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return F.linear(self.norm(x), self.words.weight)


def gpt2_forward(batch: int, length: int) -> int:
    """Return 2 FLOP per weight and token, plus two length x length products per layer."""
    weights = 12 * LAYERS * WIDTH**2 + VOCABULARY * WIDTH
    return batch * length * (2 * weights + 4 * LAYERS * length * WIDTH)


@pytest.mark.parametrize("recompute", [False, True])
def test_flops_of_gpt2_small_follow_the_formula(recompute):
    with torch.device("meta"):
        model, words = GPT2(recompute), torch.zeros(2, CONTEXT, dtype=torch.long)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(124e6, rel=0.01)
    flops = count_flops(model, words)
    theory = gpt2_forward(2, CONTEXT)
    assert flops.forward == pytest.approx(theory, rel=0.02)
    assert flops.backward == pytest.approx(2 * theory, rel=0.02)
    assert flops.model == pytest.approx(3 * theory, rel=0.02)
    # The blocks are recomputed, except for their last product, by early stopping.
    head = 2 * 2 * CONTEXT * VOCABULARY * WIDTH
    last = LAYERS * 2 * 2 * CONTEXT * 4 * WIDTH**2
    again = theory - head - last if recompute else 0
    assert flops.recomputed == pytest.approx(again, rel=0.02)


def test_flops_equal_torch_s_counter():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    images = torch.randn(2, 3, 8, 8)
    with FlopCount() as ours:
        net(images).sum().backward()
    with FlopCounterMode(display=False) as theirs:
        net(images).sum().backward()
    assert ours.flops.model == theirs.get_total_flops() > 0
    assert ours.flops.recomputed == 0


def test_backward_pass_that_makes_a_graph_is_not_recomputation():
    def penalized_step() -> None:
        images = torch.randn(4, 8, requires_grad=True)
        output = (torch.tanh(images @ first) @ second).sum()
        (gradient,) = torch.autograd.grad(output, images, create_graph=True)
        (output + gradient.square().sum()).backward()

    first, second = (torch.randn(shape, requires_grad=True) for shape in ((8, 16), (16, 1)))
    with FlopCount() as ours:
        penalized_step()
    with FlopCounterMode(display=False) as theirs:
        penalized_step()
    forward = 2 * 4 * (8 * 16 + 16)
    assert ours.flops == Flops(forward, theirs.get_total_flops() - forward, 0)


class Attention(nn.Module):
    """Fused attention, in which several heads may share one key and value."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.shared = nn.Linear(16, 16), nn.Linear(16, 2 * heads * 4)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).unflatten(-1, (4, 4)).transpose(1, 2)
        key, value = self.shared(x).unflatten(-1, (2 * self.heads, 4)).transpose(1, 2).chunk(2, 1)
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=self.heads < 4)


@pytest.mark.parametrize("heads", [4, 2])
def test_fused_attention_counts_as_its_products(heads):
    model, batch = Attention(heads), torch.randn(3, 10, 16)
    flops = count_flops(model, batch)
    with FlopCount() as counter:
        model(batch)
    assert counter.flops.forward == flops.forward
    products = 2 * 3 * 10 * 16 * (16 + 8 * heads)  # of the linear layers, without gradient of x
    attention = 2 * 2 * 3 * 4 * 10 * 10 * 4
    assert flops == Flops(products + attention, products + 2 * attention, 0)
    assert count_flops(model.to("meta"), batch.to("meta")) == flops


def test_counting_changes_nothing():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))
    model(torch.randn(8, 4)).sum().backward()
    before, gradients = weights_of(model), copy.deepcopy([p.grad for p in model.parameters()])
    state = torch.get_rng_state()
    flops = count_flops(model, torch.ones(8, 4))
    assert flops == Flops(2 * 8 * (16 + 8), 8 * 2 * (16 + 8 + 8), 0)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same_weights(model, before)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_without_gradients_only_the_forward_pass_counts():
    model, batch = nn.Linear(10, 5), torch.ones(2, 10)
    with torch.no_grad():
        assert count_flops(model, batch) == Flops(200, 0, 0)
    assert count_flops(model.requires_grad_(False), input=batch) == Flops(200, 0, 0)
    assert not model.weight.requires_grad


def test_random_state_of_the_device_of_named_inputs_is_restored(monkeypatch):
    devices: list[torch.device] = []
    isolated = "lightning_opt.profiling.flops.isolated_random"
    monkeypatch.setattr(isolated, lambda device: devices.append(device) or nullcontext())
    with FakeTensorMode():
        count_flops(nn.ReLU(), input=torch.empty(2, device="cuda"))
    assert [device.type for device in devices] == ["cuda"]


def test_uncounted_operator_raises(monkeypatch):
    def fails(*args, **kwargs):
        raise AssertionError("odd shapes")

    monkeypatch.setitem(torch.utils.flop_counter.flop_registry, torch.ops.aten.addmm, fails)
    with pytest.raises(ValueError, match=r"aten.addmm.*odd shapes"):
        count_flops(nn.Linear(10, 5), torch.ones(2, 10))


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA A10G", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
)
def test_peak_is_found_by_the_words_of_a_name(name, peak):
    assert peak_flops(name, "bf16-mixed") == (peak and peak * 1e12)


def test_peaks_depend_on_precision_and_equal_lightning_s(monkeypatch):
    for name, chip in (("NVIDIA H100 80GB HBM3", "h100 sxm"), ("NVIDIA A100-PCIE", "a100")):
        theirs = _CUDA_FLOPS[chip]
        assert peak_flops(name, "16-true") == pytest.approx(theirs[torch.float16])
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "highest")
        assert peak_flops(name, "32-true") == pytest.approx(theirs[torch.float32])
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
        assert peak_flops(name, "32-true") == pytest.approx(theirs["tfloat32"])
        assert peak_flops(name, "64-true") is None
        fp8 = None if chip == "a100" else pytest.approx(theirs[torch.int8])
        assert peak_flops(name, "transformer-engine") == fp8
