"""Speed of encoding and decoding a bucket with each compressor, compared with a copy.

Supports the choice of a compressor: a bucket of 26 MB, encoded with its residual as in each step,
in gigabytes of gradient per second. On CUDA, waiting during encoding or decoding is a failure.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median

import torch

import lightning_opt as lo
from benchmarks.harness import parse_arguments, publish, recorded_waits
from lightning_opt.core.measure.timing import time_in_turns

GPU = True
NUMEL = 6_553_600


def main() -> None:
    """Time the compressors alternately, and publish the table."""
    arguments = parse_arguments(__doc__ or "")
    device, numel = torch.device(arguments.device), NUMEL // (100 if arguments.quick else 1)
    gradients = [torch.randn(numel, device=device) for _ in range(4)]
    out = torch.empty(numel, device=device)
    calls: dict[str, Callable[[], object]] = {"copy": lambda: out.copy_(gradients[0])}
    waits: list[str] = []
    compressors = {
        "int8": lo.Quantize(8),
        "int4": lo.Quantize(4),
        "topk 1%": lo.TopK(0.01),
        "topk 0.1%": lo.TopK(0.001),
        "threshold": lo.Threshold(),
    }
    ratios: dict[str, float] = {"copy": 1.0}
    for name, compressor in compressors.items():
        codec = compressor.codec(numel, device)
        residual, turn = torch.zeros(numel, device=device), iter(range(10**9))

        def code(codec=codec, residual=residual, turn=turn) -> None:  # type: ignore[no-untyped-def]
            codec.compress(residual.add_(gradients[next(turn) % 4]))

        def decode(codec=codec) -> None:  # type: ignore[no-untyped-def]
            codec.decompress_add(codec.message, out, 0.5)

        code()
        ratios[name] = 4 * numel / codec.nbytes
        calls[f"{name}, code"], calls[f"{name}, decode"] = code, decode
        for call in (code, decode):
            call()  # allocates
            with recorded_waits(arguments.device, waits):
                call()
    seconds = time_in_turns(
        calls, rounds=3 if arguments.quick else 15, calls=4, device=arguments.device, warmup=4
    )
    speed = {name: 4e-9 * numel / median(values) for name, values in seconds.items()}
    rows = [{"what": "copy", "code GB/s": round(speed["copy"], 2), "of a copy": 1.0}]
    rows += [
        {
            "what": name,
            "code GB/s": round(speed[f"{name}, code"], 2),
            "decode GB/s": round(speed[f"{name}, decode"], 2),
            "of a copy": round(speed[f"{name}, code"] / speed["copy"], 3),
            "times smaller": round(ratios[name], 1),
        }
        for name in compressors
    ]
    notes = [
        f"Gigabytes of float32 gradient a second, {4e-6 * numel:.1f} MB at once; coding includes "
        "adding the gradient to the residual."
    ]
    publish("codecs", lo.Report("Coding and decoding a bucket", rows, notes), arguments)
    if waits:
        sys.exit(f"The host waits for the device: {waits}")


if __name__ == "__main__":
    main()
