"""Time and memory of each compute feature of lightning_opt, alone and combined.

Supports the table of the documentation: a vision transformer with rotary attention, a ConvNet and a
byte-level GPT, each trained by a Lightning Trainer in a plain version (attention by hand, rotary
angles computed at each call, AdamW as torch makes it, float32, no compilation) and with one switch
or all of them on. Each configuration is a process of its own, which has run nothing else; they stay
alive side by side and train some steps in turn, so that a slow minute hits all of them. Times are
medians over rounds of the ratio to the plain version within a round. The peak is taken in the same
process after the last round: on a CPU how far one step raises the process's resident memory, on
CUDA the same of torch's allocator. Runs in under nine minutes on a CPU.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import multiprocessing
import os
import statistics
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

import lightning_opt as lo
from benchmarks.harness import parse_arguments, publish
from benchmarks.kernels.kernels_models import MODELS, Batches, Learner, Parts
from benchmarks.models import quiet_trainer
from lightning_opt.core.measure.timing import wait_for
from lightning_opt.core.numerics.ratios import median_ratio

GPU = True
M_MMAP_THRESHOLD = -3
"""Of ``mallopt`` in glibc."""
WARMUP = 4
"""Steps before the timed ones; they include compilation and the callbacks' measurements."""
LIMIT = 400.0
"""Seconds after which a process counts as hanging."""


PLAIN = Parts()


@dataclass(frozen=True)
class Switch:
    """One configuration: callbacks and settings by name, so that it can be sent to a process."""

    parts: Parts = PLAIN
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    precision: str = "32-true"


FUSED: dict[str, Any] = {"FusedOptimizer": {}}
RUNTIME: dict[str, Any] = {"Runtime": {}}
BOTH = Parts(sdpa=True, cached=True)


def switches(model: str, device: str) -> dict[str, Switch]:
    """Return the configurations that apply to a model, the plain one first."""
    attention = model != "ConvNet"
    convolutions = model != "byte GPT"
    found = {"plain Lightning": Switch()}
    if attention:
        found["SelfAttention"] = Switch(Parts(sdpa=True))
        found["RotaryEmbedding"] = Switch(Parts(cached=True))
    found["FusedOptimizer"] = Switch(callbacks=FUSED)
    if convolutions:
        found["ChannelsLast"] = Switch(callbacks={"ChannelsLast": {}})
    found["CompileModel, model"] = Switch(callbacks={"CompileModel": {"scope": "model"}})
    found["CompileModel, regions"] = Switch(callbacks={"CompileModel": {"scope": "regions"}})
    found["Runtime"] = Switch(callbacks=RUNTIME)
    found["bf16-mixed"] = Switch(precision="bf16-mixed")
    # On a CPU a C++ compiler takes minutes for a whole model, and regions take seconds.
    scope = "model" if device == "cuda" else "regions"
    together = {**RUNTIME, **FUSED, "CompileModel": {"scope": scope}}
    if convolutions:
        together["ChannelsLast"] = {}
    parts = BOTH if attention else PLAIN
    found["all but bf16-mixed"] = Switch(parts, together)
    found["all"] = Switch(parts, together, "bf16-mixed")
    return found


# --- in the process of a configuration -----------------------------------------------------------


class Turns(L.Callback):
    """Trains on request and sends the measurements."""

    def __init__(self, pipe: Connection, device: str) -> None:
        self.pipe, self.device = pipe, device
        self.left, self.task = WARMUP, "warm up"
        self.start = 0.0

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.left -= 1
        if self.left > 0:
            return
        wait_for(self.device)
        seconds = time.perf_counter() - self.start
        if self.task == "memory":
            self.pipe.send(self._peak() - self.floor)
        elif self.task == "warm up":
            metrics = trainer.callback_metrics
            self.pipe.send(
                {
                    "compile": float(metrics.get("compile/seconds", 0.0)),
                    "uncompiled": int(metrics.get("compile/uncompiled", 0)),
                }
            )
        else:
            self.pipe.send((seconds, float(outputs["loss"])))
        self._obey()

    def _obey(self) -> None:
        self.task, self.left = self.pipe.recv()
        if self.task == "memory":
            gc.collect()
            self.floor = self._settle()
        self.start = time.perf_counter()

    def _settle(self) -> int:
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        libc = ctypes.CDLL(None)
        # Allocate each tensor in its own pages and return free memory, so that the peak starts low.
        libc.mallopt(M_MMAP_THRESHOLD, 2**16)
        libc.malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as file:  # noqa: PTH123 - a switch of the kernel
            file.write("5")
        return _status("VmRSS")

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self.device == "cuda" else _status("VmHWM")


def _status(key: str) -> int:
    with open("/proc/self/status") as file:  # noqa: PTH123
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(key))


def train(pipe: Connection, name: str, size: str, switch: Switch, device: str) -> None:
    """Train until killed."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        learner = Learner(name, size, switch.parts)
        callbacks = [getattr(lo, key)(**value) for key, value in switch.callbacks.items()]
        callbacks.append(Turns(pipe, device))
        precision = switch.precision
        trainer = quiet_trainer(device, max_epochs=-1, precision=precision, callbacks=callbacks)
        loader = DataLoader(Batches(learner), batch_size=None, pin_memory=device == "cuda")
        trainer.fit(learner, loader)
    except BaseException:  # noqa: BLE001 - sent to the parent
        pipe.send(traceback.format_exc())


class Runner:
    """A configuration in its process."""

    def __init__(self, name: str, size: str, switch: Switch, device: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["lightning_opt", "benchmarks.kernels.kernels_models"])
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=train, args=(other, name, size, switch, device))
        self.process.start()
        other.close()

    def answer(self) -> Any:
        if not self.pipe.poll(LIMIT):
            raise TimeoutError(f"no answer within {LIMIT:.0f} s")
        answer = self.pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer

    def ask(self, task: str, steps: int) -> Any:
        self.pipe.send((task, steps))
        return self.answer()

    def end(self) -> None:
        self.process.kill()  # it has no state to save
        self.process.join()


# --- in the main process -------------------------------------------------------------------------


def start(
    name: str, size: str, device: str, only: Sequence[str] | None
) -> dict[str, tuple[Runner, dict[str, Any]]]:
    """Return the warmed-up runners of a model; as many start at once as there are CPUs."""
    runners: dict[str, Runner] = {}
    ready: dict[str, dict[str, Any]] = {}
    wanted = {
        label: switch
        for label, switch in switches(name, device).items()
        if only is None or label in only or label == "plain Lightning"
    }
    try:
        for label, switch in wanted.items():
            runners[label] = Runner(name, size, switch, device)
            if len(runners) - len(ready) == min(os.cpu_count() or 1, 16) or label == [*wanted][-1]:
                for waiting in [key for key in runners if key not in ready]:
                    ready[waiting] = runners[waiting].answer()
    except BaseException:
        for runner in runners.values():
            runner.end()
        raise
    return {label: (runners[label], ready[label]) for label in wanted}


def measure(
    name: str, size: str, device: str, rounds: int, only: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Return the rows of one model."""
    warmed = start(name, size, device, only)
    runners = {label: runner for label, (runner, _) in warmed.items()}
    try:
        plain = runners["plain Lightning"]
        steps = max(2, min(50, round(0.3 / plain.ask("time", 2)[0] * 2)))
        for runner in [*runners.values()][1:]:
            runner.ask("time", 2)  # equal numbers of steps, since losses are compared
        labels = list(runners)
        seconds: dict[str, list[float]] = {label: [] for label in labels}
        losses: dict[str, float] = {}
        for turn in range(rounds):
            first = turn % len(labels)
            for label in labels[first:] + labels[:first]:
                elapsed, losses[label] = runners[label].ask("time", steps)
                seconds[label].append(elapsed / steps)
        for runner in runners.values():
            runner.ask("memory", 1)  # the first one starts with the heap of the rounds
        peaks = {label: runner.ask("memory", 1) for label, runner in runners.items()}
    finally:
        for runner in runners.values():
            runner.end()
    reference = seconds["plain Lightning"]
    rows = []
    for label in labels:
        ratio = median_ratio(seconds[label], reference)
        ready = warmed[label][1]
        rows.append(
            {
                "model": name,
                "switch": label + (" (did not compile)" if ready["uncompiled"] else ""),
                "time": round(ratio, 3),
                "times faster": round(1 / ratio, 2),
                "ms": round(1e3 * statistics.median(seconds[label]), 2) if ratio == 1 else None,
                "peak": round(peaks[label] / peaks["plain Lightning"], 3),
                "peak MiB": round(peaks[label] / 2**20, 1),
                "loss": round(losses[label], 4),
                "compiling s": round(ready["compile"], 1) or None,
            }
        )
    return rows


NOTES = [
    "time and peak: as shares of plain Lightning (attention by hand, rotary angles computed at "
    "each call, AdamW as torch makes it, float32, no compilation). peak: how far a step raises "
    "memory, so activations, temporaries and gradients, not weights and optimizer state. loss: of "
    "the last timed step, after the same number of steps for all switches of a model.",
    "SelfAttention stands for torch's attention instead of one written by hand, RotaryEmbedding "
    "for cached angles. all: all of a model's switches; CompileModel takes the whole model on CUDA "
    "and regions on a CPU.",
]


def main() -> None:
    """Measure every model, and publish the table after each."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--rounds", type=int, help="rounds of timing (9; 5 on CUDA)")
    parser.add_argument("--switches", nargs="+", help="only these, and plain Lightning")
    own, rest = parser.parse_known_args()
    arguments = parse_arguments(__doc__ or "", rest)
    size = "quick" if arguments.quick else arguments.device
    rounds = own.rounds or (3 if arguments.quick else 5 if arguments.device == "cuda" else 9)
    rows: list[dict[str, Any]] = []
    for name in own.models:
        rows += measure(name, size, arguments.device, rounds, own.switches)
        report = lo.Report("Switches of compute, against plain Lightning", rows, NOTES)
        publish("compute", report, arguments)


if __name__ == "__main__":
    main()
