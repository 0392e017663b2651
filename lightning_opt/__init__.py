"""Callbacks, strategies and plugins that make a Lightning Trainer faster, smaller and safer."""

from lightning_opt.batching.accumulation import Accumulation
from lightning_opt.batching.accumulator import GradientAccumulator
from lightning_opt.batching.dynamic_size import DynamicBatchSize
from lightning_opt.batching.finding import FoundSizes
from lightning_opt.batching.micro_batching import MicroBatching
from lightning_opt.batching.trials import find_batch_size
from lightning_opt.compute.attention import AttentionBackend
from lightning_opt.compute.compile import CompileModel
from lightning_opt.compute.memory_format import ChannelsLast
from lightning_opt.compute.optimizers import FusedOptimizer
from lightning_opt.compute.rotary import RotaryEmbedding
from lightning_opt.compute.runtime import Runtime
from lightning_opt.compute.self_attention import SelfAttention
from lightning_opt.core.report import Report
from lightning_opt.core.splitting import UnsplittableBatchError, micro_batches, split_batch
from lightning_opt.data.cache import CachedDataset, cached
from lightning_opt.data.monitor import DataMonitor
from lightning_opt.data.prefetcher import DevicePrefetcher
from lightning_opt.data.tuning import DataPipelineTuner
from lightning_opt.gradients.clipper import GradientClipper
from lightning_opt.gradients.clipping import AdaptiveClipping
from lightning_opt.gradients.curvature import (
    hessian_diagonal,
    hessian_trace,
    hessian_vector_product,
    top_eigenvalue,
)
from lightning_opt.gradients.curvature_monitor import CurvatureMonitor
from lightning_opt.gradients.guard import NonFiniteGuard
from lightning_opt.gradients.health import GradientHealth
from lightning_opt.gradients.preconditioner import CurvaturePreconditioner
from lightning_opt.gradients.rules import (
    ClippingRule,
    FixedNorm,
    MeanStd,
    NormRule,
    Percentile,
    Robust,
    ZClip,
)
from lightning_opt.gradients.tensor_rules import FixedValue, PerParameter, UnitWise
from lightning_opt.memory.budgeting import BudgetError
from lightning_opt.memory.checkpointing import ActivationCheckpointing
from lightning_opt.memory.cleanup import MemoryCleanup
from lightning_opt.memory.garbage import GarbageCollection
from lightning_opt.memory.leaks import LeakDetector
from lightning_opt.memory.profiler import MemoryProfiler
from lightning_opt.precision.loss_scale import DynamicLossScale
from lightning_opt.presets.preset import Preset
from lightning_opt.presets.registry import preset, register_preset
from lightning_opt.profiling.benchmark import BenchmarkResult, benchmark
from lightning_opt.profiling.comparing import compare
from lightning_opt.profiling.comparison import Comparison
from lightning_opt.profiling.doctor import Diagnosis, doctor
from lightning_opt.profiling.flops import count_flops
from lightning_opt.profiling.monitor import PerformanceMonitor
from lightning_opt.profiling.step_profiler import StepProfiler
from lightning_opt.strategies.baselines import HookedDDPStrategy
from lightning_opt.strategies.compressors import Compressor, Quantize, Threshold, TopK
from lightning_opt.strategies.ddp import CompressedDDPStrategy
from lightning_opt.strategies.registry import register_strategies as _register_strategies
from lightning_opt.tuner.autotune import autotune
from lightning_opt.tuner.result import TuneResult

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
