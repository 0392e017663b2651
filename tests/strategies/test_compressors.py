"""Compressors against float64 arithmetic, without processes."""

import math
import os
import queue
import shutil
import signal
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_opt.strategies import packing, quantization
from lightning_opt.strategies.compressors import (
    Quantize,
    QuantizedCodec,
    Selector,
    Threshold,
    TopK,
    share_of,
)
from lightning_opt.strategies.packing import GROUP_SIZE, read_count
from lightning_opt.strategies.quantization import Quantizer, encode
from tests.helpers.syncs import take_device_path

CPU = torch.device("cpu")
ONE = torch.ones(())

relaxed = settings(max_examples=40)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """Let small tensors take several chunks."""
    monkeypatch.setattr(packing, "CHUNK_SIZE", 100)


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


compressors = st.one_of(
    st.builds(TopK, st.one_of(st.just(1.0), st.floats(1e-4, 1.0))),
    st.builds(Threshold, st.one_of(st.just("auto"), st.floats(1e-3, 10)), st.floats(1e-3, 1.0)),
    st.builds(Quantize, st.sampled_from([8, 4]), st.sampled_from([2, 34, 1024])),
)


def compress(codec, flat: Tensor) -> Tensor:
    """Encode a tensor without a residual, and return the unsent rest."""
    rest = torch.empty_like(flat)
    codec.compress(torch.zeros_like(flat), flat, rest, ONE)
    return rest


def decompressed(codec, message: Tensor, numel: int) -> Tensor:
    out = torch.zeros(numel, dtype=torch.float64)
    codec.decompress_add(message, out)
    return out


def assert_rounded(sent: Tensor, exact: Tensor, block: int, levels: int) -> None:
    """Assert that each element is within half a quantization step of its block."""
    for part, true in zip(sent.split(block), exact.split(block), strict=True):
        if len(true):
            assert (part - true).abs().max() <= true.abs().max() / levels * 0.5001 + 1e-35


def round_off(flat: Tensor) -> float:
    return 1e-6 * flat.abs().max().item() + 1e-37


@relaxed
@given(compressor=compressors, flat=tensors(), steps=st.integers(1, 4))
def test_messages_and_residual_add_up_to_the_gradients(compressor, flat, steps):
    codec = compressor.codec(len(flat), CPU)
    place, residual = codec.message.data_ptr(), torch.zeros_like(flat)
    sent = torch.zeros(len(flat), dtype=torch.float64)
    total = torch.zeros(len(flat), dtype=torch.float64)
    for step in range(steps):
        gradient = flat.roll(step) * (1 + step)
        codec.compress(residual, gradient, residual, ONE)
        sent += decompressed(codec, codec.message, len(flat))
        total += gradient
        assert codec.message.shape == (codec.nbytes,)
        assert codec.message.data_ptr() == place
    torch.testing.assert_close(sent + residual, total, rtol=0, atol=20 * round_off(total))


@relaxed
@given(
    flat=tensors(),
    ratio=st.floats(1e-4, 1.0),
    warm=st.floats(0.05, 20.0),
)
def test_top_k_sends_the_largest_elements(flat, ratio, warm):
    k = share_of(len(flat), ratio)
    codec = TopK(ratio).codec(len(flat), CPU)
    compress(codec, flat * warm)  # leaves a threshold that is too high, or too low
    compress(codec, flat)
    indices, sent = codec.layout.read(codec.message)

    magnitudes = flat.double().abs().numpy()
    present = int((magnitudes >= torch.finfo(torch.float32).tiny).sum())
    assert len(indices) <= k
    assert len(indices) >= min(k, present) // 2
    assert torch.equal(indices, indices.unique())
    # No unsent element is larger than a sent one.
    np.testing.assert_array_equal(
        np.sort(magnitudes[indices.numpy()]),
        np.sort(magnitudes)[len(magnitudes) - len(indices) :],
    )
    exact = flat[indices]
    for part, true in zip(sent.split(GROUP_SIZE), exact.split(GROUP_SIZE), strict=True):
        if len(true):
            assert ((part - true).abs() <= true.abs().max() / 127 * 0.5001 + 1e-36).all()


@relaxed
@given(flat=tensors(), bound=st.floats(1e-3, 10), max_ratio=st.floats(1e-3, 1.0))
def test_threshold_sends_elements_that_reach_it(flat, bound, max_ratio):
    codec = Threshold(bound, max_ratio).codec(len(flat), CPU)
    above = np.flatnonzero(flat.abs().numpy() >= np.float32(bound))
    capacity = max(round(max_ratio * len(flat)), 1)
    for _ in range(2):
        compress(codec, flat)
        indices, _ = codec.layout.read(codec.message)
        if len(above) <= capacity:
            np.testing.assert_array_equal(indices.numpy(), above)
        else:
            assert min(capacity, len(above)) // 2 <= len(indices) <= capacity
            assert set(indices.tolist()) <= set(above.tolist())


def test_automatic_threshold_is_learned_once():
    flat = torch.randn(5000)
    codec = Threshold("auto", max_ratio=0.05).codec(5000, CPU)
    compress(codec, flat)
    assert read_count(codec.message) == 50
    compress(codec, flat / 10)
    assert read_count(codec.message) == 0  # a layer with small gradients sends nothing
    compress(codec, flat * 1.2)
    assert 50 < read_count(codec.message) < 250


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_automatic_threshold_on_a_gpu_is_not_learned_from_a_useless_step(value, monkeypatch):
    take_device_path(monkeypatch)
    codec = Threshold("auto", max_ratio=0.05).codec(5000, CPU)
    compress(codec, torch.full((5000,), value))
    flat = torch.randn(5000)
    for sent in (50, 50):
        compress(codec, flat)
        assert read_count(codec.message) == sent


@relaxed
@given(flat=tensors(), bits=st.sampled_from([8, 4]), block=st.sampled_from([2, 34, 1024]))
def test_quantization_rounds_to_the_nearest_level(flat, bits, block):
    codec = Quantize(bits, block).codec(len(flat), CPU)
    compress(codec, flat)
    sent = decompressed(codec, codec.message, len(flat))
    assert_rounded(sent, flat.double(), block, 127 if bits == 8 else 7)


def test_float64_keeps_its_precision():
    flat = torch.randn(3000, dtype=torch.float64)
    codec = TopK(0.1).codec(3000, CPU)
    rest = compress(codec, flat)
    codec.decompress_add(codec.message, rest)
    torch.testing.assert_close(rest, flat, rtol=0, atol=1e-15)


@pytest.mark.parametrize("compressor", [TopK(0.1), Threshold(0.5), Quantize(8), Quantize(4, 34)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled_gradient_is_added_to_the_residual(compressor, dtype):
    residual, gradient = torch.randn(300), torch.randn(300).to(dtype)
    codec, rest = compressor.codec(300, CPU), torch.empty(300)
    assert codec.compress(residual, gradient, rest, torch.tensor(0.25))
    total = rest.double() + decompressed(codec, codec.message, 300)
    torch.testing.assert_close(total, residual.double() + gradient.double() / 4, rtol=0, atol=1e-6)
    for bad in (math.nan, -math.inf):
        gradient[123] = bad
        assert not codec.compress(residual, gradient, rest, torch.tensor(0.25))


# --- compilation ------------------------------------------------------------------------------


loads_packages = pytest.mark.skipif(
    not hasattr(torch._inductor, "aoti_load_package"), reason="needs torch 2.6"
)


@loads_packages
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_quantization_gives_the_same_bits(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    # Without inductor's own tests of the compiler, which take half of the time.
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")  # in the process that compiles
    monkeypatch.setattr(torch._inductor.config.cpp, "vec_isa_ok", True)
    # Beside other tests, a process of low priority takes ten times as long.
    monkeypatch.setattr(os, "setpriority", lambda *_: None)
    compiled, eager = Quantizer(4, 128), Quantizer(4, 128)
    random_state = torch.get_rng_state()
    compiled.compile()
    assert compiled.compiled is not None
    assert torch.equal(torch.get_rng_state(), random_state)
    for numel in (0, 1, 128, 300, 2**20 + 4 * 128 + 5):
        flat = torch.randn(numel).mul_(torch.logspace(-44, 20, numel))
        flat[128:256] = 0
        gradient, found = flat.roll(9) * 5, []
        for quantizer in (compiled, eager):
            codec, rest, total = QuantizedCodec(numel, quantizer, CPU), flat.clone(), flat.clone()
            codec.compress(rest, gradient, rest, torch.tensor(1 / 3))  # in place, as DiLoCo does
            codec.decompress_add(codec.message, total, 1 / 3)
            found.append((codec.message, rest, total))
        assert all(map(torch.equal, *found))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    later_run = Quantizer(4, 128)
    later_run.compile()
    assert later_run.compiled is not None


@loads_packages
def test_kept_function_is_used_only_if_it_gives_the_same_bits(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    quantizer = Quantizer(4, 34)
    quantizer.compile()
    assert quantizer.compiled is None  # without a compiler and a kept function
    folder = quantizer._folder()
    (folder / "encode.pt2").touch()
    for function, is_used in ((encode, True), (lambda *tensors: encode(*tensors) + 1, False)):
        load = {str(folder / "encode.pt2"): function}.get
        monkeypatch.setattr(torch._inductor, "aoti_load_package", load)
        quantizer = Quantizer(4, 34)
        quantizer.compile()
        assert (quantizer.compiled is function) == is_used


@loads_packages
def test_machines_with_other_instructions_keep_other_functions(monkeypatch):
    folders = []
    for flags in ({"avx2"}, {"avx2", "bmi2"}, {"bmi2", "avx2"}):
        monkeypatch.setattr(quantization, "cpu_flags", lambda flags=flags: frozenset(flags))
        folders.append(Quantizer(4, 34)._folder())
    assert folders[0] != folders[1] == folders[2]


def test_codec_compiles_once_after_many_elements(monkeypatch):
    compilations = queue.Queue()
    monkeypatch.setattr(quantization, "COMPILE_AFTER", 1000)
    monkeypatch.setattr(Quantizer, "compile", lambda self: compilations.put(self))
    quantizer = Quantizer(8, 34)
    codec = QuantizedCodec(400, quantizer, CPU)
    for _ in range(9):
        compress(codec, torch.randn(400, dtype=torch.float64))
    for _ in range(2):
        compress(codec, torch.randn(400))
    assert compilations.empty()
    for _ in range(9):
        compress(codec, torch.randn(400))
    assert compilations.get(timeout=60) is quantizer
    assert compilations.empty()


def test_compiler_ends_if_its_priority_cannot_be_set(monkeypatch, tmp_path):
    start, children = subprocess.Popen, []

    def popen(*arguments, **settings):
        children.append(start(*arguments, **settings))
        return children[0]

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(os, "setpriority", mock.Mock(side_effect=PermissionError))
    quantizer = Quantizer(4, 34)
    quantizer.compile()
    assert quantizer.compiled is None
    assert children[0].returncode == -signal.SIGKILL


# --- size ---------------------------------------------------------------------------------------


def test_message_sizes():
    numel = 1_000_000
    element = TopK(0.01).codec(numel, CPU).nbytes / (0.01 * numel)
    assert element <= 2.45
    assert 4 * numel / TopK(0.01).codec(numel, CPU).nbytes >= 150
    assert TopK(0.001).codec(numel, CPU).nbytes / (0.001 * numel) <= 3.2
    assert Quantize(8).codec(numel, CPU).nbytes <= 1.005 * numel
    assert Quantize(4).codec(numel, CPU).nbytes <= 0.505 * numel


# --- selection ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_selection_needs_one_pass_after_the_first_step(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    codec = TopK(0.01).codec(200_000, CPU)
    residual = torch.zeros(200_000)
    passes, original = [], Selector.at_least

    def at_least(*arguments):
        passes.append(original(*arguments))
        return passes[-1]

    monkeypatch.setattr(Selector, "at_least", at_least)
    counts = []
    for step in range(16):
        passes.clear()
        gradient = torch.randn(200_000, generator=generator)
        codec.compress(residual, gradient, residual, ONE)
        counts.append(read_count(codec.message))
        assert len(passes) == 1, step
        assert len(passes[0][0]) < 2 * 2000 or step < 10
    assert sum(counts) >= 0.97 * 16 * 2000


# --- arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: TopK(0.0), "ratio"),
        (lambda: Threshold(max_ratio=0.0), "max_ratio"),
        (lambda: Quantize(bits=3), "bits"),
        (lambda: Quantize(block=5), "block"),
        (lambda: Threshold(value=0.0), "value"),
    ],
)
def test_invalid_arguments_raise(make, word):
    with pytest.raises(ValueError, match=word):
        make()
