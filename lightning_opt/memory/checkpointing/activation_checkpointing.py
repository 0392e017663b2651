"""Activation checkpointing for any Lightning Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_opt.core.arguments import at_least, positive
from lightning_opt.core.measure.memory import MB
from lightning_opt.core.modules.blocks import Block, find_blocks
from lightning_opt.core.modules.compiling import (
    has_compiled_parts,
    is_checkpointed,
    is_compiled,
    run_eagerly,
)
from lightning_opt.core.modules.patching import replaced
from lightning_opt.core.modules.trial import TrialStep, as_delivered
from lightning_opt.core.output.loggers import log_scalars
from lightning_opt.core.output.report import Report
from lightning_opt.memory.checkpointing.methods.arguments import switch_caches_off
from lightning_opt.memory.checkpointing.methods.offloading import Offload
from lightning_opt.memory.checkpointing.methods.policies import (
    AppliedPlan,
    Plan,
    count_recomputed,
    make_plan,
    select_modules,
)
from lightning_opt.memory.checkpointing.planning.batch_planning import (
    Budget,
    Planning,
    batch_shapes,
    plan_for_batch,
)
from lightning_opt.trainer.run_callback import RunCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl

POLICIES = ("auto", "none", "every_layer", "sqrt", "block", "every_nth", "selective", "custom")


class ActivationCheckpointing(RunCallback):
    """Keeps fewer activations for the backward pass, and recomputes the rest.

    You do not change the model's code. The callback finds repeated blocks by structure and shapes,
    and replaces ``forward`` of those that the policy selects until the fit ends, even by an
    exception. Gradients are bit-identical: the recomputation restores random state, autocast and
    the buffers that a block writes, so dropout draws the same numbers and BatchNorm counts a
    batch once. Names in ``state_dict`` and ``named_parameters``, classes, hooks and attributes
    do not change. Validation is unaffected.

    ================= ==========================================================================
    ``"auto"``        the fastest mixture of all below within the budget: measured on the first
                      batch, planned, applied, and verified by measuring again
    ``"none"``        nothing is recomputed
    ``"every_layer"`` each block separately
    ``"sqrt"``        segments of about the square root of the number of blocks
    ``"block"``       segments of ``interval`` consecutive blocks; only the segment's input is kept
    ``"every_nth"``   one block in ``interval``; the others keep everything
    ``"selective"``   each block, except the outputs of its expensive operators, which are kept
    ``"custom"``      exactly ``modules``, each separately
    ================= ==========================================================================

    Blocks are joined into segments as the model runs, if the output of one is the input of the
    next. Otherwise, and under torch.compile or FSDP, each is recomputed on its own.

    With ``"auto"`` the training step runs twenty to forty times on the first batch before the
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
    ``checkpointing/offloaded_mb``        with ``offload``: kept on the host by the first step
    ===================================== ======================================================

    A megabyte is 2**20 bytes. On CUDA, peaks come from torch's allocator; elsewhere they count the
    memory of all tensors, without kernels' internal buffers.

    Args:
        policy: One of the names above.
        interval: For ``"block"`` and ``"every_nth"``: how many blocks, at least 1.
        modules: What to use as blocks instead of those found: qualified names, shell patterns
            (``"encoder.layers.*"``), classes or their names.
        min_flops: For ``"selective"``: the number of operations that makes an operator expensive
            or, below 1, its share of the block's; ``None`` for every matrix product, convolution
            and attention.
        budget_mb: For ``"auto"``: megabytes for parameters, buffers, gradients, optimizer states
            and activations together.
        budget: For ``"auto"``: share of the activations' peak without recomputation, above 0. With
            neither, the budget is nine tenths of the device's free memory.
        strict: Whether a budget that cannot be met is an error; otherwise it warns and uses the
            plan with the smallest peak.
        offload: Keep everything saved for the backward pass, of recomputed blocks and of the rest,
            in pinned host memory. On CUDA only; elsewhere it has no effect, and a log line says
            so. Not for ``"auto"``, which measures the device, and not under FSDP.
        worst_batch: For ``"auto"``: a batch from the loader with the largest shapes that will
            occur. It is planned for instead of the first one, so a budget that it cannot meet is an
            error before the first step, and not a warning later.

    Raises:
        ValueError: In ``__init__`` for an unknown policy or a setting that it has no use for; in
            ``setup`` under DeepSpeed and beside Lightning's own checkpointing for FSDP; in
            ``on_fit_start`` if there is no such module, if no blocks are found, if parts of the
            model are checkpointed already, or compiled under ``"auto"`` and ``"selective"`` and
            with ``offload``.
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
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}; got {policy!r}.")
        _refuse_unused(policy, ("block", "every_nth"), interval=interval)
        _refuse_unused(policy, ("selective",), min_flops=min_flops)
        _refuse_unused(
            policy, ("auto",), budget_mb=budget_mb, budget=budget, worst_batch=worst_batch
        )
        if policy in ("block", "every_nth"):
            interval = at_least("interval", 3 if interval is None else interval, 1)
        if min_flops is not None:
            positive("min_flops", min_flops)
        if policy == "custom" and not modules:
            raise ValueError("policy='custom' needs modules=[...]: names, patterns or classes.")
        if policy == "auto" and offload:
            raise ValueError(
                "offload=True changes what the plan of policy='auto' would be made from. Use it "
                "with another policy, such as 'every_layer' or 'none'."
            )
        self.offload, self.worst_batch = offload, worst_batch
        self.policy, self.interval, self.min_flops = policy, interval, min_flops
        self.modules = None if modules is None else list(modules)
        self.budget = Budget(budget_mb, budget, strict)
        self.blocks: list[Block] = []
        self.plan: Plan = []
        self.planning: Planning | None = None
        self._applied = AppliedPlan([])
        self._offload: Offload | None = None
        self._patches = ExitStack()
        self._planned: list[Planning] = []
        self._is_logged = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse strategies that have a checkpointing of their own."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            raise ValueError(
                "ActivationCheckpointing does not work with the DeepSpeed strategy, which moves "
                "parameters and activations itself. Use activation_checkpointing in DeepSpeed's "
                "config, or the strategies 'ddp', 'fsdp' or ModelParallelStrategy."
            )
        if isinstance(trainer.strategy, FSDPStrategy) and getattr(
            trainer.strategy, "_activation_checkpointing_kwargs", None
        ):
            raise ValueError(
                "ActivationCheckpointing and FSDPStrategy(activation_checkpointing_policy=...) "
                "would recompute twice. Leave one of them out."
            )
        if self.offload and isinstance(trainer.strategy, (FSDPStrategy, ModelParallelStrategy)):
            raise ValueError(
                "ActivationCheckpointing(offload=True) does not work with sharded parameters "
                "(FSDPStrategy, ModelParallelStrategy), whose memory comes and goes under what "
                "autograd saves. Use a policy that recomputes, such as 'every_layer', or DDP."
            )

    @property
    def needs_operators(self) -> str:
        """The setting that needs to see individual operators; empty if none does."""
        if self.offload:
            return "offload=True"
        return repr(self.policy) if self.policy in ("auto", "selective") else ""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find the blocks and apply the policy: strategies have wrapped the model by now."""
        self.release(trainer)
        refuse_checkpointed(pl_module)
        if self.needs_operators:
            refuse_compiled(pl_module, f"ActivationCheckpointing({self.needs_operators})")
        self.blocks = self._choose_blocks(pl_module)
        self._is_logged = False
        if self.policy != "none":
            self._patches.enter_context(switch_caches_off(pl_module))
        if self.policy == "auto":
            self.plan, self.planning, self._planned = [], None, []
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
                "ActivationCheckpointing(offload=True) needs a CUDA device; on "
                f"{pl_module.device.type} saved tensors are where they would be moved to, so "
                "nothing is moved."
            )
            return
        self._offload = Offload(pl_module.device)
        step = self._offload.around(pl_module, pl_module.training_step)
        self._patches.enter_context(replaced(pl_module, training_step=step))

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Under ``"auto"``, plan for the first batch, and for a larger one that may not fit."""
        if self.policy != "auto" or not self.blocks:
            unknown = any(one.buffers.read_only is None for one in self._applied.forwards)
            if unknown and not self._is_logged and has_compiled_parts(pl_module):
                # What writes buffers stays out of the graph, so that is found out before there is
                # one: Dynamo never looks again at code that it had to break in a loop.
                with run_eagerly():
                    TrialStep(trainer, pl_module, batch, batch_idx).run()
            return
        if self.worst_batch is not None and not self._planned:
            worst_batch = as_delivered(trainer, pl_module, self.worst_batch)
            self._plan_for(trainer, pl_module, worst_batch, batch_idx)
        self._plan_for(trainer, pl_module, batch, batch_idx)

    def _plan_for(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        shapes = batch_shapes(batch)
        planning = next((one for one in self._planned if one.serves(shapes)), None)
        if planning is None:
            self._applied.undo()
            first = self._planned[0] if self._planned else None
            planning = plan_for_batch(
                trainer, pl_module, batch, batch_idx, self.blocks, self.budget, first
            )
            self._planned.append(planning)
            rank_zero_info(planning.summary())
            log_scalars(trainer, planning.scalars())
        if planning is not self.planning:
            self._apply(planning.plan)
        self.planning = planning

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Log once what was done."""
        if self._is_logged:
            return
        self._is_logged = True
        counts = {
            "checkpointing/blocks": float(len(self.blocks)),
            "checkpointing/recomputed": float(count_recomputed(self.plan)),
        }
        if self._offload is not None:
            counts["checkpointing/offloaded_mb"] = self._offload.nbytes / MB
        log_scalars(trainer, counts)
        forwards = self._applied.forwards
        left_out = sum(not forward.buffers.read_only for forward in forwards)
        if left_out and has_compiled_parts(pl_module):
            rank_zero_info(
                f"ActivationCheckpointing({self.policy!r}): {left_out} of {len(forwards)} "
                "recomputed modules write buffers (such as running statistics), and run outside of "
                "the compiled graph: in it a recomputation would see what the first run wrote."
            )

    def describe(self) -> Report:
        """Return one row a block: its class, its parameters, and what is done with it.

        Under ``"auto"``, once planned, also its place in the order of execution, what keeping it
        holds and what recomputing it costs.
        """
        treatment = {block: stretch.treatment for stretch in self.plan for block in stretch.blocks}
        rows: list[dict[str, Any]] = [
            {
                "block": block.name,
                "class": ", ".join(type(module).__name__ for module in block.modules),
                "parameters": sum(p.numel() for m in block.modules for p in m.parameters()),
                "policy": treatment.get(block, "kept"),
                **(self.planning.details(block) if self.planning is not None else {}),
            }
            for block in self.blocks
        ]
        notes = [] if self.planning is None else [self.planning.summary()]
        return Report(f"ActivationCheckpointing({self.policy!r})", rows, notes)

    def release(self, trainer: pl.Trainer) -> None:
        """Put the modules' ``forward`` and ``training_step`` back."""
        self._patches.close()
        self._offload = None
        self._applied.undo()

    def _choose_blocks(self, model: nn.Module) -> list[Block]:
        if self.modules is not None:
            return select_modules(model, self.modules)
        if self.policy == "none":
            return []
        blocks = find_blocks(model)
        if not blocks and self.policy != "auto":
            raise ValueError(
                f"ActivationCheckpointing({self.policy!r}) finds no repeated blocks in "
                f"{type(model).__name__}. Name what to recompute: "
                "ActivationCheckpointing('custom', modules=['encoder', 'decoder'])."
            )
        return blocks

    def _apply(self, plan: Plan) -> None:
        self._applied.undo()
        self._applied = AppliedPlan(plan)
        self.plan = plan


def _refuse_unused(policy: str, users: Sequence[str], **settings: Any) -> None:
    for name, value in settings.items():
        if value is not None and policy not in users:
            allowed = " and ".join(repr(user) for user in users)
            raise ValueError(f"{name}={value!r} is for policy {allowed}, not for {policy!r}.")


def refuse_compiled(model: nn.Module, who: str) -> None:
    """Raise where a part of ``model`` is compiled: inside of a graph no operator is seen.

    Raises:
        ValueError: For modules under ``torch.compile``.
    """
    for name, module in model.named_modules():
        if is_compiled(module):
            raise ValueError(
                f"{who} looks at single operators, and {name or type(model).__name__} is "
                "compiled. Use policy 'every_layer' or 'custom' with torch.compile, no offload, or "
                "the compiler's own budget: torch._functorch.config.activation_memory_budget."
            )


def refuse_checkpointed(model: nn.Module) -> None:
    """Raise where a part of ``model`` is checkpointed by someone else.

    Raises:
        ValueError: For torch's ``CheckpointWrapper``, Transformers' ``gradient_checkpointing`` and
            a second :class:`ActivationCheckpointing`.
    """
    for name, module in model.named_modules():
        if is_checkpointed(module):
            raise ValueError(
                f"{name or type(model).__name__} is checkpointed already, and would be recomputed "
                "twice. Take that away (gradient_checkpointing_disable() in Transformers, "
                "torch's checkpoint_wrapper, a second ActivationCheckpointing) or this callback."
            )
