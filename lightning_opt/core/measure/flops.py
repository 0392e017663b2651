"""The floating-point operations of one operator."""

from __future__ import annotations

from typing import Any

from torch.utils.flop_counter import flop_registry

in_trial = False
"""Whether a trial step runs, whose operations must not be counted for the run."""


def operator_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> int:
    """Return the floating-point operations of one operator by torch's formulas, or 0.

    Attention has its own formula here: two products, and twice as many in the backward pass. torch
    has none for the CPU's kernel, also counts the products that a fused kernel repeats in its
    backward pass, and in older versions fails with grouped-query attention.
    """
    packet = getattr(func, "overloadpacket", None)
    if str(packet).startswith("aten._scaled_dot_product_"):
        is_backward = str(packet).endswith("_backward")
        query, key, value = (tensor.shape for tensor in args[is_backward : 3 + is_backward])
        flops = 2 * query[:3].numel() * key[2] * (query[3] + value[3])
        return int(2 * flops if is_backward else flops)
    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=output))
