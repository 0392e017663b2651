"""Callbacks, strategies and plugins that make a Lightning Trainer faster, smaller and safer."""

from lightning_opt.batching.accumulation.accumulation import Accumulation
from lightning_opt.batching.accumulation.gradient_accumulator import GradientAccumulator
from lightning_opt.batching.batch_size.dynamic_batch_size import DynamicBatchSize
from lightning_opt.batching.batch_size.search import FoundSizes
from lightning_opt.batching.batch_size.trials import find_batch_size
from lightning_opt.batching.micro_batching.micro_batching import MicroBatching
from lightning_opt.core.report import Report
from lightning_opt.core.splitting import UnsplittableBatchError, micro_batches, split_batch
from lightning_opt.data.cache.cached_dataset import CachedDataset, cached
from lightning_opt.data.pipeline.data_monitor import DataMonitor
from lightning_opt.data.pipeline.device_prefetcher import DevicePrefetcher
from lightning_opt.data.pipeline.pipeline_tuner import DataPipelineTuner
from lightning_opt.gradients.clipping.adaptive_clipping import AdaptiveClipping
from lightning_opt.gradients.clipping.gradient_clipper import GradientClipper
from lightning_opt.gradients.clipping.norm_rules import (
    ClippingRule,
    FixedNorm,
    MeanStd,
    NormRule,
    Percentile,
    Robust,
    ZClip,
)
from lightning_opt.gradients.clipping.tensor_rules import FixedValue, PerParameter, UnitWise
from lightning_opt.gradients.curvature.curvature_monitor import CurvatureMonitor
from lightning_opt.gradients.curvature.curvature_preconditioner import CurvaturePreconditioner
from lightning_opt.gradients.curvature.hessian import (
    hessian_diagonal,
    hessian_trace,
    hessian_vector_product,
    top_eigenvalue,
)
from lightning_opt.gradients.guard.non_finite_guard import NonFiniteGuard
from lightning_opt.gradients.health.gradient_health import GradientHealth
from lightning_opt.kernels.attention.attention_backend import AttentionBackend
from lightning_opt.kernels.attention.rotary_embedding import RotaryEmbedding
from lightning_opt.kernels.attention.self_attention import SelfAttention
from lightning_opt.kernels.channels_last.channels_last import ChannelsLast
from lightning_opt.kernels.compiling.compile_model import CompileModel
from lightning_opt.kernels.fused_optimizer.fused_optimizer import FusedOptimizer
from lightning_opt.kernels.runtime.runtime import Runtime
from lightning_opt.memory.checkpointing.activation_checkpointing import ActivationCheckpointing
from lightning_opt.memory.checkpointing.planning.batch_planning import BudgetError
from lightning_opt.memory.cleanup.memory_cleanup import MemoryCleanup
from lightning_opt.memory.garbage.garbage_collection import GarbageCollection
from lightning_opt.memory.leaks.leak_detector import LeakDetector
from lightning_opt.memory.profiler.memory_profiler import MemoryProfiler
from lightning_opt.precision.loss_scale.dynamic_loss_scale import DynamicLossScale
from lightning_opt.presets.preset import Preset
from lightning_opt.presets.registry import preset, register_preset
from lightning_opt.profiling.comparing.benchmark import BenchmarkResult, benchmark
from lightning_opt.profiling.comparing.compare import compare
from lightning_opt.profiling.comparing.result import Comparison
from lightning_opt.profiling.doctor.doctor import Diagnosis, doctor
from lightning_opt.profiling.flops import count_flops
from lightning_opt.profiling.monitor.performance_monitor import PerformanceMonitor
from lightning_opt.profiling.steps.step_profiler import StepProfiler
from lightning_opt.strategies.compression.codecs.compressors import (
    Compressor,
    Quantize,
    Threshold,
    TopK,
)
from lightning_opt.strategies.compression.compressed_ddp import CompressedDDPStrategy
from lightning_opt.strategies.compression.hooked_ddp import HookedDDPStrategy
from lightning_opt.strategies.compression.strategy_strings import (
    register_strategies as _register_strategies,
)
from lightning_opt.tuner.autotune import autotune
from lightning_opt.tuner.report.result import TuneResult

__version__ = "0.1.0"

__all__ = [
    "Accumulation",
    "ActivationCheckpointing",
    "AdaptiveClipping",
    "AttentionBackend",
    "BenchmarkResult",
    "BudgetError",
    "CachedDataset",
    "ChannelsLast",
    "ClippingRule",
    "Comparison",
    "CompileModel",
    "CompressedDDPStrategy",
    "Compressor",
    "CurvatureMonitor",
    "CurvaturePreconditioner",
    "DataMonitor",
    "DataPipelineTuner",
    "DevicePrefetcher",
    "Diagnosis",
    "DynamicBatchSize",
    "DynamicLossScale",
    "FixedNorm",
    "FixedValue",
    "FoundSizes",
    "FusedOptimizer",
    "GarbageCollection",
    "GradientAccumulator",
    "GradientClipper",
    "GradientHealth",
    "HookedDDPStrategy",
    "LeakDetector",
    "MeanStd",
    "MemoryCleanup",
    "MemoryProfiler",
    "MicroBatching",
    "NonFiniteGuard",
    "NormRule",
    "PerParameter",
    "Percentile",
    "PerformanceMonitor",
    "Preset",
    "Quantize",
    "Report",
    "Robust",
    "RotaryEmbedding",
    "Runtime",
    "SelfAttention",
    "StepProfiler",
    "Threshold",
    "TopK",
    "TuneResult",
    "UnitWise",
    "UnsplittableBatchError",
    "ZClip",
    "autotune",
    "benchmark",
    "cached",
    "compare",
    "count_flops",
    "doctor",
    "find_batch_size",
    "hessian_diagonal",
    "hessian_trace",
    "hessian_vector_product",
    "micro_batches",
    "preset",
    "register_preset",
    "split_batch",
    "top_eigenvalue",
]

_register_strategies()
