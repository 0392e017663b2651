"""Counts the floating-point operations of a model, and lists the peak FLOPs of GPUs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lightning_opt.core.modules.batches import tensors_of
from lightning_opt.core.modules.preserve import isolated_random, preserved


class Flops(NamedTuple):
    """Floating-point operations. A multiplication and an addition count as two.

    Attributes:
        forward: Operations of the forward pass.
        backward: Operations of the backward pass, without recomputation.
        recomputed: Forward operations repeated in the backward pass, as in activation
            checkpointing.
    """

    forward: int
    backward: int
    recomputed: int

    @property
    def model(self) -> int:
        """Operations of forward and backward pass, without recomputation: the numerator of MFU."""
        return self.forward + self.backward


class FlopCount(TorchDispatchMode):
    """Counts matrix products, convolutions and attention in a ``with`` block, by torch's formulas.

    Unlike torch's ``FlopCounterMode`` it needs no hooks on modules, separates recomputation, counts
    this process's part of a sharded product, and continues if a formula fails. Gradients are
    disabled in a backward pass. So an operation in it with gradients enabled counts as
    recomputation. This is wrong for ``create_graph=True``, which enables gradients too.

    Attributes:
        failures: The operators whose formula failed, with the error. They are not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.failures: dict[str, str] = {}
        self._counts = [0, 0, 0]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(kind, "device_mesh") for kind in types):
            return NotImplemented  # DTensor then runs local operations, which are counted instead
        result = func(*args, **kwargs)
        formula = flop_registry.get(getattr(func, "overloadpacket", None))
        if formula is not None:
            in_backward = torch._C._current_graph_task_id() != -1
            part = (2 if torch.is_grad_enabled() else 1) if in_backward else 0
            try:
                self._counts[part] += formula(*args, **kwargs, out_val=result)
            except Exception as error:  # noqa: BLE001 - counting must not end a run
                self.failures[str(func.overloadpacket)] = f"{type(error).__name__}: {error}"
        return result

    @property
    def flops(self) -> Flops:
        return Flops(*self._counts)


def count_flops(
    model: nn.Module,
    *batch: Any,
    backward: bool = True,
    loss: Callable[[Any], Tensor] | None = None,
    **inputs: Any,
) -> Flops:
    """Count the floating-point operations of a model on a batch, without changing either.

    The model runs once. Parameters may be on the ``meta`` device, which takes no memory. Matrix
    products, convolutions and attention are counted, as in :mod:`torch.utils.flop_counter`.
    Elementwise operations, a few percent at most, are not. Register your own operators with
    ``torch.utils.flop_counter.register_flop_formula``.

    Args:
        model: Called as ``model(*batch, **inputs)``.
        *batch: Positional inputs of the model.
        backward: Whether to count a backward pass too.
        loss: A function from the output to a scalar. By default the loss is the sum of all output
            tensors that require gradients.
        **inputs: Named inputs of the model.

    Returns:
        The operations of the forward and the backward pass.

    Raises:
        ValueError: If no output requires a gradient, or an operator could not be counted.

    Example:
        >>> import torch
        >>> flops = count_flops(torch.nn.Linear(10, 5), torch.ones(2, 10))
        >>> flops.forward, flops.backward  # 2 * 2 * 10 * 5, and the weight's gradient
        (200, 200)
    """
    devices = {tensor.device for tensor in (*model.parameters(), *tensors_of(batch))}
    device = next((d for d in devices if d.type == "cuda"), torch.device("cpu"))
    counter = FlopCount()
    with isolated_random(device), preserved(model), torch.set_grad_enabled(backward), counter:
        output = model(*batch, **inputs)
        if backward:
            _loss_of(output, loss).backward()
    if counter.failures:
        raise ValueError(f"The FLOPs of these operators could not be counted: {counter.failures}.")
    return counter.flops


def _loss_of(output: Any, loss: Callable[[Any], Tensor] | None) -> Tensor:
    if loss is not None:
        return loss(output)
    parts = [t.sum() for t in tensors_of(output) if t.requires_grad]
    if not parts:
        raise ValueError(
            "The output has no tensor with a gradient, so there is no backward pass to count: pass "
            "backward=False, or a loss that returns a scalar."
        )
    return sum(parts[1:], parts[0])


TF32 = "tf32"
"""Products of 32-bit tensors, with their inputs rounded to TF32."""

_PEAKS: dict[str, dict[torch.dtype | str, float]] = {
    # Dense (without sparsity) tensor-core peaks in TFLOP/s. Where sums in 16 bits are faster, the
    # peak is that of sums in 32 bits.
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
    # NVIDIA V100 and T4 data sheets; their tensor cores support only fp16.
    "V100-SXM": {"fp16": 125.0, "fp32": 15.7},
    "V100": {"fp16": 112.0, "fp32": 14.0},
    "T4": {"fp16": 65.0, "fp32": 8.1},
}
_KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", TF32: TF32}
_OTHERS = ("A10G", "A1000", "SUPER", " TI", "LAPTOP", "MOBILE", "MAX-Q", "MIG", " D ")
"""Words in the names of cards, or of parts of cards, that are not in the table."""


def peak_flops(device: torch.device | str, dtype: torch.dtype | str) -> float | None:
    """Return the manufacturer's dense peak of a GPU in FLOP per second; None if unknown.

    Args:
        device: A device such as ``"cuda:0"``, or the name of a GPU such as ``"NVIDIA A100-SXM4"``.
        dtype: Type of the inputs: ``torch.bfloat16``, ``float16``, ``float32``, or ``"tf32"``.

    Returns:
        FLOP per second. A multiplication and an addition count as two. None for a CPU, a part of a
        GPU (MIG), a card that is not in the table, and a dtype that the card's entry lacks.

    Example:
        >>> peak_flops("NVIDIA A100-SXM4-80GB", torch.bfloat16) / 1e12
        312.0
        >>> peak_flops("cpu", torch.float32)
    """
    name = _name_of(device)
    if name is None or any(other in f"{name} " for other in _OTHERS):
        return None
    # Take the longest matching name: "L40S" before "L40" before "L4".
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
    """Return whether a GPU's name contains the words of a table entry, in order.

    "A100-SXM4-80GB" is an A100 and "V100-SXM2" a V100-SXM, but "A1000" is not an A100.
    """
    words = (word if "-" in word else rf"{word}(?![A-Z0-9])" for word in known.split())
    return re.search(r".*\b".join((r"\b", *words)), name.replace("_", " ")) is not None


def matmul_dtype(precision: str) -> torch.dtype | str:
    """Return the dtype of matrix products for a Trainer's precision; TF32 if torch may use it."""
    for sign, dtype in (("bf16", torch.bfloat16), ("16", torch.float16), ("64", torch.float64)):
        if precision.startswith(sign):
            return dtype
    return torch.float32 if torch.get_float32_matmul_precision() == "highest" else TF32
