"""The peak arithmetic of GPUs, by name and type, as their makers state it."""

from __future__ import annotations

import re

import torch

TF32 = "tf32"
"""32-bit tensors multiplied with TF32 inputs."""

_PEAKS: dict[str, dict[torch.dtype | str, float]] = {
    # Dense (without sparsity) tensor-core peaks in TFLOP/s; sums in 32 bits where that is slower.
    # NVIDIA Blackwell Architecture Technical Brief, 2024.
    "B200": {"bf16": 2250.0, TF32: 1125.0, "fp32": 75.0},
    "B100": {"bf16": 1750.0, TF32: 875.0, "fp32": 60.0},
    # NVIDIA H200 and H100 Tensor Core GPU data sheets (their sparse figures halved).
    "H200 NVL": {"bf16": 835.5, TF32: 417.5, "fp32": 60.0},
    "H200": {"bf16": 989.4, TF32: 494.7, "fp32": 66.9},
    "GH200": {"bf16": 989.4, TF32: 494.7, "fp32": 66.9},
    "H100 NVL": {"bf16": 835.5, TF32: 417.5, "fp32": 60.0},
    "H100 PCIE": {"bf16": 756.0, TF32: 378.0, "fp32": 51.2},
    "H100": {"bf16": 989.4, TF32: 494.7, "fp32": 66.9},
    # NVIDIA A100, A40, A30, A10 data sheets.
    "A100": {"bf16": 312.0, TF32: 156.0, "fp32": 19.5},
    "A40": {"bf16": 149.7, TF32: 74.8, "fp32": 37.4},
    "A30": {"bf16": 165.0, TF32: 82.0, "fp32": 10.3},
    "A10": {"bf16": 125.0, TF32: 62.5, "fp32": 31.2},
    # NVIDIA L40S, L40, L4 data sheets (their sparse figures halved).
    "L40S": {"bf16": 362.0, TF32: 183.0, "fp32": 91.6},
    "L40": {"bf16": 181.0, TF32: 90.5, "fp32": 90.5},
    "L4": {"bf16": 121.0, TF32: 60.0, "fp32": 30.3},
    # NVIDIA Ada and Ampere GA102 GPU Architecture white papers, with sums in 32 bits.
    "RTX 4090": {"bf16": 165.2, TF32: 82.6, "fp32": 82.6},
    "RTX 4080": {"bf16": 97.5, TF32: 48.7, "fp32": 48.7},
    "RTX 3090": {"bf16": 71.0, TF32: 35.6, "fp32": 35.6},
    "RTX 3080": {"bf16": 59.5, TF32: 29.8, "fp32": 29.8},
    "RTX A6000": {"bf16": 154.8, TF32: 77.4, "fp32": 38.7},
    # NVIDIA V100 and T4 data sheets; their tensor cores know fp16 alone.
    "V100-SXM": {"fp16": 125.0, "fp32": 15.7},
    "V100": {"fp16": 112.0, "fp32": 14.0},
    "T4": {"fp16": 65.0, "fp32": 8.1},
}
_KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", TF32: TF32}
_OTHERS = ("A10G", "A1000", "SUPER", " TI", "LAPTOP", "MOBILE", "MAX-Q", "MIG", " D ")
"""Cards whose names contain another's, and parts of a card: not in the table."""


def peak_flops(device: torch.device | str, dtype: torch.dtype | str) -> float | None:
    """Return the peak of a GPU in FLOP a second, dense, by its maker's word; None if unknown.

    Args:
        device: A device such as ``"cuda:0"``, or the name of a GPU such as ``"NVIDIA A100-SXM4"``.
        dtype: What is multiplied: ``torch.bfloat16``, ``float16``, ``float32``, or ``"tf32"``.

    Returns:
        FLOP a second, a multiplication and an addition counting as two. None for a CPU, a part of a
        GPU (MIG), a card that the table does not have, and a type that the card is not made for.

    Example:
        >>> peak_flops("NVIDIA A100-SXM4-80GB", torch.bfloat16) / 1e12
        312.0
        >>> peak_flops("cpu", torch.float32)
    """
    name = _name_of(device)
    if name is None or any(other in f"{name} " for other in _OTHERS):
        return None
    # "L40S" before "L40" before "L4": the longest name that fits.
    known = max((known for known in _PEAKS if _fits(known, name)), key=len, default="")
    peaks, kind = _PEAKS.get(known, {}), _KINDS.get(dtype, str(dtype))
    found = peaks.get(kind, peaks.get("bf16") if kind == "fp16" else None)
    return None if found is None else found * 1e12


def _name_of(device: torch.device | str) -> str | None:
    if isinstance(device, str) and device.split(":")[0] not in ("cuda", "cpu", "mps", "meta"):
        return device.upper()
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_name(device).upper()


def _fits(known: str, name: str) -> bool:
    """Return whether a name has the words of a known one, in order.

    "A100-SXM4-80GB" is an A100, "V100-SXM2" a V100-SXM; "A1000" is no A100, "L4" no "L40".
    """
    words = (word if "-" in word else rf"{word}(?![A-Z0-9])" for word in known.split())
    return re.search(r".*\b".join((r"\b", *words)), name.replace("_", " ")) is not None


def multiplied_type(precision: str) -> torch.dtype | str:
    """Return what a Trainer's precision multiplies: 16 bits, TF32 if torch may use it, or 32."""
    for sign, dtype in (("bf16", torch.bfloat16), ("16", torch.float16), ("64", torch.float64)):
        if precision.startswith(sign):
            return dtype
    return torch.float32 if torch.get_float32_matmul_precision() == "highest" else TF32
