"""The communication hook: what happens to each bucket at each step."""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the classes
# themselves, and strings would not do.

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.utils.hooks import RemovableHandle

from lightning_opt.strategies.compression.choosing.auto import AutoChoice
from lightning_opt.strategies.compression.choosing.measurements import Scheme
from lightning_opt.strategies.compression.codecs.compressors import (
    Compressor,
    Quantize,
    Threshold,
    TopK,
)
from lightning_opt.strategies.compression.exchange.channels import (
    Channel,
    DenseChannel,
    GatherChannel,
    all_reduce_mean,
    dense_bytes,
)
from lightning_opt.strategies.compression.exchange.error_feedback import Residuals
from lightning_opt.strategies.compression.exchange.momentum import Velocity
from lightning_opt.strategies.compression.exchange.two_stage import TwoStageChannel, is_staged

MODES: dict[type, float] = {
    type(None): 0.0,
    Quantize: 1.0,
    Threshold: 2.0,
    TopK: 3.0,
    torch.dtype: 5.0,
}
"""What ``comm/mode`` logs, since loggers take numbers; 4 for a compressor of somebody else's."""

STAGED_FROM = 1024
"""Elements of a shard below which a sparse message is not worth a second stage."""


@dataclass
class Traffic:
    """What this rank sent since the last reset. Counting costs no look at any device.

    Attributes:
        sent_bytes: Bytes handed to the network by this rank.
        dense_bytes: What an all-reduce of the same gradients would have sent.
        seconds: Time during which at least one bucket was on its way.
        steps: Reduced backward passes.
        landed: When the latest bucket arrived, by ``perf_counter``.
    """

    sent_bytes: int = 0
    dense_bytes: int = 0
    seconds: float = 0.0
    steps: int = 0
    landed: float = 0.0
    _open: int = field(default=0, repr=False)
    _since: float = field(default=0.0, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def opened(self, sent: int, dense: int) -> None:
        """Count a bucket that is launched."""
        with self._lock:
            self.sent_bytes += sent
            self.dense_bytes += dense
            if self._open == 0:
                self._since = time.perf_counter()
            self._open += 1

    def closed(self, _: object = None) -> None:
        """Count a bucket that has arrived."""
        with self._lock:
            self._open -= 1
            self.landed = time.perf_counter()
            if self._open == 0:
                self.seconds += self.landed - self._since

    def reset(self) -> None:
        """Start counting anew."""
        with self._lock:
            self.sent_bytes = self.dense_bytes = self.steps = 0
            self.seconds = 0.0


@dataclass
class Bucket:
    """One bucket of the present layout.

    Attributes:
        residual: Its flat residual.
        known: Whether the residual may hold anything from before this layout.
        channel: How it travels; None before it has its first.
        scheme: What the channel was made for.
        velocity: Its momentum, where that is applied before compression.
    """

    residual: Tensor
    known: bool = False
    channel: Channel | None = None
    scheme: Scheme = None
    velocity: Velocity | None = None

    @property
    def owes(self) -> bool:
        """Whether the residual may hold anything."""
        return self.known if self.channel is None else self.channel.owes

    def fold(self) -> None:
        """Gather in the residual all that this rank owes."""
        if self.channel is not None:
            self.channel.fold()


class CompressedReduction:
    """A DDP communication hook that compresses with error feedback.

    Args:
        names: The name of each parameter of the wrapped module.
        compressor_at: Says for a step (the first is 0) how to compress it; None for dense. It must
            say the same on every rank.
        error_feedback: Add what was not sent to the next step's gradient.
        loss_scale: Says what the gradients are multiplied with at this moment.
        may_skip: Whether a step may leave parameters without a gradient
            (``find_unused_parameters``).
        auto: Chooses how to send each bucket, instead of ``compressor_at``.
        sparse_stages_from: Ranks from which on :class:`TopK` travels in two stages.
        momentum: Share of a velocity that is left after a step, to send velocities instead of
            gradients; needs error feedback, and that no parameter is skipped.
    """

    def __init__(
        self,
        names: Mapping[Tensor, str],
        compressor_at: Callable[[int], Compressor | None],
        *,
        error_feedback: bool = True,
        loss_scale: Callable[[], float],
        may_skip: bool = False,
        auto: AutoChoice | None = None,
        sparse_stages_from: int = 32,
        momentum: float | None = None,
    ) -> None:
        self.residuals = Residuals()
        self.velocities = Residuals()
        self.traffic = Traffic()
        self.step = -1
        self._names = names
        self._compressor_at = compressor_at
        self._error_feedback = error_feedback
        self._loss_scale = loss_scale
        self._may_skip = may_skip
        self._auto = auto
        self._momentum = momentum
        self._world = dist.get_world_size()
        self._is_staged = partial(
            is_staged, world=self._world, sparse_from=sparse_stages_from, may_skip=may_skip
        )
        self._buckets: dict[tuple[int, ...], Bucket] = {}
        self._compressor: Compressor | None = None
        self._sent_as: Counter[float] = Counter()
        self._scale = 1.0
        self._launched: list[Channel] = []
        self._ended = True
        self._worker: ThreadPoolExecutor | None = None
        self._touched: set[Tensor] = set()
        self._handles: list[RemovableHandle] = []
        if may_skip:
            # Fires before DDP hears of the gradient, so a bucket knows which of its parameters the
            # backward passes since the last exchange have reached.
            self._handles = [
                parameter.register_post_accumulate_grad_hook(self._touched.add)
                for parameter in names
                if parameter.requires_grad
            ]

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Average one bucket over the ranks; see :func:`reduce_bucket`."""
        if bucket.index() == 0:
            self._begin_step()
        gradient = bucket.buffer()
        if gradient.layout is not torch.strided:  # an embedding's sparse gradient is small already
            return all_reduce_mean(gradient)
        auto = self._auto
        scheme = self._compressor if auto is None else auto.scheme(bucket.index(), gradient)
        self._sent_as[MODES.get(type(scheme), 4.0)] += gradient.numel()
        dense = dense_bytes(gradient.numel(), gradient.element_size(), self._world)
        mixed = auto is not None and auto.mixed
        plain = scheme is None and self._momentum is None and not mixed
        if plain and not self._owes(bucket):
            self.traffic.opened(dense, dense)
            future = all_reduce_mean(gradient)
            if self._may_skip:
                self._touched.difference_update(bucket.parameters())
        else:
            state = self._bucket(bucket)
            held = self._hold_unused(bucket, state) if self._may_skip else []
            channel = self._channel(state, scheme, gradient)
            if isinstance(channel, DenseChannel):
                channel.keeps = bool(held)
            self._launched.append(channel)
            self.traffic.opened(channel.sent_bytes, dense)
            if state.velocity is not None:
                state.velocity.advance(gradient, self._scale, channel)
            future = channel.start(gradient, self._scale)
            if held:
                future = future.then(partial(_give_back, held))
        future.add_done_callback(self.traffic.closed)
        return future

    def _owes(self, bucket: GradBucket) -> bool:
        return len(self.residuals) > 0 and self._bucket(bucket).owes

    def _begin_step(self) -> None:
        self.step += 1
        self.traffic.steps += 1
        self._end_step()
        self._ended = False
        self._launched = []
        self._sent_as.clear()
        if self._auto is None:
            self._compressor = self._compressor_at(self.step)
        else:
            self._auto.begin_step(self.traffic.landed)
        self._scale = self._loss_scale()

    def _end_step(self) -> None:
        """Draw the consequences of the last step, once it is known whether it will be applied."""
        if self._ended:
            return
        self._ended = True
        flagged = any(channel.flagged for channel in self._launched)
        if self._error_feedback and flagged:
            # The last step will not have been applied, to no parameter.
            for channel in self._launched:
                if not channel.flagged:
                    channel.take_back()
        for channel in self._launched:
            channel.forget()
        for state in self._buckets.values():
            if state.velocity is not None:
                state.velocity.end_step(applied=not flagged)

    def _bucket(self, bucket: GradBucket) -> Bucket:
        """Return the state of a bucket, made anew when DDP has arranged the buckets anew."""
        parameters = bucket.parameters()
        key = tuple(map(id, parameters))
        state = self._buckets.get(key)
        if state is None:
            for other in [other for other in self._buckets if not set(other).isdisjoint(key)]:
                self._buckets.pop(other).fold()
            names = [self._names[parameter] for parameter in parameters]
            known = any(name in self.residuals for name in names)
            numels = [parameter.numel() for parameter in parameters]
            state = Bucket(self.residuals.bind(names, numels, bucket.buffer()), known)
            if self._momentum is not None:
                kept = self.velocities.bind(names, numels, bucket.buffer())
                state.velocity = Velocity(kept, self._momentum)
            self._buckets[key] = state
        return state

    def _channel(self, state: Bucket, scheme: Scheme, gradient: Tensor) -> Channel:
        if state.channel is None or state.scheme is not scheme:
            state.fold()
            state.channel = self._make_channel(state, scheme, gradient)
            state.scheme = scheme
        if not self._error_feedback:
            state.fold()
            state.residual.zero_()
        return state.channel

    def _make_channel(self, state: Bucket, scheme: Scheme, gradient: Tensor) -> Channel:
        residual = state.residual
        if not isinstance(scheme, Compressor):
            return DenseChannel(residual, state.owes and self._error_feedback, gradient, scheme)
        staged = self._is_staged(scheme)
        if staged and (isinstance(scheme, Quantize) or len(residual) >= STAGED_FROM * self._world):
            if self._worker is None:
                # All ranks come here at the same bucket of the same step.
                self._worker = ThreadPoolExecutor(1, thread_name_prefix="compressed-ddp")
                self._own_group = dist.new_group()
            return TwoStageChannel(scheme, residual, self._own_group, self._worker)
        return GatherChannel(scheme, residual)

    def _hold_unused(self, bucket: GradBucket, state: Bucket) -> list[tuple[Tensor, Tensor]]:
        """Set aside the residual of parameters that took no part in this step.

        DDP gives a parameter that no rank used no gradient, so what would be sent for it was lost;
        and what it finds in their ``.grad`` is an earlier step's.
        """
        held = []
        parameters = bucket.parameters()
        parts = state.residual.split([parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            if parameter in self._touched:
                self._touched.remove(parameter)
            else:
                held.append((part, part.clone()))
                part.zero_()
        return held

    def close(self) -> None:
        """Take back what was registered with the model's parameters."""
        for handle in self._handles:
            handle.remove()
        if self._worker is not None:
            self._worker.shutdown(wait=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the mean of the ranks' residuals and the step. All ranks must call it."""
        self._end_step()
        for state in self._buckets.values():
            state.fold()
        sent = 0 if self._auto is None else self._auto.sent
        return {
            "step": self.step,
            "residuals": self.residuals.averaged(),
            "velocities": self.velocities.averaged(),
            "sent": sent,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, at any number of ranks."""
        self.step = state_dict["step"]
        self.residuals.load(state_dict["residuals"])
        if self._momentum is not None:
            self.velocities.load(state_dict.get("velocities", {}))
        if self._auto is not None:
            self._auto.sent = state_dict.get("sent", 0)

    def read(self) -> dict[str, float]:
        """Return what the strategy logs, per step since the last call. Reads from the device."""
        traffic, channels = self.traffic, self._launched
        steps = max(traffic.steps, 1)
        total = self._sent_as.total()
        compressed = sum(channel.residual.numel() for channel in channels)
        selected = sum(channel.selected for channel in channels) + total - compressed
        values = {
            "bytes": traffic.sent_bytes / steps,
            "ratio": traffic.dense_bytes / traffic.sent_bytes if traffic.sent_bytes else 1.0,
            "selected": selected / total if total else 1.0,
            "residual_norm": self.residuals.norm(),
            "seconds": traffic.seconds / steps,
            "mode": max(self._sent_as, key=self._sent_as.__getitem__, default=0.0),
        }
        traffic.reset()
        return values


def reduce_bucket(state: CompressedReduction, bucket: GradBucket) -> Future[Tensor]:
    """Average one bucket over the ranks. The hook that is registered with DDP."""
    return state.reduce(bucket)


def _give_back(held: list[tuple[Tensor, Tensor]], future: Future[Tensor]) -> Tensor:
    for part, residual in held:
        part.copy_(residual)
    return future.value()
