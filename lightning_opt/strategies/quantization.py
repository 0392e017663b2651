"""Encodes rows of values in 8 or 4 bits, by torch's operations or compiled for this CPU.

Another process compiles, because ``torch.compile`` restores torch's random state when it ends: in a
thread of this process, training would repeat the random numbers that it has drawn meanwhile.
Compiled functions give the same bits. They are kept for later runs.
"""

from __future__ import annotations

import atexit
import hashlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, reduce
from pathlib import Path
from threading import Thread

import torch
from filelock import FileLock
from torch import Tensor, nn
from torch.nn import functional

from lightning_opt.core.measure.machine import cpu_flags
from lightning_opt.strategies.packing import chunks_of, scales_of

COMPILE_AFTER = 2**24
"""Elements that are encoded before a CPU compiles: small models need no compiled functions."""

LEVELS = {8: 127, 4: 7}
"""The largest code, by its bits."""


def encode(alpha: Tensor, codes: Tensor, *parts: Tensor) -> Tensor:
    """Encode ``residual + alpha * gradient`` in rows, and write the unsent rest.

    Args:
        alpha: 0-dimensional.
        codes: Written. int8 of shape ``(r, c)``; or uint8 of shape ``(r, c / 2)``, each two codes
            of 4 bits: of the left and the right half of a row.
        *parts: Residual, gradient and rest, of shape ``(r, c)``, or the left and right half of
            each. The rest is written, and may be one of the other two.

    Returns:
        The largest magnitude of each row, float32 of shape ``(r, 1)``.
    """
    # Compiled, this is one loop over the rows, in which a row stays in the cache. Inductor makes it
    # several loops over the whole tensor if the scales are returned instead of the maxima, if the
    # rest is the same argument as the residual, or if the codes take halves of an argument.
    count = len(parts) // 3
    residuals, gradients, rests = parts[:count], parts[count:-count], parts[-count:]
    sums = [
        torch.add(residual, gradient.to(residual.dtype) * alpha, out=rest)
        for residual, gradient, rest in zip(residuals, gradients, rests, strict=True)
    ]
    largest = reduce(torch.maximum, [one.float().abs() for one in sums]).amax(dim=1, keepdim=True)
    bits = 8 if codes.dtype is torch.int8 else 4
    scales, factors = scales_of(largest, LEVELS[bits])
    rounded = [one.float().mul(factors).round_() for one in sums]
    if bits == 8:
        codes.copy_(rounded[0])
    else:
        # 16 * high + low, both moved from [-7, 7] to [1, 15]
        low, high = rounded if count == 2 else rounded[0].chunk(2, dim=1)
        codes.copy_(low.add(high, alpha=16).add_(136))
    for one, codes_of_one in zip(sums, rounded, strict=True):
        one.sub_(codes_of_one.mul_(scales))
    return largest


class Quantizer:
    """Encodes and decodes flat tensors in rows. Compiled on a CPU when that pays.

    Args:
        bits: 8 or 4.
        block: Elements per row, even.
    """

    def __init__(self, bits: int, block: int) -> None:
        self.bits, self.block = bits, block
        self.compiled: Callable[..., Tensor] | None = None
        self._until_compilation = COMPILE_AFTER

    def encode(self, flats: Sequence[Tensor], alpha: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Encode ``residual + alpha * gradient``.

        Args:
            flats: Residual, gradient and rest; the unsent rest is written into the last.
            alpha: 0-dimensional.
            codes: One row per block, written; see :func:`encode`.
            scales: float32 of shape ``(r, 1)``, written; not finite if the sum is not.
        """
        compiled = self._compiled_for(flats)
        for rows, numbers in self._in_rows(flats, whole=compiled is not None):
            # Halves, and all rows in one call, are slower for operations of torch.
            parts = rows if compiled is None else self._parts(*rows)
            scales[numbers].copy_((compiled or encode)(alpha, codes[numbers], *parts))
        scales.copy_(scales_of(scales, LEVELS[self.bits])[0])

    def decode(self, out: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Add the values of codes to ``out``, in place."""
        for (rows,), numbers in self._in_rows([out]):
            own = codes[numbers]
            if self.bits == 4:
                own = torch.cat([own & 15, own >> 4], dim=1).view(torch.int8).sub_(8)
            # Not `addcmul_`: whether it rounds the product depends on the CPU.
            rows.add_(own.float().mul_(scales[numbers]))

    def _in_rows(
        self, flats: Sequence[Tensor], *, whole: bool = False
    ) -> Iterator[tuple[list[Tensor], slice]]:
        """Yield the rows of each tensor, and their numbers. The last tensor may be written."""
        for chunk in chunks_of(flats[-1], self.block, whole=whole):
            pieces, missing = [flat[chunk] for flat in flats], -chunk.stop % self.block
            padded = [functional.pad(one, (0, missing)) for one in pieces] if missing else pieces
            first, end = chunk.start // self.block, -(-chunk.stop // self.block)
            yield [one.view(end - first, self.block) for one in padded], slice(first, end)
            if missing:
                pieces[-1].copy_(padded[-1][: len(pieces[-1])])

    def _parts(self, *tensors: Tensor) -> list[Tensor]:
        """Return the rows of all tensors, for 4 bits in halves."""
        return [part for rows in tensors for part in rows.chunk(8 // self.bits, dim=1)]

    def _compiled_for(self, flats: Sequence[Tensor]) -> Callable[..., Tensor] | None:
        """Return the compiled function if it takes these tensors. Their elements are counted."""
        if any(flat.dtype is not torch.float32 or flat.device.type != "cpu" for flat in flats):
            return None
        if 0 < self._until_compilation <= len(flats[-1]):
            Thread(target=self.compile, daemon=True).start()
        self._until_compilation -= len(flats[-1])
        return self.compiled

    def compile(self) -> None:
        """Compile, unless an earlier process has, and use the functions from then on."""
        with suppress(Exception):  # no compiler, torch before 2.6
            folder = self._folder()
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / "lock"):  # ranks on one machine compile once
                if not (folder / "encode.pt2").exists():
                    self._compile_into(folder)
            compiled = torch._inductor.aoti_load_package(f"{folder}/encode.pt2")
            mine, its = self.example(99), self.example(99)
            if torch.equal(encode(*mine), compiled(*its)) and all(map(torch.equal, mine, its)):
                self.compiled = compiled

    def _folder(self) -> Path:
        """Return where compiled functions are kept: in the folder of ``torch.compile``'s cache."""
        sources = [inspect.getsource(one) for one in (encode, scales_of, Quantizer, main)]
        # The compiler uses all instructions of this CPU, and machines may share the folder.
        machine = torch.__version__, torch.backends.cpu.get_cpu_capability(), sorted(cpu_flags())
        key = repr([self.bits, self.block, machine, sources]).encode()
        default = torch._inductor.runtime.cache_dir_utils.default_cache_dir
        parent = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default()
        return Path(parent, f"lightning_opt-{hashlib.sha256(key).hexdigest()[:16]}")

    def _compile_into(self, folder: Path) -> None:
        command = [sys.executable, "-m", __name__, str(self.bits), str(self.block), str(folder)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        none = subprocess.DEVNULL
        with subprocess.Popen(command, env=environment, stdout=none, stderr=none) as child:
            atexit.register(child.kill)
            try:
                os.setpriority(os.PRIO_PROCESS, child.pid, 10)  # training goes first
                child.wait()
            finally:
                child.kill()  # has no effect after its end
                atexit.unregister(child.kill)

    def example(self, rows: int) -> tuple[Tensor, ...]:
        """Return arguments of the compiled :func:`encode`."""
        values = torch.linspace(-2, 3, rows * self.block).pow(9).view(rows, self.block)
        parts = self._parts(values, values.flip(0), values.clone())
        codes = torch.zeros(parts[0].shape, dtype=torch.int8 if self.bits == 8 else torch.uint8)
        return torch.tensor(1 / 3), codes, *parts


quantizer = cache(Quantizer)
"""Return the quantizer of these bits and this block, which all codecs share."""


def main(bits: int, block: int, folder: str) -> None:
    """Compile :func:`encode` for any number of rows, and write it to a folder."""
    torch._inductor.cpp_builder.get_cpp_compiler()  # raises now if there is none
    torch.set_num_threads(16)  # for one thread, no parallel loop is written
    module = nn.Module()  # `export` takes no functions
    module.forward = encode
    arguments = Quantizer(bits, block).example(2**20 // block)
    shapes = torch.export.ShapesCollection()
    for tensor in arguments[1:]:
        shapes[tensor] = {0: torch.export.Dim("rows")}
    exported = torch.export.export(
        module, arguments, dynamic_shapes=shapes.dynamic_shapes(module, arguments)
    )
    configs: dict[str, object] = {"cpp.dynamic_threads": True}
    if hasattr(torch._inductor.config.aot_inductor, "precompile_headers"):  # newer torch
        configs["aot_inductor.precompile_headers"] = False  # takes longer for one source file
        configs["aot_inductor.compile_wrapper_opt_level"] = "O0"  # it only calls the kernel
    part = torch._inductor.aoti_compile_and_package(
        exported, package_path=f"{folder}/part.pt2", inductor_configs=configs
    )
    Path(part).replace(f"{folder}/encode.pt2")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
