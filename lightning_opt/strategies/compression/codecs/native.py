"""The compressors' passes over memory in C, compiled on the user's machine when first needed.

In torch operations, compressing takes a pass over the gradient for each operation; ``native.c``
takes one for all. Both give the same bits, so that it does not matter if one rank has a compiler
and another has not. The library is built once with the system's compiler (``$CC`` or ``cc``), kept
in the user's cache folder (``$XDG_CACHE_HOME/lightning_opt``), and called through ctypes.

``LIGHTNING_OPT_NATIVE=0`` in the environment switches it off, ``1`` makes its absence an error.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from lightning_opt.strategies.compression.codecs.packing import WIDE, QuantizedLayout, SparseLayout

SWITCH = "LIGHTNING_OPT_NATIVE"

SOURCE = Path(__file__).with_name("native.c")

# Fused multiply-adds would round differently from torch; the other two only speed up.
FLAGS = (
    *("-O3", "-shared", "-fPIC", "-std=c11"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)

PIECE = 1024
"""Elements that ``lo_select`` wants room for before it looks at them."""

_log = logging.getLogger("lightning_opt")


class NativeUnavailableError(RuntimeError):
    """The library can neither be found nor built."""


def kernels(device: torch.device) -> Kernels | None:
    """Return the library for tensors on ``device``, or None for torch operations.

    Raises:
        NativeUnavailableError: If ``LIGHTNING_OPT_NATIVE=1`` and it cannot be built.
    """
    wish = os.environ.get(SWITCH, "")
    if wish == "0" or device.type != "cpu":
        return None
    loaded = _load()
    if isinstance(loaded, Kernels):
        return loaded
    if wish == "1":
        raise NativeUnavailableError(f"{SWITCH}=1, but {loaded}.")
    return None


@functools.cache
def _load() -> Kernels | str:
    """Return the library, built if need be, or why there is none, which is also logged once."""
    try:
        return Kernels(build())
    except (NativeUnavailableError, OSError, subprocess.SubprocessError) as error:
        reason = str(error).strip().rstrip(".")
    if os.environ.get("LOCAL_RANK", "0") == "0":  # once a machine
        _log.warning(
            "Gradients on the CPU are compressed in torch operations, which takes two to six "
            "times as long as in native code: %s. To change that, install a C compiler or name one "
            "in CC; to read this no more, set %s=0.",
            reason,
            SWITCH,
        )
    return reason


# --- building -----------------------------------------------------------------------------------


def build() -> ctypes.CDLL:
    """Load the library from the cache, compiling it if it is not there.

    Processes that start together may all compile; each puts its result in place in one move.

    Raises:
        NativeUnavailableError: If there is no compiler or it fails.
        OSError: If the result cannot be loaded.
    """
    compiler = shlex.split(os.environ.get("CC") or "cc")
    found = shutil.which(compiler[0])
    if found is None:
        raise NativeUnavailableError(f"there is no C compiler {compiler[0]!r}")
    commands = [[found, *compiler[1:], *FLAGS, *more] for more in (["-march=native"], [])]
    with _folder() as folder:
        targets = [folder / f"native-{_fingerprint(command)}.so" for command in commands]
        for target in targets:
            if target.exists():
                return ctypes.CDLL(str(target))
        errors = None
        for command, target in zip(commands, targets, strict=True):
            errors = _compile(command, target)
            if errors is None:
                return ctypes.CDLL(str(target))
    raise NativeUnavailableError(f"{found} failed with: {errors}")


def _compile(command: list[str], target: Path) -> str | None:
    """Compile into ``target``; return what went wrong, if anything."""
    handle, name = tempfile.mkstemp(dir=target.parent, suffix=".tmp")
    os.close(handle)
    try:
        done = subprocess.run(
            [*command, "-o", name, str(SOURCE), "-lm"],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if done.returncode != 0:
            return done.stderr.strip()[-500:] or f"exit status {done.returncode}"
        Path(name).replace(target)
        return None
    finally:
        Path(name).unlink(missing_ok=True)


def _fingerprint(command: list[str]) -> str:
    """Return a name for what a command makes of the source with this compiler on this processor."""
    compiler = Path(command[0]).resolve()
    status = compiler.stat()
    parts = [
        SOURCE.read_text(),
        *command,
        f"{compiler} {status.st_size} {status.st_mtime_ns}",
        _processor(),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _processor() -> str:
    """Return what tells processors apart that do not run each other's native code.

    A home folder may be shared by different machines.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    told = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU"))}
    return "\n".join([platform.platform(), platform.processor(), *sorted(told)])


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Yield where libraries are kept, or a folder for this once where nothing can be kept."""
    folder = _cache()
    if folder is not None:
        yield folder
    else:
        with tempfile.TemporaryDirectory() as name:
            yield Path(name)


def _cache() -> Path | None:
    """Return the folder in the user's cache if it can be written by the user and nobody else."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
        if not cache.is_absolute():
            cache = Path.home() / ".cache"
        folder = cache / "lightning_opt"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
        # What others could write, others could make this process run.
        private = status.st_uid == os.getuid() and not status.st_mode & 0o022
        return folder if private and os.access(folder, os.W_OK) else None
    except (AttributeError, OSError, RuntimeError):  # no such notion, no right, no home
        return None


# --- calling ------------------------------------------------------------------------------------

_TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}

_SIGNATURES = {  # the result's type, then the arguments'
    "lo_select": "l ppfllfpppl",
    "lo_largest": "f ppll",
    "lo_sparse_write": " pppplp",
    "lo_sparse_add": "i ppllpfip",
    "lo_quantize": "l ppflilp",
    "lo_quantized_add": " plllilplfi",
}


class _SparseLayout(ctypes.Structure):
    """``struct layout`` in native.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("numel", "capacity", "block", "blocks")),
        *((name, ctypes.c_int64) for name in ("scales", "codes", "counts", "offsets")),
        *((name, ctypes.c_int64) for name in ("wide", "bf16")),
    ]


class Kernels:
    """The library's functions for tensors.

    All tensors lie on the CPU. Where a float32 tensor is expected, :func:`fits` must hold.

    Args:
        library: What :func:`build` returned.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name, signature in _SIGNATURES.items():
            result, arguments = signature.split(" ")
            function = getattr(library, name)
            function.restype = _TYPES.get(result)
            function.argtypes = [_TYPES[argument] for argument in arguments]

    def select(
        self,
        flat: Tensor,
        increment: Tensor | None,
        alpha: float,
        threshold: float,
        start: int,
        found: int,
        indices: Tensor,
        values: Tensor,
    ) -> tuple[int, int]:
        """Add ``alpha * increment`` to ``flat[start:]``, and list what then reaches a threshold.

        Args:
            flat: float32, changed in place.
            increment: As long as ``flat``, or None.
            alpha: What it is multiplied with.
            threshold: The least magnitude.
            start: Where to begin.
            found: How many elements have been listed before.
            indices: int64, for the list; ``values`` float32, as long.
            values: See ``indices``.

        Returns:
            Where it stopped, and how many are listed now. It stops early where the list has no more
            room for :data:`PIECE` elements, with everything before that place done; and at
            ``-1 - place`` if the increment is not finite in the piece that begins at ``place``.
        """
        count = ctypes.c_int64(found)
        stopped = self._library.lo_select(
            flat.data_ptr(),
            None if increment is None else increment.data_ptr(),
            alpha,
            start,
            flat.numel(),
            threshold,
            indices.data_ptr(),
            values.data_ptr(),
            ctypes.byref(count),
            len(indices),
        )
        return int(stopped), count.value

    def largest(self, indices: Tensor, values: Tensor, k: int) -> float:
        """Move the ``k`` elements of largest magnitude to the front, in their order.

        Returns:
            The magnitude of the ``k``-th.
        """
        return float(
            self._library.lo_largest(indices.data_ptr(), values.data_ptr(), len(indices), k)
        )

    def sparse_write(
        self, layout: SparseLayout, message: Tensor, indices: Tensor, values: Tensor, flat: Tensor
    ) -> None:
        """Write a message, and take off ``flat`` what it carries."""
        self._library.lo_sparse_write(
            ctypes.byref(_described(layout)),
            message.data_ptr(),
            indices.data_ptr(),
            values.data_ptr(),
            len(indices),
            flat.data_ptr(),
        )

    def sparse_add(
        self, layout: SparseLayout, messages: Tensor, out: Tensor, alpha: float, overwrite: bool
    ) -> None:
        """Add ``alpha`` times each row of ``messages`` to ``out``, or to zero if ``overwrite``.

        Raises:
            ValueError: If a message names elements that ``out`` does not have.
        """
        cursors = torch.empty(len(messages), dtype=torch.int64)
        failed = self._library.lo_sparse_add(
            ctypes.byref(_described(layout)),
            messages.data_ptr(),
            messages.stride(0),
            len(messages),
            out.data_ptr(),
            alpha,
            overwrite,
            cursors.data_ptr(),
        )
        if failed:
            raise ValueError("A compressed gradient arrived damaged.")

    def quantize(
        self,
        layout: QuantizedLayout,
        message: Tensor,
        flat: Tensor,
        increment: Tensor | None,
        alpha: float,
    ) -> int:
        """Add ``alpha * increment`` to ``flat``, write a message, and take off what it carries.

        The message's header is left to the caller.

        Returns:
            Where it stopped: at the end, or at ``-1 - place`` as :meth:`select` does.
        """
        return int(
            self._library.lo_quantize(
                flat.data_ptr(),
                None if increment is None else increment.data_ptr(),
                alpha,
                layout.numel,
                layout.bits,
                layout.block,
                message.data_ptr(),
            )
        )

    def quantized_add(
        self, layout: QuantizedLayout, messages: Tensor, out: Tensor, alpha: float, overwrite: bool
    ) -> None:
        """Add ``alpha`` times each row of ``messages`` to ``out``, or to zero if ``overwrite``.

        ``out`` may be shorter than the tensor was; the rest is then left out.
        """
        self._library.lo_quantized_add(
            messages.data_ptr(),
            messages.stride(0),
            len(messages),
            layout.numel,
            layout.bits,
            layout.block,
            out.data_ptr(),
            out.numel(),
            alpha,
            overwrite,
        )


def fits(*tensors: Tensor | None) -> bool:
    """Return whether all are contiguous float32 tensors on the CPU; None counts as such."""
    return all(
        tensor is None
        or (
            tensor.dtype is torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()
        )
        for tensor in tensors
    )


@functools.lru_cache(maxsize=256)
def _described(layout: SparseLayout) -> _SparseLayout:
    return _SparseLayout(
        layout.numel,
        layout.capacity,
        layout.block,
        layout.blocks,
        *layout.starts,
        layout.block == WIDE,
        layout.values == "bf16",
    )
