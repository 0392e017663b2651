"""Cost of GradientHealth, alone and with AdaptiveClipping, compared with other monitors.

Supports: health and clipping together at most 1.25 of the bare step on a model of 40 small tensors
and 1.03 on a transformer of ten million parameters, reports included. Each timing covers the steps
between two reports, so it contains exactly one report; hooks are called as the Trainer calls them.
Other monitors are timed at each step, and once per report interval if that is their usual setting.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import grad_norm

import lightning_opt as lo
from benchmarks.harness import parse_arguments, publish
from benchmarks.models import Regression, fit_two_steps, forty_tensor_mlp, ten_million_transformer
from lightning_opt.core.measure.timing import time_in_turns
from lightning_opt.core.numerics.ratios import median_ratio

GPU = True

BARE = "bare step"
Watch = Callable[[int], object]


def lightning_grad_norm(module: Regression, every: int = 1) -> Watch:
    """Compute Lightning's own norms of all gradients, and read them as a logger would."""

    def observe(step: int) -> None:
        if step % every == 0:
            {name: float(norm) for name, norm in grad_norm(module, 2).items()}

    return observe


def histograms(module: Regression, every: int) -> Watch:
    """Compute what ``wandb.watch`` does: a histogram of 64 bins per gradient, on the host."""

    def observe(step: int) -> None:
        if step % every:
            return
        for parameter in module.parameters():
            if parameter.grad is not None:
                flat = parameter.grad.flatten()
                low, high = flat.min().item(), flat.max().item()
                flat.histc(bins=64, min=low, max=high if high > low else low + 1).tolist()

    return observe


def naive_monitor(module: Regression, every: int = 1) -> Watch:
    """Compute four numbers per parameter and read each one, as a simple monitor does."""

    def observe(step: int) -> None:
        if step % every:
            return
        for parameter in module.parameters():
            gradient = parameter.grad
            if gradient is not None:
                gradient.norm().item()
                gradient.abs().max().item()
                (gradient == 0).float().mean().item()
                torch.isfinite(gradient).all().item()

    return observe


class Loop:
    """Trains a model in a manual loop, calling callbacks as the Trainer does.

    Args:
        module: The model.
        trainer: A Trainer that has fitted it.
        callbacks: Called around each step.
        watch: Called with the step's number before each update.
    """

    def __init__(
        self,
        module: Regression,
        trainer: L.Trainer,
        callbacks: Sequence[L.Callback] = (),
        watch: Watch | None = None,
    ) -> None:
        self.module, self.trainer, self.callbacks, self.watch = module, trainer, callbacks, watch
        self.optimizer = module.configure_optimizers()
        self.start = {name: value.clone() for name, value in module.state_dict().items()}
        self.steps = 0

    def run(self, steps: int) -> None:
        """Run some steps from the initial weights; remove all hooks afterwards.

        A model that has fitted its only batch computes with denormal numbers, at a tenth of the
        speed.
        """
        module, trainer, optimizer, batch = self.module, self.trainer, self.optimizer, None
        module.load_state_dict(self.start)
        trainer.strategy.optimizers = [optimizer]
        for callback in self.callbacks:
            callback.on_fit_start(trainer, module)
            callback.on_train_start(trainer, module)
        for _ in range(steps):
            self.steps += 1
            for callback in self.callbacks:
                callback.on_train_batch_start(trainer, module, batch, 0)
            optimizer.zero_grad()
            module.training_step(module.batch, 0).backward()
            for callback in self.callbacks:
                callback.on_before_optimizer_step(trainer, module, optimizer)
            if self.watch is not None:
                self.watch(self.steps)
            optimizer.step()
            for callback in self.callbacks:
                callback.on_train_batch_end(trainer, module, None, batch, 0)
        for callback in self.callbacks:
            callback.teardown(trainer, module, "fit")


def loops(module: Regression, trainer: L.Trainer, every: int) -> dict[str, Loop]:
    """Return each candidate's own training loop over one model."""

    def with_callbacks(*callbacks: Any) -> Loop:
        return Loop(module, trainer, callbacks)

    def health(**settings: Any) -> lo.GradientHealth:
        return lo.GradientHealth(every_n_steps=every, figure=None, **settings)

    def watched(watch: Watch) -> Loop:
        return Loop(module, trainer, watch=watch)

    return {
        BARE: Loop(module, trainer),
        "GradientHealth": with_callbacks(health()),
        "GradientHealth and AdaptiveClipping": with_callbacks(
            health(), lo.AdaptiveClipping(every_n_steps=every)
        ),
        "GradientHealth(activations=True)": with_callbacks(health(activations=True)),
        "Lightning grad_norm, each step": watched(lightning_grad_norm(module)),
        f"histograms, every {every} steps": watched(histograms(module, every)),
        "histograms, each step": watched(histograms(module, 1)),
        f"naive monitor, every {every} steps": watched(naive_monitor(module, every)),
        "naive monitor, each step": watched(naive_monitor(module)),
    }


def measure(
    name: str, module: Regression, device: str, rounds: int, every: int
) -> list[dict[str, object]]:
    """Time a block of ``every`` steps of each candidate, round by round."""
    candidates = loops(module, fit_two_steps(module, device), every)
    seconds = time_in_turns(
        {key: (lambda loop=loop: loop.run(every)) for key, loop in candidates.items()},
        rounds=rounds, device=device, warmup=1,
    )  # fmt: skip
    return [
        {
            "model": name,
            "what": key,
            "us a step": round(statistics.median(values) / every * 1e6),
            "of bare": round(median_ratio(values, seconds[BARE]), 3),
        }
        for key, values in seconds.items()
    ]


def main() -> None:
    """Measure both models and publish the table."""
    arguments = parse_arguments(__doc__)
    torch.manual_seed(0)
    device, quick = arguments.device, arguments.quick
    rows = measure("40-tensor MLP", forty_tensor_mlp(), device, 3 if quick else 21, 50)
    # Shorter blocks for the slow model: a report every 10 steps costs more than one every 50.
    rounds, every = (1, 5) if quick else (5, 10)
    rows += measure("9.5 M transformer", ten_million_transformer(), device, rounds, every)
    notes = [
        "us a step: median microseconds of one step, the report's share included. of bare: median "
        "ratio within a round to the bare step.",
        "Reports are 50 steps apart on the MLP and 10 on the transformer (50 is the default).",
    ]
    publish("health_cost", lo.Report("Cost of watching gradients", rows, notes), arguments)


if __name__ == "__main__":
    main()
