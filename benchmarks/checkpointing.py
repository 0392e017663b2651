"""What each checkpointing policy saves and costs, on five kinds of model.

Supports the table of the documentation. Bytes saved for the backward pass are counted with
saved-tensor hooks, once a storage, without parameters; so are the boundaries that checkpointing
keeps. The peak is measured in a fresh process for each row: on a CPU as the growth of the process's
peak resident memory over a step, on CUDA as torch's allocator counts it; both above parameters and
gradients. Times of a step (forward and backward) are taken in turns with the unchecked model, and
given as the median ratio within a round.
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

import lightning_opt as lo
from harness import median_ratio, parse_arguments, publish, time_interleaved
from lightning_opt.core.blocks import find_blocks
from lightning_opt.memory.auto import StepPlanner
from lightning_opt.memory.checkpointing import make_plan
from lightning_opt.memory.operators import KeepDear, Selection
from lightning_opt.memory.policies import AppliedPlan, Plan, Stretch

GPU = True
BATCH = 2
"""Sequences of the transformer; the ratios hardly depend on it."""


class Chained(nn.Module):
    """Blocks between an input and an output."""

    def __init__(self, first: nn.Module, blocks: list[nn.Module], last: nn.Module) -> None:
        super().__init__()
        self.first, self.blocks, self.last = first, nn.ModuleList(blocks), last

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Residual(nn.Module):
    """Two convolutions with BatchNorm, and a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


class Dense(nn.Module):
    """A linear layer with norm and activation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(self.linear(x)))


class DoubleConvolution(nn.Module):
    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(fan_in, fan_out, 3, padding=1),
            nn.GroupNorm(8, fan_out),
            nn.SiLU(),
            nn.Conv2d(fan_out, fan_out, 3, padding=1),
            nn.GroupNorm(8, fan_out),
            nn.SiLU(),
        )

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        return self.body(x if skip is None else torch.cat([x, skip], 1))


class UNet(nn.Module):
    """Four levels with long skips."""

    def __init__(self) -> None:
        super().__init__()
        widths = (16, 32, 64, 128)
        self.down = nn.ModuleList(
            DoubleConvolution(a, b) for a, b in zip((3, *widths), widths, strict=False)
        )
        self.up = nn.ModuleList(
            DoubleConvolution(a + b, b) for a, b in zip(widths[:0:-1], widths[-2::-1], strict=True)
        )
        self.last = nn.Conv2d(widths[0], 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down[:-1]:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.down[-1](x)
        for block in self.up:
            x = block(F.interpolate(x, scale_factor=2.0), skip=skips.pop())
        return self.last(x)


class EncoderDecoder(nn.Module):
    """Every block of the decoder attends to the encoder's output."""

    def __init__(self, width: int = 192, depth: int = 6) -> None:
        super().__init__()
        settings: dict[str, Any] = {
            "dim_feedforward": 4 * width,
            "dropout": 0.0,
            "batch_first": True,
            "norm_first": True,
        }
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, **settings) for _ in range(depth)
        )
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(width, 4, **settings) for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        memory = x
        for block in self.encoder:
            memory = block(memory)
        for block in self.decoder:
            x = block(x, memory)
        return x


def transformer() -> tuple[nn.Module, Tensor]:
    def layer() -> nn.Module:
        return nn.TransformerEncoderLayer(
            256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
        )

    model = Chained(nn.Identity(), [layer() for _ in range(24)], nn.LayerNorm(256))
    return model, torch.randn(BATCH, 256, 256)


def mlp() -> tuple[nn.Module, Tensor]:
    return (
        Chained(nn.Identity(), [Dense(256) for _ in range(32)], nn.Linear(256, 10)),
        torch.randn(1024, 256),
    )


def convnet() -> tuple[nn.Module, Tensor]:
    first = nn.Conv2d(3, 32, 3, padding=1)
    last = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return Chained(first, [Residual(32) for _ in range(12)], last), torch.randn(4, 3, 48, 48)


def unet() -> tuple[nn.Module, Tensor]:
    return UNet(), torch.randn(2, 3, 96, 96)


def encoder_decoder() -> tuple[nn.Module, Tensor]:
    return EncoderDecoder(), torch.randn(4, 128, 192)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "transformer": transformer,
    "convnet": convnet,
    "mlp": mlp,
    "unet": unet,
    "encoder_decoder": encoder_decoder,
}
POLICIES: dict[str, dict[str, Any]] = {
    "none": {},
    "every_layer": {},
    "every_nth, 3": {"interval": 3},
    "block, 3": {"interval": 3},
    "sqrt": {},
    "selective": {},
    "selective, 0.2": {"min_flops": 0.2},
}
BUDGETS = (0.2, 0.3, 0.4, 0.5, 0.7)


class Step:
    """A forward and backward pass on gradients that are there."""

    def __init__(self, name: str, device: str) -> None:
        torch.manual_seed(0)
        model, batch = MODELS[name]()
        self.model, self.batch = model.to(device), batch.to(device)
        self.device = device
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def run(self, inside: Callable[[ExitStack], Any] | None = None) -> float:
        with ExitStack() as stack:
            if inside is not None:
                inside(stack)
            return time_interleaved({"": self}, rounds=1, warmup=0, device=self.device)[""][0]

    def __call__(self) -> None:
        self.model(self.batch).square().mean().backward()

    def plan(self, policy: str) -> Plan:
        name = policy.split(",")[0]
        settings = POLICIES[policy]
        blocks = find_blocks(self.model)
        return make_plan(name, blocks, settings.get("interval"), settings.get("min_flops"))

    def under(self, plan: Plan) -> Callable[[], None]:
        """Return a step under ``plan`` that leaves the model as it was."""
        applied = AppliedPlan(plan)
        forwards = list(applied.forwards)
        applied.undo()

        def step() -> None:
            for forward in forwards:
                forward.module.forward = forward
            try:
                self()
            finally:
                for forward in forwards:
                    del forward.module.forward

        return step


def saved_bytes(step: Step, run: Callable[[], None]) -> int:
    """Return what the graph holds when the forward pass ends: tensors by storage, no parameters."""
    own = {p.untyped_storage().data_ptr() for p in step.model.parameters()}
    own |= {b.untyped_storage().data_ptr() for b in step.model.buffers()}
    held: dict[int, int] = {}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(held.values())


def step_flops(run: Callable[[], None]) -> int:
    """Return the operations of a whole step, as torch counts them."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def count(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(query, key, value))

    with FlopCounterMode(display=False, custom_mapping={attention: count}) as counter:
        run()
    return int(counter.get_total_flops())


def trim() -> None:
    """Give what is free back to the system, so that the next peak starts low."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def process_peak(step: Step, run: Callable[[], None]) -> int:
    """Return how far one step raises the process's memory, on the allocator's word on CUDA."""
    run()  # what is made once is there
    if step.device == "cuda":
        start = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - start
    trim()
    with open("/proc/self/clear_refs", "w") as file:  # noqa: PTH123 - a switch of the kernel
        file.write("5")  # the peak starts anew from the present size
    start = _status("VmRSS")
    run()
    return _status("VmHWM") - start


def _status(key: str) -> int:
    with open("/proc/self/status") as file:  # noqa: PTH123
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(key))


def described(plan: Plan) -> str:
    """Return a plan as text: names of blocks, and what is kept of them."""
    return json.dumps(
        [
            {
                "blocks": [block.name for block in stretch.blocks],
                "kept": None if stretch.choice is None else sorted(stretch.choice().kept or ()),
                "rule": getattr(stretch.choice and stretch.choice().rule, "min_flops", None),
            }
            for stretch in plan
        ]
    )


def read(plan: str, model: nn.Module) -> Plan:
    """Return the plan for ``model`` that :func:`described` wrote."""
    blocks = {block.name: block for block in find_blocks(model)}
    stretches = []
    for entry in json.loads(plan):
        choice = None
        if entry["kept"]:
            choice = partial(Selection, None, frozenset(tuple(place) for place in entry["kept"]))
        elif entry["kept"] is not None:
            choice = partial(Selection, KeepDear(entry["rule"]))
        stretches.append(Stretch(tuple(blocks[name] for name in entry["blocks"]), choice))
    return stretches


def peak_in_a_fresh_process(name: str, plan: Plan, device: str) -> int:
    command = [sys.executable, __file__, "--peak", name, described(plan), device]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(json.loads(output.splitlines()[-1]))


def print_peak(name: str, plan: str, device: str) -> None:
    """Measure one peak and print it: what the fresh process does."""
    torch.set_num_threads(1)
    step = Step(name, device)
    run = step.under(read(plan, step.model))
    run()
    print(json.dumps(process_peak(step, run)))


def measure(name: str, device: str, rounds: int) -> list[dict[str, Any]]:
    """Return the rows of one model."""
    step = Step(name, device)
    step()
    plans = {policy: step.plan(policy) for policy in POLICIES}
    planner = StepPlanner(step, find_blocks(step.model), torch.device(device))
    tensors: dict[str, float | None] = {}
    predicted: dict[str, float | None] = {}
    for policy, plan in plans.items():
        # A selective policy learns in its first step, and would be measured in that.
        tensors[policy] = None if policy.startswith("sel") else planner.measure_peak(plan)
    for budget in BUDGETS:
        outcome = planner.plan(budget * planner.unchecked_peak)
        label = f"auto, {budget}"
        plans[label] = outcome.plan
        tensors[label] = outcome.peak
        predicted[label] = outcome.solution.peak if outcome.fits else None
    peaks = {label: peak_in_a_fresh_process(name, plan, device) for label, plan in plans.items()}
    runs = {label: step.under(plan) for label, plan in plans.items()}
    seconds = time_interleaved(runs, rounds=rounds, device=device, warmup=1)
    saved = {label: saved_bytes(step, run) for label, run in runs.items()}
    flops = {label: step_flops(run) for label, run in runs.items()}

    def ratio(values: Mapping[str, float | None], label: str, none: float) -> float | None:
        value = values.get(label)
        return None if value is None else round(value / none, 3)

    return [
        {
            "model": name,
            "policy": label,
            "saved": ratio(saved, label, saved["none"]),
            "peak": ratio(peaks, label, peaks["none"]),
            "tensors": ratio(tensors, label, planner.unchecked_peak),
            "predicted": ratio(predicted, label, planner.unchecked_peak),
            "FLOPs": ratio(flops, label, flops["none"]),
            "time": round(median_ratio(seconds[label], seconds["none"]), 2),
        }
        for label in plans
    ]


def main() -> None:
    """Measure every model and publish the table."""
    if "--peak" in sys.argv:
        print_peak(*sys.argv[2:])
        return
    arguments = parse_arguments(__doc__)
    rows = []
    for name in MODELS:
        rows += measure(name, arguments.device, 2 if arguments.quick else 7)
    notes = [
        "All numbers are ratios to policy none. saved: bytes that the graph holds after the "
        "forward pass. peak: of the process (on CUDA of the allocator), above parameters and "
        "gradients. tensors: the same counted by tensors, which is what auto measures and what "
        "its budget bounds. predicted: by auto, where the budget can be met.",
    ]
    publish("checkpointing", lo.Report("Activation checkpointing", rows, notes), arguments)


if __name__ == "__main__":
    main()
