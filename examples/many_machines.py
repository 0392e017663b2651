"""One script for one process, several processes and several machines, with compressed gradients.

    python many_machines.py                                    # one process
    python many_machines.py --devices 2                        # two processes of this machine

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 1 \\
        --master-addr 10.0.0.1 --master-port 29500 many_machines.py   # on the first machine
    torchrun --nnodes 2 --node-rank 1 --nproc-per-node 1 \\
        --master-addr 10.0.0.1 --master-port 29500 many_machines.py   # on the second

    srun python many_machines.py                               # in a SLURM job

The script reads the layout from the environment of torchrun or SLURM. It trains the small GPT of
``byte_gpt.py`` from one seed with each strategy in turn. The processes share the same 8 windows per
step, so losses can be compared. See docs/many_machines.md.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import Strategy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lightning_opt as lo
from byte_gpt import ByteGPT, SourceBatches, read_sources
from measuring import Record, quiet_trainer, silence_advice

BATCH = 8  # windows per step, over all processes
COMPRESSORS = {
    "ddp_topk": "topk",
    "ddp_threshold": "threshold",
    "ddp_int8": "int8",
    "ddp_int4": "int4",
    "ddp_compressed": "auto",
}


def find_layout(devices: int) -> tuple[int, int]:
    """Return the number of machines and of processes per machine.

    Args:
        devices: Number of processes without torchrun or SLURM.
    """
    environment = os.environ
    if "TORCHELASTIC_RUN_ID" in environment:  # torchrun
        local = int(environment["LOCAL_WORLD_SIZE"])
        return int(environment["WORLD_SIZE"]) // local, local
    if "SLURM_JOB_ID" in environment and "SLURM_NTASKS" in environment:
        nodes = int(environment["SLURM_NNODES"])
        return nodes, int(environment["SLURM_NTASKS"]) // nodes
    return 1, devices


def make_strategy(name: str, processes: int) -> Strategy | str:
    """Return the argument of ``Trainer(strategy=...)``; the string itself works too."""
    if processes == 1:
        return "auto"  # no other process
    if name in COMPRESSORS:
        return lo.CompressedDDPStrategy(COMPRESSORS[name], every_n_steps=10)  # reports more often
    return name


class Traffic(Logger):
    """Records the bytes that the strategy logs."""

    name, version = "traffic", 0

    def __init__(self) -> None:
        super().__init__()
        self.reports: list[dict[str, float]] = []

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "comm/bytes" in metrics:
            self.reports.append(metrics)


class DistributedGPT(ByteGPT):
    """The small GPT with its data; each process reads its share of each batch."""

    def __init__(self, steps: int) -> None:
        super().__init__(width=96, depth=3, heads=4)
        self.steps = steps

    def train_dataloader(self) -> DataLoader[Any]:
        world = self.trainer.world_size
        if BATCH % world:
            raise ValueError(f"{BATCH} windows cannot be shared by {world} processes.")
        drawn = SourceBatches(read_sources(), self.steps, BATCH)
        dataset = TensorDataset(torch.cat([windows for windows, _ in drawn]))
        share = DistributedSampler(dataset, world, self.trainer.global_rank, shuffle=False)
        return DataLoader(dataset, BATCH // world, sampler=share)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the loss on windows of another seed."""
        windows, _ = SourceBatches(read_sources(), 1, 64, seed=1)[0]
        return self.loss(windows).item()


def train(name: str, steps: int, nodes: int, devices: int) -> dict[str, Any]:
    """Train with a strategy in each process, and return one row of the table."""
    L.seed_everything(0, verbose=False)
    model, record, traffic = DistributedGPT(steps), Record(), Traffic()
    processes = nodes * devices
    trainer = quiet_trainer(
        [record],
        max_epochs=1,
        num_nodes=nodes,
        devices=devices,
        strategy=make_strategy(name, processes),
        logger=traffic,
        log_every_n_steps=16,  # a window of DiLoCo
        use_distributed_sampler=False,
    )
    trainer.fit(model)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    # In a ring all-reduce, each process sends the gradient twice except its own part.
    dense = 2 * (processes - 1) / processes * weights.numel() * weights.element_size()
    sent = [report["comm/bytes"] for report in traffic.reports]
    chosen = getattr(trainer.strategy, "describe", lambda: None)()
    if chosen is not None and trainer.is_global_zero:
        chosen.print()  # the measured network and the chosen compressor
    return {
        "strategy": name if processes > 1 else "one process",
        "loss": model.held_out_loss(),
        "step ms": record.step_ms(),
        "KB sent, dense": dense / 1e3,
        "KB sent, mean": sum(sent) / len(sent) / 1e3 if sent else dense / 1e3,
        "KB sent, at the end": sent[-1] / 1e3 if sent else dense / 1e3,
        "replicas equal": are_equal(weights),
    }


def are_equal(weights: torch.Tensor) -> bool:
    """Return whether the weights are bit-identical in all processes."""
    if not dist.is_initialized():
        return True
    largest, smallest = weights.clone(), weights.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    dist.all_reduce(smallest, dist.ReduceOp.MIN)
    return torch.equal(largest, smallest)


def find_processes() -> list[str]:
    """Return host and process id of all processes, by rank."""
    mine = f"{socket.gethostname()}:{os.getpid()}"
    if not dist.is_initialized():
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategy", nargs="+", default=["ddp", "ddp_topk"], help="(%(default)s)")
    parser.add_argument("--devices", type=int, default=1, help="processes to start (%(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="of each run (%(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file to write the table to")
    args = parser.parse_args()
    if min(args.steps, args.devices) < 1:
        parser.error("--steps and --devices must be at least 1")
    silence_advice()
    torch.set_num_threads(1)
    nodes, devices = find_layout(args.devices)
    names = args.strategy if nodes * devices > 1 else args.strategy[:1]
    rows = [train(name, args.steps, nodes, devices) for name in names]
    processes = find_processes()
    if not dist.is_initialized() or dist.get_rank() == 0:
        title = (
            f"A byte-level GPT, {args.steps} steps, machines: {nodes}, processes on each: {devices}"
        )
        notes = ["Rank by rank: " + ", ".join(processes) + ".",
                 "KB: sent by each process in a step."]  # fmt: skip
        report = lo.Report(title, rows, notes)
        report.print()
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps({**report.to_dict(), "processes": processes}))
    if dist.is_initialized():
        dist.barrier()  # an early exit is an error for the other processes
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
