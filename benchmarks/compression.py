"""Step time of compressed DDP over slow networks, as a ratio to plain DDP.

Claim: over 1 Gbit/s and slower, sending 1% of the gradient's elements with error feedback, or all
of them in 8 or 4 bits, takes a fraction of the time of an uncompressed step.

Real processes, one a network namespace, joined by a bridge in a namespace of its own; `tc tbf`
limits what each may send and receive. Nothing outside these namespaces is touched, and they are
removed at the end, come what may. That needs root, `ip` and `tc`; elsewhere the script says so and
ends. Model: eight linear layers of 1024 x 1024 (33.6 MB of float32), batch 64, SGD.
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
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

import lightning_opt as lo
from harness import median_ratio, parse_arguments, publish, time_interleaved

NETWORKS: dict[str, tuple[str, str] | None] = {
    "1 Gbit/s": ("1gbit", "256kb"),
    "100 Mbit/s": ("100mbit", "64kb"),
    "no limit": None,
}
"""Rate and burst for `tc tbf`."""

LEFT_OUT = 5


class SilentDDP(DDPStrategy):
    """Exchanges nothing: what the step takes without a network."""

    def _register_ddp_hooks(self) -> None:
        self.model.register_comm_hook(None, _keep)  # type: ignore[union-attr]


def _keep(state, bucket):  # type: ignore[no-untyped-def]
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def candidates() -> dict[str, Any]:
    """Return the strategies by name; the first is what the others are compared with."""
    return {
        "dense": lambda: "ddp",
        "no exchange": SilentDDP,
        "fp16": lambda: lo.HookedDDPStrategy("fp16"),
        "PowerSGD rank 1": lambda: lo.HookedDDPStrategy("powersgd", warmup_steps=2),
        "ddp_topk 1%": lambda: lo.CompressedDDPStrategy("topk", warmup_steps=2),
        "ddp_int8": lambda: lo.CompressedDDPStrategy("int8", warmup_steps=2),
        "ddp_int4": lambda: lo.CompressedDDPStrategy("int4", warmup_steps=2),
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
    """Notes when each step ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.times.append(time.perf_counter())


def run_rank(arguments: argparse.Namespace) -> None:
    """Time every candidate, round by round, and write the seconds of a step as JSON."""
    torch.set_num_threads(1)
    world = int(os.environ["WORLD_SIZE"])
    seconds: dict[str, list[float]] = {}
    for _ in range(arguments.rounds):
        for name, strategy in candidates().items():
            watch = Stopwatch()
            trainer = L.Trainer(
                accelerator="cpu",
                devices=world,
                strategy=strategy(),
                max_steps=arguments.steps + LEFT_OUT,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                callbacks=[watch],
            )
            trainer.fit(Network(), range(arguments.steps + LEFT_OUT))
            steps = [b - a for a, b in zip(watch.times, watch.times[1:], strict=False)]
            seconds.setdefault(name, []).append(statistics.median(steps[LEFT_OUT - 1 :]))
            dist.barrier()
    if dist.get_rank() == 0:
        arguments.result.write_text(json.dumps(seconds))
    dist.barrier()


# --- the network --------------------------------------------------------------------------------


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def namespaces(ranks: int, limit: tuple[str, str] | None) -> Iterator[list[str]]:
    """Make one network namespace a rank, joined by a bridge in a further one; remove them after.

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


def why_not() -> str | None:
    """Return why this machine cannot make networks, or None if it can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found (package iproute2)"
    try:
        with namespaces(1, ("1gbit", "256kb")):
            return None
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"


def start_ranks(
    script: str,
    ranks: int,
    options: Sequence[object],
    *,
    namespaces: Sequence[str] = (),
    address: str = "127.0.0.1",
    port: int = 29500,
    interface: str = "lo",
) -> Any:
    """Run a script once a rank, and return what its rank 0 writes as JSON to ``--result``.

    Args:
        script: The benchmark; with ``--result`` it is one rank, for which Lightning finds the
            others in the environment.
        ranks: How many.
        options: What else each is given.
        namespaces: The network namespace of each rank; empty for the machine's own.
        address: Where rank 0 can be reached.
        port: The port there.
        interface: What gloo sends through.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-W", "ignore", script, "--result", str(result)]
        command += map(str, options)
        processes = []
        try:
            for rank in range(ranks):
                environment = {
                    **os.environ,
                    "MASTER_ADDR": address,
                    "MASTER_PORT": str(port),
                    "WORLD_SIZE": str(ranks),
                    "NODE_RANK": "0",
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "GLOO_SOCKET_IFNAME": interface,
                    "OMP_NUM_THREADS": "1",
                }
                inside = ["ip", "netns", "exec", namespaces[rank]] if namespaces else []
                with (Path(folder) / f"{rank}.log").open("w") as log:
                    processes.append(
                        subprocess.Popen(inside + command, env=environment, stdout=log, stderr=log)
                    )
            for process in processes:
                process.wait(timeout=3600)
        finally:
            for process in processes:
                process.kill()
        if not result.exists():
            raise RuntimeError((Path(folder) / "0.log").read_text()[-3000:])
        return json.loads(result.read_text())


def measure(ranks: int, network: str, steps: int, rounds: int) -> dict[str, list[float]]:
    """Return for each candidate the seconds of a step, one number a round."""
    with namespaces(ranks, NETWORKS[network]) as names:
        seconds: dict[str, list[float]] = start_ranks(
            __file__,
            ranks,
            ["--steps", steps, "--rounds", rounds],
            namespaces=names,
            address="10.99.0.1",
            interface="eth0",
        )
        return seconds


# --- the processor's part -----------------------------------------------------------------------


def cost_of_compression(rounds: int) -> lo.Report:
    """Time compressing and decompressing one bucket of 26 MB, as a ratio to copying it."""
    numel = 6_553_600
    device = torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(numel, generator=generator) for _ in range(3)]
    copy, mean = torch.empty(numel), torch.zeros(numel)
    turn = itertools.count()
    timed: dict[str, Callable[[], object]] = {
        "memory copy": lambda: copy.copy_(gradients[next(turn) % 3]),
        "torch.topk of 1%": lambda: torch.topk(
            gradients[next(turn) % 3].abs(), numel // 100, sorted=False
        ),
    }
    for name, compressor in {
        "TopK(0.01)": lo.TopK(0.01),
        "TopK(0.001)": lo.TopK(0.001),
        "Quantize(8)": lo.Quantize(8),
        "Quantize(4)": lo.Quantize(4),
    }.items():
        codec, residual = compressor.codec(numel, device), torch.zeros(numel)

        def compress(codec: Any = codec, residual: Tensor = residual) -> None:
            codec.compress(residual, gradients[next(turn) % 3])

        def settle(codec: Any = codec, residual: Tensor = residual) -> None:
            codec.decompress_add(codec.message, residual, -1.0)

        def decompress(codec: Any = codec) -> None:
            codec.decompress_add(codec.message, mean, 0.5)

        another = compressor.codec(numel, device)

        def compress_only(codec: Any = another) -> None:
            codec.compress(gradients[next(turn) % 3])

        timed[f"{name}: compress"] = compress_only
        timed[f"{name}: compress, with gradient added and checked"] = compress
        timed[f"{name}: keep the rest"] = settle
        timed[f"{name}: add one message"] = decompress
    seconds = time_interleaved(timed, rounds=rounds, warmup=10)
    return lo.Report(
        "The processor's part: one bucket of 6.5 million elements, one thread",
        [
            {
                "what": name,
                "ms": round(1000 * statistics.median(own), 2),
                "memory copies": round(median_ratio(own, seconds["memory copy"]), 2),
            }
            for name, own in seconds.items()
        ],
    )


# --- the report ---------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--result", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    own, rest = parser.parse_known_args(argv)
    if own.result is not None:
        run_rank(own)
        return
    arguments = parse_arguments(__doc__ or "", rest)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that networks are removed then too
    publish("compression_cost", cost_of_compression(5 if arguments.quick else 30), arguments)
    reason = why_not()
    if reason is not None:
        print(f"This machine does not allow the benchmark's own networks: {reason}")
        return
    steps, rounds = (
        own.steps or (3 if arguments.quick else 12),
        own.rounds or (1 if arguments.quick else 3),
    )
    rows = []
    raw = {}
    for ranks in own.ranks:
        for network in own.networks:
            seconds = raw[f"{ranks} ranks, {network}"] = measure(ranks, network, steps, rounds)
            rows += rows_of(ranks, network, seconds)
    report = lo.Report(
        "A step with 33.6 MB of gradients, compared with plain DDP over the same network",
        rows,
        [
            "`step`: time of a step, as a ratio to dense. `exchange`: the same for what is left "
            "after the time of a step without any exchange. Medians over "
            f"{rounds} rounds of {steps} steps; the first {LEFT_OUT} of each are left out."
        ],
    )
    publish("compression", report, arguments, seconds=raw)


def rows_of(ranks: int, network: str, seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return one row a candidate: median ratios within a round."""
    alone = statistics.median(seconds["no exchange"])
    dense = seconds["dense"]
    return [
        {
            "ranks": ranks,
            "network": network,
            "strategy": name,
            "ms": round(1000 * statistics.median(own), 1),
            "step": round(statistics.median(a / b for a, b in zip(own, dense, strict=True)), 3),
            "exchange": round(
                statistics.median(
                    (a - alone) / (b - alone) for a, b in zip(own, dense, strict=True)
                ),
                3,
            ),
        }
        for name, own in seconds.items()
    ]


if __name__ == "__main__":
    main()
