"""What the network between the ranks takes, measured where a run trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from lightning_opt.strategies.compression.exchange.channels import dense_bytes

SMALLEST, LARGEST, FACTOR = 4096, 2**24, 8
"""Bytes of the probes, and by how much they grow."""

QUICK = 0.01
"""Seconds below which a probe is repeated."""

REPEATS = 8

LIMIT = 0.5
"""Seconds that no probe should take."""


def agree(values: Sequence[float], device: torch.device) -> list[float]:
    """Return the largest of each value over all ranks. All ranks must call it."""
    agreed = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    return agreed.tolist()


def time_of(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def probe(device: torch.device, largest: int) -> list[tuple[float, float]]:
    """Time all-reduces of growing sizes. All ranks must call it, with nothing else on its way.

    Args:
        device: Where gradients lie.
        largest: Bytes of the largest bucket, beyond which there is nothing to learn.

    Returns:
        Pairs of the bytes that a rank sends and the seconds of the slowest rank, the same on all.
    """
    world = dist.get_world_size()
    samples: list[tuple[float, float]] = []
    nbytes, seconds = SMALLEST, 0.0
    agree([0.0], device)  # connects the ranks, and lets them start together
    # Two sizes at least, or a line through them would not tell latency from bandwidth.
    while len(samples) < 2 or (nbytes <= min(largest, LARGEST) and seconds * FACTOR <= LIMIT):
        call = partial(dist.all_reduce, torch.zeros(nbytes // 4, device=device))
        # What is quick is repeated, and the best counts. All ranks must come to the same decision.
        seconds = agree([time_of(call, device)], device)[0]
        for _ in range(REPEATS if seconds < QUICK else 0):
            seconds = min(seconds, agree([time_of(call, device)], device)[0])
        samples.append((dense_bytes(nbytes // 4, 4, world), seconds))
        nbytes *= FACTOR
    return samples
