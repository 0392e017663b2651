# What the package exports, and where it stands. `lazy_loader` reads this file when the package is
# imported, type checkers when they check; a name is imported when it is first used.
from .batching.accumulation.accumulation import Accumulation as Accumulation
from .batching.accumulation.gradient_accumulator import GradientAccumulator as GradientAccumulator
from .batching.batch_size.dynamic_batch_size import DynamicBatchSize as DynamicBatchSize
from .batching.batch_size.find_batch_size import find_batch_size as find_batch_size
from .batching.batch_size.search import FoundSizes as FoundSizes
from .batching.micro_batching.micro_batching import MicroBatching as MicroBatching
from .core.modules.batches import UnsplittableBatchError as UnsplittableBatchError
from .core.modules.batches import micro_batches as micro_batches
from .core.modules.batches import split_batch as split_batch
from .core.output.report import Report as Report
from .data.cache.cached_dataset import CachedDataset as CachedDataset
from .data.cache.cached_function import cached as cached
from .data.pipeline.data_monitor import DataMonitor as DataMonitor
from .data.pipeline.device_prefetcher import DevicePrefetcher as DevicePrefetcher
from .data.pipeline.pipeline_tuner import DataPipelineTuner as DataPipelineTuner
from .gradients.clipping.adaptive_clipping import AdaptiveClipping as AdaptiveClipping
from .gradients.clipping.gradient_clipper import GradientClipper as GradientClipper
from .gradients.clipping.norm_rules import ClippingRule as ClippingRule
from .gradients.clipping.norm_rules import FixedNorm as FixedNorm
from .gradients.clipping.norm_rules import MeanStd as MeanStd
from .gradients.clipping.norm_rules import NormRule as NormRule
from .gradients.clipping.norm_rules import Percentile as Percentile
from .gradients.clipping.norm_rules import Robust as Robust
from .gradients.clipping.norm_rules import ZClip as ZClip
from .gradients.clipping.tensor_rules import FixedValue as FixedValue
from .gradients.clipping.tensor_rules import PerParameter as PerParameter
from .gradients.clipping.tensor_rules import UnitWise as UnitWise
from .gradients.curvature.curvature_monitor import CurvatureMonitor as CurvatureMonitor
from .gradients.curvature.curvature_preconditioner import (
    CurvaturePreconditioner as CurvaturePreconditioner,
)
from .gradients.curvature.hessian import hessian_diagonal as hessian_diagonal
from .gradients.curvature.hessian import hessian_trace as hessian_trace
from .gradients.curvature.hessian import hessian_vector_product as hessian_vector_product
from .gradients.curvature.hessian import top_eigenvalue as top_eigenvalue
from .gradients.guard.non_finite_guard import NonFiniteGuard as NonFiniteGuard
from .gradients.health.gradient_health import GradientHealth as GradientHealth
from .kernels.attention.attention_backend import AttentionBackend as AttentionBackend
from .kernels.attention.self_attention import RotaryEmbedding as RotaryEmbedding
from .kernels.attention.self_attention import SelfAttention as SelfAttention
from .kernels.channels_last.channels_last import ChannelsLast as ChannelsLast
from .kernels.compiling.compile_model import CompileModel as CompileModel
from .kernels.fused_optimizer.fused_optimizer import FusedOptimizer as FusedOptimizer
from .kernels.runtime.runtime import Runtime as Runtime
from .memory.checkpointing.activation_checkpointing import (
    ActivationCheckpointing as ActivationCheckpointing,
)
from .memory.checkpointing.batch_plan import BudgetError as BudgetError
from .memory.cleanup.memory_cleanup import MemoryCleanup as MemoryCleanup
from .memory.garbage.garbage_collection import GarbageCollection as GarbageCollection
from .memory.leaks.leak_detector import LeakDetector as LeakDetector
from .memory.profiler.memory_profiler import MemoryProfiler as MemoryProfiler
from .precision.loss_scale.dynamic_loss_scale import DynamicLossScale as DynamicLossScale
from .presets.preset import Preset as Preset
from .presets.registry import preset as preset
from .presets.registry import register_preset as register_preset
from .profiling.comparing.benchmark import BenchmarkResult as BenchmarkResult
from .profiling.comparing.benchmark import benchmark as benchmark
from .profiling.comparing.compare import Comparison as Comparison
from .profiling.comparing.compare import compare as compare
from .profiling.doctor.doctor import Diagnosis as Diagnosis
from .profiling.doctor.doctor import doctor as doctor
from .profiling.flops import count_flops as count_flops
from .profiling.monitor.performance_monitor import PerformanceMonitor as PerformanceMonitor
from .profiling.run_report.run_report import RunReport as RunReport
from .profiling.run_report.run_report import report as report
from .profiling.steps.step_profiler import StepProfiler as StepProfiler
from .strategies.compression.compressed_ddp import CompressedDDPStrategy as CompressedDDPStrategy
from .strategies.compression.compressed_ddp import HookedDDPStrategy as HookedDDPStrategy
from .strategies.compressors import Compressor as Compressor
from .strategies.compressors import Quantize as Quantize
from .strategies.compressors import Threshold as Threshold
from .strategies.compressors import TopK as TopK
from .strategies.diloco.diloco_strategy import DiLoCoStrategy as DiLoCoStrategy
from .tuner.autotune import autotune as autotune
from .tuner.result import TuneResult as TuneResult

__version__: str
