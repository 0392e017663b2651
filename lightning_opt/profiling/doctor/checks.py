"""Checks of a Trainer that need no callback."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from lightning_opt.core.measure.machine import why_no_bf16
from lightning_opt.core.measure.memory import MB, peak_usage
from lightning_opt.core.modules.compiling import has_compiled_parts
from lightning_opt.core.modules.sharding import local_part
from lightning_opt.core.output.report import State, Verdict

if TYPE_CHECKING:
    import lightning.pytorch as pl

MAX_USER_SEED = 2**32
"""Seeds below this value are set by users. Seeds that torch draws by itself are larger."""

NEARLY_FULL, HALF_EMPTY = 0.95, 0.5
"""Shares of available memory. Above the first, a run may soon run out of memory. Below the second,
a larger batch fits on a GPU."""


def profile(trainer: pl.Trainer) -> Verdict | None:
    """Was a profiler used?"""
    name = type(trainer.profiler).__name__  # type: ignore[attr-defined]
    if name == "PassThroughProfiler" or hasattr(trainer.profiler, "diagnose"):  # type: ignore[attr-defined]
        return None
    return Verdict("profile", "ok", f"{name} profiled the run.")


def memory(trainer: pl.Trainer) -> list[Verdict]:
    """How close was peak memory to its limit?"""
    device = trainer.strategy.root_device
    if device.type != "cuda" and not trainer.global_step:
        return []
    peak = peak_usage(device)
    if peak is None or not peak.used:
        return []
    used = peak.fraction
    of = f"{peak.used / MB:,.0f} of {peak.total / MB:,.0f} MB ({peak.source})"
    finding = f"At the peak, memory was {used:.0%} full: {of}."
    split = "A longer batch may run out of memory: MicroBatching('auto') splits it then."
    search = "find_batch_size() finds the largest and the fastest batch size."
    verdicts = [
        Verdict("memory", "look", finding, split, gain=min(1.0, used))
        if used > NEARLY_FULL
        else Verdict("memory", "ok", finding)
    ]
    if device.type == "cuda":
        state: State = "look" if used < HALF_EMPTY else "ok"
        verdicts.append(Verdict("batch size", state, finding, search if state == "look" else ""))
    return verdicts


def precision(trainer: pl.Trainer) -> Verdict | None:
    """Does training use the device's fastest precision?"""
    precision, device = str(trainer.precision), trainer.strategy.root_device
    if not precision.startswith(("32", "64")):
        return Verdict("precision", "ok", f"The precision is {precision}.")
    if why_no_bf16(device.type) is not None:
        return Verdict("precision", "ok", f"The precision is {precision} on {device}.")
    advice = "Try Trainer(precision='bf16-mixed'); compare() measures the speedup and the loss."
    finding = f"The precision is {precision}, but {device} also has fast bfloat16."
    return Verdict("precision", "look", finding, advice)


def optimizer(trainer: pl.Trainer) -> Verdict | None:
    """Are the optimizers fused?"""
    optimizers = [o for o in trainer.optimizers if isinstance(o, Optimizer)]
    if not optimizers:
        return None
    slow = [
        type(optimizer).__name__
        for optimizer in optimizers
        if "fused" in optimizer.defaults
        and not all(group.get("fused") for group in optimizer.param_groups)
    ]
    if slow:
        finding = f"{', '.join(slow)} has a fused kernel, which is off."
        return Verdict("optimizer", "look", finding, "Add FusedOptimizer(), or pass fused=True.")
    names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
    return Verdict("optimizer", "ok", f"{names}: fused, or torch has no fused kernel.")


def compilation(trainer: pl.Trainer) -> Verdict | None:
    """Is the model compiled?"""
    module = trainer.lightning_module
    if module is None or not has_compiled_parts(module):
        return None
    return Verdict("compilation", "ok", "The model or a part of it is compiled.")


def stability(trainer: pl.Trainer) -> Verdict | None:
    """Are all weights and buffers finite?"""
    module = trainer.lightning_module
    if module is None:
        return None
    # Check only this process's shards. A collective would hang if only some ranks call this.
    bad = [
        name
        for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers())
        if tensor.is_floating_point()
        and not bool(torch.isfinite(local_part(tensor.detach())).all())
    ]
    if not bad:
        return None  # only a guard can count bad steps
    more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
    finding = f"{bad[0]}{more} of the model's tensors are NaN or infinite."
    advice = "Resume from a good checkpoint, and add NonFiniteGuard(policy='rollback')."
    return Verdict("stability", "look", finding, advice, gain=1.0)


def clipping(trainer: pl.Trainer) -> Verdict | None:
    """Does the Trainer clip gradients?"""
    value = trainer.gradient_clip_val
    if not value:
        return None
    finding = f"gradient_clip_val={value}, but clipped steps are not counted."
    return Verdict("clipping", "unknown", finding, "AdaptiveClipping() counts them.")


def determinism(trainer: pl.Trainer) -> Verdict | None:
    """Was a seed set?"""
    seeded = "PL_GLOBAL_SEED" in os.environ or torch.initial_seed() < MAX_USER_SEED
    if not seeded:
        advice = "Call lightning.seed_everything(seed, workers=True) first."
        return Verdict("determinism", "look", "No seed was set.", advice)
    if torch.are_deterministic_algorithms_enabled():
        return Verdict("determinism", "ok", "Seeded, with deterministic algorithms.")
    finding = "Seeded; last digits may differ between runs."
    return Verdict("determinism", "ok", finding)


def checkpoints(trainer: pl.Trainer) -> Verdict | None:
    """Was a checkpoint saved?"""
    callbacks: list[Any] = trainer.checkpoint_callbacks
    if not callbacks:
        advice = "Add ModelCheckpoint(every_n_train_steps=1000, save_last=True)."
        return Verdict("checkpoints", "look", "Nothing saves checkpoints.", advice)
    names = ("last_model_path", "best_model_path")
    saved = [path for c in callbacks for path in (getattr(c, name, "") for name in names) if path]
    if not saved:
        advice = "Save more often: ModelCheckpoint(every_n_train_steps=1000, save_last=True)."
        return Verdict("checkpoints", "look", "No checkpoint has been saved yet.", advice)
    return Verdict("checkpoints", "ok", f"The newest checkpoint is {saved[0]}.")


def monitoring(trainer: pl.Trainer) -> Verdict | None:
    """Does the Trainer have a logger?"""
    if not trainer.loggers:
        advice = "Give the Trainer a logger, such as CSVLogger or TensorBoardLogger."
        return Verdict("monitoring", "look", "The Trainer has no logger.", advice)
    names = ", ".join(type(logger).__name__ for logger in trainer.loggers)
    return Verdict("monitoring", "ok", f"Metrics are logged by {names}.")


CHECKS: tuple[Callable[[Any], Verdict | list[Verdict] | None], ...] = (
    profile, memory, precision, optimizer, compilation, stability, clipping, determinism,
    checkpoints, monitoring,
)  # fmt: skip
