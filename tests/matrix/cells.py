"""Runs cells of the matrix: one small fit per cell.

The outcome of a cell compares its final weights with a reference: ``identical``, ``close`` or
``changed``. The reference is the same run without the plugin; for a row in ``ACTS`` an equal run on
one process; for a resumed run the uninterrupted one. Only plugins in ``CHANGES`` may end with other
weights. An error before the first training step is ``refused``. Anything else ``fails``.
"""

import math
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel

import lightning_opt as lo
from tests.helpers.models import whole
from tests.helpers.processes import launch
from tests.helpers.trainers import FSDPOnCPU, quiet_trainer
from tests.matrix.nets import MatrixNet
from tests.matrix.outcomes import Cells, Weights, describe_error, largest_difference
from tests.matrix.subjects import ACTS, AT_ONCE, CHANGES, IDLE, NO_PLUGIN, ROUNDS, Act, Subject

PRECISIONS = ("32-true", "bf16-mixed", "float16")
"""float16 uses :class:`lightning_opt.DynamicLossScale`, since ``16-mixed`` exists on CUDA only."""

STEPS = ("plain", "resume", "accumulation", "manual")
"""A resumed run follows the uninterrupted run, whose checkpoint it loads."""

SHORT = [("32-true", "plain"), ("32-true", "resume")]
USUAL = [*SHORT, ("32-true", "manual"), ("bf16-mixed", "accumulation")]
COLUMNS: dict[str, list[tuple[str, str]]] = {
    "single": [(precision, steps) for precision in PRECISIONS for steps in STEPS],
    "ddp": [*USUAL, ("float16", "accumulation")],
    "ddp_3": SHORT,
    "ddp_topk": SHORT[:1],
    "diloco": SHORT,
    "fsdp1": [pair for pair in USUAL if pair[1] != "manual"],  # it wraps the whole module
    "fsdp2": USUAL,
    "fsdp2_3": SHORT,
    "tp": USUAL,
}
"""Precisions and steps by strategy."""

STRATEGIES = tuple(COLUMNS)
OWN_GRADIENTS = ("ddp_topk", "diloco")
"""Strategies whose ranks do not step with the mean gradient of one large batch."""

TIMEOUT = 400.0
SAVE_AT = 4
CLOSE = {"32-true": 1e-4, "bf16-mixed": 0.1, "float16": 0.1}
"""Largest difference that counts as rounding, as a share of the change by training."""

FAR = 1.0
"""Largest difference of plugins in ``CHANGES``, as a share of the change by training."""

References: TypeAlias = dict[tuple[str, "Condition"], Weights]
"""Weights by the subject's label and the condition."""

REFERENCES = "references.pt"


class Condition(NamedTuple):
    """One column: a strategy with one of its precisions and steps."""

    strategy: str
    precision: str
    steps: str

    def __str__(self) -> str:
        return " / ".join(self)

    def applies_to(self, subject: Subject) -> bool:
        """Return whether the subject can be combined with this condition."""
        if subject.kind == "strategy":
            return self.strategy in ("ddp", "ddp_3")  # which it replaces
        return subject.kind != "precision" or self.precision == "float16"


def conditions_of(strategy: str) -> list[Condition]:
    return [Condition(strategy, *pair) for pair in COLUMNS[strategy]]


def processes_of(strategy: str) -> int:
    return 1 if strategy == "single" else 3 if strategy.endswith("3") else 2


def make_strategy(name: str) -> dict[str, Any]:
    """Return the Trainer's arguments for a strategy of the matrix."""
    processes = processes_of(name)
    gloo = {"process_group_backend": "gloo"}
    mesh = {"save_distributed_checkpoint": False}
    topk = AT_ONCE["CompressedDDPStrategy"]
    kinds: dict[str, Callable[[], Any]] = {
        "single": lambda: "auto",
        "ddp": lambda: DDPStrategy(**gloo),
        "ddp_topk": lambda: lo.CompressedDDPStrategy("topk", **gloo, **topk),
        "diloco": lambda: lo.DiLoCoStrategy(2, fragments=2, **gloo),
        "fsdp1": lambda: FSDPOnCPU(use_orig_params=True, state_dict_type="sharded"),
        "fsdp2": lambda: ModelParallelStrategy(processes, 1, **mesh),
        "tp": lambda: ModelParallelStrategy(1, processes, **mesh),
    }
    return {"strategy": kinds[name.removesuffix("_3")](), "devices": processes}


class Record(Callback):
    """Keeps the final unsharded weights, and saves one checkpoint if a file is given."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self.weights: Weights = {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.file is not None and batch_idx + 1 == SAVE_AT:
            trainer.save_checkpoint(self.file)

    def on_train_end(self, trainer, pl_module):
        with FullyShardedDataParallel.summon_full_params(trainer.model, writeback=False):
            for name, value in pl_module.named_parameters():
                for wrapper in ("_fsdp_wrapped_module.", "_orig_mod."):
                    name = name.replace(wrapper, "")
                self.weights[name] = whole(value).detach().float().clone()


def train(
    condition: Condition, subject: Subject, model: MatrixNet, save: Path | None = None, **fit: Any
) -> Weights:
    """Fit, and return the final weights."""
    torch.manual_seed(0)
    settings = make_strategy(condition.strategy)
    if subject.kind != "precision" and condition.precision == "float16":
        settings["plugins"] = [lo.DynamicLossScale(init_scale=1024.0)]
    elif subject.kind != "precision":
        settings["precision"] = condition.precision
    if condition.steps == "accumulation" and model.merge == 1:
        settings["accumulate_grad_batches"] = 2
    settings.update(subject.trainer_settings())
    if condition.strategy == "ddp_3" and isinstance(settings["strategy"], DDPStrategy):
        # After its first step DDP arranges gradients in new buckets. With three processes, the
        # place in a bucket decides the order of summation, and so the rounding of a resumed step.
        settings["strategy"]._ddp_kwargs["find_unused_parameters"] = True
    record = Record(save)
    settings["callbacks"] = [*settings.get("callbacks", []), record]
    quiet_trainer(limit_val_batches=0, **settings).fit(model, **fit)
    return record.weights


def act_of(subject: Subject, condition: Condition) -> Act:
    """Return what the feature has to do in this cell."""
    act = ACTS.get(subject.label, IDLE)
    return IDLE if condition.strategy in (*OWN_GRADIENTS, *act.never) else act


def run_references(strategy: str, subjects: Sequence[Subject], folder: Path) -> None:
    """Save the weights that rows in ``ACTS`` must end with, from one process."""
    os.chdir(folder)
    found: References = {}
    for subject, condition in product(subjects, conditions_of(strategy)):
        act = act_of(subject, condition)
        if condition.steps in act.steps:
            model = MatrixNet(condition.steps == "manual", **(act.instead or {}))
            alone = condition._replace(strategy="single")
            plugin = subject if act.instead is None else NO_PLUGIN
            found[subject.label, condition] = train(alone, plugin, model)
    torch.save(found, folder / REFERENCES)


class Runner:
    """Runs the cells of one strategy, after the same runs without a plugin.

    Args:
        strategy: One of :data:`STRATEGIES`.
        folder: For checkpoints, with the references; the same on all ranks.
    """

    def __init__(self, strategy: str, folder: Path) -> None:
        self.file = folder / "checkpoint.ckpt"
        self.references: References = torch.load(folder / REFERENCES, weights_only=False)
        start = MatrixNet().named_parameters()
        self.start = {name: value.detach().clone() for name, value in start}
        self.plain: dict[Condition, Weights] = {}
        # Weights and outcome of the last uninterrupted run, which the resumed run continues.
        self.whole: Weights = {}
        self.outcome = ""
        for condition in conditions_of(strategy):
            outcome = self.run(NO_PLUGIN, condition)
            if outcome != "identical":
                raise RuntimeError(f"Without a plugin, {condition} gives {outcome!r}.")

    def run(self, subject: Subject, condition: Condition) -> str:
        """Return the outcome of a cell."""
        steps = condition.steps
        if steps == "resume" and self.outcome.startswith(("refused", "fails")):
            return self.outcome
        model = MatrixNet(steps == "manual", **act_of(subject, condition).plants)
        save = self.file if steps == "plain" else None
        resume = {"ckpt_path": self.file} if steps == "resume" else {}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                weights = train(condition, subject, model, save, **resume)
            outcome = self._compare(subject, condition, weights)
        except Exception as error:  # noqa: BLE001 - any error is an outcome
            outcome = describe_error(error, model.begun)
        if dist.is_initialized():
            outcomes: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(outcomes, outcome)
            if len(set(outcomes)) > 1:
                outcome = f"fails: the ranks differ: {outcomes}"
        if steps == "plain":
            self.outcome = outcome
        return outcome

    def _compare(self, subject: Subject, condition: Condition, weights: Weights) -> str:
        if condition.steps == "plain":
            self.whole = weights
        reference = self.references.get((subject.label, condition))
        expected = reference or self._without_plugin(subject, condition, weights)
        moved = largest_difference(expected, self.start)
        rounding = CLOSE[condition.precision] * moved
        distance = largest_difference(weights, expected)
        if not 0.0 < moved < math.inf:
            return "fails: the weights of the reference did not change, or are not finite"
        needs_difference = reference and not ACTS[subject.label].plants
        if needs_difference and largest_difference(expected, self.plain[condition]) <= rounding:
            return "fails: there was nothing to do"
        if distance == 0.0 and subject.name not in ROUNDS:
            return "identical"
        if distance <= rounding:
            return "close"
        if subject.name in CHANGES and not reference and distance < FAR * moved:
            return "changed"
        return f"fails: other weights; the difference is {distance / moved:.2g} of the change"

    def _without_plugin(self, subject: Subject, condition: Condition, weights: Weights) -> Weights:
        if condition.steps == "resume":
            return self.whole
        if subject.kind == "precision":  # another one
            others = (condition._replace(precision=precision) for precision in PRECISIONS)
            return next(self.plain[other] for other in others if other in self.plain)
        return self.plain.setdefault(condition, weights)


def run_cells(strategy: str, subjects: Sequence[Subject], folder: Path) -> dict[str, Cells]:
    """Run the cells of one strategy in each process; return them by the subject's label."""
    os.chdir(folder)  # some plugins write files
    runner = Runner(strategy, folder)
    found: dict[str, Cells] = {}
    for subject, condition in product(subjects, conditions_of(strategy)):
        if condition.applies_to(subject):
            print(subject.label, condition, flush=True)  # identifies a cell that hangs
            found.setdefault(subject.label, {})[str(condition)] = runner.run(subject, condition)
    return found


def run_strategy(strategy: str, subjects: Sequence[Subject]) -> dict[str, Cells]:
    """Run the cells of one strategy in new processes; return them by the subject's label."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = strategy, subjects, Path(folder)
        launch(run_references, *arguments, processes=1, timeout=TIMEOUT)
        cells: list[dict[str, Cells]] = launch(
            run_cells, *arguments, processes=processes_of(strategy), timeout=TIMEOUT
        )
    return cells[0]
