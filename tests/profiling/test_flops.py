"""Counted FLOPs against formulas, and the peaks of GPUs against Lightning's table."""

import copy

import pytest
import torch
from lightning.fabric.utilities.throughput import _CUDA_FLOPS
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_opt.profiling.flops import FlopCount, Flops, count_flops, matmul_dtype, peak_flops
from tests.helpers.models import assert_same_weights, weights_of

VOCABULARY, WIDTH, LAYERS, HEADS, CONTEXT = 50257, 768, 12, 12, 1024


class Block(nn.Module):
    """A layer of GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = (heads[0] @ heads[1].transpose(-2, -1)) / (WIDTH // HEADS) ** 0.5
        mixed = (scores.softmax(-1) @ heads[2]).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT2(nn.Module):
    """GPT-2 small; its head shares the embedding's weight."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
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


def test_forward_only_and_custom_loss():
    model = nn.Linear(10, 5)
    batch = torch.ones(2, 10)
    assert count_flops(model, batch, backward=False) == Flops(200, 0, 0)
    assert count_flops(model, input=batch, loss=lambda out: out.square().mean()).backward == 200
    with pytest.raises(ValueError, match="backward=False"):
        count_flops(model.requires_grad_(False), batch)
    assert not model.weight.requires_grad


def test_uncounted_operator_raises(monkeypatch):
    def fails(*args, **kwargs):
        raise AssertionError("odd shapes")

    monkeypatch.setitem(torch.utils.flop_counter.flop_registry, torch.ops.aten.addmm, fails)
    with pytest.raises(ValueError, match=r"aten.addmm.*odd shapes"):
        count_flops(nn.Linear(10, 5), torch.ones(2, 10))


@pytest.mark.parametrize(
    ("name", "chip"),
    [
        ("NVIDIA H100 80GB HBM3", "h100 sxm"),
        ("NVIDIA H100 PCIe", "h100 pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40", "l40"),
        ("Tesla T4", "t4"),
    ],
)
def test_peaks_equal_lightning_s_table(name, chip):
    for dtype, peak in _CUDA_FLOPS[chip].items():
        if dtype in (torch.float16, torch.bfloat16, torch.float32):
            assert peak_flops(name, dtype) == pytest.approx(peak, rel=0.01)
        elif dtype == "tfloat32":
            assert peak_flops(name, "tf32") == pytest.approx(peak, rel=0.01)


def test_peaks_of_similar_names():
    def peak_of(name: str) -> float | None:
        peak = peak_flops(name, torch.bfloat16)
        return None if peak is None else round(peak / 1e12, 1)

    assert peak_of("NVIDIA L40S") == 362.0
    assert peak_of("NVIDIA H200") == 989.4
    assert peak_of("NVIDIA H200 NVL") == 835.5
    assert peak_of("NVIDIA GH200 480GB") == 989.4
    assert peak_of("NVIDIA A10") == 125.0
    assert peak_of("NVIDIA GeForce RTX 4090") == 165.2
    assert peak_flops("Tesla V100-SXM2-16GB", torch.float16) == 125e12
    assert peak_flops("Tesla V100-PCIE-32GB", torch.float16) == 112e12
    assert peak_flops("Tesla T4", torch.bfloat16) is None  # it has none
    for unknown in (
        "cpu", "NVIDIA A10G", "NVIDIA A1000", "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 4080 SUPER", "NVIDIA GeForce RTX 4090 Laptop GPU", "AMD Radeon",
    ):  # fmt: skip
        assert peak_of(unknown) is None, unknown


def test_matmul_dtype_follows_precision(monkeypatch):
    assert matmul_dtype("bf16-mixed") is torch.bfloat16
    assert matmul_dtype("16-true") is torch.float16
    assert matmul_dtype("64-true") is torch.float64
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "highest")
    assert matmul_dtype("32-true") is torch.float32
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert matmul_dtype("32-true") == "tf32"
