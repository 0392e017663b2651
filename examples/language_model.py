"""A byte-level transformer with the usual techniques for large models, alone and together.

The text is the source of Python's standard library (see ``byte_gpt.py``). All runs start from the
same weights, read the same windows and warm up the learning rate: plain, with mixed precision,
checkpointing of sqrt(layers) segments, gradient accumulation, diagnostics, and with all together.

    python language_model.py             # bfloat16
    python language_model.py --half fp16 # float16 with a dynamic loss scale
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_opt as lo
from byte_gpt import ByteGPT, SourceBatches, read_sources
from measuring import Record, largest_difference, quiet_trainer, silence_advice

BATCH = 8
WINDOW = 64
MB = 2**20


class LanguageModel(ByteGPT):
    """The GPT of ``byte_gpt.py``, deeper and narrower, with warm-up."""

    def __init__(self, warmup: int = 10, lr: float = 1e-3) -> None:
        super().__init__(width=48, depth=9, heads=4, window=WINDOW, lr=lr)
        self.warmup = warmup

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, betas=(0.9, 0.95))
        warmup = torch.optim.lr_scheduler.LinearLR(
            optimizer, start_factor=1 / self.warmup, total_iters=self.warmup
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


def windows(steps: int, seed: int = 0) -> TensorDataset:
    """Return the windows of ``steps`` batches, in order."""
    drawn = SourceBatches(read_sources(), steps, BATCH, WINDOW, seed=seed)
    return TensorDataset(torch.cat([batch for batch, _ in drawn]))


@dataclass(frozen=True)
class Variant:
    """One way to train the same model on the same windows.

    Attributes:
        name: Its name in the table.
        callbacks: Creates the callbacks of a run.
        settings: Creates further Trainer arguments.
        accumulate: Parts of a batch per step of the optimizer.
    """

    name: str
    callbacks: Callable[[], list[L.Callback]] = list
    settings: Callable[[], dict[str, Any]] = field(default=dict)
    accumulate: int = 1


def variants(half: str) -> list[Variant]:
    """Return the plain run, each technique alone, and all together.

    Args:
        half: ``"bf16"``, or ``"fp16"`` with a loss scale.
    """

    def mixed() -> dict[str, Any]:
        if half == "bf16":
            return {"precision": "bf16-mixed"}
        return {"plugins": [lo.DynamicLossScale(init_scale=1024.0)]}

    def checkpointed() -> list[L.Callback]:
        return [lo.ActivationCheckpointing("sqrt")]

    def diagnostics() -> list[L.Callback]:
        return [lo.GradientHealth(every_n_steps=5)]

    return [
        Variant("plain"),
        Variant("GradientHealth", diagnostics),
        Variant('ActivationCheckpointing("sqrt")', checkpointed),
        Variant("accumulation, 2 x 4", accumulate=2),
        Variant(f"mixed precision, {half}", settings=mixed),
        Variant("all together", lambda: [*diagnostics(), *checkpointed()], mixed, 2),
    ]


def train(variant: Variant, data: TensorDataset, warmup: int, seed: int) -> dict[str, Any]:
    """Train once over ``data``; return the record, the model, the memory profile and callbacks."""
    L.seed_everything(seed, verbose=False)
    model, record, callbacks = LanguageModel(warmup), Record(), variant.callbacks()
    # One batch in 5 is profiled, which does not affect the median time.
    memory = lo.MemoryProfiler(every_n_steps=5)
    trainer = quiet_trainer(
        [*callbacks, memory, record],
        max_epochs=1,
        accumulate_grad_batches=variant.accumulate,
        **variant.settings(),
    )
    trainer.fit(model, DataLoader(data, BATCH // variant.accumulate))
    return {"model": model, "record": record, "memory": memory, "callbacks": callbacks}


def step_peak_mb(memory: lo.MemoryProfiler) -> float:
    """Return the peak memory of a forward and backward pass, above the level before."""
    peak = max(memory.profile.peaks[phase][-1] for phase in ("forward", "backward"))
    return (peak - memory.profile.latest("step_start").live) / MB


def compare(steps: int, warmup: int, half: str, seed: int) -> tuple[lo.Report, str]:
    """Return a table with one row per variant, and the diagnosis of the last run."""
    data = windows(steps, seed)
    rows: list[dict[str, Any]] = []
    reference: list[float] = []
    said = ""
    for variant in variants(half):
        run = train(variant, data, warmup, seed)
        record: Record = run["record"]
        losses = record.step_losses(variant.accumulate)
        reference = reference or losses
        rows.append(
            {
                "run": variant.name,
                "peak MB": step_peak_mb(run["memory"]),
                "step ms": (ms := record.step_ms(variant.accumulate)),
                "of plain": ms / (rows[0]["step ms"] if rows else ms),
                "last loss": losses[-1],
                "difference": largest_difference(losses, reference),
            }
        )
        for callback in run["callbacks"]:
            if isinstance(callback, lo.GradientHealth):
                said = str(callback.summary())
    notes = [
        "peak: the highest live memory during a forward and backward pass, above the level before.",
        "difference: the largest relative difference of a step's loss from the plain run. "
        "Checkpointing and diagnostics are bit-identical; the others round differently.",
        "Processors without 16-bit instructions are slower with 16 bits.",
    ]
    title = f"A byte-level GPT of 9 layers, {steps} steps, {warmup} of warm-up, seed {seed}"
    return lo.Report(title, rows, notes), said


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40, help="of each run (%(default)s)")
    parser.add_argument("--warmup", type=int, default=10, help="steps (%(default)s)")
    parser.add_argument("--half", choices=("bf16", "fp16"), default="bf16", help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and text (%(default)s)")
    args = parser.parse_args()
    if min(args.steps, args.warmup) < 1:
        parser.error("--steps and --warmup must be at least 1")
    silence_advice()
    report, said = compare(args.steps, args.warmup, args.half, args.seed)
    report.print()
    print(said)


if __name__ == "__main__":
    main()
