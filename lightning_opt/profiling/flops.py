"""Counts the floating-point operations of a model, and lists the peak FLOPs of GPUs."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_opt.core.measure import flops
from lightning_opt.core.measure.flops import operator_flops
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
    this process's part of a sharded product, and continues if a formula fails. A plain
    backward pass disables gradients, so an operation in it with gradients enabled counts as
    recomputation. With ``create_graph=True`` gradients are enabled in the whole backward pass, so
    recomputation counts as backward.

    Attributes:
        failures: The operators whose formula failed, with the error. They are not counted.
        counts_forward: Whether operators outside of backward passes are counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.failures: dict[str, str] = {}
        self.counts_forward = True
        self._counts: Counter[tuple[int, bool]] = Counter()  # by backward pass and grad mode

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(kind, "device_mesh") for kind in types):
            return NotImplemented  # DTensor then runs local operations, which are counted
        result = func(*args, **kwargs)
        backward = torch._C._current_graph_task_id()  # -1 outside of backward passes
        if not flops.in_trial and (backward != -1 or self.counts_forward):
            key = backward, torch.is_grad_enabled()
            try:
                self._counts[key] += operator_flops(func, args, kwargs, result)
            except Exception as error:  # noqa: BLE001 - counting must not end a run
                self.failures[str(func.overloadpacket)] = f"{type(error).__name__}: {error}"
        return result

    @property
    def flops(self) -> Flops:
        parts = [0, 0, 0]
        for (backward, has_grad), count in self._counts.items():
            recomputed = has_grad and (backward, False) in self._counts
            parts[0 if backward == -1 else 1 + recomputed] += count
        return Flops(*parts)


def count_flops(model: nn.Module, *batch: Any, **inputs: Any) -> Flops:
    """Count the floating-point operations of a model on a batch, without changing either.

    The model runs once, and backward from the sum of its outputs if any of them requires a
    gradient. Parameters may be on the ``meta`` device, which takes no memory. Matrix products,
    convolutions and attention are counted, as in :mod:`torch.utils.flop_counter`. Elementwise
    operations, a few percent at most, are not. Register your own operators with
    ``torch.utils.flop_counter.register_flop_formula``.

    Args:
        model: Called as ``model(*batch, **inputs)``.
        *batch: Positional inputs of the model.
        **inputs: Named inputs of the model.

    Returns:
        The operations of the forward and the backward pass.

    Raises:
        ValueError: If an operator could not be counted.

    Example:
        >>> import torch
        >>> flops = count_flops(torch.nn.Linear(10, 5), torch.ones(2, 10))
        >>> flops.forward, flops.backward  # 2 * 2 * 10 * 5, and the weight's gradient
        (200, 200)
    """
    devices = {tensor.device for tensor in (*model.parameters(), *tensors_of((batch, inputs)))}
    device = next((d for d in devices if d.type == "cuda"), torch.device("cpu"))
    counter = FlopCount()
    with isolated_random(device), preserved(model), counter:
        outputs = tensors_of(model(*batch, **inputs))
        parts = [output.sum() for output in outputs if output.requires_grad]
        if parts:
            torch.autograd.backward(parts)
    if counter.failures:
        raise ValueError(f"The FLOPs of these operators could not be counted: {counter.failures}.")
    return counter.flops


PEAKS = {
    "B200": (2250.0, 1125.0, 75.0, 4500.0),  # Blackwell Architecture Technical Brief, 2024
    "H200 NVL": (835.5, 417.5, 60.0, 1670.5),  # data sheets from here on, sparse figures halved
    "H200": (989.4, 494.7, 66.9, 1978.9),
    "GH200": (989.4, 494.7, 66.9, 1978.9),
    "H100 NVL": (835.5, 417.5, 60.0, 1670.5),
    "H100 PCIE": (756.0, 378.0, 51.2, 1513.0),
    "H100": (989.4, 494.7, 66.9, 1978.9),
    "A100": (312.0, 156.0, 19.5, 0.0),
    "A40": (149.7, 74.8, 37.4, 0.0),
    "A10": (125.0, 62.5, 31.2, 0.0),
    "L40S": (362.0, 183.0, 91.6, 733.0),
    "L40": (181.0, 90.5, 90.5, 362.0),
    "L4": (121.0, 60.0, 30.3, 242.5),
    "RTX 4090": (165.2, 82.6, 82.6, 330.3),  # Ada and Ampere GA102 GPU Architecture white papers
    "RTX 3090": (71.0, 35.6, 35.6, 0.0),
    "RTX A6000": (154.8, 77.4, 38.7, 0.0),
}
"""Dense peaks in TFLOP/s for inputs in 16 bits, TF32, float32 and FP8, with sums in 32 bits.

The first key whose words are all in the GPU's name is used, so more specific keys come first.
GPUs without FP8 have 0 there. Lightning's own table (2.6) lacks the H200, and confuses an L40S
with an L4.
"""

VARIANTS = {"SUPER", "TI", "LAPTOP", "MOBILE", "MAX", "MIG", "D"}
"""Words in the names of GPUs and GPU slices that the table does not contain."""


def peak_flops(gpu: str, precision: str) -> float | None:
    """Return the manufacturer's dense peak of a GPU in FLOP per second; None if unknown.

    A multiplication and an addition count as two.

    Args:
        gpu: The name of the GPU.
        precision: The Trainer's precision. ``"32-true"`` uses the peak of TF32 if torch may use
            TF32, ``"transformer-engine"`` that of FP8.

    Example:
        >>> peak_flops("NVIDIA A100-SXM4-80GB", "bf16-mixed") / 1e12
        312.0
    """
    words = set(gpu.upper().replace("-", " ").split())
    peaks = next((PEAKS[name] for name in PEAKS if words.issuperset(name.split())), None)
    if peaks is None or words & VARIANTS or precision.startswith("64"):
        return None
    if precision.startswith("transformer-engine"):
        return peaks[3] * 1e12 or None
    if precision.startswith(("16", "bf16")):
        return peaks[0] * 1e12
    return peaks[1 + (torch.get_float32_matmul_precision() == "highest")] * 1e12
