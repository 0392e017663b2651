"""What there is to choose by: what a run's steps, network and processors take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_opt.strategies.compression.choosing.cost_model import (
    LATE_MARGIN,
    MARGIN,
    Line,
    Option,
    exchange_seconds,
    fit_line,
)
from lightning_opt.strategies.compression.choosing.network_probe import agree, probe, time_of
from lightning_opt.strategies.compression.exchange.channels import dense_bytes
from lightning_opt.strategies.compression.exchange.two_stage import is_staged
from lightning_opt.strategies.compressors import Compressor, Quantize, TopK

Scheme = Compressor | torch.dtype | None
"""How buckets are sent: compressed, cast to a narrower dtype, or as they are."""

SAMPLE = 2**20
"""Elements of a gradient on which compressors are timed."""

REPEATS = 3
"""How often; the best counts."""


Costs = Sequence[Line]
"""Seconds of processor time by the elements of a bucket, three lines: adding the gradient to the
residual and writing the message; making room for the sum of the messages; adding one message up."""


def measure_costs(scheme: Scheme, sample: Tensor) -> Costs:
    """Time a scheme on finite values, a piece of a real gradient."""
    timed: list[list[tuple[float, float]]] = [[], [], []]
    for numel in sorted({max(len(sample) // 8, 1), len(sample)}):
        for times, call in zip(timed, _calls(scheme, sample[:numel]), strict=True):
            call()  # allocates, compiles, and finds the first threshold
            best = min(time_of(call, sample.device) for _ in range(REPEATS))
            times.append((numel, best))
    return [fit_line(samples) for samples in timed]


def _calls(scheme: Scheme, gradient: Tensor) -> list[Callable[[], object]]:
    """Return what compresses, makes room and decodes."""
    if scheme is None:
        return [_nothing, _nothing, _nothing]
    mean = torch.zeros_like(gradient)
    if isinstance(scheme, torch.dtype):
        narrow = gradient.to(scheme)
        return [lambda: narrow.copy_(gradient), _nothing, lambda: mean.copy_(narrow)]
    codec, residual = scheme.codec(gradient.numel(), gradient.device), torch.zeros_like(gradient)
    return [
        lambda: codec.compress(residual.add_(gradient)),
        mean.zero_,
        lambda: codec.decompress_add(codec.message, mean, 0.5),
    ]


def _nothing() -> None:
    """What dense exchanges take of the processor is part of what the network takes."""


def name_of(scheme: Scheme) -> str:
    """Return what people call a scheme."""
    if scheme is None:
        return "uncompressed"
    if isinstance(scheme, TopK):
        return f"TopK({scheme.ratio:g})"
    if isinstance(scheme, Quantize):
        return f"Quantize({scheme.bits})"
    return str(scheme).removeprefix("torch.")


def option_of(
    scheme: Scheme, costs: Costs, sizes: Sequence[tuple[int, int]], device: torch.device
) -> Option:
    """Put together what each bucket would take.

    Args:
        scheme: How the buckets would be sent.
        costs: What that was seen to take.
        sizes: Elements of each bucket, and bytes of an element.
        device: Where gradients lie.
    """
    world = dist.get_world_size()
    compress, clear, decode = costs
    name = name_of(scheme)
    numels = [numel for numel, _ in sizes]
    before = [compress(n) for n in numels]
    if not isinstance(scheme, Compressor):
        sent = [dense_bytes(n, scheme.itemsize if scheme else size, world) for n, size in sizes]
        return Option(name, sent, before, [decode(n) for n in numels])
    length = {n: scheme.codec(n, device).nbytes for n in set(numels)}
    margin = LATE_MARGIN if scheme.late else MARGIN
    if not is_staged(scheme):
        after = [clear(n) + world * decode(n) for n in numels]
        sent = [(world - 1) * length[n] for n in numels]
        return Option(name, sent, before, after, margin=margin)
    after = [clear(n) + world * decode(n / world) + compress(n / world) + decode(n) for n in numels]
    sent = [2 * (world - 1) * length[n] // world for n in numels]
    return Option(name, sent, before, after, rounds=2, margin=margin)


@dataclass(frozen=True)
class Measured:
    """What there is to choose by, the same on all ranks.

    Attributes:
        predicted: The ways to send gradients, with the seconds that a step would take by each.
        link: Seconds of a collective by the bytes that a rank sends.
        step: Seconds of an uncompressed step.
    """

    predicted: list[tuple[Option, float]]
    link: Line
    step: float


class WarmUp:
    """Takes down when buckets become ready, and what uncompressed steps take."""

    def __init__(self) -> None:
        self._ready: dict[int, list[float]] = {}
        self.sizes: dict[int, tuple[int, int]] = {}
        self.sample = torch.empty(0)

    def note(self, index: int, gradient: Tensor, began: float, *, sample: bool) -> None:
        """Take down a bucket.

        Args:
            index: Which.
            gradient: Its contents.
            began: When the first bucket of the step was ready, by ``perf_counter``.
            sample: Whether to keep a piece of it to try compressors on.
        """
        if gradient.is_cuda:
            torch.cuda.current_stream(gradient.device).synchronize()  # only then is it ready
        self._ready.setdefault(index, []).append(time.perf_counter() - began)
        self.sizes[index] = (gradient.numel(), gradient.element_size())
        if sample and len(self.sample) < min(len(gradient), SAMPLE):
            dtype = torch.promote_types(gradient.dtype, torch.float32)
            self.sample = gradient[:SAMPLE].to(dtype, copy=True).nan_to_num_(0.0, 0.0, 0.0)

    def measure(self, schemes: Sequence[Scheme], steps: Iterable[float]) -> Measured:
        """Measure the rest, and agree with the other ranks. All of them must call it.

        Args:
            schemes: The ways to send gradients; the first is uncompressed.
            steps: Seconds of uncompressed steps.
        """
        indices, device = sorted(self.sizes), self.sample.device
        sizes = [self.sizes[index] for index in indices]
        link = fit_line(probe(device, largest=max(numel * size for numel, size in sizes)))
        numbers = [median(steps), *(median(self._ready[index]) for index in indices)]
        for scheme in schemes:
            for line in measure_costs(scheme, self.sample):
                numbers += [line.fixed, line.slope]
        step, *numbers = agree(numbers, device)  # the slowest rank's
        ready, numbers = sorted(numbers[: len(indices)]), numbers[len(indices) :]
        lines = [Line(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]
        options = [
            option_of(scheme, lines[3 * place :][:3], sizes, device)
            for place, scheme in enumerate(schemes)
        ]
        exchanges = [exchange_seconds(ready, option, link) for option in options]
        compute = max(step - exchanges[0], 0.0)
        seconds = [compute + exchange for exchange in exchanges]
        return Measured(list(zip(options, seconds, strict=True)), link, step)
