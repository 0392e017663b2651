"""Runs cells of the matrix: one small fit per cell.

The outcome of a cell compares its final weights with the same run without the plugin, or, if it
resumes, with the uninterrupted run: ``identical``, ``close`` or ``changed``. An error before the
first training step is ``refused``. Anything else ``fails``.
"""

import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, strategies
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

import lightning_opt as lo
from tests.helpers.processes import launch
from tests.helpers.trainers import quiet_trainer
from tests.matrix.nets import MatrixNet
from tests.matrix.outcomes import Cells, describe_error, largest_difference
from tests.matrix.subjects import (
    AT_ONCE,
    CHANGES,
    OF_A_REPLICA,
    RESUMES_OTHERWISE,
    ROUNDS,
    Subject,
)

STRATEGIES = ("single", "ddp", "ddp_topk", "diloco", "fsdp1", "fsdp2")
PRECISIONS = ("32-true", "bf16-mixed", "float16")
STEPS = ("plain", "resume", "accumulation", "manual")

TIMEOUT = 400.0
SAVE_AT = 4
CLOSE = {"32-true": 1e-4, "bf16-mixed": 0.1, "float16": 0.1}
"""Largest difference that counts as rounding, as a share of the change by training."""


@dataclass(frozen=True)
class Condition:
    """One column.

    Attributes:
        strategy: One of :data:`STRATEGIES`.
        precision: One of :data:`PRECISIONS`; float16 uses :class:`lightning_opt.DynamicLossScale`,
            since ``16-mixed`` exists on CUDA only.
        steps: One of :data:`STEPS`.
    """

    strategy: str
    precision: str = "32-true"
    steps: str = "plain"

    def __str__(self) -> str:
        return f"{self.strategy} / {self.precision} / {self.steps}"

    def applies_to(self, subject: Subject) -> bool:
        """Return whether the subject can be combined with this condition."""
        if subject.kind == "strategy":
            return self.strategy == "ddp"  # which it replaces
        return subject.kind != "precision" or self.precision == "float16"


def conditions_of(strategy: str) -> list[Condition]:
    """Return the columns of a strategy: all combinations on one process, fewer on two.

    A resumed run follows the uninterrupted run, whose checkpoint it loads.
    """
    if strategy == "single":
        return [Condition(strategy, p, s) for p in PRECISIONS for s in STEPS]
    pairs = [("32-true", "plain"), ("32-true", "resume")]
    if strategy in ("ddp_topk", "diloco"):  # their rows under DDP cover the other steps
        return [Condition(strategy, *pair) for pair in pairs]
    if strategy != "fsdp1":  # it wraps the whole module: no backward pass inside a step
        pairs.append(("32-true", "manual"))
    pairs.append(("bf16-mixed", "accumulation"))
    if strategy == "ddp":
        pairs.append(("float16", "accumulation"))
    return [Condition(strategy, *pair) for pair in pairs]


class FSDPStrategy(strategies.FSDPStrategy):
    """Lightning's FSDP1 without its requirement of an accelerator."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(
            model,
            sharding_strategy=self.sharding_strategy,
            mixed_precision=self.mixed_precision_config,
            device_id=torch.device("cpu"),
            **self.kwargs,
        )


def make_strategy(name: str) -> dict[str, Any]:
    """Return the Trainer's arguments for a strategy of the matrix."""
    if name == "single":
        return {}
    kinds: dict[str, Callable[[], Any]] = {
        "ddp": lambda: strategies.DDPStrategy(process_group_backend="gloo"),
        "ddp_topk": lambda: lo.CompressedDDPStrategy(
            "topk", process_group_backend="gloo", **AT_ONCE["CompressedDDPStrategy"]
        ),
        "diloco": lambda: lo.DiLoCoStrategy(2, fragments=2, process_group_backend="gloo"),
        "fsdp1": lambda: FSDPStrategy(use_orig_params=True, state_dict_type="sharded"),
        "fsdp2": lambda: strategies.ModelParallelStrategy(2, 1, save_distributed_checkpoint=False),
    }
    return {"strategy": kinds[name](), "devices": 2}


class Record(Callback):
    """Keeps the final unsharded weights, and saves one checkpoint if a file is given."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self.weights: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.file is not None and batch_idx + 1 == SAVE_AT:
            trainer.save_checkpoint(self.file)

    def on_train_end(self, trainer, pl_module):
        with FullyShardedDataParallel.summon_full_params(trainer.model, writeback=False):
            for name, value in pl_module.named_parameters():
                for wrapper in ("_fsdp_wrapped_module.", "_orig_mod."):
                    name = name.replace(wrapper, "")
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                self.weights[name] = whole.detach().float().clone()


def train(
    condition: Condition,
    subject: Subject | None,
    model: MatrixNet,
    save: Path | None = None,
    resume: Path | None = None,
) -> dict[str, Tensor]:
    """Fit, and return the final weights."""
    torch.manual_seed(0)
    settings = make_strategy(condition.strategy)
    if not _is_precision(subject):
        if condition.precision == "float16":
            settings["plugins"] = [lo.DynamicLossScale(init_scale=1024.0)]
        else:
            settings["precision"] = condition.precision
    if condition.steps == "accumulation":
        settings["accumulate_grad_batches"] = 2
    record = Record(save)
    if subject is not None:
        settings.update(subject.trainer_settings())
    settings["callbacks"] = [*settings.get("callbacks", []), record]
    quiet_trainer(limit_val_batches=0, **settings).fit(model, ckpt_path=resume)
    return record.weights


class Runner:
    """Runs the cells of one strategy, after the same runs without a plugin.

    Args:
        strategy: One of :data:`STRATEGIES`.
        folder: For checkpoints; the same on all ranks.
    """

    def __init__(self, strategy: str, folder: Path) -> None:
        self.strategy, self.folder = strategy, folder
        self.start = {name: value.clone() for name, value in MatrixNet().named_parameters()}
        self.plain: dict[Condition, dict[str, Tensor]] = {}
        # Weights and outcome of the last uninterrupted run, which the resumed run continues.
        self.whole: dict[str, Tensor] = {}
        self.outcome = ""
        for condition in conditions_of(strategy):
            outcome = self.run(None, condition)
            differs = condition.steps == "resume" and strategy in RESUMES_OTHERWISE
            if outcome != "identical" and not (differs and outcome == "changed"):
                raise RuntimeError(f"Without a plugin, {condition} gives {outcome!r}.")

    def run(self, subject: Subject | None, condition: Condition) -> str:
        """Return the outcome of a cell."""
        if condition.steps == "resume" and self.outcome.startswith(("refused", "fails")):
            return self.outcome
        model = MatrixNet(manual=condition.steps == "manual")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                outcome = self._compare(subject, condition, model)
        except Exception as error:  # noqa: BLE001 - any error is an outcome
            outcome = describe_error(error, model.begun)
        if dist.is_initialized():
            outcomes: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(outcomes, outcome)
            if len(set(outcomes)) > 1:
                outcome = f"fails: the ranks differ: {outcomes}"
        if condition.steps == "plain":
            self.outcome = outcome
        return outcome

    def _compare(self, subject: Subject | None, condition: Condition, model: MatrixNet) -> str:
        file = self.folder / "checkpoint.ckpt"
        save = resume = None
        if condition.steps == "plain":
            save = file
        elif condition.steps == "resume":
            resume = file
        weights = train(condition, subject, model, save=save, resume=resume)
        if condition.steps == "plain":
            self.whole = weights
        if condition.steps == "resume":
            expected = self.whole
        else:
            # A precision is compared with float32, other plugins with the same condition.
            reference = (
                replace(condition, precision="32-true") if _is_precision(subject) else condition
            )
            expected = self.plain.setdefault(reference, weights)
        if not all(value.isfinite().all() for value in weights.values()):
            return "fails: the weights are not finite"
        moved = largest_difference(expected, self.start)
        if not largest_difference(weights, self.start) > 0.0 or not moved > 0.0:
            return "fails: the weights did not change"
        distance = largest_difference(weights, expected)
        if distance == 0.0 and (subject is None or subject.name not in ROUNDS):
            return "identical"
        if distance <= CLOSE[condition.precision] * moved:
            return "close"
        share = f"the difference is {distance / moved:.2g} of the change by training"
        if condition.steps == "resume":
            strategy = subject.strategy if subject is not None else ""
            strategy = strategy or condition.strategy
            of_a_replica = subject is not None and subject.name in OF_A_REPLICA
            if strategy in RESUMES_OTHERWISE or (of_a_replica and strategy == "diloco"):
                return "changed"
            return f"fails: the resumed run ends with other weights; {share}"
        if subject is not None and subject.name in CHANGES:
            return "changed"
        return f"fails: it changes the weights; {share}"


def _is_precision(subject: Subject | None) -> bool:
    return subject is not None and subject.kind == "precision"


def run_cells(strategy: str, subjects: Sequence[Subject], folder: Path) -> dict[str, Cells]:
    """Run the cells of one strategy in each process; return them by the subject's label."""
    os.chdir(folder)  # some plugins write files
    runner = Runner(strategy, folder)
    found: dict[str, Cells] = {}
    for subject in subjects:
        cells = found.setdefault(subject.label, {})
        for condition in conditions_of(strategy):
            if condition.applies_to(subject):
                print(subject.label, condition, flush=True)  # identifies a cell that hangs
                cells[str(condition)] = runner.run(subject, condition)
    return found


def run_strategy(strategy: str, subjects: Sequence[Subject]) -> dict[str, Cells]:
    """Run the cells of one strategy in new processes; return them by the subject's label."""
    processes = 1 if strategy == "single" else 2
    with tempfile.TemporaryDirectory() as folder:
        found: list[dict[str, Cells]] = launch(
            run_cells, strategy, subjects, Path(folder), processes=processes, timeout=TIMEOUT
        )
    return found[0]
