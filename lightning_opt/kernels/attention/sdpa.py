"""What torch's scaled dot-product attention is asked, which backend answers, and why no better one.

Nothing here runs attention: torch is asked which backend it would choose, by the very function that
:func:`torch.nn.functional.scaled_dot_product_attention` asks itself.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_NUMBERS = {name: backend.value for name, backend in BACKENDS.items()}
_NAMES = {number: name for name, number in _NUMBERS.items()}
_ENABLED: dict[str, Callable[[], bool]] = {
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
    "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "math": torch.backends.cuda.math_sdp_enabled,
}
_ENABLE: dict[str, Callable[[bool], None]] = {
    "flash": torch.backends.cuda.enable_flash_sdp,
    "cudnn": torch.backends.cuda.enable_cudnn_sdp,
    "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
    "math": torch.backends.cuda.enable_math_sdp,
}
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
        self._enabled = {name: enabled() for name, enabled in _ENABLED.items()}
        self._ranks = torch._C._get_sdp_priority_order() if CAN_RANK else []
        self.reachable = reachable(order)
        for name, enable in _ENABLE.items():
            enable(name in self.reachable)
        if CAN_RANK:
            ranks = [_NUMBERS[name] for name in self.reachable]
            rest = [rank for rank in self._ranks if rank not in ranks]
            torch._C._set_sdp_priority_order(ranks + rest)

    def restore(self) -> None:
        """Put back what was set before."""
        for name, enable in _ENABLE.items():
            enable(self._enabled[name])
        if CAN_RANK:
            torch._C._set_sdp_priority_order(self._ranks)


def reachable(order: Sequence[str]) -> list[str]:
    """Return the backends of ``order`` that a call can get to, math being the last."""
    names = list(order)
    return [*(names[: names.index("math")] if "math" in names else names), "math"]


@dataclass(frozen=True)
class Signature:
    """What tells one kind of call from another.

    Attributes:
        device: Its type.
        dtype: That the attention is computed in, autocast considered.
        query: Shape.
        key: Shape.
        value: Shape.
        mask: Shape and dtype of ``attn_mask``, or ``"none"``.
        causal: ``is_causal``.
        dropout: ``dropout_p``.
    """

    device: str
    dtype: str
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    mask: str
    causal: bool
    dropout: float


@dataclass
class Call:
    """One kind of call: how often it was seen, who serves it, and why nobody better does."""

    backend: str
    reasons: dict[str, str]
    count: int = 1


class Watch:
    """Looks at each call of scaled dot-product attention until :meth:`end`.

    The function is replaced wherever a loaded module has it under its own name. A
    ``TorchFunctionMode`` would not see the calls within ``nn.MultiheadAttention``, and sends that
    module down another path in evaluation.

    Args:
        calls: Where to note what is seen.
        order: The backends in the order in which they are wanted.
    """

    def __init__(self, calls: dict[Signature, Call], order: Sequence[str]) -> None:
        self._calls, self._order = calls, order
        self._original: Callable[..., Tensor] = functional.scaled_dot_product_attention
        self._replaced = list(_holders(self._original))
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
        signature = Signature(
            query.device.type,
            str(query.dtype).removeprefix("torch."),
            tuple(query.shape),
            tuple(key.shape),
            tuple(value.shape),
            "none"
            if attn_mask is None
            else f"{str(attn_mask.dtype).removeprefix('torch.')} {tuple(attn_mask.shape)}",
            is_causal,
            float(dropout_p),
        )
        if signature in self._calls:
            self._calls[signature].count += 1
            return
        question = Question(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        backend = question.choose()
        better = (
            self._order[: self._order.index(backend)] if backend in self._order else self._order
        )
        reasons = {name: question.why_not(name) for name in better if name != backend}
        self._calls[signature] = Call(backend, reasons)


def _holders(function: Any) -> Iterator[Any]:
    return (
        module
        for module in list(sys.modules.values())
        if getattr(module, "__dict__", {}).get(NAME) is function and module is not torch._C._nn
    )


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


@dataclass
class Question:
    """One call, as torch sees it before it chooses."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    causal: bool
    scale: float | None
    grouped: bool

    def choose(self) -> str:
        """Return the backend that serves the call."""
        try:
            choice = torch._fused_sdp_choice(
                self.query,
                self.key,
                self.value,
                self.mask,
                self.dropout,
                self.causal,
                scale=self.scale,
                enable_gqa=self.grouped,
            )
        except (RuntimeError, NotImplementedError, TypeError):  # a tensor of another kind
            return "unknown"
        return _NAMES.get(int(choice), f"number {int(choice)}")

    def why_not(self, name: str) -> str:
        """Return why the backend ``name``, which is wanted more, does not serve the call."""
        kind = self.query.device.type
        if kind == "cuda":
            return self._ask_torch(name)
        if kind == "cpu":
            return "it takes neither dropout nor every mask" if name == "flash" else "not for CPUs"
        return f"torch does not say why on {kind}"

    def _ask_torch(self, name: str) -> str:
        """Return what torch says on CUDA, which it does as warnings."""
        can_use = getattr(torch.backends.cuda, f"can_use_{name}_attention", None)
        if can_use is None:
            return "not in this version of torch"
        inputs = (self.query, self.key, self.value, self.mask)
        asked = torch.backends.cuda.SDPAParams(*inputs, self.dropout, self.causal, self.grouped)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            able = can_use(asked, True)
        if able:
            return "it could, but this version of torch prefers another"
        texts = [str(warning.message).partition(" (Triggered")[0].strip() for warning in said]
        # The last words of each are the place in torch's source.
        return " ".join(dict.fromkeys(text for text in texts if text)) or "torch does not say why"
