"""A hundred steps with a switch against a hundred without, on tiny models.

Bit-identical where the switch promises it, within the stated tolerance else. Attention by hand and
rotary angles at each call are the reference, as in ``benchmarks/kernels/kernels.py``.
"""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import lightning_opt as lo
from lightning_opt.kernels.attention.rotary_embedding import rotate
from tests.helpers.models import assert_same_weights
from tests.helpers.trainers import quiet_trainer

STEPS, BATCH, LENGTH, WIDTH = 100, 4, 12, 16


class ByHand(lo.SelfAttention):
    """The same weights; angles, scores, softmax and weighted sum by formula."""

    def forward(self, x: Tensor, key_padding_mask: Any = None, offset: int = 0) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in self.qkv(x).split(self.sizes, dim=-1)
        )
        frequencies = 10_000.0 ** -(torch.arange(0, self.head_dim, 2) / self.head_dim)
        angles = torch.outer(torch.arange(x.shape[1]), frequencies)
        query, key = (rotate(part, angles.cos(), angles.sin()) for part in (query, key))
        scores = query @ key.transpose(-1, -2) / self.head_dim**0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        shares = scores.masked_fill(later, -torch.inf).softmax(-1)
        return self.out((shares @ value).transpose(1, 2).flatten(2))


class TinyGPT(LightningModule):
    """Two layers on random bytes; each is the sum of the two before."""

    def __init__(self, attention: type[lo.SelfAttention], **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(32, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attentions = nn.ModuleList(
            attention(WIDTH, 2, causal=True, rotary=True, **settings) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 32)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        x = self.embedding(tokens)
        for norm, attention in zip(self.norms, self.attentions, strict=True):
            x = x + attention(norm(x))
        logits = self.head(x[:, :-1]).float()
        loss = functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(32, (STEPS * BATCH, LENGTH), generator=generator)
        for place in range(2, LENGTH):
            tokens[:, place] = (tokens[:, place - 1] + tokens[:, place - 2]) % 32
        return DataLoader(TensorDataset(tokens), batch_size=BATCH)


def fit(net: TinyGPT, *callbacks: Callback, **settings: Any) -> TinyGPT:
    quiet_trainer(callbacks=list(callbacks), **settings).fit(net)
    assert len(net.losses) == STEPS
    assert net.losses[-1] < 0.97 * net.losses[0]  # the loss has decreased
    return net


@pytest.fixture(scope="module")
def plain() -> TinyGPT:
    return fit(TinyGPT(lo.SelfAttention))


def test_self_attention_trains_like_the_formula(plain):
    """Within 1e-3 after a hundred steps of AdamW, and 2e-6 at the first."""
    expected = fit(TinyGPT(ByHand))
    assert plain.losses[0] == pytest.approx(expected.losses[0], abs=2e-6)
    assert plain.losses == pytest.approx(expected.losses, abs=1e-3)


def test_attention_backend_is_bit_identical(plain):
    net = fit(TinyGPT(lo.SelfAttention), lo.AttentionBackend())
    assert net.losses == plain.losses
    assert_same_weights(net, plain)


def test_math_backend_differs_only_by_rounding(plain):
    net = fit(TinyGPT(lo.SelfAttention), lo.AttentionBackend(("math",)))
    assert net.losses == pytest.approx(plain.losses, abs=1e-3)


def test_dynamic_loss_scale_equals_lightnings_scaler():
    theirs = MixedPrecision(
        "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_interval=20)
    )
    expected = fit(TinyGPT(lo.SelfAttention), plugins=[theirs])
    ours = lo.DynamicLossScale(2.0**15, growth_interval=20)
    net = fit(TinyGPT(lo.SelfAttention), plugins=[ours])
    assert net.losses == expected.losses
    assert_same_weights(net, expected)
    assert ours.scaler.get_scale() == theirs.scaler.get_scale()


def test_dynamic_loss_scale_is_close_to_float32(plain):
    """Within 0.02: float16 rounds at each layer."""
    net = fit(TinyGPT(lo.SelfAttention), plugins=[lo.DynamicLossScale(2.0**12)])
    assert net.losses == pytest.approx(plain.losses, abs=0.02)
