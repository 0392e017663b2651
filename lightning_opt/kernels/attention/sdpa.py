"""What torch's scaled dot-product attention is asked, which backend answers, and why no better one.

Nothing here runs attention: torch is asked which backend it would choose, by the very function that
:func:`torch.nn.functional.scaled_dot_product_attention` asks itself.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn import functional
from torch.nn.attention import SDPBackend

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_NAMES = {backend.value: name for name, backend in BACKENDS.items()}
_SWITCHES: dict[str, tuple[Callable[[], bool], Callable[[bool], None]]] = {
    "flash": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    "cudnn": (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    "efficient": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    "math": (cuda.math_sdp_enabled, cuda.enable_math_sdp),
}
"""For each backend, what tells whether it may be used, and what sets that."""

NAME = "scaled_dot_product_attention"
CAN_RANK = hasattr(torch._C, "_set_sdp_priority_order")
"""Whether this torch (2.6 or newer) lets their order be set, and not only which are used."""


class Preference:
    """The backends that torch may use, and their order, until :meth:`restore`.

    ``torch.nn.attention.sdpa_kernel`` does the same for a ``with`` block. It is not used here since
    it turns off the backends of other devices (XPU), and after it a backend that was off before may
    have another place in the order.

    Args:
        order: Names of :data:`BACKENDS`, best first. What stands behind ``"math"`` is never
            reached, since math serves every call, and is turned off: that holds also where torch
            cannot rank. Math itself stays on, as the last, or calls that no other backend takes
            would be errors.
    """

    def __init__(self, order: Sequence[str]) -> None:
        self._enabled = {name: enabled() for name, (enabled, _) in _SWITCHES.items()}
        self._ranks = torch._C._get_sdp_priority_order() if CAN_RANK else []
        reachable = [*takewhile(lambda name: name != "math", order), "math"]
        for name, (_, enable) in _SWITCHES.items():
            enable(name in reachable)
        if CAN_RANK:
            ranks = [BACKENDS[name].value for name in reachable]
            rest = [rank for rank in self._ranks if rank not in ranks]
            torch._C._set_sdp_priority_order(ranks + rest)

    def restore(self) -> None:
        """Put back what was set before."""
        for name, (_, enable) in _SWITCHES.items():
            enable(self._enabled[name])
        if CAN_RANK:
            torch._C._set_sdp_priority_order(self._ranks)


class Watch:
    """Looks at each call of scaled dot-product attention until :meth:`end`.

    The function is replaced wherever a loaded module has it under its own name. A
    ``TorchFunctionMode`` would not see the calls within ``nn.MultiheadAttention``, and sends that
    module down another path in evaluation.

    Args:
        seen: Where to note what is seen: by what tells one kind of call from another, its row in a
            report. That has who serves it, how often it was seen, its dtype (autocast considered),
            shapes and settings, and why nobody better serves it.
        order: The backends in the order in which they are wanted.
    """

    def __init__(self, seen: dict[tuple[Any, ...], dict[str, Any]], order: Sequence[str]) -> None:
        self._seen, self._order = seen, order
        self._original: Callable[..., Tensor] = functional.scaled_dot_product_attention
        self._replaced = [
            module
            for module in list(sys.modules.values())
            if getattr(module, "__dict__", {}).get(NAME) is self._original
            and module is not torch._C._nn
        ]
        for module in self._replaced:
            setattr(module, NAME, self)

    def end(self) -> None:
        """Put the function back."""
        for module in self._replaced:
            if vars(module).get(NAME) is self:  # else someone has replaced it in the meantime
                setattr(module, NAME, self._original)
        self._replaced = []

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Note the call, and do what it asks for."""
        if not torch.compiler.is_compiling():
            self._note(*args, **kwargs)
        return self._original(*args, **kwargs)

    def _note(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        inputs = (query, key, value, attn_mask)
        query, key, value, attn_mask = (_as_autocast(tensor) for tensor in inputs)  # type: ignore[assignment]
        call: dict[str, Any] = {
            "device": query.device.type,
            "dtype": str(query.dtype).removeprefix("torch."),
            "query": str(tuple(query.shape)),
            "key": str(tuple(key.shape)),
            "mask": "none"
            if attn_mask is None
            else f"{str(attn_mask.dtype).removeprefix('torch.')} {tuple(attn_mask.shape)}",
            "causal": is_causal,
            "dropout": float(dropout_p),
        }
        kind = (*call.values(), tuple(value.shape))
        if kind in self._seen:
            self._seen[kind]["calls"] += 1
            return
        asked = (query, key, value, attn_mask, dropout_p, is_causal)
        backend = _choose(asked, scale, enable_gqa)
        better = (
            self._order[: self._order.index(backend)] if backend in self._order else self._order
        )
        reasons = [
            f"{name}: {_why_not(name, (*asked, enable_gqa))}" for name in better if name != backend
        ]
        self._seen[kind] = {
            "backend": backend,
            "calls": 1,
            **call,
            "better ones": "; ".join(reasons),
        }


def _as_autocast(tensor: Tensor | None) -> Tensor | None:
    """Return ``tensor``, or an empty one of the dtype that autocast is going to give it."""
    if tensor is None or tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return tensor
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind):
        return tensor
    dtype = torch.get_autocast_dtype(kind)
    if tensor.dtype is dtype:
        return tensor
    return torch.empty_like(tensor, dtype=dtype).requires_grad_(tensor.requires_grad)


def _choose(asked: tuple[Any, ...], scale: float | None, grouped: bool) -> str:
    """Return the backend that serves a call: query, key, value, mask, dropout, causal or not."""
    try:
        choice = torch._fused_sdp_choice(*asked, scale=scale, enable_gqa=grouped)
    except (RuntimeError, NotImplementedError, TypeError):  # a tensor of another kind
        return "unknown"
    return _NAMES.get(int(choice), f"number {int(choice)}")


def _why_not(name: str, asked: tuple[Any, ...]) -> str:
    """Return why the backend ``name``, which is wanted more, does not serve the call."""
    kind = asked[0].device.type
    if kind == "cpu":
        return "it takes neither dropout nor every mask" if name == "flash" else "not for CPUs"
    if kind != "cuda":
        return f"torch does not say why on {kind}"
    can_use = getattr(cuda, f"can_use_{name}_attention", None)
    if can_use is None:
        return "not in this version of torch"
    question = cuda.SDPAParams(*asked)
    with warnings.catch_warnings(record=True) as said:  # which is how torch tells
        warnings.simplefilter("always")
        able = can_use(question, True)
    if able:
        return "it could, but this version of torch prefers another"
    texts = [str(warning.message).partition(" (Triggered")[0].strip() for warning in said]
    # The last words of each are the place in torch's source.
    return " ".join(dict.fromkeys(text for text in texts if text)) or "torch does not say why"
