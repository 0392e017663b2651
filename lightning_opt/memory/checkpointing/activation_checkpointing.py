"""Activation checkpointing for any Lightning Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_opt.core.arguments import check_at_least, check_one_of, check_positive
from lightning_opt.core.measure.memory import MB
from lightning_opt.core.modules.blocks import Block, find_blocks
from lightning_opt.core.modules.compiling import (
    has_compiled_parts,
    is_checkpointed,
    is_compiled,
    run_eagerly,
)
from lightning_opt.core.modules.lazy import raise_if_lazy
from lightning_opt.core.modules.trial import TrialStep, prepare_batch
from lightning_opt.core.output.loggers import log_scalars
from lightning_opt.core.output.report import Report
from lightning_opt.memory.checkpointing.batch_plan import Budget, StepPlan, batch_shapes, plan_batch
from lightning_opt.memory.checkpointing.forward import Offload, disable_caches
from lightning_opt.memory.checkpointing.policies import (
    AppliedPlan,
    Plan,
    count_recomputed,
    make_plan,
    select_modules,
)
from lightning_opt.trainer.lightning import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning_opt.trainer.run_callback import RunCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl

POLICIES = ("auto", "none", "every_layer", "sqrt", "block", "every_nth", "selective", "custom")


class ActivationCheckpointing(RunCallback):
    """Keeps fewer activations for the backward pass, and recomputes the rest.

    You do not change the model's code. The callback finds repeated blocks by structure and shapes,
    and replaces ``forward`` of the selected blocks until the fit ends or fails. Gradients are
    bit-identical: the recomputation restores random state, autocast, and the buffers and attributes
    that a block writes, so dropout draws the same numbers and BatchNorm counts each batch once.
    Names in ``state_dict`` and ``named_parameters``, classes, hooks and attributes do not change.
    Validation is unaffected.

    ================= ==========================================================================
    ``"auto"``        for each block ``"none"``, ``"every_layer"`` or ``"selective"``: the fastest
                      combination that fits the budget, found by measuring the first batch
    ``"none"``        nothing is recomputed
    ``"every_layer"`` each block separately
    ``"sqrt"``        about sqrt(n) segments of sqrt(n) blocks each
    ``"block"``       segments of ``interval`` consecutive blocks; only the segment's input is kept
    ``"every_nth"``   one block in ``interval``; the others keep everything
    ``"selective"``   each block, but the outputs of its expensive operators are kept
    ``"custom"``      exactly ``modules``, each separately
    ================= ==========================================================================

    Blocks are joined into segments as the model runs, if the output of one is the input of the
    next. Otherwise, and under torch.compile or FSDP, each is recomputed on its own.

    With ``"auto"`` the training step runs up to twenty times on the first batch before the
    first optimizer step. Random state, gradients, buffers, metrics and attributes of plain types
    are restored, nothing is logged, and no optimizer steps. A larger batch that would exceed the
    budget gets a new plan.

    Logged once; times and peaks only with ``"auto"``:

    ===================================== ======================================================
    ``checkpointing/blocks``              blocks found
    ``checkpointing/recomputed``          blocks recomputed, partly or fully
    ``checkpointing/unchecked_peak_mb``   peak of the step's activations without recomputation
    ``checkpointing/predicted_peak_mb``   the plan's peak, predicted
    ``checkpointing/peak_mb``             the plan's peak, measured
    ``checkpointing/unchecked_step_ms``   forward and backward pass without recomputation
    ``checkpointing/step_ms``             the same under the plan
    ``checkpointing/offloaded_mb``        with ``offload``: MB moved to the host in the first step
    ===================================== ======================================================

    A megabyte is 2**20 bytes. On CUDA, peaks come from torch's allocator; elsewhere they count the
    memory of all tensors, without kernels' internal buffers.

    Args:
        policy: One of the names above.
        interval: For ``"block"`` and ``"every_nth"``: number of blocks, at least 1.
        modules: Modules to use as blocks instead of the repeated ones: qualified names, shell
            patterns (``"encoder.layers.*"``), classes or their names.
        min_flops: For ``"selective"``: operators with at least this number of operations are
            expensive; below 1, it is a share of the block's operations. ``None`` selects every
            matrix product, convolution and attention.
        budget_mb: For ``"auto"``: megabytes for parameters, buffers, gradients, optimizer states
            and activations together.
        budget: For ``"auto"``: share of the activations' peak without recomputation, above 0.
            Without ``budget_mb`` and ``budget``, the budget is 90% of the device's free memory.
        strict: Whether a budget that cannot be met is an error; otherwise it warns and uses the
            plan with the smallest peak.
        offload: Keep tensors that are saved for the backward pass in pinned host memory. On CUDA
            only; elsewhere it warns and has no effect. Not for ``"auto"``, whose measurements it
            would change, and not under FSDP.
        worst_batch: For ``"auto"``: a batch from the loader with the largest shapes that will
            occur. The plan is made for it before the first step, so that a budget that cannot be
            met raises at the start instead of warning later.

    Raises:
        ValueError: In ``__init__`` for an unknown policy or a setting that it does not use. In
            ``setup`` with DeepSpeed, or if FSDP's own checkpointing is on. In ``on_fit_start`` if
            ``modules`` matches nothing or a module of torch.jit, if no blocks are found, if a lazy
            layer has no shapes yet, or if the model is checkpointed already; for ``"auto"``,
            ``"selective"`` and ``offload`` also if it is compiled.
        BudgetError: Before the first step, if the budget cannot be met. It is a ``ValueError``.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> callback = lo.ActivationCheckpointing("auto", budget_mb=4096)
        >>> trainer = L.Trainer(callbacks=[callback], logger=False)

    References:
        Chen, Xu, Zhang and Guestrin (2016). *Training Deep Nets with Sublinear Memory Cost*.
    """

    def __init__(
        self,
        policy: str = "auto",
        interval: int | None = None,
        modules: Sequence[str | type[nn.Module]] | None = None,
        min_flops: float | None = None,
        budget_mb: float | None = None,
        budget: float | None = None,
        strict: bool = True,
        offload: bool = False,
        worst_batch: Any = None,
    ) -> None:
        check_one_of("policy", policy, POLICIES)
        _raise_if_unused(policy, ("block", "every_nth"), interval=interval)
        _raise_if_unused(policy, ("selective",), min_flops=min_flops)
        _raise_if_unused(
            policy, ("auto",), budget_mb=budget_mb, budget=budget, worst_batch=worst_batch
        )
        if policy in ("block", "every_nth"):
            interval = check_at_least("interval", 3 if interval is None else interval, 1)
        if policy == "custom" and not modules:
            raise ValueError("policy='custom' needs modules=[...]: names, patterns or classes.")
        if policy == "auto" and offload:
            raise ValueError(
                "offload=True would change the measurements behind policy='auto'. Use it with "
                "another policy, such as 'every_layer' or 'none'."
            )
        self.policy, self.interval = policy, interval
        self.min_flops = None if min_flops is None else check_positive("min_flops", min_flops)
        self.offload, self.worst_batch = offload, worst_batch
        self.modules = None if modules is None else list(modules)
        self.budget = Budget(budget_mb, budget, strict)
        self.blocks: list[Block] = []
        self.plan: Plan = []
        self.step_plan: StepPlan | None = None
        self._step_plans: list[StepPlan] = []
        self._applied = AppliedPlan([])
        self._offload: Offload | None = None

    @property
    def needs_operators(self) -> str:
        """Name of the setting that needs to see individual operators; empty if none does."""
        if self.offload:
            return "offload=True"
        return repr(self.policy) if self.policy in ("auto", "selective") else ""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Raise if the strategy has its own checkpointing, or if it does not allow offloading."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            raise ValueError(
                "ActivationCheckpointing does not work with the DeepSpeed strategy, which moves "
                "parameters and activations itself. Use activation_checkpointing in DeepSpeed's "
                "config, or the strategies 'ddp', 'fsdp' or ModelParallelStrategy."
            )
        its_own = getattr(trainer.strategy, "_activation_checkpointing_kwargs", None)
        if its_own and isinstance(trainer.strategy, FSDPStrategy):
            raise ValueError(
                "ActivationCheckpointing and FSDPStrategy(activation_checkpointing_policy=...) "
                "would recompute twice. Remove one of them."
            )
        if self.offload and isinstance(trainer.strategy, (FSDPStrategy, ModelParallelStrategy)):
            raise ValueError(
                "ActivationCheckpointing(offload=True) does not work with sharded parameters "
                "(FSDPStrategy, ModelParallelStrategy), whose memory is freed and reused while "
                "autograd saves tensors. Use DDP, or a policy such as 'every_layer'."
            )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find the blocks and apply the policy, after the strategy has wrapped the model."""
        self.release(trainer)
        self._check_modules(pl_module)
        self.blocks = self._find_blocks(pl_module)
        self._is_logged = False
        if self.policy != "none":
            disable_caches(pl_module, self._patches)
        if self.policy == "auto":
            self.plan, self.step_plan, self._step_plans = [], None, []
        else:
            self._apply(make_plan(self.policy, self.blocks, self.interval, self.min_flops))
            rank_zero_info(
                f"ActivationCheckpointing({self.policy!r}): {len(self.blocks)} blocks found, "
                f"{count_recomputed(self.plan)} of them recomputed."
            )
        if self.offload:
            self._start_offloading(pl_module)

    def _start_offloading(self, pl_module: pl.LightningModule) -> None:
        if pl_module.device.type != "cuda":
            rank_zero_warn(
                "ActivationCheckpointing(offload=True) needs a CUDA device. On "
                f"{pl_module.device.type} saved tensors are in host memory already, so nothing is "
                "moved."
            )
            return
        self._offload = Offload()
        step = self._offload.around(pl_module, pl_module.training_step)
        self._replace(pl_module, training_step=step)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Under ``"auto"``, make a plan for the first batch and for batches that may not fit."""
        if self.policy != "auto" or not self.blocks:
            untested = any(forward.state.read_only is None for forward in self._applied.forwards)
            if untested and not self._is_logged and has_compiled_parts(pl_module):
                # Find the modules that write buffers before the first compilation: they are not
                # compiled, and Dynamo skips a function with a graph break in a loop.
                with run_eagerly():
                    TrialStep(trainer, pl_module, batch, batch_idx).run()
            return
        if self.worst_batch is not None and not self._step_plans:
            worst_batch = prepare_batch(trainer, pl_module, self.worst_batch)
            self._plan_for(trainer, pl_module, worst_batch, batch_idx)
        self._plan_for(trainer, pl_module, batch, batch_idx)

    def _plan_for(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        shapes = batch_shapes(batch)
        step_plan = next((known for known in self._step_plans if known.covers(shapes)), None)
        if step_plan is None:
            self._applied.undo()
            first = self._step_plans[0] if self._step_plans else None
            step_plan = plan_batch(
                trainer, pl_module, batch, batch_idx, self.blocks, self.budget, first
            )
            self._step_plans.append(step_plan)
            rank_zero_info(step_plan.summary())
            log_scalars(trainer, step_plan.scalars())
        if step_plan is not self.step_plan:
            self._apply(step_plan.plan)
        self.step_plan = step_plan

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Log the number of blocks once."""
        if self._is_logged:
            return
        self._is_logged = True
        scalars = {
            "checkpointing/blocks": float(len(self.blocks)),
            "checkpointing/recomputed": float(count_recomputed(self.plan)),
        }
        if self._offload is not None:
            scalars["checkpointing/offloaded_mb"] = self._offload.nbytes / MB
        log_scalars(trainer, scalars)

    def describe(self) -> Report:
        """Return a table of the blocks: class, parameters and treatment.

        Once ``"auto"`` has a plan, the table also has the order of execution, the memory that the
        block keeps without recomputation, and its recomputation time.
        """
        treatment = {block: group.treatment for group in self.plan for block in group.blocks}
        rows: list[dict[str, Any]] = [
            {
                "block": block.name,
                "class": ", ".join(type(module).__name__ for module in block.modules),
                "parameters": sum(p.numel() for m in block.modules for p in m.parameters()),
                "policy": treatment.get(block, "kept"),
                **(self.step_plan.details(block) if self.step_plan is not None else {}),
            }
            for block in self.blocks
        ]
        notes = [] if self.step_plan is None else [self.step_plan.summary()]
        return Report(f"ActivationCheckpointing({self.policy!r})", rows, notes)

    def release(self, trainer: pl.Trainer) -> None:
        """Restore the modules' ``forward`` and ``training_step``."""
        super().release(trainer)
        self._offload = None
        self._applied.undo()

    def _check_modules(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            name = name or type(model).__name__
            if is_checkpointed(module):
                raise ValueError(
                    f"{name} is checkpointed already, and would be recomputed twice. Disable the "
                    "other checkpointing (gradient_checkpointing_disable() in Transformers, "
                    "torch's checkpoint_wrapper, a second ActivationCheckpointing), or remove "
                    "this callback."
                )
            if self.needs_operators and is_compiled(module):
                raise ValueError(
                    f"ActivationCheckpointing({self.needs_operators}) needs to see individual "
                    f"operators, and {name} is compiled. With torch.compile, use policy "
                    "'every_layer' or 'custom' without offload, or "
                    "torch._functorch.config.activation_memory_budget instead."
                )

    def _find_blocks(self, model: nn.Module) -> list[Block]:
        if self.policy == "auto" or (self.policy != "none" and self.modules is None):
            raise_if_lazy(f"ActivationCheckpointing({self.policy!r})", model)
        if self.modules is not None:
            return select_modules(model, self.modules)
        if self.policy == "none":
            return []
        blocks = find_blocks(model)
        if not blocks and self.policy != "auto":
            raise ValueError(
                f"ActivationCheckpointing({self.policy!r}) finds no repeated blocks in "
                f"{type(model).__name__}. Name the modules to recompute: "
                "ActivationCheckpointing('custom', modules=['encoder', 'decoder'])."
            )
        return blocks

    def _apply(self, plan: Plan) -> None:
        self._applied.undo()
        self._applied = AppliedPlan(plan)
        self.plan = plan


def _raise_if_unused(policy: str, valid_policies: Sequence[str], **settings: Any) -> None:
    for name, value in settings.items():
        if value is not None and policy not in valid_policies:
            allowed = " and ".join(repr(valid) for valid in valid_policies)
            raise ValueError(f"{name}={value!r} is for policy {allowed}, not for {policy!r}.")
