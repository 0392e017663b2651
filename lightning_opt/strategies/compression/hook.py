"""The communication hook of compressed DDP: exchanges each bucket of each step.

The hook adds each bucket's gradient to the bucket's residual. An exchange encodes the sum, sends it
and decodes the mean. The unsent rest stays in the residual.
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the classes
# themselves, not with strings.

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda import Event
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future

from lightning_opt.strategies.compression.buckets import Bucket, Buckets
from lightning_opt.strategies.compression.choice import Scheme
from lightning_opt.strategies.compression.exchange import (
    GatherExchange,
    TwoStageExchange,
    all_reduce_mean,
    dense_bytes,
)
from lightning_opt.strategies.compressors import Compressor, Quantize, Threshold, TopK
from lightning_opt.strategies.own_exchange import ExchangeThread

MODES = {type(None): 0.0, Quantize: 1.0, Threshold: 2.0, TopK: 3.0, torch.dtype: 5.0}
"""Values of ``comm/mode``; 4 for other compressors."""


class HostEvent:
    """Replaces a CUDA event; uses the host's clock."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "HostEvent") -> float:
        return 1e3 * (end.at - self.at)


@dataclass
class Traffic:
    """Counts the sent bytes since the last report, without reading from a device.

    Attributes:
        sent_bytes: Bytes that this rank has sent.
        dense_bytes: Bytes that an all-reduce of the same gradients would have sent.
        steps: Number of reduced backward passes.
        spans: For each bucket of the latest step, the events of its launch and arrival.
    """

    sent_bytes: int = 0
    dense_bytes: int = 0
    steps: int = 0
    spans: list[tuple[Any, Any]] = field(default_factory=list)

    def record_launch(
        self, sent: int, dense: int, device: torch.device
    ) -> Callable[[Future[Tensor]], Tensor]:
        """Count a bucket that is about to be sent, and return a callback for its future."""
        self.sent_bytes += sent
        self.dense_bytes += dense
        event: Any = partial(Event, enable_timing=True) if device.type == "cuda" else HostEvent
        span = event(), event()
        span[0].record()
        self.spans.append(span)

        def record_arrival(future: Future[Tensor]) -> Tensor:
            span[1].record()  # on a stream that waits for the future's value
            return future.value()

        return record_arrival

    def seconds(self) -> float:
        """Return the time with any bucket of the latest step in flight. Waits for the device."""
        total = end = 0.0
        for launched, arrived in self.spans:  # in the order of their launch
            arrived.synchronize()
            first = self.spans[0][0]
            start, end = end, max(first.elapsed_time(arrived), end)
            total += max(end - max(first.elapsed_time(launched), start), 0.0)
        return total / 1e3


@lru_cache(maxsize=1)
def second_group(default_group: Any) -> Any:
    """Return a second group of all ranks. Later runs reuse it, because a group cannot safely close.

    Every rank must call this. ``default_group`` is only the key under which the group is cached.
    """
    return dist.new_group()


class CompressedReduction:
    """A DDP communication hook that compresses with error feedback.

    The residual of a step is committed when the step is applied, that is at the next step or
    checkpoint. So a skipped or non-finite step does not change the residual.

    Args:
        names: The name of each parameter of the wrapped module.
        schemes: All schemes that may be used.
        scheme_at: Returns the scheme of a step (the first is 0), the same on every rank. Called
            once per step.
        error_feedback: Add the unsent rest to the next step's gradient.
        loss_scale: Returns the current loss scale of the gradients.
        clip: Clips a rank's gradient with this loss scale before it is added to the residual; for
            compressors that are ``late``.
        may_skip: Whether a step may leave parameters without a gradient
            (``find_unused_parameters``).
    """

    def __init__(
        self,
        names: Mapping[Tensor, str],
        schemes: Sequence[Scheme],
        scheme_at: Callable[[int], Scheme],
        *,
        error_feedback: bool = True,
        loss_scale: Callable[[], Tensor],
        clip: Callable[[Tensor, Tensor], None],
        may_skip: bool = False,
    ) -> None:
        self.buckets = Buckets()
        self.traffic = Traffic()
        self.step = -1
        self._names = names
        self._scheme_at = scheme_at
        self._error_feedback = error_feedback
        self._loss_scale = loss_scale
        self._clip = clip
        self._may_skip = may_skip
        self._world = dist.get_world_size()
        # Learned thresholds of a checkpoint, by the name of the bucket's first parameter.
        self._bounds: dict[str, float] = {}
        self._scheme: Scheme = None
        self._scale = torch.ones(())
        self._launched: list[Bucket] = []  # of the latest step
        self._elements = 0  # in the latest step
        self._thread = ExchangeThread()
        self._own_group: dist.ProcessGroup | None = None
        # The two-stage exchange cannot exclude unused parameters from its residual of the mean.
        is_quantized = any(isinstance(scheme, Quantize) for scheme in schemes)
        if is_quantized and self._world > 2 and not may_skip:
            self._own_group = second_group(dist.group.WORLD)
            # Connects the ranks now, not during a backward pass.
            dist.all_reduce(next(iter(names)).new_zeros(()), group=self._own_group)
        # Parameters with a gradient since the last exchange: these hooks run before DDP's.
        self._touched: set[Tensor] = set()
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._touched.add)
            for parameter in names
            if may_skip and parameter.requires_grad
        ]

    # --- a step -----------------------------------------------------------------------------------

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        gradient = bucket.buffer()
        if bucket.index() == 0:
            self._begin_step()
        scheme = self._scheme
        # Sparse gradients of embeddings are small. Complex gradients are pairs of real numbers.
        if gradient.layout is not torch.strided or bucket.parameters()[0].is_complex():
            return all_reduce_mean(gradient)
        self._elements += gradient.numel()
        dense = dense_bytes(gradient.numel(), gradient.element_size(), self._world)
        if isinstance(scheme, Compressor):
            if scheme.late:
                self._clip(gradient, self._scale)
            compressed, residual = self._begin_bucket(bucket, scheme)
            assert compressed.exchange is not None
            sent = compressed.exchange.sent_bytes
            start = partial(compressed.exchange.start, residual, gradient, self._scale)
        else:
            if self.buckets.may_be_nonzero:
                uncompressed, residual = self._begin_bucket(bucket, None)
                uncompressed.send_all(residual, gradient, self._scale)
            itemsize = gradient.element_size() if scheme is None else scheme.itemsize
            sent = dense_bytes(gradient.numel(), itemsize, self._world)
            start = partial(all_reduce_mean, gradient, scheme)
        self._touched.difference_update(bucket.parameters())
        record_arrival = self.traffic.record_launch(sent, dense, gradient.device)
        return start().then(record_arrival)

    def _begin_bucket(
        self, grad_bucket: GradBucket, compressor: Compressor | None
    ) -> tuple[Bucket, Tensor]:
        """Return the bucket of these gradients, and the residual to add to them."""
        parameters = {self._names[parameter]: parameter for parameter in grad_bucket.parameters()}
        bucket = self.buckets.get(parameters, grad_bucket.buffer())
        if bucket.compressor is not compressor:
            bucket.by_parameter()  # folds the residuals of the earlier exchange
            bucket.compressor, bucket.exchange = compressor, None
            group = self._own_group
            if group is not None and isinstance(compressor, Quantize):
                bucket.exchange = TwoStageExchange(compressor, bucket, group, self._thread)
            elif compressor is not None:
                bucket.exchange = GatherExchange(compressor, bucket, self._thread)
                bucket.exchange.codec.bound = self._bounds.get(next(iter(parameters)))
        # DDP discards the reduced gradient of a parameter that no rank used, and the bucket holds
        # its gradient of an earlier step.
        unused = [name for name, parameter in parameters.items() if parameter not in self._touched]
        self._launched.append(bucket)
        return bucket, bucket.begin_step(unused if self._may_skip else ())

    def _begin_step(self) -> None:
        self.commit()
        self.step += 1
        self.traffic.steps += 1
        self.traffic.spans.clear()
        self._elements = 0
        self._scheme = self._scheme_at(self.step)
        self._scale = self._loss_scale()
        if not isinstance(self._scheme, Compressor) and not self.buckets.may_be_nonzero:
            self.reset()  # frees buffers of the gradients' size

    def skip(self, parameters: Collection[Tensor], condition: Tensor | None = None) -> None:
        """Record that the latest step was not applied to these parameters.

        Args:
            parameters: All parameters of an optimizer.
            condition: Positive if the step was not applied; None for always.
        """
        names = [self._names[one] for one in parameters if one in self._names]
        for bucket in self._launched:
            bucket.skip(names, condition)

    def commit(self) -> None:
        """Commit the residuals of the latest step, for the parameters to which it was applied."""
        launched, self._launched = self._launched, []
        for bucket in launched if self._error_feedback else []:
            bucket.commit_step()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._thread.close()

    # --- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with residuals averaged over ranks. All ranks must call it."""
        self.commit()
        bounds = dict(self._bounds)
        for names, bucket in self.buckets.current.items():
            if bucket.exchange is not None and bucket.exchange.codec.bound is not None:
                bounds[names[0]] = float(bucket.exchange.codec.bound)
        # A bound of 0, NaN or infinity, from a step of zeros or NaN, will be learned again.
        bounds = {name: bound for name, bound in bounds.items() if 0 < bound < torch.inf}
        parameters = {name: parameter for parameter, name in self._names.items()}
        residuals = self.buckets.averaged(parameters)
        return {"step": self.step, "residuals": residuals, "bounds": bounds}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state of :meth:`state_dict`, at any number of ranks; reset if it is empty."""
        self.reset()
        self.step = state_dict.get("step", -1)
        if self._error_feedback:
            self.buckets.load(state_dict.get("residuals", {}))
        self._bounds = dict(state_dict.get("bounds", {}))

    def reset(self) -> None:
        self._launched = []
        self.buckets.load({})

    def read(self) -> dict[str, float]:
        """Return the values to log, per step since the last call. Waits for the device."""
        traffic, self.traffic = self.traffic, Traffic()
        steps = max(traffic.steps, 1)
        total = selected = self._elements
        for bucket in self._launched:
            if bucket.exchange is not None:
                selected += bucket.exchange.selected - bucket.committed.numel()
        return {
            "comm/bytes": traffic.sent_bytes / steps,
            "comm/ratio": traffic.dense_bytes / traffic.sent_bytes if traffic.sent_bytes else 1.0,
            "comm/selected": selected / total if total else 1.0,
            "comm/residual_norm": self.buckets.norm(),
            "comm/seconds": traffic.seconds(),
            "comm/mode": MODES.get(type(self._scheme), 4.0),
        }
