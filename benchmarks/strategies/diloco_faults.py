"""Random faults under DiLoCo: does a run hang, and do all replicas share the same bits?

Claim: a NaN on one rank, a rank that is stopped for a while, a network that is paused and processes
that are killed and started again leave no rank waiting for ever, and all ranks with the same outer
weights, bit by bit, after every synchronisation.

Real processes, one a network namespace where this machine allows them (else the network is not
paused). Each writes a hash of the outer weights after each exchange; the hashes of a step must
agree over ranks. A checkpoint is written every 40 steps, from which a killed run goes on. One that
gets nowhere for 60 seconds counts as a hang.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

import lightning_opt as lo
from benchmarks.harness import parse_arguments, publish
from benchmarks.strategies.compression import namespaces, why_not
from benchmarks.strategies.compression_accuracy import free_port

MODULE = "benchmarks.strategies.diloco_faults"

SAVE_EVERY = 40

PATIENCE = 60.0
"""Seconds without a step after which a run counts as hanging."""


class Net(L.LightningModule):
    """A small net on noise, whose steps take a few milliseconds."""

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
    """Plants a NaN when told to, writes hashes of the outer weights, and saves."""

    def __init__(self, folder: Path, rank: int, attempt: int) -> None:
        self.folder, self.rank, self.attempt = folder, rank, attempt
        self.last: list[str] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        step, rank = trainer.global_step, self.rank
        order = self.folder / f"nan{rank}"
        if order.exists():
            order.unlink()
            with torch.no_grad():
                next(module.parameters())[0] = torch.nan
        hashes = [
            hashlib.sha256(fragment.outer.numpy().tobytes()).hexdigest()[:16]
            for fragment in trainer.strategy._replica._fragments
        ]
        if hashes != self.last:
            self.last = hashes
            with (self.folder / f"hashes{rank}-{self.attempt}").open("a") as file:
                file.write(f"{step} {' '.join(hashes)}\n")
        if step % SAVE_EVERY == 0:
            trainer.save_checkpoint(self.folder / "next.ckpt")
            if rank == 0:
                (self.folder / "next.ckpt").replace(self.folder / "last.ckpt")
        (self.folder / f"step{rank}").write_text(str(step))


def run_rank(own: argparse.Namespace) -> None:
    """Train until killed, from the last checkpoint if there is one."""
    torch.set_num_threads(1)
    rank, last = int(os.environ["RANK"]), own.folder / "last.ckpt"
    torch.manual_seed(rank + os.getpid())
    trainer = L.Trainer(
        accelerator="cpu",
        devices=own.ranks,
        strategy=lo.DiLoCoStrategy(8, 0.7, 0.8, fragments=own.fragments, delay=own.delay),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[Witness(own.folder, rank, own.attempt)],
    )
    trainer.fit(Net(), range(10**7), ckpt_path=last if last.exists() else None)


class Run:
    """Processes that train, and what can be done to them."""

    def __init__(self, own: argparse.Namespace, folder: Path, names: Sequence[str]) -> None:
        self.own, self.folder, self.names = own, folder, names
        self.processes: list[subprocess.Popen[bytes]] = []
        self.attempts = 0

    def start(self) -> None:
        port = free_port()
        options = [f"--ranks={self.own.ranks}", f"--fragments={self.own.fragments}"]
        options += [f"--delay={self.own.delay}", f"--folder={self.folder}"]
        options += [f"--attempt={self.attempts}"]
        self.attempts += 1
        for rank in range(self.own.ranks):
            inside = ["ip", "netns", "exec", self.names[rank]] if self.names else []
            environment = {
                **os.environ,
                "MASTER_ADDR": "10.99.0.1" if self.names else "127.0.0.1",
                "MASTER_PORT": str(port),
                "WORLD_SIZE": str(self.own.ranks),
                "NODE_RANK": "0",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "GLOO_SOCKET_IFNAME": "eth0" if self.names else "lo",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(Path(__file__).parents[2]),
            }
            command = [*inside, sys.executable, "-W", "ignore", "-m", MODULE, *options]
            with (self.folder / f"log{rank}").open("ab") as log:
                self.processes.append(
                    subprocess.Popen(command, env=environment, stdout=log, stderr=log)
                )

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.processes = []

    def steps(self) -> list[int]:
        """Return the latest step of each rank."""
        files = [self.folder / f"step{rank}" for rank in range(self.own.ranks)]
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
        """Do one of them to a rank."""
        if kind == "NaN":
            (self.folder / f"nan{rank}").touch()
        elif kind == "slow rank":
            self.processes[rank].send_signal(signal.SIGSTOP)
            time.sleep(1.0)
            self.processes[rank].send_signal(signal.SIGCONT)
        elif kind == "network paused for 5 s":
            hub = self.names[rank].rpartition("-")[0]
            for state in ("down", "up"):
                subprocess.run(["ip", "-n", hub, "link", "set", f"port{rank}", state], check=True)
                time.sleep(5.0 if state == "down" else 0.0)
        else:
            self.processes[rank].kill()
            time.sleep(0.5)
            self.end()
            last = self.folder / "last.ckpt"
            step = 0 if not last.exists() else torch.load(last, weights_only=True)["global_step"]
            for number in range(self.own.ranks):
                (self.folder / f"step{number}").write_text(str(step))
            self.start()


def parted(folder: Path, ranks: int, attempts: int) -> tuple[int, int]:
    """Return how many hashes could be compared over ranks, and how many of them differ.

    A process that was killed may lack the last ones.
    """
    compared = differ = 0
    for attempt in range(attempts):
        files = [folder / f"hashes{rank}-{attempt}" for rank in range(ranks)]
        lines = [file.read_text().splitlines() if file.exists() else [] for file in files]
        for of_ranks in zip(*lines, strict=False):
            compared += 1
            differ += len(set(of_ranks)) > 1
    return compared, differ


@contextlib.contextmanager
def nothing() -> Iterator[list[str]]:
    """Stand in for namespaces where there can be none."""
    yield []


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--attempt", type=int)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--fragments", type=int, default=2)
    parser.add_argument("--delay", type=int, default=2)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no fault after")
    own, rest = parser.parse_known_args(argv)
    if own.folder is not None:
        run_rank(own)
        return
    arguments = parse_arguments(__doc__ or "", rest)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that networks are removed then too
    draw, end = random.Random(own.seed), time.monotonic() + 60 * own.minutes
    reason = why_not()
    kinds = ["NaN", "slow rank", "killed and resumed"]
    kinds += [] if reason else ["network paused for 5 s"]
    counts: Counter[str] = Counter()
    hangs: Counter[str] = Counter()
    place = nothing() if reason else namespaces(own.ranks, ("1gbit", "256kb"))
    with tempfile.TemporaryDirectory() as name, place as names:
        run = Run(own, Path(name), names)
        try:
            run.start()
            going = run.wait_for_progress()
            while going and counts.total() < own.faults and time.monotonic() < end:
                kind = draw.choices(kinds, [4, 4, 1, 2][: len(kinds)])[0]
                run.fault(kind, draw.randrange(own.ranks))
                counts[kind] += 1
                if not run.wait_for_progress():
                    hangs[kind] += 1
                    run.end()
                    run.start()
                    going = run.wait_for_progress()
                time.sleep(draw.random())
        finally:
            run.end()
        compared, differ = parted(Path(name), own.ranks, run.attempts)
        report = lo.Report(
            f"{counts.total()} random faults on {own.ranks} ranks",
            [{"fault": k, "times": counts[k], "hangs": hangs[k]} for k in kinds],
            [
                f"Outer weights were compared over ranks after {compared} exchanges; different: "
                f"{differ}. H=8, {own.fragments} fragments, delay {own.delay}."
            ],
        )
        publish("diloco_faults", report, arguments, compared=compared, differ=differ)


if __name__ == "__main__":
    main()
