"""Random tensors for tests of compressors."""

import torch
from hypothesis import strategies as st
from torch import Tensor


@st.composite
def tensors(draw: st.DrawFn, least: int = 1) -> Tensor:
    """Generate flat tensors: normal, heavy-tailed, sparse, zero, equal, few values, tiny."""
    numel = draw(st.one_of(st.integers(least, 70), st.integers(least, 3000)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale = 10.0 ** draw(st.integers(-20, 12))
    kind = draw(
        st.sampled_from(["normal", "heavy", "sparse", "zero", "minus", "equal", "few", "tiny"])
    )
    normal = torch.randn(numel, generator=generator)
    values = {
        "normal": normal,
        "heavy": normal**5,
        "sparse": normal * (torch.rand(numel, generator=generator) < 0.01),
        "zero": torch.zeros(numel),
        "minus": -torch.zeros(numel),
        "equal": torch.ones(numel),
        "few": normal.round(),
        "tiny": normal * 1e-38,
    }[kind]
    return values * scale
