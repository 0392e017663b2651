"""RotaryEmbedding and SelfAttention against formulas in float64."""

import copy
import math

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import lightning_opt as lo


def rotated(x: Tensor, base: float, offset: int, interleaved: bool) -> Tensor:
    """Rotate each pair of features as a complex number, in float64."""
    *_, length, dim = x.shape
    turned = x.detach().double().clone()
    for place in range(length):
        for pair in range(dim // 2):
            first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + dim // 2)
            angle = (place + offset) / base ** (2 * pair / dim)
            number = torch.complex(turned[..., place, first], turned[..., place, second])
            number = number * complex(math.cos(angle), math.sin(angle))
            turned[..., place, first], turned[..., place, second] = number.real, number.imag
    return turned


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offset", [0, 13])
@pytest.mark.parametrize("base", [10_000.0, 50.0])
def test_rotation_matches_the_formula(interleaved, offset, base):
    x = torch.randn(2, 3, 9, 8, generator=torch.Generator().manual_seed(0))
    rotary = lo.RotaryEmbedding(8, base, interleaved=interleaved)
    expected = rotated(x, base, offset, interleaved)
    torch.testing.assert_close(rotary(x, offset).double(), expected, rtol=0, atol=1e-6)
    exact = rotary.double()(x.double(), offset)
    torch.testing.assert_close(exact, expected, rtol=0, atol=1e-13)


def test_far_positions_are_as_exact_as_near_positions():
    """Angles computed in float32 would be off by thousandths."""
    x, position = torch.ones(1, 8), 100_003
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)):
        rotary = lo.RotaryEmbedding(8, max_positions=position + 1).to(dtype)
        actual = rotary(x.to(dtype), position)
        assert actual.dtype is dtype
        expected = rotated(x, 10_000.0, position, False)
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=tolerance)


def test_tables_grow_with_the_sequence():
    rotary, large = lo.RotaryEmbedding(4, max_positions=3), lo.RotaryEmbedding(4)
    x = torch.randn(1, 20, 4)
    assert torch.equal(rotary(x[:, :3]), large(x[:, :3]))
    assert rotary.cos.shape == (3, 2)
    assert torch.equal(rotary(x), large(x))
    assert rotary.cos.shape == rotary.sin.shape == (32, 2)  # the next power of two
    tables = rotary.cos
    rotary(x[:, :5], offset=27)
    assert rotary.cos is tables
    assert torch.equal(rotary(x[:, :1], offset=32), large(x[:, :1], offset=32))


def test_tables_that_grow_in_validation_serve_training():
    rotary = lo.RotaryEmbedding(4, max_positions=3)
    x = torch.randn(1, 20, 4, requires_grad=True)
    with torch.inference_mode():
        rotary(x)
    rotary(x).sum().backward()
    assert x.grad is not None


def test_tables_keep_their_precision_through_conversions():
    rotary = lo.RotaryEmbedding(8, max_positions=50)
    cos = rotary.cos.clone()
    assert rotary.half().cos.dtype is torch.float32
    assert rotary.bfloat16().float().to(torch.float32).cos.equal(cos)
    assert rotary.double().cos.dtype is torch.float64
    assert rotary.float().cos.equal(cos)
    assert rotary.to("meta").cos.is_meta
    assert rotary.to_empty(device="cpu").cos.equal(cos)
    with torch.device("meta"):
        assert lo.RotaryEmbedding(8, max_positions=50).cos.device.type in ("cpu", "meta")
    assert copy.deepcopy(rotary).cos.equal(cos)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lo.RotaryEmbedding(7), r"dim must be even.* got 7"),
        (lambda: lo.RotaryEmbedding(8, base=0), r"base must be .* got 0"),
        (lambda: lo.RotaryEmbedding(8, max_positions=0), r"max_positions must be .* got 0"),
        (lambda: lo.SelfAttention(8, 3), r"dim \(8\) must be divisible by heads"),
        (lambda: lo.SelfAttention(8, 4, kv_heads=3), "must be divisible by kv_heads"),
        (lambda: lo.SelfAttention(8, 2, rotary=lo.RotaryEmbedding(8)), "rotary must be for 4"),
        (lambda: lo.SelfAttention(8, 2, dropout=1), r"dropout must be .* got 1"),
    ],
)
def test_invalid_settings_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- SelfAttention ------------------------------------------------------------------------------


def attended(
    module: lo.SelfAttention, x: Tensor, padding: Tensor | None = None, offset: int = 0
) -> Tensor:
    """Compute the expected output query by query in float64."""
    batch, length, _ = x.shape
    weights = {name: value.double() for name, value in module.state_dict().items()}
    qkv = x.double() @ weights["qkv.weight"].T + weights.get("qkv.bias", 0.0)
    query, key, value = qkv.split(module.sizes, -1)
    query = query.reshape(batch, length, module.heads, -1)
    key = key.reshape(batch, length, module.kv_heads, -1)
    value = value.reshape(batch, length, module.kv_heads, -1)
    if module.rotary is not None:
        query, key = (
            rotated(part.transpose(1, 2), module.rotary.base, offset, module.rotary.interleaved)
            for part in (query, key)
        )
        query, key = query.transpose(1, 2), key.transpose(1, 2)
    seen = torch.zeros(batch, length, module.heads, module.head_dim, dtype=torch.float64)
    for sample in range(batch):
        for head in range(module.heads):
            source = head * module.kv_heads // module.heads
            for place in range(length):
                keys = [
                    other
                    for other in range(length)
                    if (other <= place or not module.causal)
                    and not (padding is not None and padding[sample, other])
                ]
                if keys:
                    scores = key[sample, keys, source] @ query[sample, place, head]
                    shares = (scores / math.sqrt(module.head_dim)).softmax(0)
                    seen[sample, place, head] = shares @ value[sample, keys, source]
    return seen.flatten(2) @ weights["out.weight"].T + weights.get("out.bias", 0.0)


PADDING = torch.tensor(
    [
        [False, False, False, False, False],
        [False, False, False, True, True],
        [True, True, False, False, True],  # with causal, two queries have no visible keys
        [True, True, True, True, True],
    ]
)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padding", [None, PADDING], ids=["whole", "padded"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"rotary": True},
        {"kv_heads": 2, "rotary": lo.RotaryEmbedding(4, base=100.0, interleaved=True)},
        {"kv_heads": 1, "bias": False},
        {"head_dim": 6, "rotary": True},
    ],
    ids=str,
)
def test_self_attention_matches_the_formula(settings, causal, padding):
    torch.manual_seed(0)
    module = lo.SelfAttention(16, 4, causal=causal, **settings)
    x = torch.randn(4, 5, 16)
    assert not [name for name in module.state_dict() if "rotary" in name]
    for offset in (0, 3):
        actual = module(x, padding, offset)
        expected = attended(module, x, padding, offset)
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=2e-6)
    exact = copy.deepcopy(module).double()
    torch.testing.assert_close(
        exact(x.double(), padding), attended(exact, x, padding), rtol=0, atol=1e-13
    )


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_match_finite_differences(causal):
    torch.manual_seed(0)
    module = lo.SelfAttention(8, 2, causal=causal).double()
    x = torch.randn(4, 5, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: module(x, PADDING), x)


def test_dropout_applies_only_in_training():
    torch.manual_seed(0)
    module = lo.SelfAttention(8, 2, dropout=0.5)
    x = torch.randn(2, 5, 8)
    assert not module(x).equal(module(x))
    module.eval()
    torch.testing.assert_close(module(x).double(), attended(module, x), rtol=0, atol=1e-6)


# --- torch.compile ------------------------------------------------------------------------------


@pytest.fixture
def counter():
    torch._dynamo.reset()
    yield CompileCounter()
    torch._dynamo.reset()


def test_other_lengths_and_offsets_need_no_further_graphs(counter):
    rotary = lo.RotaryEmbedding(4, interleaved=True)
    module = lo.SelfAttention(8, 2, causal=True, rotary=rotary)
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    for length, offset in ((6, 0), (6, 0), (7, 0), (9, 0), (9, 4), (9, 5), (11, 7), (20, 31)):
        x = torch.randn(2, length, 8)
        assert compiled(x, offset=offset).equal(module(x, offset=offset))
    assert counter.frame_count <= 3  # the first; any length; any offset
    before = counter.frame_count
    for length, offset in ((8, 1), (13, 2), (30, 300)):
        compiled(torch.randn(2, length, 8), offset=offset)
    assert counter.frame_count == before


def test_tables_grow_in_a_compiled_model(counter):
    rotary, large = lo.RotaryEmbedding(4, max_positions=8), lo.RotaryEmbedding(4)
    compiled = torch.compile(rotary, backend=counter)
    for length in (8, 12, 40, 41, 42, 43, 50, 64, 33, 48, 63, 5):
        if length == 33:
            before = counter.frame_count
        x = torch.randn(1, length, 4)
        assert compiled(x).equal(large(x))
    assert counter.frame_count == before
