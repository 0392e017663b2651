"""Step time of DDP on two processes of one machine, dense and compressed.

Supports a claim about NCCL: within a machine compression gains nothing. Two GPUs are needed for
``--device cuda``; NCCL rejects two processes on one. On a CPU a tiny model runs over gloo.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

import lightning_opt as lo
from benchmarks.gpt import GPT, size_for
from benchmarks.gradients.gpt_step import Language
from benchmarks.harness import parse_arguments, publish

GPU = 2
WARMUP = 14
"""Untimed first steps: compression begins after ten."""
COMPRESSORS = ("int8", "int4", "topk", "threshold")


def make_model(size: str) -> Language:
    network = GPT(size)
    return Language(network, network.batch(4, "cpu"))


def make_data(size: str) -> DataLoader[Any]:
    return DataLoader([GPT(size).batch(4, "cpu")] * 1000, batch_size=None)


def settings(accelerator: str, compressor: str | None) -> dict[str, Any]:
    """Return the Trainer's arguments."""
    arguments = {"ramp_steps": 0} if compressor == "topk" else {}
    strategy = lo.CompressedDDPStrategy(compressor, **arguments) if compressor else "ddp"
    return {
        "accelerator": accelerator,
        "devices": 2,
        "strategy": strategy,
        "use_distributed_sampler": False,
    }


def main() -> None:
    """Compare, and publish the table."""
    arguments = parse_arguments(__doc__ or "")
    cuda = arguments.device == "cuda"
    if cuda and torch.cuda.device_count() < 2:
        print("This needs two GPUs.")
        return
    size, accelerator = size_for(arguments.device, "124M"), "gpu" if cuda else "cpu"
    configurations = {
        compressor or "dense": partial(settings, accelerator, compressor)
        for compressor in (None, *COMPRESSORS)
    }
    rounds, steps = (2, 4) if arguments.quick else (5, 15)
    report = lo.compare(
        partial(make_model, size),
        partial(make_data, size),
        configurations,
        rounds=rounds,
        steps=steps,
        starts=1,
        warmup=WARMUP,
    ).report
    report.title = f"DDP on two processes, GPT {size}"
    publish("nccl_pair", report, arguments)


if __name__ == "__main__":
    main()
