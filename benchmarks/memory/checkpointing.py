"""Memory and time of each checkpointing policy on seven models, and the plans of "auto".

Supports the table of the documentation. The bytes held for the backward pass are those of all
tensors that live when the forward pass ends, once a storage; with policy none they are those that a
saved-tensor hook sees. The peak excludes parameters and gradients. On a CPU it is the growth of the
resident memory during a step, measured in a fresh process per row; on CUDA it is the growth of the
memory that torch's allocator counts. Times of a step (forward and backward pass) are taken in turns
and given as the median of the ratios to the unchecked model within a round. Runs in about twelve
minutes; ``--models`` measures some.

Two models of ``transformers`` stand beside torchtitan's selective way, which is rebuilt here from
torch's ``checkpoint_wrapper``: of each block the outputs of attention and of every second matrix
product are kept, the rest is recomputed (pytorch/torchtitan, torchtitan/distributed/
activation_checkpoint.py, the option "op" as it was in 2025).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

import lightning_opt as lo
from benchmarks.harness import median_ratio, parse_arguments, publish
from benchmarks.memory.checkpointing_models import MODELS
from lightning_opt.core.measure.timing import time_in_turns, wait_for
from lightning_opt.core.modules.blocks import find_blocks
from lightning_opt.memory.checkpointing.batch_plan import plan_step
from lightning_opt.memory.checkpointing.policies import (
    AppliedPlan,
    BlockGroup,
    Plan,
    make_plan,
)
from lightning_opt.memory.checkpointing.selective import Selection
from lightning_opt.memory.checkpointing.step_profile import StepRunner, profile_step
from lightning_opt.memory.meters import measuring

GPU = True
POLICIES: dict[str, dict[str, Any]] = {
    "none": {},
    "every_layer": {},
    "every_nth, 3": {"interval": 3},
    "block, 3": {"interval": 3},
    "sqrt": {},
    "selective": {},
    "selective, 0.2": {"min_flops": 0.2},
}
SLOW = {"transformer", "GPT-2", "ViT"}
"""Models that are timed in fewer rounds."""
OTHERS = {"GPT-2", "ViT"}
"""Models of `transformers`: fewer policies, and torchtitan's policy."""
TORCHTITAN = "torchtitan"
TORCH = "torch's checkpoint"
"""Every block under ``torch.utils.checkpoint``, for the cost of this package's own wrapper."""
M_MMAP_THRESHOLD = -3
"""Of ``mallopt`` in glibc."""
NOTES = [
    "Ratios to policy none. Memory excludes parameters and gradients. `after forward`: bytes of "
    "all tensors between forward and backward pass. `tensor peak`: peak bytes of all tensors "
    "during the step. `peak`: peak memory of the process (on CUDA, of torch's allocator); malloc "
    "returns freed memory at once. `FLOPs`, `time`: of forward and backward pass.",
    "A row `auto, x` has a budget of x of the peak. `predicted`: the planner's prediction of the "
    "peak. `error, points`: its distance from the measured peak, in percentage points. `feasible`: "
    "whether the planner can meet the budget; if not, the row shows the plan with the lowest peak. "
    "`meets budget`: whether the measured peak does. `fastest fixed policy`: the fastest other "
    "policy whose measured peak meets the budget, and its time.",
]
BUDGETS = (0.2, 0.3, 0.4, 0.5, 0.7)


class Step:
    """A forward and backward pass with allocated gradients."""

    def __init__(self, name: str, device: str, quick: bool) -> None:
        torch.manual_seed(0)
        model, batch = MODELS[name](quick)
        self.model, self.batch = model.to(device), batch.to(device)
        self.device = device
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def __call__(self) -> None:
        self.loss().backward()

    def loss(self) -> Tensor:
        return self.model(self.batch).square().mean()

    def run(self, inside: Callable[[ExitStack], Any] | None = None) -> float:
        """Run once, with the interface of `TrialStep`."""
        with ExitStack() as stack:
            if inside is not None:
                inside(stack)
            wait_for(self.device)
            return time_in_turns({"": self}, rounds=1, warmup=0, device=self.device)[""][0]

    def candidate(self, plan: str) -> Callable[[Callable[[], Any]], Any]:
        """Return a function that calls another one under a described plan, or as others do."""
        others = {TORCHTITAN: torchtitan, TORCH: every_block_by_torch}
        return others[plan](self) if plan in others else self.under(read(plan, self))

    def plan(self, policy: str) -> Plan:
        settings = POLICIES[policy]
        name, blocks = policy.split(",")[0], find_blocks(self.model)
        return make_plan(name, blocks, settings.get("interval"), settings.get("min_flops"))

    def under(self, plan: Plan) -> Callable[[Callable[[], Any]], Any]:
        """Return a function that calls another one under ``plan`` and restores the model."""
        applied = AppliedPlan(plan)
        forwards = list(applied.forwards)
        applied.undo()

        def call(function: Callable[[], Any]) -> Any:
            for forward in forwards:
                forward.module.forward = forward
            try:
                return function()
            finally:
                for forward in forwards:
                    del forward.module.forward

        return call


def every_block_by_torch(step: Step) -> Callable[[Callable[[], Any]], Any]:
    """Return a function that calls another one with every block under torch's ``checkpoint``."""
    modules = [module for block in find_blocks(step.model) for module in block.modules]

    def call(function: Callable[[], Any]) -> Any:
        for module in modules:
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
        try:
            return function()
        finally:
            for module in modules:
                del module.forward

    return call


def torchtitan(step: Step) -> Callable[[Callable[[], Any]], Any]:
    """Return a function that calls another one with every block wrapped as in torchtitan."""
    aten = torch.ops.aten
    products = {aten.mm.default, aten.addmm.default}
    attention = {
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }

    def contexts() -> Any:
        counts: Counter[bool] = Counter()

        def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            counts[context.is_recompute] += operator in products
            second = operator in products and counts[context.is_recompute] % 2 == 0
            kept = operator in attention | products and not second
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    places = []
    for block in find_blocks(step.model):
        parent, _, name = block.name.rpartition(".")
        children = step.model.get_submodule(parent)._modules
        places.append((children, name, checkpoint_wrapper(block.modules[0], context_fn=contexts)))

    def call(function: Callable[[], Any]) -> Any:
        for children, name, wrapped in places:
            children[name] = wrapped
        try:
            return function()
        finally:
            for children, name, wrapped in places:
                children[name] = wrapped._checkpoint_wrapped_module

    return call


def count_flops(step: Step) -> int:
    """Return the operations of a step on one sample, as torch counts them.

    Attention on CPUs is included. The counter holds tensors, so bytes are counted separately.
    """
    aten = torch.ops.aten

    def forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(query, key, value))

    def backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_backward_flop_count(gradient, query, key, value))

    formulas = {
        aten._scaled_dot_product_flash_attention_for_cpu: forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }
    whole, step.batch = step.batch, step.batch[:1]
    try:
        with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
            step()
    finally:
        step.batch = whole
    return int(counter.get_total_flops())


def count_bytes(step: Step) -> tuple[int, int]:
    """Return the bytes held between forward and backward pass, and the peak of the step."""
    with measuring(torch.device(step.device)) as meter:
        loss = step.loss()
        held = meter.live()
        loss.backward()
    return held, meter.mark()


def process_peak(step: Step) -> int:
    """Return by how many bytes one step raises the process's memory; on CUDA the allocator's."""
    if step.device == "cuda":
        start = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated() - start
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # return free memory to the system
    with open("/proc/self/clear_refs", "w") as file:  # noqa: PTH123 - a switch of the kernel
        file.write("5")  # reset the peak to the present size
    start = _status("VmRSS")
    step()
    return _status("VmHWM") - start


def _status(key: str) -> int:
    with open("/proc/self/status") as file:  # noqa: PTH123
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(key))


def described(plan: Plan) -> str:
    """Return a plan as text: names of blocks and the operators that are kept."""
    entries = []
    for group in plan:
        selection = group.selection() if group.selection is not None else None
        settings = selection and [selection.min_flops, selection.kept and sorted(selection.kept)]
        entries.append([[block.name for block in group.blocks], settings])
    return json.dumps(entries)


def read(plan: str, step: Step) -> Plan:
    """Return the plan for the step's model that :func:`described` wrote."""
    blocks = {block.name: block for block in find_blocks(step.model)}
    groups = []
    for names, settings in json.loads(plan):
        selection = None
        if settings is not None:
            min_flops, kept = settings
            kept = None if kept is None else frozenset(map(tuple, kept))
            selection = partial(Selection, min_flops, kept)
        groups.append(BlockGroup(tuple(blocks[name] for name in names), selection))
    return groups


def put_peak(results: Any, name: str, plan: str, device: str, quick: bool) -> None:
    """Measure one peak, in a fresh process."""
    torch.set_num_threads(1)
    # Allocate each tensor in pages of its own, which are returned to the system when freed.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
    step = Step(name, device, quick)
    call = step.candidate(plan)
    call(step)  # allocate what is made once, and let a selective policy record operators
    results.put(call(partial(process_peak, step)))


class FreshProcesses:
    """Processes in which only the imports have run, forked from one server."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["lightning_opt", "lightning_opt.memory.checkpointing.step_profile"]
        )

    def peak(self, name: str, plan: str, device: str, quick: bool) -> int:
        results = self._context.Queue()
        arguments = (results, name, plan, device, quick)
        process = self._context.Process(target=put_peak, args=arguments)
        process.start()
        peak = int(results.get(timeout=300))
        process.join()
        return peak


def measure(
    name: str, device: str, quick: bool, rounds: int, fresh: FreshProcesses
) -> list[dict[str, Any]]:
    """Return the rows of one model."""
    step = Step(name, device, quick)
    step()
    policies = [policy for policy in POLICIES if name not in OTHERS or "," not in policy]
    plans = {policy: described(step.plan(policy)) for policy in policies}
    plans[TORCH] = TORCH
    if name in OTHERS:
        plans[TORCHTITAN] = TORCHTITAN
    runner = StepRunner(step, torch.device(device))
    profile = profile_step(runner, find_blocks(step.model))
    unchecked = profile.unchecked_peak + profile.reserve
    budgets = (0.3, 0.5) if name in OTHERS else BUDGETS
    outcomes = {
        f"auto, {budget}": plan_step(runner, profile, budget * unchecked) for budget in budgets
    }
    plans |= {label: described(outcome.plan) for label, outcome in outcomes.items()}
    calls = {label: step.candidate(plan) for label, plan in plans.items()}
    for call in calls.values():  # a selective policy records operators in its first step
        call(step)
    if device == "cuda":  # the allocator's peak needs no fresh process
        peaks = {label: call(partial(process_peak, step)) for label, call in calls.items()}
    else:
        peaks = {label: fresh.peak(name, plan, device, quick) for label, plan in plans.items()}
    flops = {label: call(partial(count_flops, step)) for label, call in calls.items()}
    counts = {label: call(partial(count_bytes, step)) for label, call in calls.items()}
    held, counted = (
        {label: numbers[place] for label, numbers in counts.items()} for place in range(2)
    )
    seconds = time_in_turns(
        {label: partial(call, step) for label, call in calls.items()},
        rounds=rounds,
        device=device,
        warmup=0,  # each has run
    )
    rows: list[dict[str, Any]] = [
        {
            "model": name,
            "policy": label,
            "after forward": round(held[label] / held["none"], 3),
            "tensor peak": round(counted[label] / counted["none"], 3),
            "peak": round(peaks[label] / peaks["none"], 3),
            "FLOPs": round(flops[label] / flops["none"], 3),
            "time": round(median_ratio(seconds[label], seconds["none"]), 3),
        }
        for label in plans
    ]
    by_hand = [row for row in rows if row["policy"] not in outcomes]
    for row in rows:
        if row["policy"] in outcomes:
            budget, outcome = float(row["policy"].split(", ")[1]), outcomes[row["policy"]]
            row["predicted"] = round((outcome.predicted + profile.reserve) / unchecked, 3)
            row["error, points"] = round(100 * abs(row["predicted"] - row["peak"]), 1)
            row["feasible"] = outcome.fits
            row["meets budget"] = row["peak"] <= budget
            meeting = [r for r in by_hand if r["peak"] <= budget]
            best = min(meeting, key=lambda r: r["time"], default=None)
            row["fastest fixed policy"] = f"{best['policy']} {best['time']:.2f}" if best else "none"
    return rows


def main() -> None:
    """Measure every model, and publish the table after each."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    own, rest = parser.parse_known_args()
    arguments = parse_arguments(__doc__ or "", rest)
    fresh = FreshProcesses()
    for record, mine in (("checkpointing", False), ("checkpointing_others", True)):
        rows: list[dict[str, Any]] = []
        names = [name for name in own.models if (name in OTHERS) == mine]
        for name in names:
            rounds = 5 if name in SLOW else 9
            rounds = 3 if arguments.quick else rounds
            rows += measure(name, arguments.device, arguments.quick, rounds, fresh)
            title = "Activation checkpointing, compared with no checkpointing"
            report = lo.Report(title, rows, NOTES)
            publish(record, report, arguments, complete=name == names[-1])


if __name__ == "__main__":
    main()
