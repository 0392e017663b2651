"""Presets by name: user-defined ones, and three built-in ones, each extending the previous."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_opt.batching.accumulation.accumulation import Accumulation
from lightning_opt.batching.micro_batching.micro_batching import MicroBatching
from lightning_opt.core.arguments import did_you_mean
from lightning_opt.core.measure.machine import why_no_bf16, why_no_compiler
from lightning_opt.data.pipeline.pipeline_tuner import DataPipelineTuner
from lightning_opt.gradients.clipping.adaptive_clipping import AdaptiveClipping
from lightning_opt.gradients.guard.non_finite_guard import NonFiniteGuard
from lightning_opt.gradients.health.gradient_health import GradientHealth
from lightning_opt.kernels.attention.attention_backend import AttentionBackend
from lightning_opt.kernels.channels_last.channels_last import ChannelsLast
from lightning_opt.kernels.compiling.compile_model import CompileModel
from lightning_opt.kernels.fused_optimizer.fused_optimizer import FusedOptimizer
from lightning_opt.kernels.runtime.runtime import Runtime
from lightning_opt.memory.cleanup.memory_cleanup import MemoryCleanup
from lightning_opt.memory.garbage.garbage_collection import GarbageCollection
from lightning_opt.presets.preset import Preset
from lightning_opt.presets.situation import Situation
from lightning_opt.profiling.monitor.performance_monitor import PerformanceMonitor
from lightning_opt.strategies.compression.compressed_ddp import CompressedDDPStrategy
from lightning_opt.trainer.lightning import Precision
from lightning_opt.worker.recipes import as_list


def basic() -> Preset:
    """Monitoring and protection that hardly change the numbers of a healthy run."""
    return (
        Preset("basic", purpose="Monitors and protects, and leaves a healthy run's numbers alone.")
        .plus(GradientHealth, None,
              "reports gradient problems by layer, with advice",
              "1 to 3% of a step with 9.5 M weights, 7% with a tiny MLP",
              _excluded_by_deepspeed)
        .plus(NonFiniteGuard, None, "skips steps with NaN or infinite values",
              "1 to 3% of a step with 9.5 M weights, 6% with a tiny MLP; one small all-reduce",
              _excluded_by_deepspeed)
        .plus(AdaptiveClipping, None, "clips gradients at a threshold learned from the run",
              "shares norms with GradientHealth and NonFiniteGuard; changes the steps it clips",
              _why_not_clipping)
        .plus(PerformanceMonitor, None,
              "logs speed and machine usage, warns if the run gets slower",
              "a thread that samples every second")
        .plus(MemoryCleanup, None, "collects garbage and trims caches when memory runs short",
              "0.4% of a 14 ms step; a pause when memory runs short")
    )  # fmt: skip


def advanced() -> Preset:
    """``basic`` with faster steps and the same result up to rounding."""
    return (
        basic().named("advanced", "Makes steps faster, with the same result up to rounding.")
        .plus_argument("precision", "bf16-mixed",
              "matrix products in bfloat16: faster, and half the memory of activations",
              "activations have 8 bits of precision; weights and updates stay in float32",
              _why_not_bf16)
        .plus(Runtime, None, "TF32 and cuDNN's fastest kernels on CUDA, restored afterwards",
              "float32 matrix products are less exact on GPUs with TF32")
        .plus(FusedOptimizer, None, "the update in one pass over each tensor, if supported",
              "may round differently", _excluded_by_deepspeed)
        .plus(ChannelsLast, None,
              "the channels_last memory format, in convolutional models",
              "may be slower on some devices")
        .plus(AttentionBackend, None,
              "a warning where torch's slow attention kernel is used",
              "inspects the first batch")
        # Under FSDP2, each hook that gathers parameters would break a graph of the whole model.
        .plus(CompileModel, lambda s: {"scope": "regions" if s.strategy == "fsdp2" else "model"},
              "torch.compile, for runs of at least several minutes",
              "seconds to minutes in the first steps, and again for new shapes",
              _why_not_compile)
        .plus(DataPipelineTuner, None,
              "tunes workers and prefetching of the training loader by measuring",
              "up to 20 s before the first step; workers need memory", _why_not_workers)
        .plus(GarbageCollection, None,
              "all ranks collect garbage at the same step; otherwise each waits for the others",
              "objects in reference cycles live for up to 100 steps",
              lambda s: None if s.processes > 1 else "there is only one process")
    )  # fmt: skip


def ultra() -> Preset:
    """``advanced`` with parts that may change the result, or that cost time before they help."""
    return (
        advanced().named("ultra", "Saves memory and traffic, and may change the result.")
        .plus(MicroBatching, {"size": "auto"},
              "splits a batch that runs out of memory into the largest parts that fit",
              "0.3 ms per step; BatchNorm sees one part at a time once a batch is split",
              _excluded_by_deepspeed)
        # normalize="samples" would need batches whose samples can be counted.
        .plus(Accumulation, {"normalize": "batches"},
              "averages accumulated gradients exactly, also in a short last window",
              "nothing measurable", _why_not_accumulation)
        .plus_argument("strategy", "ddp_compressed",
              "compressed gradients with error feedback, if the measured network is the bottleneck",
              "a copy of the gradients; Top-K, if it is chosen, changes the result",
              _why_not_compression)
    )  # fmt: skip


# --- by name --------------------------------------------------------------------------------------

BUILT_IN: dict[str, Callable[[], Preset]] = {"basic": basic, "advanced": advanced, "ultra": ultra}

_builders = dict(BUILT_IN)


def preset(name: str, /, **overrides: Any) -> Preset:
    """Return a preset: callbacks and Trainer arguments chosen for this machine.

    =============== ==============================================================================
    ``"basic"``     monitors and protects: gradient health, a guard against NaN, adaptive clipping,
                    cleanup when memory runs short
    ``"advanced"``  adds speed with the same result up to rounding: bf16 in hardware, compilation,
                    fused updates, channels_last, attention, data loading
    ``"ultra"``     adds features that may change the result: micro-batches, exact accumulation,
                    gradients compressed between machines
    =============== ==============================================================================

    Args:
        name: One of these names, or the name of a registered preset.
        overrides: By the name of a callback of the preset: a dict of its settings, None to leave it
            out, True to add it in any case. By the name of a Trainer argument: its value.

    Raises:
        ValueError: For an unknown preset, callback or argument, or settings that are not accepted.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> preset = lo.preset("basic", NonFiniteGuard={"spike": 6.0}, MemoryCleanup=None)
        >>> trainer = L.Trainer(**preset.trainer_kwargs(max_epochs=3, logger=False))
    """
    if name not in _builders:
        raise ValueError(
            f"There is no preset {name!r}{did_you_mean(name, _builders)} "
            f"The presets are {', '.join(_builders)}."
        )
    return _builders[name]().named(name).override(**overrides)


def register_preset(name: str, builder: Callable[[], Preset]) -> None:
    """Register your own preset under a name.

    Args:
        name: The preset's name. Registering a name again replaces the preset.
        builder: Returns the :class:`Preset`; it is called each time the preset is used.

    Raises:
        ValueError: For the name of a preset of this package.

    Example:
        >>> import lightning_opt as lo
        >>> def team():
        ...     return lo.preset("basic").plus(lo.LeakDetector, why="we had a leak last year")
        >>> lo.register_preset("team", team)
        >>> [type(callback).__name__ for callback in lo.preset("team").callbacks()][-1]
        'LeakDetector'
    """
    if name in BUILT_IN:
        raise ValueError(f"{name!r} is a preset of lightning_opt; choose another name.")
    _builders[name] = builder


def preset_names() -> list[str]:
    """Return the names of all presets, built-in and registered."""
    return list(_builders)


# --- reasons to leave a part out ------------------------------------------------------------------
# Callbacks check more in their first hooks. If they raise there, they are left out with a warning.


def _excluded_by_deepspeed(situation: Situation) -> str | None:
    if situation.strategy == "deepspeed":
        return "DeepSpeed handles gradients, optimizers and activations itself"
    return None


def _why_not_clipping(situation: Situation) -> str | None:
    if situation.arguments.get("gradient_clip_val"):
        return "the Trainer clips by gradient_clip_val; AdaptiveClipping would clip again"
    strategy = situation.arguments.get("strategy")
    if isinstance(strategy, CompressedDDPStrategy):
        sends_late = not strategy.chooses and strategy.compressor.late
    else:
        sends_late = str(strategy).startswith(("ddp_topk", "ddp_threshold"))
    if sends_late:
        return (
            "callbacks cannot clip the gradients that the strategy sends later; "
            "use Trainer(gradient_clip_val=...)"
        )
    return _excluded_by_deepspeed(situation)


def _why_not_bf16(situation: Situation) -> str | None:
    if any(isinstance(plugin, Precision) for plugin in as_list(situation.arguments.get("plugins"))):
        return "your plugin sets the precision"
    return why_no_bf16(situation.device, situation.forks)


def _why_not_compile(situation: Situation) -> str | None:
    if situation.strategy in ("deepspeed", "fsdp1", "tensor_parallel", "other"):
        return "not tested, or not supported, under this strategy"
    if situation.device == "cpu" and situation.overrides.get("CompileModel") is None:
        return (
            "on a CPU compilation takes half a minute or more and seldom helps: lightning-opt tune "
            "measures it, CompileModel=True adds it"
        )
    return why_no_compiler(situation.device, situation.forks)


def _why_not_workers(situation: Situation) -> str | None:
    if situation.arguments.get("deterministic"):
        return "random augmentation would depend on the tuned number of workers"
    return None


def _why_not_accumulation(situation: Situation) -> str | None:
    if (situation.arguments.get("accumulate_grad_batches") or 1) == 1:
        return "accumulate_grad_batches is not set"
    return _excluded_by_deepspeed(situation)


def _why_not_compression(situation: Situation) -> str | None:
    if situation.nodes == 1:
        return "all processes are on one machine, without a network between them"
    return None if situation.device in ("cpu", "cuda") else f"not tested on {situation.device!r}"
