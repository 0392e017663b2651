"""Time of encoding and decoding a bucket with each compressor, compared with a memory copy.

Supports the choice of a compressor: a bucket of 26 MB, encoded with its residual as in each step.
On CUDA, waiting during encoding or decoding is a failure.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

import lightning_opt as lo
from benchmarks.harness import median_ratio, parse_arguments, publish, recorded_waits
from lightning_opt.core.measure.timing import time_in_turns
from lightning_opt.strategies import quantization
from lightning_opt.strategies.compressors import QuantizedCodec
from lightning_opt.strategies.quantization import Quantizer

GPU = True
NUMEL = 6_553_600
COPY, TOPK = "memory copy", "torch.topk of 1%"
COMPRESSORS = {
    "int8": lo.Quantize(8),
    "int4": lo.Quantize(4),
    "topk 1%": lo.TopK(0.01),
    "topk 0.1%": lo.TopK(0.001),
    "threshold": lo.Threshold(),
}


def main() -> None:
    """Time the compressors alternately, and publish the table."""
    arguments = parse_arguments(__doc__ or "")
    device, numel = torch.device(arguments.device), NUMEL // (100 if arguments.quick else 1)
    gradients = [torch.randn(numel, device=device) for _ in range(4)]
    turn, out = itertools.cycle(gradients), torch.empty(numel, device=device)
    encode: dict[str, Callable[[], object]] = {
        COPY: lambda: out.copy_(next(turn)),
        TOPK: lambda: torch.topk(next(turn).abs(), numel // 100, sorted=False),
    }
    decode: dict[str, Callable[[], object]] = {}
    smaller: dict[str, float] = {}
    waits: list[str] = []
    quantization.COMPILE_AFTER = sys.maxsize  # never: compiled codecs have their own rows
    codecs = {name: compressor.codec(numel, device) for name, compressor in COMPRESSORS.items()}
    one = torch.ones((), device=device)
    for bits in (8, 4) if device.type == "cpu" else ():
        quantizer = Quantizer(bits, 1024)
        quantizer.compile()
        if quantizer.compiled is not None:
            codecs[f"int{bits}, compiled"] = QuantizedCodec(numel, quantizer, device)
    for name, codec in codecs.items():
        residual = torch.zeros(numel, device=device)

        def encode_one(codec=codec, residual: Tensor = residual) -> None:  # type: ignore[no-untyped-def]
            codec.compress(residual, next(turn), residual, one)

        def decode_one(codec=codec) -> None:  # type: ignore[no-untyped-def]
            codec.decompress_add(codec.message, out, 0.5)

        smaller[name] = 4 * numel / codec.nbytes
        encode[name], decode[f"{name}, decode"] = encode_one, decode_one
        for call in (encode_one, decode_one):
            call()  # allocates
            with recorded_waits(arguments.device, waits):
                call()
    rounds = 3 if arguments.quick else 30
    seconds = time_in_turns(encode | decode, rounds=rounds, device=arguments.device, warmup=10)

    def columns(kind: str, name: str) -> dict[str, object]:
        own = seconds[name]
        ratio = median_ratio(own, seconds[COPY])
        return {f"{kind} ms": round(1e3 * median(own), 2), f"{kind} / copy": round(ratio, 2)}

    rows: list[dict[str, object]] = []
    for name in encode:
        row = {"what": name, **columns("encode", name)}
        if name in codecs:
            row |= columns("decode", f"{name}, decode")
            row["times smaller"] = round(smaller[name], 1)
        rows.append(row)
    notes = [
        "`encode`: add the gradient to the residual, compress the sum, and store the error as the "
        "new residual. `decode`: add one message to the sum. A step encodes the bucket once and "
        "decodes one message per rank. `/ copy`: time as a ratio to a memory copy of the bucket. "
        "`times smaller`: size of the bucket divided by the size of the message."
    ]
    title = f"Encoding and decoding a bucket of {numel / 1e6:.1f} million elements"
    publish("compression_cost", lo.Report(title, rows, notes), arguments)
    if waits:
        sys.exit(f"The host waits for the device: {waits}")


if __name__ == "__main__":
    main()
