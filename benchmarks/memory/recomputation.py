"""The price of recomputation: policies beside torch's ``checkpoint``, and "auto" beside all plans.

Supports two claims. Each policy takes at most 1.02 times as long as ``torch.utils.checkpoint``
around the same blocks (for "selective" and "auto" with torch's selective contexts that keep the
same operators), on a transformer, a ConvNet with BatchNorm and an MLP. And the plan of "auto" takes
at most 1.03 times as long as the fastest of all plans within the same budget, where every plan of a
small model is measured. Times are those of a forward and backward pass, taken in turns; ratios are
medians over rounds. Runs in about four minutes.
"""

from __future__ import annotations

import itertools
import operator
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import lightning_opt as lo
from benchmarks.harness import median_ratio, parse_arguments, publish
from benchmarks.memory.checkpointing import Step
from benchmarks.memory.checkpointing_models import Chained, convnet, mlp
from lightning_opt.core.measure.timing import time_in_turns
from lightning_opt.core.modules.blocks import find_blocks
from lightning_opt.memory.checkpointing.batch_plan import plan_step
from lightning_opt.memory.checkpointing.policies import Plan, make_plan, recompute
from lightning_opt.memory.checkpointing.selective import OperatorKey
from lightning_opt.memory.checkpointing.step_profile import StepProfile, StepRunner, profile_step

POLICIES = {"every_layer": None, "every_nth": 3, "block": 3, "sqrt": None, "selective": None}
BUDGETS = (0.5, 0.7, 0.85)


class Mixed(nn.Module):
    """A residual block of a chosen inner width."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def transformer() -> tuple[nn.Module, Tensor]:
    """Ten layers of width 128."""
    layers = [
        nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(10)
    ]
    return Chained(nn.Identity(), [*layers], nn.LayerNorm(128)), torch.randn(4, 128, 128)


def mixed_mlp() -> tuple[nn.Module, Tensor]:
    """Five residual blocks whose inner widths differ by up to a factor of eight."""
    blocks = [Mixed(128, inner) for inner in (128, 1024, 256, 512, 256)]
    return Chained(nn.Identity(), [*blocks], nn.Linear(128, 10)), torch.randn(512, 128)


def mixed_transformer() -> tuple[nn.Module, Tensor]:
    """Five layers whose feed-forward widths differ."""
    layers = [
        nn.TransformerEncoderLayer(96, 4, inner, dropout=0.0, batch_first=True, norm_first=True)
        for inner in (96, 768, 192, 384, 192)
    ]
    return Chained(nn.Identity(), [*layers], nn.LayerNorm(96)), torch.randn(4, 96, 96)


class ModelStep(Step):
    """The step of `checkpointing.py` on a given model."""

    def __init__(self, made: tuple[nn.Module, Tensor]) -> None:
        self.model, self.batch = made
        self.device = "cpu"
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

        self.runner = StepRunner(self, torch.device("cpu"))

    def profile(self) -> StepProfile:
        return profile_step(self.runner, find_blocks(self.model))


def operators_of(keys: frozenset[OperatorKey]) -> list[Any]:
    """Return torch's operators of these names."""
    names = sorted({name for name, _ in keys})  # such as "aten.mm.default"
    return [operator.attrgetter(name)(torch.ops) for name in names]


def by_torch(plan: Plan, kept: frozenset[OperatorKey]) -> Callable[[Callable[[], Any]], Any]:
    """Return a function that calls another one with the groups of a plan under ``checkpoint``.

    Groups with a selection keep all operators of the names in ``kept``.
    """
    replaced: dict[nn.Module, Any] = {}
    for group in plan:
        modules = [module for block in group.blocks for module in block.modules]

        def run(x: Tensor, forwards: Any = tuple(module.forward for module in modules)) -> Tensor:
            for forward in forwards:
                x = forward(x)
            return x

        settings: dict[str, Any] = {"use_reentrant": False}
        if group.selection is not None:
            settings["context_fn"] = partial(
                create_selective_checkpoint_contexts, operators_of(kept)
            )
        replaced |= dict.fromkeys(modules[1:], lambda x: x)
        replaced[modules[0]] = partial(checkpoint, run, **settings)

    def call(function: Callable[[], Any]) -> Any:
        for module, forward in replaced.items():
            module.forward = forward
        try:
            return function()
        finally:
            for module in replaced:
                del module.forward

    return call


def compare_with_torch(name: str, step: ModelStep, rounds: int) -> list[dict[str, Any]]:
    """Return one row per policy."""
    step()
    blocks, profile = find_blocks(step.model), step.profile()
    unchecked = profile.unchecked_peak + profile.reserve
    plans = {policy: make_plan(policy, blocks, n) for policy, n in POLICIES.items()}
    plans["auto, half"] = plan_step(step.runner, profile, 0.5 * unchecked).plan
    kept = frozenset(known.key for known in profile.units[0].expensive)
    calls = {"none": step.under([])}
    for policy, plan in plans.items():
        calls[policy], calls[f"{policy} by torch"] = step.under(plan), by_torch(plan, kept)
    seconds = time_in_turns(
        {key: partial(call, step) for key, call in calls.items()}, rounds=rounds
    )
    return [
        {
            "model": name,
            "policy": policy,
            "ms": round(1e3 * statistics.median(seconds[policy]), 1),
            "time / torch": round(median_ratio(seconds[policy], seconds[f"{policy} by torch"]), 3),
            "time / none": round(median_ratio(seconds[policy], seconds["none"]), 3),
        }
        for policy in plans
    ]


def compare_with_all_plans(name: str, step: ModelStep, rounds: int) -> list[dict[str, Any]]:
    """Measure peak and time of every plan, and return one row per budget."""
    step()
    profile = step.profile()
    choices = [
        [None if option.kept is None else recompute(unit.block, option.kept)
         for option in unit.options]
        for unit in profile.units
    ]  # fmt: skip
    plans = [[group for group in groups if group] for groups in itertools.product(*choices)]
    peaks = [step.runner.peak(plan) for plan in plans]
    calls = {str(number): partial(step.under(plan), step) for number, plan in enumerate(plans)}
    quickest = {
        number: min(seconds)
        for number, seconds in time_in_turns(calls, rounds=max(2, rounds // 3)).items()
    }
    rows = []
    for budget in BUDGETS:
        limit = budget * (profile.unchecked_peak + profile.reserve)
        found = plan_step(step.runner, profile, limit)
        within = [n for n in quickest if peaks[int(n)] + profile.reserve <= limit]
        if not found.fits or not within:
            row = {"model": name, "budget": budget, "plans": len(plans), "plans in budget": 0}
            rows.append(row)
            continue
        # The minimum of many noisy times is too low, so the fastest few run again.
        best = sorted(within, key=lambda number: quickest[number])[:3]
        finalists = {"auto": partial(step.under(found.plan), step)} | {n: calls[n] for n in best}
        seconds = time_in_turns(finalists, rounds=3 * rounds)
        fastest = min(best, key=lambda number: statistics.median(seconds[number]))
        rows.append(
            {
                "model": name,
                "budget": budget,
                "plans": len(plans),
                "plans in budget": len(within),
                "auto ms": round(1e3 * statistics.median(seconds["auto"]), 2),
                "best ms": round(1e3 * statistics.median(seconds[fastest]), 2),
                "auto / best": round(median_ratio(seconds["auto"], seconds[fastest]), 3),
            }
        )
    return rows


def main() -> None:
    """Measure and publish both tables."""
    arguments = parse_arguments(__doc__ or "")
    torch.manual_seed(0)
    rounds = 2 if arguments.quick else 9
    models = {"transformer": transformer(), "convnet": convnet(True), "mlp": mlp(True)}
    rows = []
    for name, made in models.items():
        rows += compare_with_torch(name, ModelStep(made), rounds)
    notes = [
        "`ms`: time of forward and backward pass. `time / torch`: as a ratio to torch's "
        "`checkpoint` around the same blocks. `time / none`: as a ratio to no checkpointing. Both "
        "ratios are medians over rounds."
    ]
    report = lo.Report("Recomputation, compared with torch.utils.checkpoint", rows, notes)
    publish("recomputation", report, arguments)
    rows = []
    for name, made in {"MLP": mixed_mlp(), "transformer": mixed_transformer()}.items():
        rows += compare_with_all_plans(name, ModelStep(made), rounds)
    notes = [
        "`budget`: largest allowed peak, as a share of the peak without checkpointing. `plans`: "
        "all combinations of the blocks' options. `plans in budget`: those whose measured peak is "
        "within the budget. `best ms`: time of the fastest of these. `auto / best`: ratio of the "
        "times, median over rounds."
    ]
    report = lo.Report('The plan of "auto", compared with all plans', rows, notes)
    publish("recomputation_plans", report, arguments)


if __name__ == "__main__":
    main()
