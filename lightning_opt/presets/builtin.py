"""The presets that come with the package: each adds to the one before."""

from __future__ import annotations

from typing import Any

from lightning_opt.batching.accumulation.accumulation import Accumulation
from lightning_opt.batching.micro_batching.micro_batching import MicroBatching
from lightning_opt.core.measure.machine import why_no_bf16, why_no_compiler
from lightning_opt.core.modules.blocks import find_blocks
from lightning_opt.data.pipeline.pipeline_tuner import DataPipelineTuner
from lightning_opt.gradients.clipping.adaptive_clipping import AdaptiveClipping
from lightning_opt.gradients.guard.non_finite_guard import NonFiniteGuard
from lightning_opt.gradients.health.gradient_health import GradientHealth
from lightning_opt.kernels.attention.attention_backend import AttentionBackend
from lightning_opt.kernels.channels_last.channels_last import ChannelsLast
from lightning_opt.kernels.compiling.compile_model import CompileModel
from lightning_opt.kernels.fused_optimizer.fused_optimizer import FusedOptimizer
from lightning_opt.kernels.runtime.runtime import Runtime
from lightning_opt.memory.checkpointing.activation_checkpointing import ActivationCheckpointing
from lightning_opt.memory.cleanup.memory_cleanup import MemoryCleanup
from lightning_opt.memory.garbage.garbage_collection import GarbageCollection
from lightning_opt.presets.preset import Preset
from lightning_opt.presets.situation import Situation
from lightning_opt.profiling.monitor.performance_monitor import PerformanceMonitor

SINGLE_OPERATORS = ("auto", "selective")
"""Policies of ActivationCheckpointing that cannot look into a compiled graph."""


def basic() -> Preset:
    """Return what watches and protects, and leaves the numbers of a healthy run nearly alone."""
    return (
        Preset("basic", purpose="Watches and protects, and leaves a healthy run's numbers alone.")
        .plus(GradientHealth, _figure, "says what is wrong with gradients, where, and what to do",
              "1% of a step of 9.5 M weights, 10% of a tiny MLP's; a figure at the end", _deepspeed)
        .plus(NonFiniteGuard, None, "leaves out steps that are NaN or infinite",
              "1% of a step of 9.5 M weights, 6% of a tiny MLP's; one small all-reduce", _deepspeed)
        .plus(AdaptiveClipping, None, "clips gradients at a threshold learned from the run",
              "shares its norms with the two above; changes the steps that it clips", _no_clipping)
        .plus(PerformanceMonitor, None,
              "logs speed and use of the machine, warns when the run gets slower",
              "a thread that looks each second; the second step counts FLOPs")
        .plus(MemoryCleanup, None, "collects garbage and trims caches when memory runs short",
              "0.4% of a step of 14 ms; a pause when memory is short")
    )  # fmt: skip


def advanced() -> Preset:
    """Return ``basic`` with what makes steps faster and gives the same result up to rounding."""
    return (
        basic().named("advanced", "Makes steps faster with the same result up to rounding.")
        .plus_argument("precision", "bf16-mixed",
              "matrix products in bfloat16: faster, and half the bytes of activations",
              "activations have 8 bits of precision; weights and updates stay in float32", _no_bf16)
        .plus(Runtime, None, "TF32 and cuDNN's fastest kernels on CUDA, put back afterwards",
              "matrix products of float32 are less exact on GPUs that have TF32")
        .plus(FusedOptimizer, None, "the update in one pass over each tensor, where torch has that",
              "rounds in another order", _deepspeed)
        .plus(ChannelsLast, None,
              "convolutions with the channels last in memory, where that is faster",
              "eight steps on the first batch, where it can be measured")
        .plus(AttentionBackend, None,
              "flash attention first, and a warning where the slow kernel serves",
              "the first batch is looked at")
        .plus(CompileModel, _compile_scope,
              "torch.compile, where it is measured to pay in the steps that are left",
              "seven steps uncompiled, then seconds to minutes, and again for new shapes",
              _no_compile)
        .plus(ActivationCheckpointing, _checkpointing_policy,
              "recomputes blocks in the backward pass instead of keeping them",
              "up to a third of a step; with 'auto' some tens of steps on the first batch",
              _no_checkpointing)
        .plus(DataPipelineTuner, _tuner_settings,
              "measures workers and prefetching of the training loader",
              "up to 20 s before the first step; workers take memory")
        .plus(GarbageCollection, None,
              "all ranks collect garbage at the same step, else each waits for all others",
              "what is in reference cycles lives for up to 100 steps", _alone)
    )  # fmt: skip


def ultra() -> Preset:
    """Return ``advanced`` with what may take minutes before it pays, or changes the result."""
    return (
        advanced().named("ultra", "Takes minutes before it pays, or changes the result: for long "
                         "runs.")
        .plus(CompileModel, _tuned_compile,
              "torch.compile, on CUDA block by block with the fastest kernels by trial, where it "
              "pays", "minutes in the first steps on CUDA, and again for new shapes", _no_compile)
        .plus(MicroBatching, {"size": "auto"},
              "takes a batch that runs out of memory in the largest parts that fit",
              "0.3 ms a step; BatchNorm sees one part at a time, once there are parts",
              _no_micro_batching)
        # Samples may not be countable.
        .plus(Accumulation, {"normalize": "batches"},
              "accumulated gradients that are a mean, in a short last window too",
              "nothing that could be measured", _no_accumulation)
        .plus_argument("strategy", "ddp_compressed",
              "compressed gradients with error feedback, where the measured network is what is "
              "waited for",
              "a copy of the gradients; Top-K, if it comes to that, changes the result",
              _no_network)
    )  # fmt: skip


# --- why not --------------------------------------------------------------------------------------


def _deepspeed(situation: Situation) -> str | None:
    if situation.strategy == "deepspeed":
        return "DeepSpeed keeps gradients and optimizers to itself"
    return None


def _no_clipping(situation: Situation) -> str | None:
    if situation.arguments.get("gradient_clip_val"):
        return "the Trainer clips by gradient_clip_val, and both would clip twice"
    if situation.sends_late:
        return (
            f"{situation.strategy_name} keeps what is not sent, which no callback could clip: "
            "Trainer(gradient_clip_val=...) does"
        )
    return _deepspeed(situation)


def _no_bf16(situation: Situation) -> str | None:
    if situation.precision_plugin:
        return "a plugin of yours brings the precision"
    return why_no_bf16(situation.device, situation.forks)


def _no_compile(situation: Situation) -> str | None:
    if situation.strategy in ("deepspeed", "fsdp1", "tensor_parallel", "other"):
        return f"not tried, or refused, under {situation.strategy_name}"
    if situation.compiled:
        return "the model is compiled already"
    if situation.device == "cpu" and situation.wants("CompileModel") is None:
        return (
            "on a CPU it seldom pays for its start of half a minute and more: lightning-opt tune "
            "measures it, CompileModel=True has it"
        )
    recompute = situation.wants("ActivationCheckpointing")
    if recompute is not None and (
        recompute.get("policy", "auto") in SINGLE_OPERATORS or recompute.get("offload")
    ):
        return (
            "ActivationCheckpointing as you want it looks at single operators; 'every_layer' would "
            "go with it"
        )
    return why_no_compiler(situation.device, situation.forks)


def _alone(situation: Situation) -> str | None:
    return None if situation.processes > 1 else "there is one process: no rank waits for another"


def _no_checkpointing(situation: Situation) -> str | None:
    if situation.strategy == "deepspeed":
        return "DeepSpeed has a checkpointing of its own"
    if situation.checkpointed:
        return "the model is checkpointed already"
    if situation.wants("ActivationCheckpointing") is not None:
        return None
    if situation.model is None:
        return (
            "nothing says that memory is short: ActivationCheckpointing={'policy': 'every_layer'} "
            "or {'budget_mb': ...} asks for it, for_model(model) finds out"
        )
    if situation.does_not_fit:
        return f"it is not activations that fill the memory. {situation.does_not_fit}"
    if situation.memory_is_tight is None:
        return "the model leaves enough memory for activations"
    return None if find_blocks(situation.model) else "the model has no repeated blocks"


def _no_micro_batching(situation: Situation) -> str | None:
    if situation.manual:
        return "the model steps its optimizers itself: use lightning_opt.micro_batches there"
    if situation.takes_iterator:
        return "training_step takes dataloader_iter, so there is no batch to split"
    if situation.wants("DynamicBatchSize") is not None:
        return "in the trials of DynamicBatchSize nothing would run out of memory"
    if situation.strategy == "deepspeed":
        return "DeepSpeed accumulates gradients itself"
    if (situation.wants("MicroBatching") or {}).get("size", "auto") != "auto":
        return None
    if situation.strategy not in ("single", "ddp", "fsdp2"):
        return (
            f"under {situation.strategy_name} a rank that runs out of memory would leave the "
            "others waiting: MicroBatching={'size': 8} works"
        )
    if situation.strategy == "ddp" and situation.static_graph:
        return "DDP's static_graph expects the same backward passes at every step"
    return None


def _no_accumulation(situation: Situation) -> str | None:
    if situation.manual:
        return "the model accumulates by itself: use lightning_opt.GradientAccumulator there"
    if situation.strategy == "deepspeed":
        return "DeepSpeed accumulates gradients itself"
    return None if situation.accumulates else "nothing accumulates: no accumulate_grad_batches"


def _no_network(situation: Situation) -> str | None:
    if situation.nodes == 1:
        return "all processes are on one machine: no network between them"
    return None if situation.device in ("cpu", "cuda") else f"not tried on {situation.device!r}"


# --- settings that depend -------------------------------------------------------------------------


def _figure(situation: Situation) -> dict[str, Any]:
    # Without a logger there is no folder of the run that it would belong to.
    return {"figure": None} if situation.arguments.get("logger") is False else {}


def _compile_scope(situation: Situation) -> dict[str, Any]:
    # Hooks that gather sharded parameters would each end a graph of the whole model.
    scope = "regions" if situation.strategy == "fsdp2" else "model"
    return {"scope": scope, "measure": True}


def _tuned_compile(situation: Situation) -> dict[str, Any]:
    if situation.device != "cuda":  # on a CPU the search takes minutes, and regions are slower
        return _compile_scope(situation)
    # CUDA graphs overwrite gradients that are still being accumulated.
    return {"mode": "max-autotune-no-cudagraphs", "scope": "regions", "measure": True}


def _checkpointing_policy(situation: Situation) -> dict[str, Any]:
    if situation.wants("ActivationCheckpointing") is not None:
        return {}
    compiles = (
        situation.compiled
        or situation.wants("CompileModel") is not None
        or not (situation.refuses("CompileModel") or _no_compile(situation))
    )
    return {"policy": "every_layer"} if compiles else {"policy": "auto", "strict": False}


def _tuner_settings(situation: Situation) -> dict[str, Any]:
    # Random augmentation draws other numbers in other workers.
    return {"random_items": "refuse"} if situation.arguments.get("deterministic") else {}
