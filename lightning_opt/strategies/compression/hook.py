"""The communication hook: what happens to each bucket at each step."""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the classes
# themselves, and strings would not do.

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda import Event
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future

from lightning_opt.strategies.compression.choosing.auto import AutoChoice
from lightning_opt.strategies.compression.choosing.measurements import Scheme
from lightning_opt.strategies.compression.exchange.buckets import Bucket, Buckets
from lightning_opt.strategies.compression.exchange.channels import (
    Channel,
    GatherChannel,
    all_reduce_mean,
    dense_bytes,
)
from lightning_opt.strategies.compression.exchange.low_rank import LowRankChannel
from lightning_opt.strategies.compression.exchange.residuals import Residual
from lightning_opt.strategies.compression.exchange.two_stage import TwoStageChannel, is_staged
from lightning_opt.strategies.compressors import Compressor, PowerSGD, Quantize, Threshold, TopK

MODES = {type(None): 0.0, Quantize: 1.0, Threshold: 2.0, TopK: 3.0, torch.dtype: 5.0}
"""What ``comm/mode`` logs, since loggers take numbers; 4 for a compressor of somebody else's."""

LAST = 2**60
"""A step after which the scheme stays what it is."""

STAGED_FROM = 1024
"""Elements of a shard below which a sparse message is not worth a second stage."""


class HostEvent:
    """What an event of a device is, by the host's clock."""

    def record(self) -> None:
        """Take down the time."""
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        """There is nothing to wait for."""

    def elapsed_time(self, end: "HostEvent") -> float:
        """Return the milliseconds up to a later event."""
        return 1e3 * (end.at - self.at)


@dataclass
class Traffic:
    """What this rank sent since the last report. Counting costs no look at any device.

    Attributes:
        sent_bytes: Bytes handed to the network by this rank.
        dense_bytes: What an all-reduce of the same gradients would have sent.
        steps: Reduced backward passes.
        spans: When each bucket of the latest step was launched and had arrived.
    """

    sent_bytes: int = 0
    dense_bytes: int = 0
    steps: int = 0
    spans: list[tuple[Any, Any]] = field(default_factory=list)

    def opened(self, sent: int, dense: int, on: torch.device) -> Callable[[Future[Tensor]], Tensor]:
        """Count a bucket that is launched, and return what its future calls then."""
        self.sent_bytes += sent
        self.dense_bytes += dense
        event: Any = partial(Event, enable_timing=True) if on.type == "cuda" else HostEvent
        span = event(), event()
        span[0].record()
        self.spans.append(span)

        def arrived(future: Future[Tensor]) -> Tensor:
            span[1].record()  # on a stream that waits for what the future holds
            return future.value()

        return arrived

    def seconds(self) -> float:
        """Return for how long the latest step had a bucket on its way. Waits for the device."""
        total = end = 0.0
        for launched, arrived in self.spans:  # in the order in which they were launched
            arrived.synchronize()
            first = self.spans[0][0]
            start, end = end, max(first.elapsed_time(arrived), end)
            total += max(end - max(first.elapsed_time(launched), start), 0.0)
        return total / 1e3


class CompressedReduction:
    """A DDP communication hook that compresses with error feedback.

    What a step leaves unsent is kept only once the step has been applied: the next step, or a
    checkpoint, settles it. So a step that a guard or a loss scaler leaves out takes back all that
    it has brought, and one that is not finite is forgotten.

    Args:
        names: The name of each parameter of the wrapped module.
        scheme_at: Says for a step (the first is 0) how to send it, the same on every rank.
        error_feedback: Add what was not sent to the next step's gradient.
        loss_scale: Says what the gradients are multiplied with at this moment.
        clip: Clips a rank's gradient with this loss scale before it is added to what is owed; for
            compressors that are ``late``.
        may_skip: Whether a step may leave parameters without a gradient
            (``find_unused_parameters``).
        auto: Chooses how to send a step, instead of ``scheme_at``.
    """

    def __init__(
        self,
        names: Mapping[Tensor, str],
        scheme_at: Callable[[int], Scheme],
        *,
        error_feedback: bool = True,
        loss_scale: Callable[[], Tensor],
        clip: Callable[[Tensor, Tensor], None],
        may_skip: bool = False,
        auto: AutoChoice | None = None,
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
        self._auto = auto
        self._world = dist.get_world_size()
        # What codecs had learned, by the name of their bucket's first parameter.
        self._bounds: dict[str, float] = {}
        self._scheme: Scheme = None
        self._scale = torch.ones(())
        self._launched: list[Bucket] = []
        self._sent_as: Counter[float] = Counter()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="compressed-ddp")
        self._own_group: dist.ProcessGroup | None = None
        schemes = [scheme_at(LAST)] if auto is None else auto.schemes
        if not may_skip and any(map(is_staged, schemes)):
            # What an unused parameter is owed as a mean could not be set aside.
            self._own_group = dist.new_group()
            # Connects the ranks now, not in the midst of a backward pass.
            dist.all_reduce(next(iter(names)).new_zeros(()), group=self._own_group)
        self._touched: set[Tensor] = set()
        # Fires before DDP hears of the gradient, so a bucket knows which of its parameters the
        # backward passes since the last exchange have reached.
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._touched.add)
            for parameter in names
            if may_skip and parameter.requires_grad
        ]

    # --- a step -----------------------------------------------------------------------------------

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Average one bucket over the ranks; see :func:`reduce_bucket`."""
        if bucket.index() == 0:
            self._begin_step()
        gradient, scheme = bucket.buffer(), self._scheme
        if gradient.layout is not torch.strided:  # an embedding's sparse gradient is small already
            return all_reduce_mean(gradient)
        if self._auto is not None:
            self._auto.note(bucket.index(), gradient)
        self._sent_as[MODES.get(type(scheme), 4.0)] += gradient.numel()
        dense = dense_bytes(gradient.numel(), gradient.element_size(), self._world)
        if isinstance(scheme, Compressor):
            if scheme.late:
                self._clip(gradient, self._scale)
            channel = self._begin(bucket, scheme).channel
            assert channel is not None
            arrived = self.traffic.opened(channel.sent_bytes, dense, gradient.device)
            future = channel.start(gradient, self._scale)
        else:
            if self.buckets.any_owed:
                self._begin(bucket, None).residual.flush(gradient, self._scale)
            itemsize = gradient.element_size() if scheme is None else scheme.itemsize
            sent = dense_bytes(gradient.numel(), itemsize, self._world)
            arrived = self.traffic.opened(sent, dense, gradient.device)
            future = all_reduce_mean(gradient, scheme)
        self._touched.difference_update(bucket.parameters())
        return future.then(arrived)

    def _begin(self, bucket: GradBucket, compressor: Compressor | None) -> Bucket:
        """Add a bucket's gradient to what it is owed."""
        parameters = {self._names[parameter]: parameter for parameter in bucket.parameters()}
        state = self.buckets.of(parameters, bucket.buffer())
        if state.compressor is not compressor:
            state.fold()
            state.compressor, state.channel = compressor, None
            if compressor is not None:
                state.channel = self._make_channel(compressor, state.residual, parameters)
        state.residual.add(bucket.buffer(), self._scale)
        if self._may_skip:
            # DDP gives a parameter that no rank used no gradient, so what would be sent for it was
            # lost; and what it finds in their ``.grad`` is an earlier step's.
            for name, parameter in parameters.items():
                if parameter not in self._touched:
                    state.residual.set_aside(name)
        self._launched.append(state)
        return state

    def _begin_step(self) -> None:
        self._settle()
        self.step += 1
        self.traffic.steps += 1
        self.traffic.spans.clear()
        self._sent_as.clear()
        if self._auto is None:
            self._scheme = self._scheme_at(self.step)
        else:
            self._scheme = self._auto.begin_step()
        self._scale = self._loss_scale()
        if not isinstance(self._scheme, Compressor) and not self.buckets.any_owed:
            self.forget()  # and with it buffers of the gradients' size

    def leave_out(self, parameters: Collection[Tensor], condition: Tensor | None = None) -> None:
        """The latest step was not applied to these parameters.

        Args:
            parameters: All of an optimizer's.
            condition: Holds where that is so; None if it is.
        """
        names = [self._names[one] for one in parameters if one in self._names]
        for state in self._launched:
            state.residual.hold(names, condition)

    def _settle(self) -> None:
        """Keep what the latest step left unsent, as far as the step has been applied."""
        launched, self._launched = self._launched, []
        for state in launched if self._error_feedback else []:
            if not state.residual.is_left_out:
                state.commit()

    # --- buckets ----------------------------------------------------------------------------------

    def _make_channel(
        self, compressor: Compressor, residual: Residual, parameters: Mapping[str, Tensor]
    ) -> Channel:
        if isinstance(compressor, PowerSGD):
            shapes = [parameter.shape for parameter in parameters.values()]
            return LowRankChannel(compressor.rank, residual, shapes)
        numel = residual.kept.numel()
        large = isinstance(compressor, Quantize) or numel >= STAGED_FROM * self._world
        if self._own_group is None or not (large and is_staged(compressor)):
            return GatherChannel(compressor, residual, self._bounds.get(next(iter(parameters))))
        return TwoStageChannel(compressor, residual, self._own_group, self._worker)

    def close(self) -> None:
        """Take back what was registered with the model's parameters."""
        for handle in self._handles:
            handle.remove()
        self._worker.shutdown(wait=False)

    # --- what lasts -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the means over the ranks of what is owed, and the step. All ranks must call it."""
        self._settle()
        bounds = dict(self._bounds)
        for names, state in self.buckets.present.items():
            if isinstance(state.channel, GatherChannel) and state.channel.bound is not None:
                bounds[names[0]] = float(state.channel.bound)
        return {
            "step": self.step,
            "residuals": self.buckets.averaged(),
            "bounds": bounds,
            "choice": None if self._auto is None else self._auto.name,
            "ramped": 0 if self._auto is None else self._auto.ramped,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, at any number of ranks; begin anew if empty."""
        self.forget()
        self.step = state_dict.get("step", -1)
        if self._error_feedback:
            self.buckets.load(state_dict.get("residuals", {}))
        self._bounds = dict(state_dict.get("bounds", {}))
        if self._auto is not None:
            self._auto.restore(state_dict.get("choice"), state_dict.get("ramped", 0))

    def forget(self) -> None:
        """Drop all that is owed, since the weights are no longer those that it is owed to."""
        self._launched = []
        self.buckets.load({})

    def read(self) -> dict[str, float]:
        """Return what the strategy logs, per step since the last call. Reads from the device."""
        traffic, self.traffic = self.traffic, Traffic()
        steps = max(traffic.steps, 1)
        total = selected = self._sent_as.total()
        for state in self._launched:
            if state.channel is not None:
                selected += state.channel.selected - state.residual.kept.numel()
        return {
            "comm/bytes": traffic.sent_bytes / steps,
            "comm/ratio": traffic.dense_bytes / traffic.sent_bytes if traffic.sent_bytes else 1.0,
            "comm/selected": selected / total if total else 1.0,
            "comm/residual_norm": self.buckets.norm(),
            "comm/seconds": traffic.seconds(),
            "comm/mode": max(self._sent_as, key=self._sent_as.__getitem__, default=0.0),
        }


def reduce_bucket(state: CompressedReduction, bucket: GradBucket) -> Future[Tensor]:
    """Average one bucket over the ranks. The hook that is registered with DDP."""
    return state.reduce(bucket)
