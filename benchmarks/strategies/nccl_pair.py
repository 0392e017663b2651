"""DDP on two processes of one machine, dense and compressed: step times, bytes and overlap.

Supports a claim about NCCL: the hook only enqueues, so a backward pass returns to the host before
its gradients are sent. ``host ms`` is the time until a step's backward pass returns, ``step ms``
until the device has finished it. Two processes share one GPU; if NCCL rejects that ("Duplicate GPU
detected"), the table contains the error. With two GPUs each has its own. On a CPU it runs over
gloo, with a tiny model.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
import warnings
from statistics import median
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_opt as lo
from benchmarks.gpt import GPT, size_for
from benchmarks.harness import free_port, parse_arguments, publish
from benchmarks.models import quiet_trainer
from lightning_opt.core.measure.timing import wait_for

GPU = True
LIMIT = 120.0
WARMUP = 14
"""Untimed first steps: compression begins after ten."""
STRATEGIES = ("ddp", "ddp_bf16", "ddp_int8", "ddp_int4", "ddp_topk", "ddp_threshold")


class Language(L.LightningModule):
    """A GPT that records the times of its steps."""

    def __init__(self, size: str, device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network, self.kind = GPT(size), device
        self.seconds: list[tuple[float, float]] = []
        self.start = 0.0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        wait_for(self.kind)
        self.start = time.perf_counter()
        return self.network(batch)

    def on_after_backward(self) -> None:
        host = time.perf_counter() - self.start
        wait_for(self.kind)
        self.seconds.append((host, time.perf_counter() - self.start))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def train(rank: int, port: int, name: str, device: str, steps: int, queue: Any) -> None:
    """Train one rank; the first one returns its measurements."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "NODE_RANK": "0"}
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        cuda = device == "cuda"
        if cuda and torch.cuda.device_count() < 2:
            # Both processes then call the one device theirs, and Lightning counts two.
            os.environ["CUDA_VISIBLE_DEVICES"] = "0,0"
        model = Language(size_for(device, "124M"), device)
        batches = [model.network.batch(4, "cpu") for _ in range(WARMUP + steps)]
        strategy: Any = name
        if name.startswith("ddp_") and name != "ddp_bf16":
            settings = {"every_n_steps": 1}
            kinds = {"topk": {"ramp_steps": 0}}
            kind = name.removeprefix("ddp_")
            strategy = lo.CompressedDDPStrategy(kind, **settings, **kinds.get(kind, {}))
        trainer = quiet_trainer(
            device,
            strategy=strategy,
            devices=2,
            max_epochs=1,
            precision="bf16-mixed" if cuda else "32-true",
            use_distributed_sampler=False,
        )
        trainer.fit(model, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
        if rank == 0:
            logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
            queue.put((model.seconds[WARMUP:], logged))
    except BaseException:  # noqa: BLE001 - the parent has to hear of it
        queue.put(traceback.format_exc())


def measure(name: str, device: str, steps: int) -> Any:
    """Return the first rank's measurements, or the error."""
    port = free_port()
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    ranks = [
        context.Process(target=train, args=(rank, port, name, device, steps, queue))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    try:
        return queue.get(timeout=LIMIT)
    except Exception as error:  # noqa: BLE001 - nobody has answered
        return f"no answer within {LIMIT:.0f} s ({type(error).__name__})"
    finally:
        for process in ranks:
            process.kill()
            process.join()


def main() -> None:
    """Measure each strategy and publish after each."""
    arguments = parse_arguments(__doc__ or "")
    device, steps = arguments.device, 3 if arguments.quick else 15
    rows: list[dict[str, Any]] = []
    for name in STRATEGIES:
        told = measure(name, device, steps)
        row: dict[str, Any] = {"strategy": name}
        if isinstance(told, str):
            print(told)
            row["failed"] = told.strip().splitlines()[-1][:100]
        else:
            seconds, logged = told
            row["host ms"] = round(1e3 * median(host for host, _ in seconds), 2)
            row["step ms"] = round(1e3 * median(whole for _, whole in seconds), 2)
            if "comm/seconds" in logged:
                row["comm ms"] = round(1e3 * logged["comm/seconds"], 2)
                row["MB a step"] = round(logged["comm/bytes"] / 1e6, 2)
        rows.append(row)
        notes = [
            "host ms: when the backward pass returns; step ms: when the device has done it, both "
            "from the begin of the forward pass. comm ms: with a bucket on its way, last step."
        ]
        title = f"DDP on two processes, GPT {size_for(device, '124M')}"
        publish("nccl_pair", lo.Report(title, rows, notes), arguments)
        if len(rows) == 1 and "failed" in row:
            break  # two processes cannot share this device


if __name__ == "__main__":
    main()
