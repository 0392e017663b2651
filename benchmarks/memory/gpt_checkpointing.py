"""Checkpointing a GPT, compared with torchtitan and torch's activation_memory_budget.

Supports the choice of a policy on a GPU. Reports peak and time of a step (forward and backward pass
in bf16 autocast) of GPT-2 with 124M and 350M parameters: plain, with this package's policies, with
every block under ``checkpoint_wrapper``, with torchtitan's selective operators (every second matrix
product is recomputed), and compiled with ``activation_memory_budget``. Each row runs in its own
process. On a GPU the processes of a model start and compile side by side, and measure one at a
time. On a CPU it runs a tiny model, and the peak is the process's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import lightning_opt as lo
from benchmarks.gpt import GPT, size_for
from benchmarks.harness import parse_arguments, publish
from benchmarks.memory.checkpointing import Step, process_peak
from lightning_opt.core.measure.timing import time_calls
from lightning_opt.core.modules.blocks import find_blocks
from lightning_opt.memory.checkpointing.batch_plan import plan_step
from lightning_opt.memory.checkpointing.policies import Plan
from lightning_opt.memory.checkpointing.step_profile import StepRunner, profile_step

GPU = True
LIMIT = 200.0
"""Seconds for one row."""


def every_block(model: GPT) -> None:
    """Recompute each block, as in torchtitan's full activation checkpointing."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for place, block in enumerate(model.blocks):
        model.blocks[place] = checkpoint_wrapper(block, preserve_rng_state=False)


def selected_operators(model: GPT) -> None:
    """Save attention and every second matrix product, as in torchtitan's selective mode."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    aten = torch.ops.aten
    products = {aten.mm.default, aten.addmm.default}
    saved = {
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_flash_attention.default,
        *products,
    }

    def contexts() -> Any:
        counts = {True: 0, False: 0}

        def policy(context: Any, func: Any, *_: Any, **__: Any) -> CheckpointPolicy:
            if func in products:
                counts[context.is_recompute] += 1
            if func in saved and not (func in products and counts[context.is_recompute] % 2 == 0):
                return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    for place, block in enumerate(model.blocks):
        model.blocks[place] = checkpoint_wrapper(
            block, context_fn=contexts, preserve_rng_state=False
        )


def budget(share: float) -> Callable[[GPT], nn.Module]:
    """Set the compiler's memory budget."""

    def compiled(model: GPT) -> nn.Module:
        import torch._functorch.config as config

        config.activation_memory_budget = share
        return torch.compile(model)  # type: ignore[return-value]

    return compiled


def ours(policy: str) -> Callable[[GPT], Any]:
    """Return a function that names a policy of this package."""
    return lambda model: policy


WAYS: dict[str, Callable[[GPT], Any]] = {
    "plain": lambda model: None,
    "ActivationCheckpointing('every_layer')": ours("every_layer"),
    "ActivationCheckpointing('selective')": ours("selective"),
    "ActivationCheckpointing('auto'), half": ours("auto"),
    "torchtitan, full": every_block,
    "torchtitan, selective operators": selected_operators,
    "torch.compile": budget(1.0),
    "torch.compile, activation_memory_budget=0.5": budget(0.5),
}


class GPTStep(Step):
    """The step of `checkpointing.py`, on a GPT."""

    def __init__(self, size: str, device: str, samples: int) -> None:
        torch.manual_seed(0)
        self.device = device
        with torch.device(device):
            self.model = GPT(size)
        self.batch = self.model.batch(samples, device)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def half(self) -> Plan:
        """Return the plan for half of the peak."""
        self()
        runner = StepRunner(self, torch.device(self.device))
        profile = profile_step(runner, find_blocks(self.model))
        return plan_step(runner, profile, 0.5 * (profile.unchecked_peak + profile.reserve)).plan

    def loss(self) -> Tensor:
        with torch.autocast(self.device.split(":")[0], torch.bfloat16):
            return self.model(self.batch)


def measure(
    pipe: Any, turn: Any, way: str, size: str, device: str, samples: int, rounds: int
) -> None:
    """Send the peak and the seconds of a step, or the traceback."""
    try:
        step = GPTStep(size, device, samples)
        if "compile" in way:
            os.nice(10)  # other processes measure in the meantime
            step.model = WAYS[way](step.model)
            step()
        with turn:
            result = time_step(step, way, rounds)
        pipe.send(result)  # after the lock: the parent kills this process once it has the result
    except BaseException:  # noqa: BLE001 - sent to the parent
        pipe.send(traceback.format_exc())


def time_step(step: GPTStep, way: str, rounds: int) -> tuple[int, list[float]]:
    """Return the peak and the seconds of a step."""
    changed = None if "compile" in way else WAYS[way](step.model)
    call = lambda function: function()  # noqa: E731
    if isinstance(changed, str):
        plan = step.half() if changed == "auto" else step.plan(changed)
        call = step.under(plan)
        call(step)  # a selective policy records operators

    def run() -> tuple[int, list[float]]:
        for _ in range(3):
            step()
        seconds = [time_calls(step, device=step.device) for _ in range(rounds)]
        return process_peak(step), seconds

    return call(run)


def main() -> None:
    """Measure each configuration in a process, and publish after each."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--sizes", nargs="+", default=["124M", "350M"])
    parser.add_argument("--samples", type=int, default=8)
    own, rest = parser.parse_known_args()
    arguments = parse_arguments(__doc__ or "", rest)
    sizes = dict.fromkeys(size_for(arguments.device, size) for size in own.sizes)
    rows: list[dict[str, Any]] = []
    context = multiprocessing.get_context("spawn")
    # Compilation takes minutes on a CPU.
    ways = [way for way in WAYS if not (arguments.quick and "compile" in way)]
    rounds = 3 if arguments.quick else 10

    def start(way: str, size: str) -> tuple[Any, Any]:
        mine, others = context.Pipe()
        values = (others, turn, way, size, arguments.device, own.samples, rounds)
        process = context.Process(target=measure, args=values)
        process.start()
        return process, mine

    for size in sizes:
        plain: dict[str, float] = {}
        turn = context.Lock()
        side_by_side = ways if arguments.device == "cuda" else []
        started = {way: start(way, size) for way in side_by_side}
        for way in ways:
            process, mine = started.get(way) or start(way, size)
            result = mine.recv() if mine.poll(LIMIT) else f"no answer within {LIMIT:.0f} s"
            process.kill()
            process.join()
            row: dict[str, Any] = {"model": size, "way": way}
            if isinstance(result, str):
                row["failed"] = result.strip().splitlines()[-1]
                print(result)
            else:
                peak, seconds = result
                row |= {"peak MiB": round(peak / 2**20, 1)}
                row |= {"ms": round(1e3 * statistics.median(seconds), 2)}
                plain = plain or row
                row["peak / plain"] = round(row["peak MiB"] / max(plain["peak MiB"], 0.1), 3)
                row["time / plain"] = round(row["ms"] / plain["ms"], 3)
            rows.append(row)
            report = lo.Report(
                f"Checkpointing GPT-2 in bf16 autocast, {own.samples} samples",
                rows,
                [
                    "`peak MiB`: peak memory without parameters and gradients. `ms`: time of "
                    "forward and backward pass. `/ plain`: as a ratio to no checkpointing."
                ],
            )
            publish("gpt_checkpointing", report, arguments, complete=way == ways[-1])


if __name__ == "__main__":
    main()
