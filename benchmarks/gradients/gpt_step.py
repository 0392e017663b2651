"""Cost of health, guard and clipping in a step of a GPT of 124M parameters.

Supports: on a GPU the three together add at most a few dozen launches to a step, and no wait
between reports. Steps of one model without callbacks, with torch's ``clip_grad_norm_`` and with the
callbacks take turns, each with its own optimizer; the table has medians of the ratios within a
round. Launches are the operators that torch dispatches during a step, without views. On CUDA every
wait during a timed step is an error. On a CPU a tiny model replaces the GPT.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping

import lightning as L
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_opt as lo
from benchmarks.gpt import GPT, size_for
from benchmarks.gradients.guard_cost import stepper
from benchmarks.harness import parse_arguments, publish
from benchmarks.models import Regression, fit_two_steps
from lightning_opt.core.measure.timing import time_in_turns
from lightning_opt.core.numerics.ratios import median_ratio

GPU = True


class Language(Regression):
    """A GPT as the module of the benchmark."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        with torch.autocast(batch.device.type, torch.bfloat16):
            return self.network(batch)


class Launches(TorchDispatchMode):
    """Counts operators without views."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.total += not func.is_view
        return func(*args, **(kwargs or {}))


NEVER = 10**9
"""Steps between reports: more than there are."""


class Watched:
    """A call that detects whether the host waits within it; only on CUDA.

    Attributes:
        waits: What torch says of a wait; the call goes on unwatched then, so that nothing is lost.
    """

    def __init__(self, call: Callable[[], None], device: str) -> None:
        self._call, self._watching = call, device.startswith("cuda")
        self.waits = ""

    def __call__(self) -> None:
        if self._watching:
            torch.cuda.set_sync_debug_mode("error")
        try:
            self._call()
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            self._watching, self.waits = False, str(error).splitlines()[0]
        finally:
            if self._watching or self.waits:
                torch.cuda.set_sync_debug_mode("default")


def say_waits(calls: Mapping[str, Watched]) -> None:
    """Exit with an error after publishing if the host has waited."""
    waits = {name: call.waits for name, call in calls.items() if call.waits}
    if waits:
        sys.exit(f"The host waits: {waits}")


def candidates(device: str) -> dict[str, Callable[[], None]]:
    """Return one step of each kind. They share weights, which does not change the timing."""
    network = GPT(size_for(device, "124M")).to(device)
    batch = network.batch(8, device)
    found: dict[str, Callable[[], None]] = {}

    def clip(*_: object) -> None:
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)

    kinds: dict[str, list[L.Callback]] = {
        "bare": [],
        "clip_grad_norm_": [],
        "AdaptiveClipping": [lo.AdaptiveClipping(every_n_steps=NEVER)],
        "NonFiniteGuard": [lo.NonFiniteGuard(every_n_steps=NEVER)],
        "GradientHealth": [lo.GradientHealth(every_n_steps=NEVER)],
        "all three": [
            lo.GradientHealth(every_n_steps=NEVER),
            lo.NonFiniteGuard(every_n_steps=NEVER),
            lo.AdaptiveClipping(every_n_steps=NEVER),
        ],
    }
    for kind, callbacks in kinds.items():
        module = Language(network, batch, fused=device == "cuda")
        trainer = fit_two_steps(module, device)
        if kind == "clip_grad_norm_":
            (optimizer,) = trainer.optimizers
            optimizer.register_step_pre_hook(clip)
        for callback in callbacks:
            callback.setup(trainer, module, "fit")
        found[kind] = stepper(module, trainer, callbacks, [])
    return found


def main() -> None:
    """Measure and publish."""
    arguments = parse_arguments(__doc__ or "")
    steps = candidates(arguments.device)
    launches: dict[str, int] = {}
    for kind, step in steps.items():
        for _ in range(3):
            step()
        with Launches() as counted:
            step()
        launches[kind] = counted.total
    watched = {kind: Watched(step, arguments.device) for kind, step in steps.items()}
    rounds = 3 if arguments.quick else 25
    seconds = time_in_turns(watched, rounds=rounds, device=arguments.device)
    rows = [
        {
            "step": kind,
            "ms": round(1e3 * statistics.median(seconds[kind]), 2),
            "of bare": round(median_ratio(seconds[kind], seconds["bare"]), 3),
            "launches": launches[kind],
            "more than bare": launches[kind] - launches["bare"],
            "waits": watched[kind].waits,
        }
        for kind in steps
    ]
    report = lo.Report(
        f"A step of a GPT ({size_for(arguments.device, '124M')}, bf16 autocast, 8 samples)",
        rows,
        ["Launches: operators that torch dispatches in a step, but for views."],
    )
    publish("gpt_step", report, arguments)
    say_waits(watched)


if __name__ == "__main__":
    main()
