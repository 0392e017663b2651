"""Random faults under DiLoCo: does a run hang, and do all replicas share the same bits?

Claim: a NaN on one rank, a rank that is stopped for a while, a network that is paused and processes
that are killed and restarted make no rank wait for ever, and all ranks have the same bits of outer
weights after every synchronization.

Each process has its own network namespace if the machine allows that (else the network is not
paused). It writes a hash of the outer weights after each exchange, and of its own weights after
each checkpoint; the hashes of a step must agree over ranks, and no weight may be NaN or infinite. A
checkpoint is written every 40 steps, from which a killed run resumes. If any rank takes no step for
60 seconds, that counts as a hang.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import json
import math
import multiprocessing
import os
import random
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

import lightning_opt as lo
from benchmarks.harness import free_port, parse_arguments, publish
from benchmarks.strategies.compression import (
    exit_on_sigterm,
    namespaces,
    rank_environment,
    why_not,
)
from benchmarks.strategies.compression_tasks import trainer_of

PLANS: list[tuple[int, dict[str, Any]]] = [
    (2, {"fragments": 2, "delay": 2}),
    (2, {}),
    (3, {"fragments": 4, "delay": 3, "compression": "int4"}),
    (2, {"fragments": 2, "delay": 7, "compression": "float32"}),
]
"""Number of ranks and arguments of the strategy; each setting gets its share of the faults."""

OUTER = {"sync_every": 8, "outer_lr": 0.7, "outer_momentum": 0.8}

KINDS = {"NaN": 4, "slow rank": 4, "killed and resumed": 1, "network paused for 5 s": 2}
"""Relative frequency of each fault."""

SAVE_EVERY = 40

PATIENCE = 60.0
"""Seconds without a step after which a run counts as hanging."""

NETWORK_NAMESPACE = 0x40000000
"""CLONE_NEWNET of sched.h."""


class Net(L.LightningModule):
    """A small model trained on noise, whose steps take a few milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(0.005)
        inputs = torch.randn(16, 64)
        return (self.layers(inputs) - inputs.roll(1)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Witness(L.Callback):
    """Inserts a NaN on request, writes hashes of weights, and saves checkpoints."""

    def __init__(self, folder: Path, rank: int, attempt: int) -> None:
        self.folder, self.rank = folder, rank
        self.hashes = folder / f"hashes{rank}-{attempt}"
        self.last: list[str] = []

    def note(self, step: int, hashes: list[str]) -> None:
        with self.hashes.open("a") as file:
            file.write(f"{step} {' '.join(hashes)}\n")

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        step, rank = trainer.global_step, self.rank
        order = self.folder / f"nan{rank}"
        if order.exists():
            order.unlink()
            with torch.no_grad():
                next(module.parameters())[0] = torch.nan
        outer = [hash_of([one.outer]) for one in trainer.strategy._replica._fragments]
        if outer != self.last:
            self.last = outer
            self.note(step, outer)
        if step % SAVE_EVERY == 0:
            trainer.save_checkpoint(self.folder / "next.ckpt")
            self.note(step, [hash_of(module.parameters())])
            if rank == 0:
                (self.folder / "next.ckpt").replace(self.folder / "last.ckpt")
        (self.folder / f"step{rank}").write_text(str(step))


def hash_of(tensors: Iterable[Tensor]) -> str:
    """Return a hash of the bits, marked if any number is not finite."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    sign = "" if math.isfinite(flat.sum()) else "!"
    return sign + hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


def run_rank(
    folder: Path, attempt: int, plan: dict[str, Any], namespace: str, environment: dict[str, str]
) -> None:
    """Train until killed, from the last checkpoint if there is one."""
    log = os.open(folder / f"log{environment['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if namespace:  # threads that this one starts will be there too
        with Path("/var/run/netns", namespace).open() as file:
            if ctypes.CDLL(None).setns(file.fileno(), NETWORK_NAMESPACE):
                raise OSError(f"{namespace} cannot be entered")
    os.environ.update(environment)
    torch.set_num_threads(1)
    rank, last = int(environment["RANK"]), folder / "last.ckpt"
    torch.manual_seed(rank + os.getpid())
    strategy = lo.DiLoCoStrategy(**OUTER, **plan)
    callbacks = [Witness(folder, rank, attempt)]
    trainer = trainer_of(int(environment["WORLD_SIZE"]), strategy, callbacks=callbacks)
    trainer.fit(Net(), range(10**7), ckpt_path=last if last.exists() else None)


class Run:
    """The training processes and their faults."""

    def __init__(
        self, ranks: int, plan: dict[str, Any], folder: Path, names: Sequence[str]
    ) -> None:
        self.ranks, self.plan, self.folder, self.names = ranks, plan, folder, names
        self.processes: list[Any] = []
        self.attempts = 0

    def start(self) -> None:
        context = multiprocessing.get_context("forkserver")  # which imports torch once
        port = free_port()
        for rank in range(self.ranks):
            name = self.names[rank] if self.names else ""
            environment = rank_environment(rank, self.ranks, port, bool(self.names))
            arguments = (self.folder, self.attempts, self.plan, name, environment)
            self.processes.append(context.Process(target=run_rank, args=arguments, daemon=True))
            self.processes[-1].start()
        self.attempts += 1

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.processes = []

    def steps(self) -> list[int]:
        """Return the latest step of each rank."""
        files = [self.folder / f"step{rank}" for rank in range(self.ranks)]
        return [int(file.read_text() or 0) if file.exists() else 0 for file in files]

    def wait_for_progress(self) -> bool:
        """Return whether every rank takes further steps in time."""
        before, end = self.steps(), time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if all(now > then for now, then in zip(self.steps(), before, strict=True)):
                return True
            time.sleep(0.1)
        return False

    def fault(self, kind: str, rank: int) -> None:
        """Inject one fault into a rank."""
        if kind == "NaN":
            (self.folder / f"nan{rank}").touch()
        elif kind == "slow rank":
            os.kill(self.processes[rank].pid, signal.SIGSTOP)
            time.sleep(1.0)
            os.kill(self.processes[rank].pid, signal.SIGCONT)
        elif kind.startswith("network"):
            hub = self.names[rank].rpartition("-")[0]
            for state in ("down", "up"):
                subprocess.run(["ip", "-n", hub, "link", "set", f"port{rank}", state], check=True)
                time.sleep(5.0 if state == "down" else 0.0)
        else:
            self.processes[rank].kill()
            time.sleep(0.5)
            self.start_again()

    def start_again(self) -> None:
        """Kill all processes, and resume from the last checkpoint."""
        self.end()
        last = self.folder / "last.ckpt"
        step = torch.load(last, weights_only=True)["global_step"] if last.exists() else 0
        for number in range(self.ranks):
            (self.folder / f"step{number}").write_text(str(step))
        self.start()

    def compared(self) -> Counter[str]:
        """Return the number of hashes compared over ranks, and the number of bad ones.

        A process that was killed may lack the last ones.
        """
        counts: Counter[str] = Counter({"compared": 0, "different": 0, "not finite": 0})
        for attempt in range(self.attempts):
            files = [self.folder / f"hashes{rank}-{attempt}" for rank in range(self.ranks)]
            lines = [file.read_text().splitlines() if file.exists() else [] for file in files]
            for of_ranks in zip(*lines, strict=False):
                counts["compared"] += 1
                counts["different"] += len(set(of_ranks)) > 1
                counts["not finite"] += "!" in "".join(of_ranks)
        return counts


def endure(
    ranks: int, plan: dict[str, Any], kinds: Sequence[str], draw: random.Random, faults: int
) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Return the counts of each fault, of hangs, and of compared hashes."""
    times: Counter[str] = Counter()
    hangs: Counter[str] = Counter()
    paused = any(kind.startswith("network") for kind in kinds)
    place = namespaces(ranks, ("1gbit", "256kb")) if paused else nothing()
    with tempfile.TemporaryDirectory() as name, place as names:
        run = Run(ranks, plan, Path(name), names)
        try:
            run.start()
            going = run.wait_for_progress()
            while going and times.total() < faults:
                kind = draw.choices(kinds, [KINDS[kind] for kind in kinds])[0]
                run.fault(kind, draw.randrange(ranks))
                times[kind] += 1
                if not run.wait_for_progress():
                    hangs[kind] += 1
                    run.start_again()
                    going = run.wait_for_progress()
                time.sleep(draw.random())
        finally:
            run.end()
        if not going:
            raise RuntimeError((Path(name) / "log0").read_text()[-3000:])
        return times, hangs, run.compared()


@contextlib.contextmanager
def nothing() -> Iterator[list[str]]:
    """Replace namespaces on machines without them."""
    yield []


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    own, rest = parser.parse_known_args(argv)
    arguments = parse_arguments(__doc__ or "", rest)
    exit_on_sigterm()
    draw, total = random.Random(own.seed), 4 if arguments.quick else own.faults
    kinds = [kind for kind in KINDS if not (kind.startswith("network") and why_not())]
    rows: list[dict[str, Any]] = []
    for number, (ranks, plan) in enumerate(PLANS):
        share = total * (number + 1) // len(PLANS) - total * number // len(PLANS)
        times, hangs, compared = endure(ranks, plan, kinds, draw, share)
        settings = ", ".join(f"{key} {value}" for key, value in plan.items()) or "defaults"
        faults = {kind: times[kind] for kind in kinds}
        row = {"ranks": ranks, "plan": settings, **faults, "hangs": hangs.total(), **compared}
        rows.append(row)
        print(json.dumps(row), flush=True)
    done = sum(row[kind] for row in rows for kind in kinds)
    report = lo.Report(
        f"{done} random faults",
        rows,
        [
            "`plan`: arguments of DiLoCoStrategy besides "
            + ", ".join(f"{key}={value}" for key, value in OUTER.items())
            + ". `NaN` to `network paused`: number of these faults. `hangs`: faults after which a "
            f"rank took no step for {PATIENCE:g} s. `compared`: exchanges and checkpoints after "
            "which the ranks' hashes of the weights were compared. `different`: how often they "
            "differed. `not finite`: how often a weight was NaN or infinite."
        ],
    )
    publish("diloco_faults", report, arguments)


if __name__ == "__main__":
    main()
