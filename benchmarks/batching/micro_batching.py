"""Cost of MicroBatching while everything fits, runs that it rescues, and regrowth of sizes.

Four tables, the first three of which support claims.

- Cost: ``MicroBatching("auto")`` takes at most 1% of a step as long as memory does not run out. One
  training run takes turns between Lightning's closures and ours, step by step, so that both are
  timed on the same model within the same second. Whole steps, as the Trainer makes them.
- Survival: trainings under a limited address space with random limits, lengths and batch sizes, in
  processes of their own, where memory runs out in the forward pass, in the loss or in the backward
  pass. Each is compared with the run without a limit: weights, and the samples trained on.
  ``--trainings`` says how many. On a GPU all trainings run in one process, and none starts after
  ``GPU_SECONDS``. The limit is set on torch's allocator, at random between the peak with single
  samples and the peak with whole batches.
- Pairs: the same on two ranks of DDP, of which one alone has a limit. ``--pairs`` says how many.
- Regrowth: the throughput if one batch in a hundred is eight times longer and does not fit, next to
  a fixed size tuned by hand, halving without regrowth (as Composer does) and a run without a limit.
"""

from __future__ import annotations

import argparse
import gc
import logging
import math
import multiprocessing
import os
import random
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_opt as lo
from benchmarks.batching.hog import (
    Limit,
    Sequences,
    limit_address_space,
    limit_device,
    some_batches,
)
from benchmarks.harness import free_port, parse_arguments, publish
from benchmarks.models import Regression, forty_tensor_mlp, ten_million_transformer
from lightning_opt.batching.micro_batching.sizes import LearnedSizes
from lightning_opt.core.measure.memory import MB, malloc_trim
from lightning_opt.core.measure.timing import wait_for

TIMEOUT = 120.0
"""Seconds after which a process counts as hung."""

GPU_SECONDS = 42.0
"""Seconds after which no further training under a limit starts on a GPU."""

COST_NOTE = (
    "`accumulate`: accumulate_grad_batches. `ms a bare step`: median step without MicroBatching. "
    "`us added`: median step with MicroBatching minus the bare step, in microseconds. "
    "`time / bare`: ratio of a step with MicroBatching to the bare step before it, median."
)
ENDS_NOTE = (
    "`completed, right weights and samples`: as in a run without a limit. `one clear error`: the "
    "error that even one sample does not fit. `retries`: attempts that ran out of memory and were "
    "repeated with smaller micro-batches, in all trainings."
)
BARE_NOTE = "`bare run completed`: runs without MicroBatching that complete under the same limit."
REGROWTH_NOTE = (
    "`of ...`: throughput as a ratio to that run. `retries`: attempts that ran out of memory and "
    "were repeated with smaller micro-batches, in the first of the runs of this kind."
)


def quiet_trainer(**settings: Any) -> L.Trainer:
    """Return a Trainer for one epoch that prints and saves nothing."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return L.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **settings,
        }
    )


# --- cost ---------------------------------------------------------------------------------------


class Turns(L.Callback):
    """Alternates between Lightning's closure and its replacement, and times each step."""

    def __init__(self, device: str, accumulate: int) -> None:
        self.device, self.accumulate = device, accumulate
        self.seconds: dict[bool, list[float]] = {False: [], True: []}
        self.ours: Any = None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        optimization = trainer.fit_loop.epoch_loop.automatic_optimization
        if self.ours is None:
            self.ours = optimization._make_closure
        if batch_idx % self.accumulate == 0:
            wait_for(self.device)
            self.with_us = batch_idx // self.accumulate % 2 == 1
            if self.with_us:
                optimization._make_closure = self.ours
            else:
                vars(optimization).pop("_make_closure", None)
            self.start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % self.accumulate == 0:
            wait_for(self.device)
            self.seconds[self.with_us].append(time.perf_counter() - self.start)
            trainer.fit_loop.epoch_loop.automatic_optimization._make_closure = self.ours


def measure_cost(
    name: str, module: Regression, accumulate: int, pairs: int, device: str
) -> dict[str, Any]:
    """Time the steps of one run without the first tenth."""
    turns = Turns(device, accumulate)
    trainer = quiet_trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        callbacks=[lo.MicroBatching(), turns],
        accumulate_grad_batches=accumulate,
    )
    batch = module.batch.cpu()
    trainer.fit(module, DataLoader([batch] * (2 * pairs * accumulate), batch_size=None))
    bare, with_us = (turns.seconds[kind][pairs // 10 :] for kind in (False, True))
    ratios = [b / a for a, b in zip(bare, with_us, strict=True)]
    return {
        "model": name,
        "accumulate": accumulate,
        "ms a bare step": round(1e3 * statistics.median(bare), 3),
        "us added": round(1e6 * (statistics.median(with_us) - statistics.median(bare)), 1),
        "time / bare": round(statistics.median(ratios), 4),
    }


# --- survival -----------------------------------------------------------------------------------


def survive(seed: int, queue: Any) -> None:
    """Train on the CPU under a limit, and put the outcome into the queue."""
    queue.put(train_under_limit(seed, "cpu"))


def train_under_limit(seed: int, device: str) -> dict[str, Any]:
    """Train without a limit, then bare and with MicroBatching under one; return how it ended."""
    accelerator = "cpu" if device == "cpu" else "gpu"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    draw = random.Random(seed)
    torch.manual_seed(seed)
    batches = some_batches(draw, 8)
    where, room = draw.choice(["forward", "loss", "backward"]), draw.uniform(4.0, 120.0)
    accumulate = draw.choice([1, 3])

    def train(*callbacks: L.Callback) -> tuple[Sequences, str]:
        if device != "cpu":
            reset_gpu()
        model = Sequences(batches, where, 240)
        trainer = quiet_trainer(
            callbacks=list(callbacks), accumulate_grad_batches=accumulate, accelerator=accelerator
        )
        try:
            trainer.fit(model)
        except (MemoryError, RuntimeError) as error:
            return model, f"{type(error).__name__}: {error}"
        return model, "completed"

    micro = lo.MicroBatching()  # imports its modules, which take up to 10 MB
    free, _ = train()
    found: dict[str, Any] = {"seed": seed, "where": where}
    if device == "cpu":
        limit_address_space(room)
    else:
        # Rescale the room (4 to 120) to the range between both peaks. In MiB it would be too
        # small where matrix products alone keep 64 MiB of workspaces, as on an H100.
        whole = torch.cuda.max_memory_allocated() / MB
        train(lo.MicroBatching(1))
        single = torch.cuda.max_memory_reserved() / MB
        limit = single + (room - 4.0) / 116.0 * (whole - single)
        reset_gpu()
        limit_device(limit - torch.cuda.memory_reserved() / MB)
        sizes = {"limit MiB": limit, "one sample MiB": single, "whole batch MiB": whole}
        found |= {name: round(size, 1) for name, size in sizes.items()}
    _, bare = train()
    model, end = train(micro)
    if device == "cpu":
        limit_address_space(math.inf)
    else:
        found["reserved MiB"] = round(torch.cuda.max_memory_reserved() / MB, 1)
        limit_device(math.inf)
    if end == "completed":
        end = compare(model, free)
    elif "Even one sample" in end:
        found["error"], end = end, "one clear error"
    retries = micro.state_dict()["retries"]
    return {**found, "bare": bare == "completed", "end": end, "retries": retries}


def reset_gpu() -> None:
    """Return all unused GPU memory of torch's allocator, and start a new peak."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # `empty_cache` keeps them
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def survive_in_pairs(seed: int, rank: int, port: int, queue: Any) -> None:
    """Train on two DDP ranks without a limit, then with one on one rank alone."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NODE_RANK="0")
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    draw = random.Random(seed)  # the same on both ranks
    where, room = draw.choice(["forward", "loss", "backward"]), draw.uniform(4.0, 120.0)
    accumulate, limited = draw.choice([1, 3]), draw.choice([0, 1])
    torch.manual_seed(100 * seed + rank)
    batches = some_batches(random.Random(100 * seed + rank), 8)

    def train(*callbacks: L.Callback) -> tuple[Sequences, str]:
        model = Sequences(batches, where, 240)
        trainer = quiet_trainer(
            callbacks=list(callbacks),
            accumulate_grad_batches=accumulate,
            devices=2,
            strategy="ddp",
            use_distributed_sampler=False,
        )
        try:
            trainer.fit(model)
        except MemoryError as error:
            return model, "one clear error" if "Even one sample" in str(error) else str(error)
        except RuntimeError as error:
            return model, str(error)
        return model, "completed"

    free, _ = train()
    micro = lo.MicroBatching()
    model, end = train(micro, *([Limit(room)] if rank == limited else []))
    limit_address_space(math.inf)
    if end == "completed":
        end = compare(model, free)
    queue.put({"where": where, "rank": rank, "end": end, "retries": micro.state_dict()["retries"]})


def compare(model: Sequences, free: Sequences) -> str:
    """Return in words whether two runs have equal results."""
    pairs = zip(model.parameters(), free.parameters(), strict=True)
    if not all(torch.allclose(a, b, rtol=0.0, atol=1e-6) for a, b in pairs):
        return "other weights"
    return "completed" if sorted(model.seen) == sorted(free.seen) else "samples lost or doubled"


def in_processes(*calls: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Call each function with its arguments and a queue in a process of its own.

    Returns:
        One result per function, or a text for one that hung or died.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lightning.pytorch", "lightning_opt"])
    queue = context.SimpleQueue()  # has no thread, which could not start under a limit
    processes = [
        context.Process(target=function, args=(*args, queue), daemon=True)
        for function, *args in calls
    ]
    for process in processes:
        process.start()
    found: list[dict[str, Any]] = []
    deadline = time.monotonic() + TIMEOUT
    while len(found) < len(calls):
        if not queue.empty():
            found.append(queue.get())
        elif time.monotonic() > deadline:
            found.append({"end": "hung"})
            break
        elif not any(process.is_alive() for process in processes):
            time.sleep(0.2)
            found.append(queue.get() if not queue.empty() else {"end": "died"})
        else:
            time.sleep(0.02)
    for process in processes:
        process.join(0 if {"end": "hung"} in found else 5)
        process.kill()
    return found


def measure_pairs(trainings: int) -> list[dict[str, Any]]:
    """Return how runs on two ranks ended, only one of which has a limit."""
    rows = []
    for seed in range(trainings):
        port = free_port()
        ranks = in_processes(*((survive_in_pairs, seed, rank, port) for rank in (0, 1)))
        ends = {rank["end"] for rank in ranks}
        rows.append(
            {
                "where": ranks[0].get("where", "?"),
                "end": ends.pop() if len(ends) == 1 else " / ".join(sorted(ends)),
                "retries": max(rank.get("retries", 0) for rank in ranks),
            }
        )
    return tabulate(rows)


def tabulate(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tabulate how the runs ended, by the place where memory ran out."""
    rows = []
    for where in dict.fromkeys(["forward", "loss", "backward", *(r["where"] for r in results)]):
        own = [result for result in results if result["where"] == where]
        if not own:
            continue
        ends = Counter(result["end"] for result in own)
        bare = [result["bare"] for result in own if "bare" in result]
        rows.append(
            {
                "memory runs out in": where,
                "trainings": len(own),
                **({"bare run completed": sum(bare)} if bare else {}),
                "completed, right weights and samples": ends.pop("completed", 0),
                "one clear error": ends.pop("one clear error", 0),
                "other outcome": sum(ends.values()),
                "retries": sum(result["retries"] for result in own),
            }
        )
        for end in ends:
            print(f"{where}: {end}")
    return rows


def measure_survival(trainings: int, device: str) -> Iterator[list[dict[str, Any]]]:
    """Yield the list of finished runs after every ten, and at the end."""
    if device != "cpu":
        torch.zeros(1, device=device)  # memory statistics need a CUDA context
        gc.collect()
        gc.freeze()  # every retry collects garbage, which takes 0.3 s with all modules
    results: list[dict[str, Any]] = []
    deadline = time.monotonic() + GPU_SECONDS
    for seed in range(trainings):
        if device == "cpu":
            results += in_processes((survive, seed))
        elif time.monotonic() < deadline:  # in this process: another takes seconds to start
            results.append(train_under_limit(seed, device))
        else:
            break
        if len(results) % 10 == 0:
            yield results
    if len(results) % 10:
        yield results


# --- regrowth -----------------------------------------------------------------------------------


def halving() -> lo.MicroBatching:
    """Return a callback that halves all micro-batches for good after out-of-memory, like Composer.

    MicroBatching itself learns a size per shape, and regrows it.
    """

    class Smallest(LearnedSizes):
        def size_for(self, shape: str, elements: int) -> int | None:
            return min((known["size"] for known in self.shapes.values()), default=None)

    class Halving(lo.MicroBatching):
        def reset_for_model(self, pl_module: L.LightningModule) -> None:
            self._sizes = Smallest(self.regrow_every)

    return Halving(regrow_every=10**9)


class Layers(L.LightningModule):
    """Layers with little overhead: about 20 ms per short batch."""

    def __init__(self, batches: list[Tensor]) -> None:
        super().__init__()
        self.batches = batches
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.GELU())] * 8)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).square().mean(dim=(1, 2)).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.batches, batch_size=None)


def regrow(kind: str, steps: int, queue: Any) -> None:
    """Time a run in which one batch in a hundred has sequences eight times longer."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    short, long = torch.randn(16, 64, 128), torch.randn(16, 512, 128)
    batches = [long if n % 100 == 10 else short for n in range(steps)]
    quiet_trainer().fit(Layers(batches[:12]))  # warms up, the long one included
    # Created before the limit, because their modules take memory. A quarter of the batch fits: the
    # size of halving without growth after the first long batch.
    callback: list[L.Callback] = {
        "no limit": [],
        "MicroBatching('auto')": [lo.MicroBatching()],
        "hand-tuned fixed size": [lo.MicroBatching(4)],
        "halving without regrowth": [halving()],
    }[kind]
    malloc_trim()
    if kind != "no limit":
        limit_address_space(30.0)  # the long batch keeps 71 MB for its backward pass
    trainer = quiet_trainer(callbacks=callback)
    model = Layers(batches)
    start = time.perf_counter()
    trainer.fit(model)
    seconds = time.perf_counter() - start
    limit_address_space(math.inf)
    retries = callback[0].state_dict()["retries"] if callback else 0
    queue.put({"kind": kind, "seconds": seconds, "retries": retries})


def measure_regrowth(steps: int, rounds: int) -> list[dict[str, Any]]:
    """Return each kind's median throughput over several runs in turn."""
    kinds = (
        "no limit",
        "MicroBatching('auto')",
        "hand-tuned fixed size",
        "halving without regrowth",
    )
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind in kinds:
            [run] = in_processes((regrow, kind, steps))
            if "seconds" not in run:
                raise RuntimeError(f"The run {kind!r} {run['end']}.")
            runs[kind].append(run)
    seconds = {kind: statistics.median(run["seconds"] for run in runs[kind]) for kind in kinds}
    return [
        {
            "run": kind,
            "batches a second": round(steps / seconds[kind], 1),
            "of the hand-tuned fixed size": round(
                seconds["hand-tuned fixed size"] / seconds[kind], 3
            ),
            "of the run without a limit": round(seconds["no limit"] / seconds[kind], 3),
            "retries": runs[kind][0]["retries"],
        }
        for kind in kinds
    ]


def publish_cost(arguments: Any, counts: Any) -> None:
    """Measure a step with and without, and publish the table."""
    rows = []
    for name, make, accumulate, pairs in (
        ("MLP of 40 tensors", forty_tensor_mlp, 1, 1500),
        ("transformer, 9.5M", ten_million_transformer, 1, 50),
        ("transformer, 9.5M", ten_million_transformer, 4, 10),
    ):
        torch.manual_seed(0)
        pairs = 10 if arguments.quick else pairs
        rows.append(measure_cost(name, make(), accumulate, pairs, arguments.device))
    title = "Cost of MicroBatching('auto') while everything fits"
    publish("micro_batching_cost", lo.Report(title, rows, [COST_NOTE]), arguments)


def publish_survival(arguments: Any, counts: Any) -> None:
    """Let runs in one process run out of memory, and publish how they ended so far."""
    on_cpu = arguments.device == "cpu"
    what = "address space" if on_cpu else "share of the GPU's memory"
    title = f"Trainings under a limited {what}, with MicroBatching('auto')"
    trainings = 3 if arguments.quick else counts.trainings
    for runs in measure_survival(trainings, arguments.device):
        rows = tabulate([{"where": "?", "retries": 0, **run} for run in runs])
        if on_cpu:
            report = lo.Report(title, rows, [BARE_NOTE, ENDS_NOTE])
            publish("micro_batching_survival", report, arguments)
        else:
            notes = [describe_failure(run) for run in runs if run["end"] != "completed"]
            report = lo.Report(title, rows, [BARE_NOTE, ENDS_NOTE, *notes])
            publish("micro_batching_survival", report, arguments, runs=runs)


def describe_failure(run: dict[str, Any]) -> str:
    """Return a line with the memory that a run on a GPU needed, and the last part of its error."""
    line = run.get("error", run["end"]).partition("\n")[0]
    return (
        f"Seed {run['seed']}, {run['where']}: limit {run['limit MiB']} MiB, reserved "
        f"{run['reserved MiB']}; single samples need {run['one sample MiB']}, whole batches "
        f"{run['whole batch MiB']}; {run['retries']} retries. "
        f"{line.rpartition('message: ')[2][:400]}"
    )


def publish_pairs(arguments: Any, counts: Any) -> None:
    """The same for one of two ranks."""
    rows = measure_pairs(2 if arguments.quick else counts.pairs)
    title = "Trainings on two DDP ranks, one of them with a limited address space"
    publish("micro_batching_pairs", lo.Report(title, rows, [ENDS_NOTE]), arguments)


def publish_regrowth(arguments: Any, counts: Any) -> None:
    """Measure the throughput with rare long batches, and publish the table."""
    rows = measure_regrowth(110 if arguments.quick else 400, 1 if arguments.quick else 3)
    title = "Throughput if one batch in a hundred is eight times longer and does not fit"
    publish("micro_batching_regrowth", lo.Report(title, rows, [REGROWTH_NOTE]), arguments)


PARTS = {
    "cost": publish_cost,
    "survival": publish_survival,
    "pairs": publish_pairs,
    "regrowth": publish_regrowth,
}
"""The last two are for CPUs, whose address space can be limited."""


def main() -> None:
    """Run the requested measurements and publish their tables."""
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--trainings", type=int, default=100, help="in one process")
    own.add_argument("--pairs", type=int, default=20, help="trainings on two ranks")
    own.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    counts, others = own.parse_known_args()
    arguments = parse_arguments(__doc__, others)
    warnings.simplefilter("ignore")
    for part in counts.parts:
        if arguments.device == "cpu" or part in ("cost", "survival"):
            PARTS[part](arguments, counts)


if __name__ == "__main__":
    main()
