"""A checklist for training runs, answered from the measurements of a run."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

import lightning_opt
from lightning_opt.core.measure.machine import why_no_bf16
from lightning_opt.core.measure.memory import MB, peak_usage
from lightning_opt.core.modules.compiling import has_compiled_parts
from lightning_opt.core.modules.sharding import local_part
from lightning_opt.core.numerics.norms import nonfinite_names
from lightning_opt.core.output.report import TOPICS, Report, State, Verdict

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)

HINTS: dict[str, str] = {
    "profile": "Use Trainer(profiler=StepProfiler()).",
    "memory": "MemoryProfiler() measures the peak of each phase.",
    "batch size": "find_batch_size() finds the largest and the fastest batch size.",
    "data": "DataMonitor() measures the share of time spent waiting for data.",
    "throughput": "PerformanceMonitor() measures it.",
    "precision": "See Trainer(precision=...).",
    "optimizer": "Call doctor() after training, when there is an optimizer.",
    "compilation": "compare() measures whether CompileModel() pays for this model.",
    "gradients": "GradientHealth() checks every layer.",
    "stability": "NonFiniteGuard() skips and counts steps with NaN, infinity or a spike.",
    "clipping": "AdaptiveClipping() clips unusual gradients, and counts them.",
    "convergence": "PerformanceMonitor() tests the trend of the loss.",
    "leaks": "LeakDetector() measures memory, and names the objects that hold it.",
    "determinism": "Call lightning.seed_everything(seed, workers=True) first.",
    "checkpoints": "Add ModelCheckpoint(every_n_train_steps=1000, save_last=True).",
    "monitoring": "Give the Trainer a logger, such as CSVLogger or TensorBoardLogger.",
    "baseline": "compare(model, data, {'plain': {...}, 'mine': {...}}) measures both side by side.",
}
"""Advice by topic: for topics that were not measured, and for the checks of this file."""

UNDONE_AFTER_TRAINING = ("optimizer", "compilation")
"""Topics of settings that callbacks undo after training. For these, a callback's verdict replaces
the check of this file, which sees the Trainer after training."""

SORT_ORDER: dict[State, int] = {"look": 0, "ok": 1, "unknown": 2}

MAX_USER_SEED = 2**32
"""Seeds below this value were set by the user. torch's own random seeds are larger."""

NEARLY_FULL, HALF_EMPTY = 0.95, 0.5
"""Shares of available memory. Above the first, a run may soon run out of memory. Below the second,
a larger batch fits on a GPU."""


class Diagnosis(Report):
    """The verdicts of the checklist.

    Prints as text, renders in a notebook, and converts to markdown or JSON.

    Attributes:
        verdicts: One for each question. Verdicts that need attention come first, sorted by gain.
        rows: The verdicts as table rows: topic, question, verdict (``ok``, ``look``, ``unknown``),
            finding and advice.
    """

    def __init__(self, verdicts: Sequence[Verdict], notes: Sequence[str] = ()) -> None:
        self.verdicts = sorted(verdicts, key=_priority)
        counts = {state: sum(v.state == state for v in verdicts) for state in SORT_ORDER}
        title = (
            f"Diagnosis: {counts['look']} to look at, {counts['ok']} ok, {counts['unknown']} not "
            "measured"
        )
        rows = [
            {
                "topic": verdict.topic,
                "question": TOPICS[verdict.topic],
                "verdict": verdict.state,
                "finding": verdict.finding,
                "advice": verdict.advice,
            }
            for verdict in self.verdicts
        ]
        super().__init__(title, rows, notes)

    def __getitem__(self, topic: str) -> Verdict:
        """Return the verdict on a topic, such as ``"data"``."""
        return {verdict.topic: verdict for verdict in self.verdicts}[topic]

    def topics(self, state: State) -> list[str]:
        """Return the topics whose verdict has this state."""
        return [verdict.topic for verdict in self.verdicts if verdict.state == state]

    def to_text(self) -> str:
        """Return the verdicts as plain text, one per paragraph."""
        lines = [self.title]
        for verdict in self.verdicts:
            mark = verdict.state.upper()
            lines.append(f"{mark:>7}  {TOPICS[verdict.topic]} {verdict.finding}")
            if verdict.advice:
                lines.append(f"         -> {verdict.advice}")
        return "\n".join([*lines, *self.notes])


def doctor(trainer: pl.Trainer) -> Diagnosis:
    """Answer a checklist from the measurements of a run.

    Call it after ``fit``. It does not train. It collects verdicts from the Trainer, and from every
    callback, profiler, strategy or plugin with a method ``diagnose() -> list[Verdict]``. If a topic
    has several verdicts, the one that needs attention is used. A topic without a verdict is
    ``unknown``, and the advice states how to measure it.

    Args:
        trainer: The Trainer after its run. Before the run, most verdicts are ``unknown``.

    Returns:
        One verdict per question, with advice if there is something to do.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> diagnosis = lo.doctor(L.Trainer(logger=False, enable_checkpointing=False))
        >>> diagnosis["monitoring"].state
        'look'
        >>> diagnosis["leaks"].advice
        'LeakDetector() measures memory, and names the objects that hold it.'
    """
    found: list[Verdict] = []
    notes: list[str] = []
    for part in parts_of(trainer):
        found += collect(getattr(part, "diagnose", list), type(part).__name__, notes)
    measured = {verdict.topic for verdict in found if verdict.state != "unknown"}
    for check in CHECKS:
        found += [
            verdict
            for verdict in collect(check, check.__name__, notes, trainer)
            if verdict.topic not in measured or verdict.topic not in UNDONE_AFTER_TRAINING
        ]
    chosen = []
    for topic in TOPICS:
        verdicts = [verdict for verdict in found if verdict.topic == topic]
        unknown = Verdict(topic, "unknown", "Not measured.", HINTS[topic])
        chosen.append(min(verdicts, key=_priority, default=unknown))
    return Diagnosis(chosen, notes)


def parts_of(trainer: pl.Trainer) -> list[Any]:
    """Return the callbacks, profilers, strategy and plugin that are ours or have ``diagnose``."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    profilers = (getattr(owner, "profiler", None) for owner in (*callbacks, trainer))
    others = (getattr(trainer, name, None) for name in ("strategy", "precision_plugin"))
    parts = {id(part): part for part in (*callbacks, *profilers, *others)}.values()
    ours = "lightning_opt."
    return [p for p in parts if type(p).__module__.startswith(ours) or hasattr(p, "diagnose")]


def code_of(advice: str) -> str:
    """Return the first call in a text of advice as a line of code; empty if there is none."""
    match = re.search(r"\b([A-Za-z_][\w.]*)\((?:[^()]|\([^()]*\))*\)", advice)
    if match is None:
        return ""
    code, name = match[0], match[1]
    code = f"lo.{code}" if name in lightning_opt.__all__ else code  # type: ignore[attr-defined]
    is_callback = name[0].isupper() and name != "Trainer"
    return f"Trainer(callbacks=[{code}])" if is_callback else code


def _priority(verdict: Verdict) -> tuple[int, float]:
    return SORT_ORDER[verdict.state], -verdict.gain


def collect(
    function: Any, name: str, notes: list[str], *arguments: Any, kind: Any = Verdict
) -> list[Any]:
    """Call a function and return its results of type ``kind``. An exception becomes a note."""
    try:
        result = function(*arguments)
    except Exception as error:  # one failure must not hide the other verdicts
        log.debug("%s failed", name, exc_info=True)
        notes.append(f"{name} failed: {type(error).__name__}: {error}")
        return []
    results = result if isinstance(result, (list, tuple)) else [result]
    return [found for found in results if isinstance(found, kind)]


# --- checks of the Trainer that need no callback ------------------------------------------------


def memory(trainer: pl.Trainer) -> list[Verdict]:
    """How close was peak memory to its limit?"""
    device = trainer.strategy.root_device
    if device.type != "cuda" and not trainer.global_step:
        return []
    peak = peak_usage(device)
    if peak is None or not peak.used:
        return []
    used = peak.fraction
    amounts = f"{peak.used / MB:,.0f} of {peak.total / MB:,.0f} MB ({peak.source})"
    finding = f"At the peak, memory was {used:.0%} full: {amounts}."
    verdicts = [Verdict("memory", "ok", finding)]
    if used > NEARLY_FULL:
        advice = "A larger batch may run out of memory. MicroBatching('auto') then splits it."
        verdicts = [Verdict("memory", "look", finding, advice, gain=min(1.0, used))]
    if device.type == "cuda" and used < HALF_EMPTY:
        verdicts.append(Verdict("batch size", "look", finding, HINTS["batch size"]))
    elif device.type == "cuda":
        verdicts.append(Verdict("batch size", "ok", finding))
    return verdicts


def precision(trainer: pl.Trainer) -> Verdict | None:
    """Does training use the device's fastest precision?"""
    precision, device = str(trainer.precision), trainer.strategy.root_device
    if not precision.startswith(("32", "64")) or why_no_bf16(device.type) is not None:
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
    bad = nonfinite_names(dict(module.named_parameters()))
    buffers = dict(module.named_buffers())  # may be infinite, as attention masks are
    bad += [name for name in nonfinite_names(buffers) if local_part(buffers[name]).isnan().any()]
    if not bad:
        return None  # no "ok": finite weights do not show that all steps were finite
    more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
    finding = f"{bad[0]}{more} of the model's tensors are NaN or infinite."
    advice = "Resume from a good checkpoint, and add NonFiniteGuard(policy='rollback')."
    return Verdict("stability", "look", finding, advice, gain=1.0)


def determinism(trainer: pl.Trainer) -> Verdict | None:
    """Was a seed set?"""
    seeded = "PL_GLOBAL_SEED" in os.environ or torch.initial_seed() < MAX_USER_SEED
    if not seeded:
        return Verdict("determinism", "look", "No seed was set.", HINTS["determinism"])
    kind = "with" if torch.are_deterministic_algorithms_enabled() else "without"
    return Verdict("determinism", "ok", f"A seed was set, {kind} deterministic algorithms.")


def checkpoints(trainer: pl.Trainer) -> Verdict | None:
    """Was a checkpoint saved?"""
    callbacks: list[Any] = trainer.checkpoint_callbacks
    names = ("last_model_path", "best_model_path")
    saved = [path for c in callbacks for path in (getattr(c, name, "") for name in names) if path]
    if saved:
        return Verdict("checkpoints", "ok", f"The newest checkpoint is {saved[0]}.")
    finding = "No checkpoint has been saved." if callbacks else "Nothing saves checkpoints."
    return Verdict("checkpoints", "look", finding, HINTS["checkpoints"])


def monitoring(trainer: pl.Trainer) -> Verdict | None:
    """Does the Trainer have a logger?"""
    if not trainer.loggers:
        return Verdict("monitoring", "look", "The Trainer has no logger.", HINTS["monitoring"])
    names = ", ".join(type(logger).__name__ for logger in trainer.loggers)
    return Verdict("monitoring", "ok", f"Metrics are logged by {names}.")


CHECKS: tuple[Callable[[Any], Verdict | list[Verdict] | None], ...] = (
    memory, precision, optimizer, compilation, stability, determinism, checkpoints, monitoring,
)  # fmt: skip
