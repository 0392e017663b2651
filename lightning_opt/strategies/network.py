"""What the network between the ranks takes, measured where a run trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from lightning_opt.strategies.choice import Line, fit_line
from lightning_opt.strategies.transport import dense_bytes

SMALLEST, LARGEST, FACTOR = 4096, 2**24, 8
"""Bytes of the probes, and by how much they grow."""

QUICK = 0.01
"""Seconds below which a measurement is repeated; the best counts."""

REPEATS = 3


def agree(values: Sequence[float], device: torch.device) -> list[float]:
    """Return the largest of each value over all ranks. All ranks must call it."""
    agreed = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    return agreed.tolist()


def best_time(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call, the best of some if it is quick."""
    best, spent = float("inf"), 0.0
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
        spent += best
        if spent > QUICK:
            break
    return best


def probe(device: torch.device, largest: int, limit: float) -> list[tuple[float, float]]:
    """Time all-reduces of growing sizes. All ranks must call it, with nothing else on its way.

    Args:
        device: Where gradients lie.
        largest: Bytes of the largest bucket, beyond which there is nothing to learn.
        limit: Seconds that no probe should take.

    Returns:
        Pairs of the bytes that a rank sends and the seconds of the slowest rank, the same on all.
    """
    world = dist.get_world_size()
    samples: list[tuple[float, float]] = []
    nbytes, seconds = SMALLEST, 0.0
    agree([0.0], device)  # connects the ranks, and lets them start together
    while not samples or (nbytes <= min(largest, LARGEST) and seconds * FACTOR <= limit):
        payload = torch.zeros(nbytes // 4, device=device)
        own = best_time(lambda payload=payload: dist.all_reduce(payload), device)  # type: ignore[misc]
        seconds = agree([own], device)[0]
        samples.append((dense_bytes(nbytes // 4, 4, world), seconds))
        nbytes *= FACTOR
    return samples


def measure_network(device: torch.device, largest: int, limit: float) -> Line:
    """Return the seconds of a collective by the bytes that a rank sends; see :func:`probe`."""
    return fit_line(probe(device, largest, limit))
