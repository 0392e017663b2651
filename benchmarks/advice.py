"""Effect of often-heard advice: a step or an operation without it and with it.

Supports docs/advice.md: if torch or Lightning already follows the advice, the ratio is 1 or the
baseline is made worse on purpose. Both versions of a pair compute the same. The pairs on pinned
memory, on reading a loss and on emptying the cache only run on a GPU.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.harness import median_ratio, parse_arguments, publish
from benchmarks.models import Regression, forty_tensor_mlp, ten_million_transformer
from lightning_opt import Report
from lightning_opt.core.measure.timing import time_in_turns, wait_for

GPU = True

Pair = tuple[str, str, str, Callable[[], object], Callable[[], object], int]
"""Advice, description, the version without it, the version with it, and calls per timing."""


class Step:
    """Forward, backward, update and zeroing of one model."""

    def __init__(self, module: Regression, fused: bool = False) -> None:
        self.module = module
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=fused or None)

    def run(self, batch: Tensor | None = None, set_to_none: bool = True) -> Tensor:
        loss = self.module.training_step(self.module.batch if batch is None else batch, 0)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=set_to_none)
        return loss

    def backward(self, batch: Tensor, share: float) -> None:
        (self.module.training_step(batch, 0) * share).backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def step_pairs(device: str) -> list[Pair]:
    mlp = [Step(forty_tensor_mlp(device)) for _ in range(10)]
    fused = Step(forty_tensor_mlp(device), fused=True)
    batch = mlp[0].module.batch

    def one_by_one() -> None:
        for sample in batch.split(1):
            mlp[4].backward(sample, 1 / len(batch))
        mlp[4].update()

    def accumulated() -> None:
        for part in batch.chunk(4):
            mlp[6].backward(part, 1 / 4)
        mlp[6].update()

    def collected() -> None:
        mlp[8].run()
        gc.collect()

    step = "step of a 40-tensor MLP"
    return [
        ("zero_grad(set_to_none=True)", step, "torch's and Lightning's default since 2.0",
         lambda: mlp[0].run(set_to_none=False), lambda: mlp[1].run(), 5),
        ("fused optimizer", step, "FusedOptimizer",
         lambda: mlp[2].run(), lambda: fused.run(), 5),
        ("one batch instead of samples", step, "every DataLoader",
         one_by_one, lambda: mlp[5].run(), 1),
        ("accumulate 4 parts of a batch", step, "MicroBatching; for memory, not for speed",
         lambda: mlp[7].run(), accumulated, 2),
        ("collect garbage each step", step, "GarbageCollection, MemoryCleanup",
         lambda: mlp[9].run(), collected, 1),
    ]  # fmt: skip


def gradient_pairs(device: str) -> list[Pair]:
    module = ten_million_transformer(device)
    gradients = [torch.randn_like(parameter) for parameter in module.parameters()]
    many = [torch.randn(64, 64, device=device) for _ in range(400)]
    large, other = (torch.randn(1000, 1000, device=device) for _ in range(2))
    buffer = torch.empty_like(large)
    rows, columns = torch.randn(256, 512, device=device), torch.randn(512, 512, device=device)
    return [
        ("scale gradients in place", "9.5 M numbers in 36 tensors", "clipping here and in torch",
         lambda: [g * 0.999 for g in gradients], lambda: [g.mul_(0.999) for g in gradients], 1),
        ("one call for all tensors (foreach)", "400 tensors of 64 x 64", "clipping, norms here",
         lambda: [g.mul_(0.999) for g in many], lambda: torch._foreach_mul_(many, 0.999), 5),
        ("reuse a buffer (out=)", "sum of 1000 x 1000", "torch's caching allocator on a GPU",
         lambda: large + other, lambda: torch.add(large, other, out=buffer), 20),
        ("multiply without a transposed copy", "256 x 512 by 512 x 512", "torch.matmul, autograd",
         lambda: rows @ columns.T.contiguous(), lambda: rows @ columns.T, 10),
    ]  # fmt: skip


def forward_pairs(device: str) -> list[Pair]:
    x = torch.randn(64, 128, 256, device=device)
    weight, bias = torch.ones(256, device=device), torch.zeros(256, device=device)
    linear = nn.Linear(256, 256).to(device)
    raw = linear.weight.detach().T.contiguous()
    network = nn.Sequential(*[nn.Linear(64, 64) for _ in range(10)]).to(device)
    image = torch.randn(64, 64, device=device)

    def normalised() -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias

    def prepared() -> Tensor:
        with torch.no_grad():
            ready = ((image + 1) * 0.5 - 0.1).clamp(-3, 3)
        return network(ready)

    return [
        ("fused kernels instead of steps", "LayerNorm of 64 x 128 x 256", "torch.nn, CompileModel",
         normalised, lambda: functional.layer_norm(x, (256,), weight, bias), 1),
        ("nn.Linear instead of raw weights", "64 x 128 x 256", "nothing to do",
         lambda: x @ raw + linear.bias, lambda: linear(x), 1),
        ("prepare inputs outside of autograd", "10 linear layers",
         "autograd records nothing of inputs that need no gradient",
         lambda: network(((image + 1) * 0.5 - 0.1).clamp(-3, 3)), prepared, 20),
    ]  # fmt: skip


def gpu_pairs(device: str) -> list[Pair]:
    """Pairs that only differ on an asynchronous device."""
    steps = [Step(forty_tensor_mlp(device)) for _ in range(4)]
    pageable = torch.randn(64, 3, 128, 128)
    pinned = pageable.pin_memory()
    work = torch.randn(2048, 2048, device=device)

    def copy(source: Tensor, non_blocking: bool) -> None:
        torch.mm(work, work)
        source.to(device, non_blocking=non_blocking)
        torch.mm(work, work)

    def read_each() -> None:
        for _ in range(10):
            steps[0].run().item()

    def read_last() -> None:
        for _ in range(9):
            steps[1].run()
        steps[1].run().item()

    def emptied() -> None:
        steps[2].run()
        torch.cuda.empty_cache()

    return [
        ("pinned memory and non_blocking", "12.6 MB between two products",
         "Lightning copies non-blocking; pin_memory is yours",
         lambda: copy(pageable, False), lambda: copy(pinned, True), 5),
        ("read the loss every 10 steps", "10 steps of an MLP", "callbacks here; self.log",
         read_each, read_last, 1),
        ("empty the cache each step", "step of a 40-tensor MLP", "MemoryCleanup, on evidence",
         lambda: steps[3].run(), emptied, 5),
    ]  # fmt: skip


def measure(pair: Pair, rounds: int, device: str) -> dict[str, Any]:
    advice, on, instead, without, advised, calls = pair
    seconds = time_in_turns(
        {"without": without, "with": advised}, rounds=rounds, calls=calls, device=device
    )
    return {
        "advice": advice,
        "measured on": on,
        "us without": 1e6 * statistics.median(seconds["without"]),
        "us with": 1e6 * statistics.median(seconds["with"]),
        "with/without": median_ratio(seconds["with"], seconds["without"]),
        "who does it": instead,
    }


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(__doc__, argv)
    device = arguments.device
    torch.manual_seed(0)
    pairs = [*step_pairs(device), *gradient_pairs(device), *forward_pairs(device)]
    if device != "cpu":
        pairs += gpu_pairs(device)
    rounds = 5 if arguments.quick else 20 if device == "cuda" else 40
    notes = [
        f"Medians of {rounds} interleaved rounds, in microseconds. `with/without`: below 1 the "
        "advice saves time. `who does it`: code that already follows the advice. A step is forward "
        "pass, backward pass, AdamW and zeroing of gradients. The rows with LayerNorm, nn.Linear "
        "and prepared inputs time a forward pass only.",
    ]
    rows = []
    for pair in pairs:
        rows.append(measure(pair, rounds, device))
        wait_for(device)
        report = Report("Common performance advice: time without and with it", rows, notes)
        publish("advice", report, arguments, complete=pair is pairs[-1])


if __name__ == "__main__":
    main()
