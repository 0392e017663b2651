"""Step time of compressed DDP over slow networks, as a ratio to plain DDP.

Claim: over 1 Gbit/s and slower, sending 1% of the gradient's elements with error feedback, or all
of them in 8 or 4 bits, takes a fraction of the time of an uncompressed step. `ddp_compressed`
chooses the right one, and costs almost nothing on a fast network.

Each process has its own network namespace; a bridge in another namespace joins them, and `tc tbf`
limits the rates. Nothing outside these namespaces is changed, and they are always removed at the
end. That needs root, `ip` and `tc`; elsewhere the script prints that and ends.

Model: eight linear layers of 1024 x 1024 (33.6 MB of float32), batch 64, SGD.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

import lightning_opt as lo
from benchmarks.harness import median_ratio, parse_arguments, publish
from benchmarks.models import quiet_trainer
from lightning_opt.strategies.quantization import quantizer

MODULE = "benchmarks.strategies.compression"

NETWORKS: dict[str, tuple[str, str] | None] = {
    "1 Gbit/s": ("1gbit", "256kb"),
    "100 Mbit/s": ("100mbit", "256kb"),
    "no limit": None,
}
"""Rate and burst for `tc tbf`.

A burst holds several of TCP's 64 KB packets, which a network card would cut into frames. With a
smaller one the CPU cuts them, which alone makes a step of DiLoCo 10% longer.
"""

INTERFACE = "eth0"
"""Name of a rank's only interface."""

LEFT_OUT = 5
LEFT_OUT_OF_AUTO = 42
"""Untimed first steps; `ddp_compressed` needs more, until it has chosen."""

SECONDS = 80.0
"""After this time, no further round starts on one network."""


ENCODINGS = ((8, 1024), (4, 1024), (4, 128))
"""Bits and elements per block of all strategies here."""

COMPILED = "Encodings were compiled before the first round."

AUTO, TOPK = "ddp_compressed", "ddp_topk 1%"

BUCKETS = (8, 25)
"""Compared by ``--buckets``: the ``bucket_cap_mb`` of 8 and 4 bits on a CPU, and that of DDP."""


class SilentDDP(DDPStrategy):
    """Exchanges nothing, for the time of a step without a network."""

    def _register_ddp_hooks(self) -> None:
        self.model.register_comm_hook(None, _keep)  # type: ignore[union-attr]


def _keep(state, bucket):  # type: ignore[no-untyped-def]
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def candidates() -> dict[str, Any]:
    """Return the strategies by name; the first is the baseline."""
    compressed = partial(lo.CompressedDDPStrategy, warmup_steps=2, ramp_steps=0)
    return {
        "dense": lambda: "ddp",
        "no exchange": SilentDDP,
        "fp16": lambda: lo.HookedDDPStrategy("fp16"),
        TOPK: lambda: compressed("topk"),
        "ddp_int8": lambda: compressed("int8"),
        "ddp_int4": lambda: compressed("int4"),
        AUTO: lambda: compressed("auto"),
        **{
            f"ddp_{name}, {size} MB": partial(compressed, name, bucket_cap_mb=size)
            for name in ("int8", "int4")
            for size in BUCKETS
        },
    }


# --- one rank -----------------------------------------------------------------------------------


class Network(L.LightningModule):
    """Eight layers of 1024 x 1024, trained on noise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [layer for _ in range(8) for layer in (nn.Linear(1024, 1024, False), nn.ReLU())]
        self.layers = nn.Sequential(*layers[:-1])
        self.batch = torch.randn(64, 1024)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers(self.batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Stopwatch(L.Callback):
    """Records the end of each step, and the bytes sent by then."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.sent: list[int] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.times.append(time.perf_counter())
        self.sent.append(sent_bytes())


def sent_bytes() -> int:
    """Return the bytes sent from this network namespace, with headers."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counts.split()[8])
    return 0


def run_rank(arguments: argparse.Namespace) -> None:
    """Time every candidate, round by round."""
    torch.set_num_threads(1)
    world = int(os.environ["WORLD_SIZE"])  # Lightning removes it after the first fit
    makers = {name: maker for name, maker in candidates().items() if name in arguments.only}
    time_in_rounds(
        list(makers),
        lambda name: time_candidate(name, makers[name](), world, arguments.steps),
        arguments,
    )


def time_in_rounds(
    names: Sequence[str],
    time_one: Callable[[str], tuple[float, float, str | None]],
    own: argparse.Namespace,
) -> None:
    """Time candidates round by round until the time is up, and write the measurements as JSON.

    The JSON has each candidate's seconds and bytes per step, one number per round.

    Args:
        names: Of the candidates.
        time_one: Returns the seconds and the bytes of a step, and what was chosen, if anything.
        own: With the ``seconds`` that there are, and where the ``result`` goes.
    """
    for bits, block in ENCODINGS:  # a usual run compiles early, in the background
        quantizer(bits, block).compile()
    found: dict[str, Any] = {kind: {name: [] for name in names} for kind in ("seconds", "bytes")}
    start, rounds = time.perf_counter(), 0
    more = True
    while more:
        began = time.perf_counter()
        turn = rounds % len(names)
        for name in [*names, *names][turn : turn + len(names)]:
            seconds, sent, chosen = time_one(name)
            found["seconds"][name].append(seconds)
            found["bytes"][name].append(sent)
            if chosen is not None:
                found["chosen"] = chosen
        rounds += 1
        now = time.perf_counter()
        # Rank 0 decides whether there is time for another round.
        goes_on = torch.tensor([now - start + now - began < own.seconds])
        dist.broadcast(goes_on, 0)
        more = bool(goes_on.item())
        if dist.get_rank() == 0:
            unfinished = own.result.with_suffix(".part")
            unfinished.write_text(json.dumps(found))
            unfinished.replace(own.result)
    dist.barrier()


def time_candidate(
    name: str, strategy: Any, world: int, steps: int
) -> tuple[float, float, str | None]:
    """Return the seconds and the bytes per step, and the choice of ``ddp_compressed``."""
    left_out = LEFT_OUT_OF_AUTO if name == AUTO else LEFT_OUT
    watch = Stopwatch()
    trainer = quiet_trainer(
        devices=world,
        strategy=strategy,
        max_steps=left_out + steps,
        callbacks=[watch, chosen := Chosen()],
    )
    trainer.fit(Network(), range(left_out + steps))
    dist.barrier()
    taken = [b - a for a, b in itertools.pairwise(watch.times)][left_out - 1 :]
    sent = watch.sent[-1] - watch.sent[left_out - 1]
    return statistics.median(taken), sent / steps, chosen.text


class Chosen(L.Callback):
    """Stores the strategy's message about its choice."""

    def __init__(self) -> None:
        self.text: str | None = None

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        describe = getattr(trainer.strategy, "describe", None)
        report = None if describe is None else describe()
        if report is not None:
            self.text = report.notes[0]


# --- the network --------------------------------------------------------------------------------


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def namespaces(ranks: int, limit: tuple[str, str] | None) -> Iterator[list[str]]:
    """Create one network namespace per rank, joined by a bridge, and remove them afterwards.

    Every command names one of these namespaces, so no interface outside them can be touched.

    Args:
        ranks: How many.
        limit: Rate and burst of each rank's link, in both directions.
    """
    hub = f"lo-bench-{os.getpid()}"
    names = [f"{hub}-{rank}" for rank in range(ranks)]
    try:
        _run("ip", "netns", "add", hub)
        _run("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", hub, "link", "set", "bridge", "up")
        for rank, name in enumerate(names):
            port = f"port{rank}"
            _run("ip", "netns", "add", name)
            _run(
                "ip", "-n", hub, "link", "add", port, "type", "veth", "peer", "eth0", "netns", name
            )
            _run("ip", "-n", hub, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", name, "addr", "add", f"10.99.0.{rank + 1}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            if limit is not None:
                rate, burst = limit
                for namespace, device in ((name, "eth0"), (hub, port)):
                    queue = ("root", "tbf", "rate", rate, "burst", burst, "latency", "400ms")
                    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, *queue)
        yield names
    finally:
        for name in (*names, hub):  # the links go with them
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def exit_on_sigterm() -> None:
    """Exit at SIGTERM, so that networks are removed; ``timeout`` sends it twice."""

    def leave(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(143)

    signal.signal(signal.SIGTERM, leave)


def why_not() -> str | None:
    """Return why this machine cannot create networks, or None if it can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found (package iproute2)"
    try:
        with namespaces(1, ("1gbit", "256kb")):
            return None
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"


def rank_environment(rank: int, ranks: int, port: int, isolated: bool) -> dict[str, str]:
    """Return the environment variables of one rank, for Lightning and gloo.

    Args:
        rank: The rank.
        ranks: Number of ranks.
        port: The port of rank 0.
        isolated: Whether each rank has its own network namespace.
    """
    return {
        "MASTER_ADDR": "10.99.0.1" if isolated else "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "NODE_RANK": "0",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GLOO_SOCKET_IFNAME": INTERFACE if isolated else "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }


def start_ranks(
    module: str,
    ranks: int,
    options: Sequence[object],
    *,
    namespaces: Sequence[str] = (),
    port: int = 29500,
    timeout: float = 3600.0,
) -> Any:
    """Run a benchmark once per rank, and return the JSON that rank 0 writes to ``--result``.

    Args:
        module: The benchmark's name; with ``--result`` it is one rank, for which Lightning finds
            the others in the environment.
        ranks: How many.
        options: What else each is given.
        namespaces: The network namespace of each rank; empty for the machine's own.
        port: The port of rank 0.
        timeout: Seconds for each rank; what rank 0 has written until then counts.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-W", "ignore", "-m", module, "--result", str(result)]
        command += map(str, options)
        processes = []
        try:
            for rank in range(ranks):
                environment = os.environ | rank_environment(rank, ranks, port, bool(namespaces))
                inside = ["ip", "netns", "exec", namespaces[rank]] if namespaces else []
                with (Path(folder) / f"{rank}.log").open("w") as log:
                    processes.append(
                        subprocess.Popen(inside + command, env=environment, stdout=log, stderr=log)
                    )
            for process in processes:
                process.wait(timeout)
        except subprocess.TimeoutExpired:
            print(f"{module}: not done after {timeout:g} seconds")
        finally:
            for process in processes:
                process.kill()
        if not result.exists():
            raise RuntimeError((Path(folder) / "0.log").read_text()[-3000:])
        return json.loads(result.read_text())


def measure(
    module: str, ranks: int, network: str, options: Sequence[object], timeout: float
) -> dict[str, Any]:
    """Return what the ranks of a benchmark measure over one network."""
    with namespaces(ranks, NETWORKS[network]) as names:
        found: dict[str, Any] = start_ranks(
            module, ranks, options, namespaces=names, timeout=timeout
        )
        return found


# --- the report ---------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--result", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seconds", type=float, help="time for rounds on each network")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--only", nargs="+", choices=list(candidates()), default=[])
    parser.add_argument("--buckets", action="store_true", help="compare sizes of buckets instead")
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    own, rest = parser.parse_known_args(argv)
    if own.result is not None:
        run_rank(own)
        return
    chosen = own.only or [name for name in candidates() if name.endswith(" MB") == own.buckets]
    own.only = [name for name in candidates() if name in {"dense", "no exchange", *chosen}]
    arguments = parse_arguments(__doc__ or "", rest)
    exit_on_sigterm()
    reason = why_not()
    if reason is not None:
        print(f"This machine does not allow the benchmark's own networks: {reason}")
        return
    steps = own.steps or (2 if arguments.quick else 5)
    seconds = 0.0 if arguments.quick else SECONDS
    seconds = seconds if own.seconds is None else own.seconds
    options = ["--steps", steps, "--seconds", seconds, "--only", *own.only]
    rows: list[dict[str, Any]] = []
    raw: dict[str, Any] = {}
    failed: list[str] = []
    for ranks in own.ranks:
        for network in own.networks:
            place = f"{ranks} ranks, {network}"
            try:
                raw[place] = measure(MODULE, ranks, network, options, 10 * SECONDS)
            except (RuntimeError, subprocess.SubprocessError) as error:
                # Keep the rows of the other networks.
                failed.append(f"Failed: {place}: {str(error)[-300:]}")
            else:
                rows += rows_of(ranks, network, raw[place])
            notes = [
                "`step`: time of a step, as a ratio to dense. `exchange`: the same after the time "
                "of a step of `no exchange` is subtracted from both. `compression ratio`: bytes "
                "that dense sends, divided by bytes that the strategy sends, headers included. "
                f"Times are medians of {steps} steps, then medians over rounds. The first "
                f"{LEFT_OUT} steps are not timed ({LEFT_OUT_OF_AUTO} for {AUTO}, which chooses its "
                f"compression in them). {COMPILED}",
                *failed,
            ]
            title = "Step time with 33.6 MB of gradients, compared with DDP on the same network"
            name = "compression_buckets" if own.buckets else "compression"
            publish(name, lo.Report(title, rows, notes), arguments, found=raw)


def rows_of(ranks: int, network: str, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row per candidate, with medians of the ratios within a round."""
    seconds, sent = found["seconds"], found["bytes"]
    dense = seconds["dense"]
    alone = statistics.median(seconds["no exchange"])
    rows = []
    for name, own in seconds.items():
        exchanges = [(a - alone) / (b - alone) for a, b in zip(own, dense, strict=True)]
        fewer = [a / b for a, b in zip(sent["dense"], sent[name], strict=True) if b > 0]
        rows.append(
            {
                "ranks": ranks,
                "network": network,
                "strategy": name,
                "rounds": len(own),
                "ms": round(1000 * statistics.median(own), 1),
                "step": round(median_ratio(own, dense), 3),
                "exchange": round(statistics.median(exchanges), 3),
                "compression ratio": round(statistics.median(fewer), 1) if fewer else None,
            }
        )
    return rows


if __name__ == "__main__":
    main()
