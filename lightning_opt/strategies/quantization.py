"""Encodes rows of values in 8 or 4 bits, by torch's operations or compiled for this CPU.

Another process compiles, because ``torch.compile`` restores torch's random state when it ends: in a
thread of this process, training would repeat the random numbers that it has drawn meanwhile.
Compiled functions give the same bits.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from threading import Thread
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_opt.strategies.packing import chunks_of, quantize_rows

COMPILE_AFTER = 2**32
"""Elements that are encoded before a CPU compiles.

Encoding and decoding them takes about as long as compiling.
"""


def encode(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Encode rows, and replace them by their unsent rest.

    Args:
        rows: Shape ``(r, c)``, float32 or float64.
        bits: 8 or 4.

    Returns:
        int8 codes of shape ``(r, c)``, or uint8 codes of shape ``(r, c / 2)``, each two of 4 bits;
        and float32 scales of shape ``(r, 1)``.
    """
    codes, scales = quantize_rows(rows.float(), 127 if bits == 8 else 7)
    if bits == 8:
        packed = codes.to(torch.int8)
    else:
        # 16 * high + low, both moved from [-7, 7] to [1, 15]
        low, high = codes.chunk(2, dim=1)
        packed = low.add(high, alpha=16).add_(136).to(torch.uint8)
    rows.sub_(codes.mul_(scales))
    return packed, scales


def decode(rows: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Add the values of codes to ``rows``, in place."""
    if codes.dtype is torch.uint8:
        halves = torch.stack([codes & 15, codes >> 4], dim=1).float().sub_(8)
        values = halves.mul_(scales.unsqueeze(2)).view(rows.shape)
    else:
        values = codes.float().mul_(scales)
    # Not `addcmul_`: whether it rounds the product depends on the CPU.
    rows.add_(values)


def rows_of(flat: Tensor, block: int) -> Iterator[tuple[Tensor, slice]]:
    """Yield a tensor in pieces: rows that may be changed in place, and the slice of row numbers."""
    for chunk in chunks_of(flat, block):
        piece, missing = flat[chunk], -chunk.stop % block
        rows = functional.pad(piece, (0, missing)) if missing else piece
        first, end = chunk.start // block, -(-chunk.stop // block)
        yield rows.view(end - first, block), slice(first, end)
        if missing:
            piece.copy_(rows[: len(piece)])


class Functions(NamedTuple):
    encode: Callable[[Tensor], tuple[Tensor, Tensor]]
    decode: Callable[[Tensor, Tensor, Tensor], None]


class Quantizer:
    """Encodes and decodes rows of ``block`` elements. Compiled on a CPU when that pays.

    Args:
        bits: 8 or 4.
        block: Elements per row, even.
    """

    def __init__(self, bits: int, block: int) -> None:
        self.bits, self.block = bits, block
        self.eager = Functions(partial(encode, bits=bits), decode)
        self.compiled = self.eager
        self._until_compilation = COMPILE_AFTER

    def functions_for(self, flat: Tensor, encoded: int = 0) -> Functions:
        """Return the functions for ``flat``. The number of ``encoded`` elements is counted."""
        if flat.dtype is not torch.float32 or flat.device.type != "cpu":
            return self.eager
        if 0 < self._until_compilation <= encoded:
            Thread(target=self.compile, daemon=True).start()
        self._until_compilation -= encoded
        return self.compiled

    def compile(self) -> None:
        """Compile in another process, and use the functions from then on."""
        command = [sys.executable, "-m", __name__, str(self.bits), str(self.block)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        none = subprocess.DEVNULL
        with suppress(Exception):  # no compiler, torch before 2.6
            with tempfile.TemporaryDirectory() as folder:
                with subprocess.Popen(
                    [*command, folder], env=environment, stdout=none, stderr=none
                ) as child:
                    atexit.register(child.kill)
                    try:
                        os.setpriority(os.PRIO_PROCESS, child.pid, 10)  # training goes first
                        child.wait()
                    finally:
                        child.kill()  # has no effect after its end
                        atexit.unregister(child.kill)
                load = torch._inductor.aoti_load_package
                compiled = Functions(load(f"{folder}/encode.pt2"), load(f"{folder}/decode.pt2"))
            if all(map(torch.equal, self._outcome(compiled), self._outcome(self.eager))):
                self.compiled = compiled

    def _outcome(self, functions: Functions) -> list[Tensor]:
        """Return the results of both functions for the same rows."""
        rest = torch.linspace(-2, 3, 99 * self.block).pow(9).view(-1, self.block)
        codes, scales = functions.encode(rest)
        total = torch.ones_like(rest)
        functions.decode(total, codes, scales)
        return [codes, scales, rest, total]


quantizer = cache(Quantizer)
"""Return the quantizer of these bits and this block, which all codecs share."""


def main(bits: int, block: int, folder: str) -> None:
    """Compile both functions for any number of rows, and write them to a folder."""
    torch.set_num_threads(16)  # for one thread, no parallel loop is written
    functions, rows = Quantizer(bits, block).eager, torch.randn(2**20 // block, block)
    inputs = {"encode": (rows,), "decode": (rows, *functions.encode(rows))}
    for name, tensors in inputs.items():
        module = nn.Module()  # `export` takes no functions
        module.forward = getattr(functions, name)
        shapes = tuple({0: torch.export.Dim("rows")} for _ in tensors)
        exported = torch.export.export(module, tensors, dynamic_shapes=shapes)
        torch._inductor.aoti_compile_and_package(
            exported,
            package_path=f"{folder}/{name}.pt2",
            inductor_configs={"cpp.dynamic_threads": True},
        )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
