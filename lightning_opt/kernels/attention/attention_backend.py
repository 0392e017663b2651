"""Reports the backend that torch uses for scaled dot-product attention.

To find a call's backend, this file asks torch's own selection function, and computes no attention.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_opt.core.modules.compiling import has_compiled_parts
from lightning_opt.core.modules.patching import replaced
from lightning_opt.core.output.report import Report
from lightning_opt.trainer.run_callback import RunCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl

BACKENDS = {
    SDPBackend.FLASH_ATTENTION.value: "flash",
    SDPBackend.CUDNN_ATTENTION.value: "cudnn",
    SDPBackend.EFFICIENT_ATTENTION.value: "efficient",
    SDPBackend.MATH.value: "math",
}
FUNCTION_NAME = "scaled_dot_product_attention"


class AttentionBackend(RunCallback):
    """Reports which attention backend torch uses, and warns if it is the slow one.

    ``torch.nn.functional.scaled_dot_product_attention`` has several implementations, called
    backends, and silently uses the first that supports a call. A mask or a dropout that the fast
    backends do not support therefore costs speed and memory unnoticed. This callback records the
    calls of the first batch, and warns once if any of them uses the slow backend, math. Its
    :meth:`report` lists the backend of each kind of call, and the reasons why better backends are
    not used. Later batches run at full speed.

    On a CPU, torch has flash and math. The calls of a compiled model are not recorded, because
    recording would compile it twice.

    Nothing is logged.

    Raises:
        ValueError: In ``setup`` for a second ``AttentionBackend``.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> attention = lo.AttentionBackend()
        >>> trainer = L.Trainer(callbacks=[attention], logger=False)
        >>> attention.report().rows
        []

    Args:
        None.
    """

    only_one = True
    not_pickled = ("_recorder",)

    def __init__(self) -> None:
        self._recorder: CallRecorder | None = None
        self._reset()

    def _reset(self) -> None:
        self._calls: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._is_first_batch = True
        self._is_compiled = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Discard the calls of an earlier run."""
        super().setup(trainer, pl_module, stage)
        self.release(trainer)
        self._reset()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Record the calls of the first batch."""
        self._start_recording(trainer, pl_module)

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Record the calls of the first batch outside of training."""
        if trainer.state.fn != "fit":
            self._start_recording(trainer, pl_module)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def _start_recording(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._is_first_batch:
            return
        self._is_first_batch = False
        self._is_compiled = has_compiled_parts(trainer.strategy.model or pl_module)
        if not self._is_compiled:
            self._recorder = CallRecorder(self._calls)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Stop recording, and warn if math is used."""
        if self._recorder is None:
            return
        self.release(trainer)
        row = next((row for row in self._calls.values() if row["backend"] == "math"), None)
        if row is not None:
            rank_zero_warn(
                f"AttentionBackend: attention with queries {row['query']} in {row['dtype']}, "
                f"mask {row['mask']}, dropout {row['dropout']:g} uses math, which is correct "
                f"but slow and stores the whole matrix of scores. Reasons: {row['better ones']}. "
                "`report()` lists all calls."
            )

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = on_train_batch_end

    def report(self) -> Report:
        """Return one row for each kind of call in the first batch."""
        notes = []
        if self._is_compiled:
            notes.append(
                "The model is compiled, so its calls were not recorded. torch.compile chooses by "
                "the same rules: run a batch without it to see the backends."
            )
        elif not self._calls:
            notes.append("No call of scaled_dot_product_attention was recorded.")
        return Report("Attention backends", list(self._calls.values()), notes)

    def release(self, trainer: pl.Trainer) -> None:
        """Restore ``scaled_dot_product_attention``."""
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None


class CallRecorder(ExitStack):
    """Records each call of scaled dot-product attention until :meth:`close`.

    The function is replaced in every loaded Python module that imports it by name. A
    ``TorchFunctionMode`` would miss the calls inside ``nn.MultiheadAttention``, and changes the
    code path of that module in evaluation.

    Args:
        rows: Dictionary to which a row of the report is added for each kind of call.
    """

    def __init__(self, rows: dict[tuple[Any, ...], dict[str, Any]]) -> None:
        super().__init__()
        self._rows = rows
        self._original: Callable[..., Tensor] = functional.scaled_dot_product_attention
        for module in list(sys.modules.values()):
            function = getattr(module, "__dict__", {}).get(FUNCTION_NAME)
            if function is self._original and module is not torch._C._nn:
                self.enter_context(replaced(module, **{FUNCTION_NAME: self}))

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if not torch.compiler.is_compiling():
            self._record(*args, **kwargs)
        return self._original(*args, **kwargs)

    def _record(
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
            "dtype": _dtype_and_shape(query)[0],
            "query": _dtype_and_shape(query)[1],
            "key": _dtype_and_shape(key)[1],
            "mask": "none" if attn_mask is None else " ".join(_dtype_and_shape(attn_mask)),
            "causal": is_causal,
            "dropout": float(dropout_p),
        }
        kind = (*call.values(), _dtype_and_shape(value))
        if kind in self._rows:
            self._rows[kind]["calls"] += 1
            return
        arguments = (query, key, value, attn_mask, dropout_p, is_causal)
        choose = partial(torch._fused_sdp_choice, *arguments, scale=scale, enable_gqa=enable_gqa)
        backend = _backend_of(choose)
        reasons = "; ".join(
            f"{name}: {_reason_not_used(name, call['device'], choose)}"
            for name in takewhile(lambda name: name != backend, BACKENDS.values())
        )
        self._rows[kind] = {"backend": backend, "calls": 1, **call, "better ones": reasons}


def _dtype_and_shape(tensor: Tensor) -> tuple[str, str]:
    # A nested tensor of the strided layout raises an error if it is asked for its shape.
    has_shape = not tensor.is_nested or tensor.layout is torch.jagged
    shape = str(tuple(tensor.shape)) if has_shape else "nested"
    return str(tensor.dtype).removeprefix("torch."), shape


def _as_autocast(tensor: Tensor | None) -> Tensor | None:
    """Return ``tensor``, or an empty tensor of the dtype that autocast would convert it to."""
    if tensor is None or tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return tensor
    device_type = tensor.device.type
    if not torch.is_autocast_enabled(device_type):
        return tensor
    dtype = torch.get_autocast_dtype(device_type)
    if tensor.dtype is dtype:
        return tensor
    return torch.empty_like(tensor, dtype=dtype).requires_grad_(tensor.requires_grad)


def _backend_of(choose: Callable[[], int]) -> str:
    try:
        choice = choose()
    except (RuntimeError, NotImplementedError, TypeError):  # raised for unusual tensors
        return "unknown"
    return BACKENDS.get(int(choice), f"number {int(choice)}")


def _reason_not_used(name: str, device: str, choose: Callable[[], int]) -> str:
    """Return the reason why the preferred backend ``name`` is not used for a call."""
    if device == "cpu" and name != "flash":
        return "not for CPUs"
    backend = next(SDPBackend(number) for number, other in BACKENDS.items() if other == name)
    # With only this backend allowed, torch raises an error and gives its reasons as warnings.
    # (`torch.backends.cuda.can_use_flash_attention` prints them to the process's standard error.)
    with warnings.catch_warnings(record=True) as caught, sdpa_kernel(backend):
        warnings.simplefilter("always")
        if _backend_of(choose) == name:
            return "it could, but it is disabled or torch prefers another"
    reasons: list[str] = []
    section = ""
    for warning in caught:
        # Each warning ends with its position in torch's source; remove that.
        text = str(warning.message).partition(" (Triggered")[0].strip()
        if text.endswith("not used because:"):
            section = text.lower()
        elif name in section:
            reasons.append(text)
    return " ".join(dict.fromkeys(reasons)) or "torch gives no reason"
