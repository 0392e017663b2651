"""Compares a training step on a batch with training steps on its parts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics import Metric

from lightning_opt.batching.splitting import Pieces, Splitter, spectral_norm_vectors
from lightning_opt.core.measure.exhaustion import is_out_of_memory
from lightning_opt.core.modules.batches import ADVICE, UnsplittableBatchError
from lightning_opt.core.modules.compiling import has_compiled_parts, run_eagerly
from lightning_opt.core.modules.patching import replaced
from lightning_opt.core.modules.preserve import isolated_random
from lightning_opt.core.modules.state_kinds import advanced, snapshot
from lightning_opt.core.modules.trial import (
    WrittenParameters,
    all_parameters,
    copy_batch,
    loss_of,
    without_side_effects,
)
from lightning_opt.core.numerics.norms import as_real

if TYPE_CHECKING:
    import lightning.pytorch as pl

TOLERANCE, TOLERANCE_16_BIT = 1e-3, 5e-2
"""Differences up to this share of the gradient's norm, or of a logged value, count as rounding. The
second is for models with 16-bit parameters."""

ROUNDING = 1e-6
"""Absolute differences between logged values up to this count as rounding."""

ONLY_FLOAT_IS_DROPOUT = ("scaled_dot_product_attention", "lstm", "gru", "rnn_tanh", "rnn_relu")
"""Functions with exactly one positional float argument, the dropout rate."""

LOG_PARAMETERS = (
    "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist",
    "sync_dist_group", "add_dataloader_idx", "batch_size", "metric_attribute", "rank_zero_only",
)  # fmt: skip
"""Positional parameters of ``LightningModule.log`` that follow name and value."""

MAX_NAMES = 5
"""Maximum number of names in a warning."""

PARTS = 3
"""Number of parts. Two parts would not reveal a loss over the hardest half of the samples."""


class _WithoutDropout(TorchFunctionMode):
    """Turns dropout off, including functional calls."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        if "dropout" in name and "native" not in name:
            return args[0] if args else kwargs["input"]
        if name in ONLY_FLOAT_IS_DROPOUT:
            args = tuple(0.0 if isinstance(value, float) else value for value in args)
            kwargs.pop("dropout_p", None)
        elif name == "multi_head_attention_forward":
            kwargs["training"] = False
        return func(*args, **kwargs)


class _FixedDraws(TorchDispatchMode):
    """Makes torch draw the same random numbers for a sample in a part as in the whole batch.

    The first step, on the whole batch, records torch's draws. In later steps, the n-th drawn tensor
    is overwritten with the part's rows of the n-th recorded tensor. A drawn permutation is replaced
    by the reversed order: a permutation of the whole batch does not split into ones of its parts.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorded: list[tuple[Tensor, list[Any]]] = []
        self._samples = 0

    def begin(self, start: int, samples: int) -> None:
        """Begin a step on ``samples`` samples, from index ``start`` of the whole batch on."""
        self._is_recording = self._samples == 0
        self._samples = self._samples or samples  # set by the first step
        self._start, self._part_samples, self._draw_index = start, samples, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags or not isinstance(result, Tensor):
            return result
        if func is torch.ops.aten.randperm.default:
            return result.copy_(torch.arange(len(result)).flip(0))
        # Draws with other numeric arguments, such as indices into a smaller batch, are kept.
        limits = [value for value in args if isinstance(value, (int, float))]
        if func is torch.ops.aten.multinomial.default:
            limits = [args[0].shape[-1]]
        if self._is_recording:
            self._recorded.append((result.detach().clone(), limits))
        elif self._draw_index < len(self._recorded):
            recorded, recorded_limits = self._recorded[self._draw_index]
            rows = self._rows(recorded, result.shape)
            if recorded_limits == limits and rows.shape == result.shape:
                result.copy_(rows)
        self._draw_index += 1
        return result

    def _rows(self, recorded: Tensor, shape: torch.Size) -> Tensor:
        """Return the rows of this part, along each dimension that grows with the samples."""
        for dimension, (whole, part) in enumerate(zip(recorded.shape, shape, strict=False)):
            per_sample = part // self._part_samples
            expected = self._samples * per_sample, self._part_samples * per_sample
            if whole != part and (whole, part) == expected:
                recorded = recorded.narrow(dimension, self._start * per_sample, part)
        return recorded


class Comparison:
    """Runs training steps on some samples of a batch, as a whole and in parts.

    Nothing is logged, and callbacks do not run. Random state, buffers, metrics, attributes,
    gradients and parameters are restored. Dropout is off. The samples of a part get the same random
    numbers as in the whole batch. BatchNorm uses its running statistics. Autocast is off, because
    its rounding would hide differences.

    Attributes:
        problem: The reason why nothing could be compared.
        fails_on_parts: Whether the batch cannot be split, or ``training_step`` fails on its parts.
        ran_out: Whether memory ran out.
        error: Norm of the difference between the gradients, as a share of the gradient's norm.
        tolerance: The share that counts as rounding.
        parameters: Names of parameters that ``training_step`` changes.
        state: Names of buffers and attributes that each step changes.
        logged: Names of logged values that are not the mean of the parts' values.
        sums: Names of logged values that are sums over samples.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        splitter: Splitter,
        batch: Any,
        batch_idx: int,
        runs_parts: bool,
    ) -> None:
        self._trainer, self._module, self._splitter = trainer, module, splitter
        self._batch, self._batch_idx = batch, batch_idx
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        # Without MicroBatching, each batch of a window updates these vectors.
        self._reset_vectors = spectral_norm_vectors(module) if runs_parts else []
        self.problem, self.fails_on_parts, self.ran_out, self.error = "", False, False, 0.0
        half = any(p.dtype in (torch.float16, torch.bfloat16) for p in module.parameters())
        self.tolerance = TOLERANCE_16_BIT if half else TOLERANCE
        self.parameters: list[str] = []
        self.state: list[str] = []
        self.logged: list[str] = []
        self.sums: set[str] = set()

    def count_samples(self) -> int:
        """Return the number of samples; 0 if the batch cannot be split."""
        try:
            samples = self._splitter.count_samples(self._batch)
            self._splitter.split(self._batch, min(2, samples))
        except UnsplittableBatchError as error:
            self.problem, self.fails_on_parts = str(error), True
            return 0
        return samples

    def compare(self, samples: int, number: int) -> None:
        """Compare a subset of at most ``samples`` samples with its parts.

        ``number`` selects the subset.
        """
        self._written, self._fixed_draws = WrittenParameters(self._module), _FixedDraws()
        self.problem, self.ran_out = "", False
        try:
            subsets = self._splitter.split(self._batch, -(-self.count_samples() // samples))
            self._compare_subset(*subsets[number % len(subsets)])
        except UnsplittableBatchError as error:
            self.problem, self.fails_on_parts = str(error), True
        except Exception as error:  # noqa: BLE001 - the real training step will raise it
            self.problem, self.ran_out = f"{type(error).__name__}: {error}", is_out_of_memory(error)

    def _compare_subset(self, subset: Any, samples: int) -> None:
        with self._trial():
            try:
                gradient, logged = self._step(subset, 0, samples)
            except Exception as error:
                if subset is self._batch or is_out_of_memory(error):
                    raise
                self._step(self._batch, 0, samples)  # raises if the whole batch fails too
                raise _failure(samples, error) from error
            after_one_step = snapshot(self._module, Metric)
            noise = float((self._step(subset, 0, samples)[0] - gradient).norm())
            after_two_steps = snapshot(self._module, Metric)
        norm = float(gradient.norm())
        if norm == 0.0:  # no loss, or samples without labels
            return
        parts = self._splitter.split(subset, min(PARTS, samples))
        shares = self._splitter.shares(parts)
        logged_in_parts = []
        with self._trial():
            steps = self._step_parts(parts)
            for (part_gradient, part_logged), share in zip(steps, shares, strict=True):
                gradient -= part_gradient * (1.0 if self._splitter.is_sum else share)
                logged_in_parts.append(part_logged)
            after_parts = snapshot(self._module, Metric)
        self.state = advanced(after_one_step, after_two_steps, after_parts)
        written = () if has_compiled_parts(self._module) else set(self._written.parameters or ())
        self.parameters = [n for n, p in all_parameters(self._module).items() if p in written]
        difference = float(gradient.norm())
        if not math.isfinite(difference):
            self.problem = (
                "the gradient is not finite. If a part of a batch has no labelled tokens, divide "
                "by `count.clamp(min=1)`."
            )
        elif difference > self.tolerance * norm and noise > difference / 10:
            moved = sorted(advanced(after_one_step, after_two_steps, after_two_steps))
            cause = f"training_step changes {moved[:MAX_NAMES]}, or because of" if moved else "of"
            self.problem = (
                "the same samples give another gradient when training_step runs again, because "
                f"{cause} state or random numbers from outside torch."
            )
        else:
            self.error = difference / norm
            for name, value in logged.items():
                values = [part_logged.get(name, math.nan) for part_logged in logged_in_parts]
                weighted = (value * share for value, share in zip(values, shares, strict=True))
                mean = float(sum(weighted) / sum(shares))
                if value and math.isclose(value, sum(values), rel_tol=self.tolerance):
                    self.sums.add(name)
                elif abs(value - mean) > self.tolerance * abs(value) + ROUNDING:
                    self.logged.append(name)

    def _step_parts(self, parts: Pieces) -> Iterator[tuple[Tensor, dict[str, float]]]:
        start, vectors = 0, [vector.clone() for vector in self._reset_vectors]
        for part, samples in parts:
            for vector, initial in zip(self._reset_vectors, vectors, strict=True):
                vector.copy_(initial)
            try:
                with isolated_random(self._module.device):
                    yield self._step(part, start, samples)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                raise _failure(samples, error) from error
            start += samples

    def _step(self, batch: Any, start: int, samples: int) -> tuple[Tensor, dict[str, float]]:
        """Return the gradient as a vector, and the values that are logged as means."""
        logged: dict[str, float] = {}

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            kwargs.update(zip(LOG_PARAMETERS, args, strict=False))
            value = value._forward_cache if isinstance(value, Metric) else value
            is_mean = kwargs.get("reduce_fx", "mean") == "mean" and "batch_size" not in kwargs
            if is_mean and value is not None and torch.as_tensor(value).ndim == 0:
                logged[name] = float(torch.as_tensor(value).detach())

        self._fixed_draws.begin(start, samples)
        with replaced(self._module, log=log), self._fixed_draws:
            loss = loss_of(self._trainer, self._module, copy_batch(batch), self._batch_idx)
            if loss is None:
                return torch.zeros(1, device=self._module.device), {}
            for parameter in self._parameters:
                parameter.grad = None
            self._module.backward(loss)
        return torch.cat([_gradient(parameter) for parameter in self._parameters]), logged

    @contextmanager
    def _trial(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(without_side_effects(self._trainer, self._module, self._written))
            stack.enter_context(_WithoutDropout())
            if has_compiled_parts(self._module):
                stack.enter_context(run_eagerly())
            for layer in self._module.modules():
                if isinstance(layer, _BatchNorm):
                    stack.enter_context(replaced(layer, training=False))
            if self._trainer.precision.endswith("-mixed"):
                plugin = self._trainer.precision_plugin
                stack.enter_context(replaced(plugin, train_step_context=nullcontext))
            for parameter in self._parameters:
                # Post-accumulate hooks may update weights as soon as a gradient is ready.
                hooks = parameter._post_accumulate_grad_hooks
                if hooks:
                    stack.callback(hooks.update, dict(hooks))
                    hooks.clear()
            yield


def _gradient(parameter: Tensor) -> Tensor:
    """Return a parameter's gradient as a float32 vector."""
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return as_real(dense).flatten().float()


def _failure(samples: int, error: Exception) -> Exception:
    # A step on a single sample may fail for reasons other than the split.
    kind = UnsplittableBatchError if samples > 1 else RuntimeError
    return kind(
        f"training_step fails on a part of the batch, but not on a larger part: "
        f"{type(error).__name__}: {error} Perhaps a tensor is padded to the longest "
        f"sample of the whole batch, or its first dimension does not index samples. {ADVICE}"
    )
