"""What there is to choose by: what a run's steps, network and processors take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_opt.strategies.compression.choosing.cost_model import (
    LATE_MARGIN,
    MARGIN,
    Line,
    Option,
    calibrate,
    exchange_seconds,
    fit_line,
    slowed,
)
from lightning_opt.strategies.compression.choosing.network_probe import (
    agree,
    measure_network,
    time_of,
)
from lightning_opt.strategies.compression.codecs.compressors import (
    Compressor,
    Quantize,
    Threshold,
    TopK,
)
from lightning_opt.strategies.compression.exchange.channels import dense_bytes

Scheme = Compressor | torch.dtype | None
"""How a bucket is sent: compressed, cast to a narrower dtype, or as it is."""

PATIENT = 0.5
"""Seconds that one probe of the network may take during the warm-up."""

SAMPLE = 2**20
"""Elements of a gradient on which compressors are timed."""

REPEATS = 3
"""How often; the best counts."""


@dataclass(frozen=True)
class Costs:
    """Seconds of processor time by the elements of a bucket.

    Attributes:
        compress: Adding the gradient to the residual, and writing the message.
        clear: Making room for the sum of the messages.
        decode: Adding one message up.
    """

    compress: Line
    clear: Line
    decode: Line

    def numbers(self) -> list[float]:
        """Return everything as one list, for :func:`agree`."""
        return [number for line in astuple(self) for number in line]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Costs:
        """Return what :meth:`numbers` took apart."""
        return cls(*(Line(*numbers[start : start + 2]) for start in (0, 2, 4)))


def measure_costs(scheme: Scheme, sample: Tensor, bucket: int) -> Costs:
    """Time a scheme on a piece of a real gradient.

    Args:
        scheme: What to time.
        sample: Finite values.
        bucket: Elements of the bucket that the sample is from.
    """
    timed: list[list[tuple[float, float]]] = [[], [], []]
    if isinstance(scheme, TopK) and scheme.k is not None:
        scheme = TopK(min(scheme.k / bucket, 1.0), values=scheme.values)
    for numel in sorted({max(len(sample) // 8, 1), len(sample)}):
        gradient = sample[:numel]
        residual = torch.zeros_like(gradient)
        for times, call in zip(timed, _calls(scheme, gradient, residual), strict=True):
            call()  # allocates, compiles, and finds the first threshold
            best = min(time_of(call, sample.device) for _ in range(REPEATS))
            times.append((numel, best))
    return Costs(*map(fit_line, timed))


def _calls(
    scheme: Scheme, gradient: Tensor, residual: Tensor
) -> tuple[Callable[[], object], Callable[[], object], Callable[[], object]]:
    """Return what compresses, makes room and decodes."""
    if scheme is None:
        return (_nothing, _nothing, _nothing)
    if isinstance(scheme, torch.dtype):
        narrow = gradient.to(scheme)
        return (lambda: narrow.copy_(gradient), _nothing, lambda: residual.copy_(narrow))
    codec, mean = scheme.codec(gradient.numel(), gradient.device), torch.zeros_like(residual)
    return (
        lambda: codec.compress(residual, gradient),
        mean.zero_,
        lambda: codec.decompress_add(codec.message, mean, 0.5),
    )


def _nothing() -> None:
    """What dense exchanges take of the processor is part of what the network takes."""


def name_of(scheme: Scheme) -> str:
    """Return what people call a scheme."""
    if scheme is None:
        return "uncompressed"
    if isinstance(scheme, TopK) and scheme.k is None:
        return f"TopK({scheme.ratio:g})"
    if isinstance(scheme, Quantize):
        return f"Quantize({scheme.bits})"
    return str(scheme).removeprefix("torch.")


def option_of(
    scheme: Scheme,
    costs: Costs,
    numels: Sequence[int],
    itemsizes: Sequence[int],
    *,
    staged: bool,
    device: torch.device,
    late_margin: float = LATE_MARGIN,
) -> Option:
    """Put together what each bucket would take.

    Args:
        scheme: How the buckets would be sent.
        costs: What that was seen to take.
        numels: Elements of each bucket.
        itemsizes: Bytes an element of each bucket.
        staged: Whether messages travel in two stages.
        device: Where gradients lie.
        late_margin: Share of a step that must be saved by what sends most elements late.
    """
    world = dist.get_world_size()
    name = name_of(scheme)
    if not isinstance(scheme, Compressor):
        sizes = itemsizes if scheme is None else [scheme.itemsize] * len(numels)
        return Option(
            name,
            [dense_bytes(n, size, world) for n, size in zip(numels, sizes, strict=True)],
            [0.0 if scheme is None else costs.compress(n) for n in numels],
            [0.0 if scheme is None else costs.decode(n) for n in numels],
        )
    length = {n: scheme.codec(n, device).nbytes for n in set(numels)}
    before = [costs.compress(n) for n in numels]
    margin = late_margin if isinstance(scheme, (TopK, Threshold)) else MARGIN
    if not staged:
        after = [costs.clear(n) + world * costs.decode(n) for n in numels]
        sent = [(world - 1) * length[n] for n in numels]
        return Option(name, sent, before, after, margin=margin)
    shard = [n / world for n in numels]
    after = [
        costs.clear(n) + world * costs.decode(part) + costs.compress(part) + costs.decode(n)
        for n, part in zip(numels, shard, strict=True)
    ]
    sent = [2 * (world - 1) * length[n] // world for n in numels]
    return Option(name, sent, before, after, rounds=2, margin=margin)


@dataclass
class Measured:
    """What there is to choose by, the same on all ranks.

    Attributes:
        places: Where the bucket of an index stands in the following.
        ready: Seconds from the first bucket to each.
        options: The ways to send them.
        stages: Gentler forms of the last of these, for a ramp.
        dense: Sending them uncompressed, whether or not that is among the options.
        link: Seconds of a collective by the bytes that a rank sends.
        step: Seconds of an uncompressed step.
        compute: Seconds of a step without an exchange.
        factor: How much of what it takes by itself the network takes during a step.
        largest: Bytes of the largest bucket.
        device: Where gradients lie.
    """

    places: dict[int, int]
    ready: list[float]
    options: list[Option]
    stages: list[Option]
    dense: Option
    link: Line
    step: float
    compute: float
    factor: float
    largest: int
    device: torch.device

    def renew(self, link: Line, step: float | None = None) -> None:
        """Take a new look at the network into account, and at uncompressed steps if there are."""
        self.link = slowed(link, self.factor)
        if step is not None:
            self.step = step
            self.compute = compute_seconds(step, self.ready, self.dense, self.link)


def compute_seconds(step: float, ready: Sequence[float], dense: Option, link: Line) -> float:
    """Return what an uncompressed step takes without its exchange."""
    return max(step - exchange_seconds(ready, [0] * len(ready), [dense], link), 0.0)


class WarmUp:
    """Takes down when buckets become ready, and what uncompressed steps take."""

    def __init__(self) -> None:
        self._ready: dict[int, list[float]] = {}
        self._sizes: dict[int, tuple[int, int]] = {}
        self._exchanges: list[float] = []
        self._sample = torch.empty(0)

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
        self._sizes[index] = (gradient.numel(), gradient.element_size())
        if sample and len(self._sample) < min(len(gradient), SAMPLE):
            dtype = torch.promote_types(gradient.dtype, torch.float32)
            self._sample = gradient[:SAMPLE].to(dtype, copy=True).nan_to_num_(0.0, 0.0, 0.0)

    @property
    def is_empty(self) -> bool:
        """Whether there was no bucket: sparse gradients are none."""
        return not self._sizes

    def end_step(self, landed: float) -> None:
        """Take down when the last bucket had arrived, in seconds since the first was ready."""
        if self._ready:
            self._exchanges.append(max(landed - self._ready[max(self._ready)][-1], 0.0))

    def measure(
        self,
        schemes: Sequence[Scheme],
        staged: Callable[[Scheme], bool],
        steps: Iterable[float],
        *,
        stages: Sequence[Scheme] = (),
        late_margin: float = LATE_MARGIN,
    ) -> Measured:
        """Measure the rest, and agree with the other ranks. All of them must call it.

        Args:
            schemes: The ways to send gradients.
            staged: Says of each whether its messages travel in two stages.
            steps: Seconds of uncompressed steps.
            stages: Gentler forms of the last way, for a ramp.
            late_margin: See :func:`option_of`.
        """
        every = [*schemes, *stages]
        indices, device = sorted(self._sizes), self._sample.device
        numels, itemsizes = zip(*(self._sizes[index] for index in indices), strict=True)
        largest = max(n * size for n, size in zip(numels, itemsizes, strict=True))
        link = measure_network(device, largest, PATIENT)
        # The slowest rank's numbers; of the exchange the least, since the others wait for that one.
        # On CUDA the host does not know when a bucket has arrived.
        seen = float("inf") if device.type == "cuda" else median(self._exchanges)
        numbers = [median(steps), -seen]
        numbers += [median(self._ready[index]) for index in indices]
        for scheme in every:
            numbers += measure_costs(scheme, self._sample, max(numels)).numbers()
        step, waited, *numbers = agree(numbers, device)
        ready, numbers = sorted(numbers[: len(indices)]), numbers[len(indices) :]
        options = [
            option_of(
                scheme,
                Costs.of(numbers[6 * place :][:6]),
                numels,
                itemsizes,
                staged=staged(scheme),
                device=device,
                late_margin=late_margin,
            )
            for place, scheme in enumerate(every)
        ]
        nothing = Costs.of([0.0] * 6)
        dense = option_of(None, nothing, numels, itemsizes, staged=False, device=device)
        factor = calibrate(ready, dense, link, -waited)
        link = slowed(link, factor)
        return Measured(
            {index: place for place, index in enumerate(indices)},
            ready,
            options[: len(schemes)],
            options[len(schemes) :],
            dense,
            link,
            step,
            compute_seconds(step, ready, dense, link),
            factor,
            largest,
            device,
        )
