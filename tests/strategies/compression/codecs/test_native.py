"""Native code against torch operations, bit for bit, and how it is built."""

import ctypes
import logging
import math
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_opt.strategies.compression.codecs import chunks, native, selection
from lightning_opt.strategies.compression.codecs.compressors import (
    Codec,
    Compressor,
    Quantize,
    Threshold,
    TopK,
)
from lightning_opt.strategies.compression.codecs.packing import read_header
from tests.helpers.processes import launch
from tests.strategies.paths import COMPILER, tensors, use
from tests.strategies.runs import SMALL_BUCKETS, Ledger, dist_world, fit, same_on_all_ranks

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler")

relaxed = settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))

compressors = st.one_of(
    st.builds(
        TopK,
        st.one_of(st.just(1.0), st.floats(1e-4, 1.0)),
        values=st.sampled_from(["int8", "bf16"]),
    ),
    st.builds(Threshold, st.one_of(st.just("auto"), st.floats(1e-3, 10)), st.floats(1e-3, 1.0)),
    st.builds(Quantize, st.sampled_from([8, 4]), st.sampled_from([2, 34, 1024, 3000])),
)

powers = st.integers(-12, 0).map(lambda exponent: 2.0**exponent)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(chunks.add_in_chunks, "__defaults__", (1.0, 2048))


def pair(compressor: Compressor, numel: int) -> tuple[Codec, Codec]:
    """A codec in native code, and one in torch operations."""
    codecs = []
    for path in ("native", "torch"):
        with pytest.MonkeyPatch.context() as patch:
            use(path, patch)
            codecs.append(compressor.codec(numel, CPU))
    assert codecs[0]._kernels is not None
    assert codecs[1]._kernels is None
    return codecs[0], codecs[1]


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    assert a.dtype == b.dtype
    assert a.numpy().tobytes() == b.numpy().tobytes()


def longer_than_a_piece() -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(2 * native.PIECE + 77, generator=generator) ** 3


# --- the same bits ------------------------------------------------------------------------------


@relaxed
@given(compressor=compressors, flat=tensors(), steps=st.integers(1, 4), alpha=powers)
@example(compressor=TopK(0.02), flat=longer_than_a_piece(), steps=4, alpha=1.0)
@example(compressor=TopK(1.0), flat=longer_than_a_piece(), steps=2, alpha=1.0)
@example(compressor=Quantize(4), flat=longer_than_a_piece(), steps=2, alpha=0.5)
@example(compressor=Quantize(8, 3000), flat=longer_than_a_piece(), steps=2, alpha=0.5)
@example(compressor=Threshold(0.5, 1.0), flat=longer_than_a_piece(), steps=2, alpha=0.5)
def test_messages_and_what_is_left_are_the_same_bits(compressor, flat, steps, alpha):
    """With a factor that is a power of two, as a loss scale is, unless the product is subnormal."""
    codecs = pair(compressor, len(flat))
    residuals = [torch.zeros_like(flat) for _ in codecs]
    for step in range(steps):
        gradient = flat.roll(step) * (1 + step) / alpha
        for codec, residual in zip(codecs, residuals, strict=True):
            # Ones that are no sum too: the first step has no threshold to go by.
            assert codec.compress(residual, None if step == 2 else gradient, alpha)
        assert_same_bits(codecs[0].message, codecs[1].message)
        assert_same_bits(*residuals)


@relaxed
@given(
    compressor=compressors,
    flat=tensors(),
    ranks=st.integers(1, 5),
    alpha=st.one_of(powers, st.floats(1e-3, 70_000), st.just(1 / 3), st.just(-1.0)),
)
@example(compressor=TopK(0.02), flat=longer_than_a_piece().repeat(9), ranks=3, alpha=1 / 3)
@example(compressor=Quantize(4), flat=longer_than_a_piece(), ranks=3, alpha=1 / 3)
def test_replicas_agree_whether_or_not_they_have_a_compiler(compressor, flat, ranks, alpha):
    """Whatever the factor is, what is decoded must have the same bits everywhere."""
    codecs = pair(compressor, len(flat))
    messages = []
    for rank in range(ranks):
        codecs[0].compress(flat.roll(rank) * (rank - 1))  # the second one's is empty
        messages.append(codecs[0].message.clone())
    # Rows with something between them, as in a two-stage exchange.
    room = torch.zeros(ranks, codecs[0].nbytes + 8, dtype=torch.uint8)
    rows = room[:, : codecs[0].nbytes].copy_(torch.stack(messages))
    start = flat.flip(0)
    sums, added = [torch.full_like(flat, math.nan) for _ in codecs], [start.clone() for _ in codecs]
    for codec, total, more in zip(codecs, sums, added, strict=True):
        codec.decompress_sum(rows, total, alpha)
        for row in rows:
            codec.decompress_add(row, more, alpha)
    assert_same_bits(*sums)
    assert_same_bits(*added)
    exact = torch.zeros(len(flat), dtype=torch.float64)
    for row in rows:
        codecs[1].decompress_add(row, exact)
    torch.testing.assert_close(
        sums[0].double(), alpha * exact, rtol=0, atol=1e-6 * abs(alpha) * flat.abs().max() + 1e-36
    )


@relaxed
@given(compressor=compressors, flat=tensors(), alpha=st.floats(1e-3, 10.0))
def test_factors_that_are_no_power_of_two_agree_to_rounding(compressor, flat, alpha):
    """torch may add ``alpha * increment`` without rounding the product, native code rounds it."""
    codec, _ = pair(compressor, len(flat))
    residual = flat.flip(0)
    assert codec.compress(residual, flat, alpha)
    codec.decompress_add(codec.message, residual)
    exact = flat.flip(0).double() + alpha * flat.double()
    largest = flat.abs().max().item()
    torch.testing.assert_close(
        residual.double(), exact, rtol=0, atol=5e-7 * (1 + alpha) * largest + 1e-36
    )


@relaxed
@given(
    compressor=compressors,
    flat=tensors(),
    place=st.integers(0, 10**6),
    bad=st.sampled_from([math.nan, math.inf, -math.inf]),
)
@example(TopK(0.02), longer_than_a_piece(), 2 * native.PIECE + 3, math.nan)
@example(Quantize(8), longer_than_a_piece(), 2 * native.PIECE + 3, -math.inf)
@example(Quantize(4, 34), longer_than_a_piece(), 2 * native.PIECE + 3, math.inf)
def test_what_is_not_finite_is_rejected_alike(compressor, flat, place, bad):
    codecs = pair(compressor, len(flat))
    residuals = [flat.flip(0) for _ in codecs]
    gradient = flat.clone()
    for codec, residual in zip(codecs, residuals, strict=True):
        codec.compress(residual, gradient)  # so that there is an older message
    before = residuals[0].clone()
    gradient[place % len(flat)] = bad
    for codec, residual in zip(codecs, residuals, strict=True):
        assert not codec.compress(residual, gradient)
        assert read_header(codec.message) == (0, 1)
        largest = flat.abs().max().item()
        torch.testing.assert_close(residual, before, rtol=0, atol=1e-6 * largest + 1e-36)
        nothing = torch.zeros_like(flat)  # whatever is left of the older message
        codec.decompress_add(codec.message, nothing)
        codec.decompress_sum(codec.message.unsqueeze(0), nothing)
        assert not nothing.any()


def test_gradients_too_large_to_square_are_finite():
    for codec in pair(TopK(0.5), 4):
        assert codec.compress(torch.zeros(4), torch.tensor([1e30, -3e38, 1e20, 0.0]))
        assert read_header(codec.message)[0] == 2


@pytest.mark.parametrize("compressor", [TopK(0.5), Quantize(8), Quantize(4)])
def test_gradients_too_large_to_add_up_are_finite(compressor):
    gradient = torch.full((3000,), 1e38)
    codecs = pair(compressor, len(gradient))
    for codec in codecs:
        assert codec.compress(torch.zeros_like(gradient), gradient)
    assert_same_bits(codecs[0].message, codecs[1].message)


@pytest.mark.parametrize("compressor", [TopK(0.3), Quantize(8), Quantize(4)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_whatever_is_not_finite_is_seen_in_every_place(compressor, bad):
    """In each lane of a vector, and in what is left over at the end of a piece."""
    codec, _ = pair(compressor, 32 + 7)
    residual = torch.ones(32 + 7)
    for place in range(32 + 7):
        gradient = torch.ones(32 + 7)
        gradient[place] = bad
        assert not codec.compress(residual, gradient)
        assert torch.equal(residual, torch.ones(32 + 7))


@pytest.mark.parametrize("compressor", [TopK(0.1), Quantize(8), Quantize(4)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_take_torch_operations(compressor, dtype):
    gradient, codecs = torch.randn(3000).to(dtype), pair(compressor, 3000)
    wide = torch.promote_types(dtype, torch.float32)
    residuals = [torch.zeros(3000, dtype=wide) for _ in codecs]
    outs = [torch.zeros(3000, dtype=dtype) for _ in codecs]
    for codec, residual, out in zip(codecs, residuals, outs, strict=True):
        assert codec.compress(residual, gradient)
        codec.decompress_sum(codec.message.unsqueeze(0), out, 0.5)
        assert out.count_nonzero() > 0
    assert torch.equal(*residuals)
    assert torch.equal(*outs)


def test_a_shard_may_be_empty():
    for codec in pair(Quantize(8), 0):
        assert codec.compress(torch.zeros(0), torch.zeros(0))
        codec.decompress_sum(codec.message.unsqueeze(0), torch.zeros(0))


@relaxed
@given(flat=tensors(), place=st.integers(0, 3000), room=st.integers(0, 5000))
def test_a_list_that_is_too_short_grows(flat, place, room):
    threshold = flat[place % len(flat)].abs().item()  # which this element just reaches
    selectors = []
    for path in ("native", "torch"):
        with pytest.MonkeyPatch.context() as patch:
            use(path, patch)
            selectors.append(selection.Selector(len(flat), CPU))
    selectors[0]._indices = torch.empty(room, dtype=torch.int64)
    selectors[0]._values = torch.empty(room)
    assert (
        threshold < selection.TINY
        or place % len(flat) in selectors[0].at_least(flat, threshold)[0].tolist()
    )
    (indices, values), (others, more) = (one.at_least(flat, threshold) for one in selectors)
    assert_same_bits(indices, others)
    assert_same_bits(values, more)


@relaxed
@given(flat=tensors(), share=st.floats(0, 1))
def test_the_largest_are_those_of_the_torch_path(flat, share):
    k = max(round(share * len(flat)), 1)
    kernels = native.kernels(CPU)
    indices, values = torch.arange(len(flat)) * 3, flat.clone()
    kth = kernels.largest(indices, values, k)
    places, expected = selection.largest(flat.abs(), k)
    assert kth == expected
    assert_same_bits(indices[:k], places * 3)
    assert_same_bits(values[:k], flat[places])


@pytest.mark.parametrize("damage", ["count", "offset", "blocks", "one more"])
def test_a_damaged_message_writes_nowhere_else(damage):
    codec, _ = pair(TopK(10 / 300), 300)
    codec.compress(torch.randn(300))
    message = codec.message.clone()
    _, _, counts, offsets = codec.layout._sections(message)
    if damage == "count":
        message[:4].view(torch.int32).fill_(1000)
        counts.fill_(255)
    elif damage == "offset":
        offsets.fill_(254)
    elif damage == "blocks":
        counts.fill_(200)
    else:
        counts[0] += 1
    with pytest.raises(ValueError, match="damaged"):
        codec.decompress_add(message, torch.zeros(300))


def test_ties_between_two_bfloat16_go_to_the_even_one():
    flat = 1 + torch.arange(1, 1000) / 256
    codecs = pair(TopK(1.0, values="bf16"), len(flat))
    for codec in codecs:
        codec.compress(flat.clone())
    assert_same_bits(codecs[0].message, codecs[1].message)


def test_large_blocks_of_indices():
    """Where few of many are sent, blocks are long and their offsets have two bytes."""
    flat = torch.randn(200_001)
    codecs = pair(TopK(1e-4), len(flat))
    assert codecs[0].layout.block > 255
    residuals = [flat.clone() for _ in codecs]
    for codec, residual in zip(codecs, residuals, strict=True):
        codec.compress(residual)
    assert_same_bits(codecs[0].message, codecs[1].message)
    assert_same_bits(*residuals)
    outs = [torch.zeros_like(flat) for _ in codecs]
    for codec, out in zip(codecs, outs, strict=True):
        codec.decompress_sum(codec.message.repeat(2, 1), out, 0.3)
    assert_same_bits(*outs)


def _mixed(compressor: Any) -> None:
    """The first rank has a compiler, the others have not."""
    rank = int(os.environ["RANK"])
    os.environ[native.SWITCH] = "1" if rank == 0 else "0"
    from lightning_opt.strategies.compression.compressed_ddp import CompressedDDPStrategy

    settings: Any = {"warmup_steps": 3, "bucket_cap_mb": SMALL_BUCKETS, "fallback": "never"}
    model = Ledger()
    strategy = CompressedDDPStrategy(compressor, **settings)
    fit(model, strategy, range(20))
    assert same_on_all_ranks(model)
    assert dist_world() == 3


@pytest.mark.distributed
@pytest.mark.parametrize("compressor", [TopK(0.05), Quantize(4)])
def test_ranks_with_and_without_a_compiler_stay_the_same(compressor):
    launch(_mixed, compressor, processes=3)


def test_code_for_any_processor_gives_the_same_bits(tmp_path):
    """Without the instructions that this processor has beyond what all have."""
    library = tmp_path / "any.so"
    command = [str(COMPILER), *native.FLAGS, "-Wno-psabi", "-o", str(library), str(native.SOURCE)]
    subprocess.run([*command, "-lm"], check=True, capture_output=True)
    both = [native.Kernels(ctypes.CDLL(str(library))), native.kernels(CPU)]
    for numel in (1, 31, 32, 33, 63, 64, 1023, 1024, 1025, 5000):
        gradient = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
        flats = [gradient.flip(0) for _ in both]
        lists = [
            (torch.zeros(numel + 2000, dtype=torch.int64), torch.zeros(numel + 2000)) for _ in both
        ]
        results = [
            kernels.select(flat, gradient, 0.5, 0.8, 0, 0, indices, values)
            for kernels, flat, (indices, values) in zip(both, flats, lists, strict=True)
        ]
        expected = (gradient.flip(0) + 0.5 * gradient).abs() >= 0.8
        found = int(expected.sum())
        assert results == [(numel, found)] * 2
        assert torch.equal(lists[0][0][:found], expected.nonzero().view(-1))
        assert_same_bits(lists[0][0][:found], lists[1][0][:found])
        assert_same_bits(lists[0][1][:found], lists[1][1][:found])
        assert_same_bits(*flats)
        for bits in (8, 4):
            codec = Quantize(bits, 34).codec(numel, CPU)
            messages = [codec.message.clone() for _ in both]
            for kernels, flat, message in zip(both, flats, messages, strict=True):
                assert kernels.quantize(codec.layout, message, flat, gradient, 1.0) == numel
            assert_same_bits(*messages)
            assert_same_bits(*flats)


# --- building -----------------------------------------------------------------------------------


@pytest.fixture
def _fresh(monkeypatch, tmp_path):
    """A cache of its own, and nothing loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(native.SWITCH, raising=False)
    native._load.cache_clear()
    yield
    native._load.cache_clear()


def libraries(folder: Path) -> list[Path]:
    return sorted((folder / "lightning_opt").iterdir())


def compiler(folder: Path, script: str) -> str:
    """A stand-in for the compiler: a shell script, where REAL is the real one."""
    path = folder / "mycc"
    path.write_text("#!/bin/sh\n" + script.replace("REAL", str(COMPILER)) + "\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.usefixtures("_fresh")
def test_it_is_compiled_once_and_kept(tmp_path, monkeypatch):
    assert native.kernels(CPU) is native.kernels(CPU)
    kept = libraries(tmp_path)
    assert [path.suffix for path in kept] == [".so"]
    native._load.cache_clear()
    monkeypatch.setattr(subprocess, "run", None)  # a second process compiles nothing
    assert native.kernels(CPU) is not None
    assert native.kernels(torch.device("meta")) is None
    assert libraries(tmp_path) == kept


@pytest.mark.usefixtures("_fresh")
def test_another_source_compiler_or_processor_gets_another_library(tmp_path, monkeypatch):
    command = [str(COMPILER), *native.FLAGS]
    names = {native._fingerprint(command), native._fingerprint([*command, "-march=native"])}
    monkeypatch.setattr(native, "_processor", lambda: "another")
    names.add(native._fingerprint(command))
    other = tmp_path / "other.c"
    other.write_text(native.SOURCE.read_text() + "\n")
    monkeypatch.setattr(native, "SOURCE", other)
    names.add(native._fingerprint(command))
    names.add(native._fingerprint([compiler(tmp_path, ""), *native.FLAGS]))
    assert len(names) == 5


@pytest.mark.usefixtures("_fresh")
def test_many_may_build_at_once(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        for library in pool.map(lambda _: native.build(), range(4)):
            assert isinstance(library, ctypes.CDLL)
    assert [path.suffix for path in libraries(tmp_path)] == [".so"]


@pytest.mark.usefixtures("_fresh")
def test_without_a_compiler_it_says_so_once_and_torch_does_the_work(monkeypatch, caplog):
    monkeypatch.setenv("CC", "no-such-compiler -O9")
    with caplog.at_level(logging.INFO):
        assert native.kernels(CPU) is None
        codec = TopK(0.1).codec(100, CPU)
    assert codec.compress(torch.randn(100))
    (record,) = caplog.records
    assert "no C compiler 'no-such-compiler'" in record.getMessage()
    assert native.SWITCH in record.getMessage()
    monkeypatch.setenv(native.SWITCH, "1")
    with pytest.raises(native.NativeUnavailableError, match="no-such-compiler"):
        native.kernels(CPU)


@pytest.mark.usefixtures("_fresh")
def test_one_process_a_machine_says_so(monkeypatch, caplog):
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert native.kernels(CPU) is None
    assert not caplog.records


@pytest.mark.usefixtures("_fresh")
def test_it_can_be_switched_off(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv(native.SWITCH, "0")
    assert native.kernels(CPU) is None
    assert TopK(0.1).codec(100, CPU)._kernels is None
    assert not caplog.records
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("_fresh")
def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("CC", compiler(tmp_path, "echo all is lost >&2; exit 3"))
    assert native.kernels(CPU) is None
    assert "all is lost" in caplog.records[0].getMessage()
    assert libraries(tmp_path) == []


@pytest.mark.usefixtures("_fresh")
def test_a_compiler_that_does_not_know_the_processor_builds_for_any(monkeypatch, tmp_path):
    script = 'case "$*" in *-march=native*) exit 1;; esac; exec REAL "$@"'
    monkeypatch.setenv("CC", compiler(tmp_path, script))
    kernels = native.kernels(CPU)
    assert kernels is not None
    indices, values = torch.arange(3), torch.tensor([1.0, -3.0, 2.0])
    assert kernels.largest(indices, values, 2) == 2.0
    assert len(libraries(tmp_path)) == 1


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize("fault", ["shared", "unwritable"])
def test_a_folder_that_is_not_only_mine_is_not_trusted(monkeypatch, tmp_path, fault):
    if fault == "shared":
        (tmp_path / "lightning_opt").mkdir()
        (tmp_path / "lightning_opt").chmod(0o777)
    else:
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert native.kernels(CPU) is not None  # from a folder of its own
    assert not list(tmp_path.glob("lightning_opt/*"))


def test_the_source_belongs_to_the_package():
    """As a wheel would install it: the file lies beside the module, where it is looked for."""
    assert native.SOURCE.is_file()
    assert native.SOURCE.parent == Path(native.__file__).parent
    assert f"#define PIECE {native.PIECE}\n" in native.SOURCE.read_text()


def test_it_compiles_without_a_warning(tmp_path):
    command = [str(COMPILER), *native.FLAGS, "-Wall", "-Wextra", "-Wno-psabi", "-Werror"]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "a.so"), str(native.SOURCE)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
