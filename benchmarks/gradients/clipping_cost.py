"""Cost of AdaptiveClipping, compared with torch's own clipping and published packages.

Supports: on a model of 40 small tensors at most 0.6 times ``clip_grad_norm_`` and 0.4 times zclip;
on a transformer of ten million parameters at most 1.02 of the bare step. The callback's hook is
called as the Trainer calls it. All candidates clip the same gradients at a threshold above their
norm, the usual case. On a CPU AdaptiveClipping then writes nothing, while torch always multiplies.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable

import lightning as L
import torch

import lightning_opt as lo
from benchmarks.harness import median_ratio, parse_arguments, publish
from benchmarks.models import Regression, fit_two_steps, forty_tensor_mlp, ten_million_transformer
from lightning_opt.core.measure.timing import time_in_turns

GPU = True

OURS = "AdaptiveClipping"


def clippers(
    module: Regression, trainer: L.Trainer, optimizer: torch.optim.Optimizer
) -> dict[str, Callable[[], object]]:
    """Return each clipper as a function that clips the module's gradients once."""
    parameters = list(module.parameters())

    def ours(rule: str) -> Callable[[], object]:
        callback = lo.AdaptiveClipping(rule, every_n_steps=10**9)
        callback.on_fit_start(trainer, module)
        return lambda: callback.on_before_optimizer_step(trainer, module, optimizer)

    candidates: dict[str, Callable[[], object]] = {
        OURS: ours("robust"),
        f"{OURS}('zclip')": ours("zclip"),
        f"{OURS}('mean_std')": ours("mean_std"),
        f"{OURS}('per_parameter')": ours("per_parameter"),
        f"{OURS}('unit_wise')": ours("unit_wise"),
        "torch clip_grad_norm_": lambda: torch.nn.utils.clip_grad_norm_(parameters, 1e6),
    }
    for name, make in {"zclip": _zclip, "smartclip": _smartclip, "autoclip": _autoclip}.items():
        try:
            candidates[name] = make(module)
        except ImportError:
            print(f"{name} is not installed, so it is not in the table")
    return candidates


def _zclip(module: Regression) -> Callable[[], object]:
    clipper = importlib.import_module("zclip").ZClip(max_grad_norm=None)
    return lambda: clipper.step(module)


def _smartclip(module: Regression) -> Callable[[], object]:
    smartclip = importlib.import_module("smartclip")
    clipper = smartclip.ZScoreClip()
    return lambda: smartclip.apply(module, clipper)


def _autoclip(module: Regression) -> Callable[[], object]:
    torch_part = importlib.import_module("autoclip.torch")
    return torch_part.QuantileClip(module.parameters(), global_threshold=True).step


def measure(
    name: str, module: Regression, device: str, rounds: int, calls: int
) -> list[dict[str, object]]:
    """Time the bare step and every clipper on one model."""
    trainer = fit_two_steps(module, device)
    optimizer = trainer.optimizers[0]
    module.training_step(module.batch, 0).backward()

    def step() -> None:
        optimizer.zero_grad()
        module.training_step(module.batch, 0).backward()
        optimizer.step()

    candidates = clippers(module, trainer, optimizer)
    seconds = time_in_turns(candidates, rounds=rounds, calls=calls, device=device)
    steps = time_in_turns({"step": step}, rounds=max(rounds // 2, 5), device=device)["step"]
    bare = statistics.median(steps)
    rows: list[dict[str, object]] = [{"model": name, "what": "bare step", "us": round(bare * 1e6)}]
    for candidate, values in seconds.items():
        cost = statistics.median(values)
        row = {
            "model": name,
            "what": candidate,
            "us": round(cost * 1e6),
            "time / torch": round(median_ratio(values, seconds["torch clip_grad_norm_"]), 2),
            "step / bare": round(1 + cost / bare, 3),
        }
        if "zclip" in seconds:
            row["time / zclip"] = round(median_ratio(values, seconds["zclip"]), 2)
        rows.append(row)
    return rows


def main() -> None:
    """Measure both models and publish the table."""
    arguments = parse_arguments(__doc__)
    torch.manual_seed(0)
    device = arguments.device
    rounds = 4 if arguments.quick else 20 if device == "cuda" else 60
    notes = [
        "`us`: median microseconds of one call. `time / torch`, `time / zclip`: its time as a "
        "ratio to `clip_grad_norm_` and to the zclip package, median over rounds. `step / bare`: a "
        "step with this call as a ratio to the bare step: (step + call) / step.",
    ]
    rows = measure("40-tensor MLP", forty_tensor_mlp(), device, rounds, 20)
    report = lo.Report("Cost of clipping", rows, notes)
    publish("clipping_cost", report, arguments, complete=False)
    rows += measure("9.5 M transformer", ten_million_transformer(), device, rounds // 2, 2)
    publish("clipping_cost", lo.Report("Cost of clipping", rows, notes), arguments)


if __name__ == "__main__":
    main()
