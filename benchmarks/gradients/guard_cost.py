"""Cost of NonFiniteGuard in a training step, alone and with AdaptiveClipping.

Supports: guard and clipping share one measurement of the gradient, so that both together cost
little more than one of them. A step includes forward, backward and update, and calls the hooks as
the Trainer does. Steps with and without callbacks take turns. There are no faults, as usual.

The noise of whole steps on a busy machine exceeds the cost of the callbacks. So the time within
their hooks is measured too, and compared with the rest of the same step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import lightning as L
import torch

import lightning_opt as lo
from benchmarks.harness import parse_arguments, publish
from benchmarks.models import Regression, fit_two_steps, forty_tensor_mlp, ten_million_transformer
from lightning_opt.core.measure.timing import time_in_turns
from lightning_opt.core.numerics.ratios import median_ratio

GPU = True


def stepper(
    module: Regression, trainer: L.Trainer, callbacks: list[L.Callback], shares: list[float]
) -> Callable[[], None]:
    """Return a function that makes one training step with these callbacks.

    Args:
        module: The model.
        trainer: Its Trainer.
        callbacks: In their order.
        shares: Gets, at each step, the time within hooks over the time without.
    """
    (optimizer,) = trainer.optimizers
    started, in_hooks = False, 0.0

    def call(hook: str, *arguments: object) -> None:
        nonlocal in_hooks
        start = time.perf_counter()
        for callback in callbacks:
            getattr(callback, hook)(trainer, module, *arguments)
        in_hooks += time.perf_counter() - start

    def begin() -> None:
        for callback in callbacks:
            callback.on_fit_start(trainer, module)
            callback.on_train_start(trainer, module)

    def closure() -> torch.Tensor:
        call("on_train_batch_start", module.batch, 0)
        loss = module.training_step(module.batch, 0)
        optimizer.zero_grad()
        call("on_before_backward", loss)
        loss.backward()
        call("on_before_optimizer_step", optimizer)
        return loss

    def step() -> None:
        nonlocal started, in_hooks
        if not started:
            begin()
            started = True
        in_hooks = 0.0
        start = time.perf_counter()
        optimizer.step(closure)
        call("on_train_batch_end", None, module.batch, 0)
        shares.append(in_hooks / (time.perf_counter() - start - in_hooks))

    return step


def measure(
    name: str, make: Callable[[], Regression], device: str, rounds: int, calls: int
) -> list[dict[str, object]]:
    """Time the step with each set of callbacks, each with its own model."""
    often = 10**9
    sets: dict[str, list[L.Callback]] = {
        "bare step": [],
        "bare step again": [],
        "NonFiniteGuard": [lo.NonFiniteGuard(every_n_steps=often)],
        "NonFiniteGuard(spike=6)": [lo.NonFiniteGuard(spike=6.0, every_n_steps=often)],
        "NonFiniteGuard, AdaptiveClipping": [
            lo.NonFiniteGuard(every_n_steps=often),
            lo.AdaptiveClipping(every_n_steps=often),
        ],
        "NonFiniteGuard('rollback'), AdaptiveClipping": [
            lo.NonFiniteGuard("rollback", every_n_steps=often),
            lo.AdaptiveClipping(every_n_steps=often),
        ],
    }
    steps, shares = {}, {}
    for label, callbacks in sets.items():
        torch.manual_seed(0)
        module = make()
        steps[label] = stepper(
            module, fit_two_steps(module, device), callbacks, shares.setdefault(label, [])
        )
    seconds = time_in_turns(steps, rounds=rounds, calls=calls, device=device)
    bare = seconds["bare step"]
    return [
        {
            "model": name,
            "callbacks": label,
            "ms a step": round(1e3 * statistics.median(values), 3),
            "of the bare step": round(median_ratio(values, bare), 3),
            "1 + hooks": round(1 + statistics.median(shares[label]), 3),
        }
        for label, values in seconds.items()
    ]


def main() -> None:
    """Measure both models and publish the table."""
    arguments = parse_arguments(__doc__)
    device = arguments.device
    fused = device == "cuda" or None

    def with_fused(make: Callable[[str], Regression]) -> Callable[[], Regression]:
        def build() -> Regression:
            module = make(device)
            module.fused = fused
            return module

        return build

    rounds = 4 if arguments.quick else 80
    rows = measure("40-tensor MLP", with_fused(forty_tensor_mlp), device, rounds, 20)
    rounds = 3 if arguments.quick else 25
    rows += measure("9.5 M transformer", with_fused(ten_million_transformer), device, rounds, 2)
    notes = [
        "ms a step: median. of the bare step: median of the ratios within a round; that of the "
        "second bare step is the noise. 1 + hooks: time within the callbacks over the time of the "
        "rest of the same step, on the host. 'rollback' takes a snapshot every 100 steps."
    ]
    publish("guard_cost", lo.Report("Cost of the guard", rows, notes), arguments)


if __name__ == "__main__":
    main()
