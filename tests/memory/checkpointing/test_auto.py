"""Plans of policy `"auto"` meet their budget; measuring leaves training unchanged."""

import random
import weakref
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_opt.core.modules.blocks import Block
from lightning_opt.memory.checkpointing.activation_checkpointing import ActivationCheckpointing
from lightning_opt.memory.checkpointing.batch_plan import (
    BudgetError,
    batch_shapes,
    growth,
    solve,
)
from lightning_opt.memory.checkpointing.policies import AppliedPlan
from lightning_opt.memory.checkpointing.step_profile import Option, Unit
from lightning_opt.memory.meters import (
    StorageMeter,
    bucket_bytes,
    optimizer_state_bytes,
    persistent_bytes,
)
from tests.gradients.faulty import BareLookahead, Lookahead
from tests.helpers.trainers import MemoryLogger, quiet_trainer, warnings_of
from tests.memory.architectures import Architecture

MB = 2**20


class Wide(Architecture):
    """Eight blocks of half a megabyte each, so that budgets are precise."""

    blocks = 8
    rows = 128

    def block(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(64, 256), nn.Sigmoid(), nn.Linear(256, 256), nn.Sigmoid(), nn.Linear(256, 64)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x

    def train_dataloader(self) -> DataLoader[Any]:
        sizes = getattr(self, "sizes", [self.rows] * 3)
        return DataLoader([torch.randn(rows, 64) for rows in sizes], batch_size=None)


def fit(callback: ActivationCheckpointing, model: Wide | None = None, **settings: Any) -> Wide:
    model = model or Wide()
    quiet_trainer(callbacks=[callback], **{"max_steps": 2, "limit_val_batches": 0, **settings}).fit(
        model
    )
    return model


class Limits(ActivationCheckpointing):
    """Records the plan of each step and its limit."""

    def on_train_start(self, *args: Any) -> None:
        self.limits: list[tuple[int, float]] = []

    def on_train_batch_start(self, *args: Any) -> None:
        super().on_train_batch_start(*args)
        assert self.step_plan is not None
        self.limits.append((id(self.step_plan), self.step_plan.limit))


def measured_peak(callback: ActivationCheckpointing, model: Wide) -> int:
    """Return a step's peak under the callback's plan, without parameters and gradients."""
    batch = torch.randn(model.rows, 64)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with AppliedPlan(callback.plan), StorageMeter() as meter:
        model.training_step(batch, 0).backward()
    return meter.mark()


@pytest.mark.parametrize("budget", [0.35, 0.7, 1.0])
def test_relative_budget_is_met_and_the_peak_is_predicted_and_logged(budget: float) -> None:
    callback, logger = ActivationCheckpointing("auto", budget=budget), MemoryLogger()
    model = fit(callback, logger=logger)
    found = callback.step_plan
    assert found is not None
    unchecked = found.profile.unchecked_peak
    measured = measured_peak(callback, model)
    assert measured <= budget * unchecked
    assert abs(found.predicted - measured) <= 0.03 * unchecked
    assert logger.series("checkpointing/peak_mb") == [found.peak / MB]
    assert logger.series("checkpointing/unchecked_peak_mb") == [unchecked / MB]
    assert len(logger.series("checkpointing/step_ms")) == 1
    assert bool(callback.plan) == (budget < 1)
    callback.plan = []
    assert measured_peak(callback, model) == unchecked


def test_budget_mb_covers_parameters_gradients_and_optimizer_state() -> None:
    probe = ActivationCheckpointing("auto", budget=1.0)
    model = fit(probe)
    assert probe.step_plan is not None
    optimizers = [model.configure_optimizers()]
    persistent = persistent_bytes(model, optimizers)
    wanted = persistent + 0.5 * probe.step_plan.profile.unchecked_peak
    callback = ActivationCheckpointing("auto", budget_mb=wanted / MB)
    model = fit(callback)
    assert 0 < measured_peak(callback, model) <= wanted - persistent


def test_frozen_parameters_need_no_room_for_gradients() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[0].requires_grad_(False)
    assert persistent_bytes(model, []) == 3 * 4 * 4 * 4


def test_impossible_budget_raises_early_and_the_error_has_the_smallest_budget() -> None:
    model = Wide()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(BudgetError, match=r"cannot meet budget=0\.01") as caught:
        fit(ActivationCheckpointing("auto", budget=0.01), model)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert not any("forward" in vars(module) for module in model.modules())
    smallest = caught.value.smallest
    fit(ActivationCheckpointing("auto", budget=smallest + 0.001))
    fit(ActivationCheckpointing("auto", budget_mb=caught.value.smallest_mb + 0.1))
    with pytest.raises(BudgetError):
        fit(ActivationCheckpointing("auto", budget=smallest - 0.01))
    callback = ActivationCheckpointing("auto", budget=0.01, strict=False)
    _, warned = warnings_of(lambda: fit(callback), "The plan with the smallest peak is used.")
    assert warned
    assert callback.plan


def test_nothing_is_recomputed_without_a_budget_if_everything_fits() -> None:
    callback = ActivationCheckpointing()
    fit(callback)
    assert callback.plan == []
    assert callback.step_plan is not None


def test_worst_batch_is_planned_before_the_first_step() -> None:
    model = Wide()
    model.sizes = [32, 128, 64, 128]
    fit(probe := ActivationCheckpointing("auto", budget=1.0), Wide(), max_steps=1)
    assert probe.step_plan is not None
    limit = 0.6 * probe.step_plan.profile.unchecked_peak  # for 128 rows
    callback = Limits("auto", budget=0.6, worst_batch=torch.randn(128, 64))
    fit(callback, model, max_steps=4)
    assert callback.limits == [callback.limits[0]] * 4
    assert callback.limits[0][1] == pytest.approx(limit, rel=0.05)
    assert measured_peak(callback, model) <= limit
    model = Wide()
    model.sizes = [8, 128]
    with pytest.raises(BudgetError):  # not only a warning at the second step
        fit(ActivationCheckpointing("auto", budget=0.01, worst_batch=torch.randn(128, 64)), model)


def test_worst_batch_passes_through_batch_transfer_hooks() -> None:
    class Preparing(Wide):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch["x"]

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader([{"x": torch.randn(8, 64)}] * 2, batch_size=None)

    callback = ActivationCheckpointing("auto", budget=0.6, worst_batch={"x": torch.randn(64, 64)})
    fit(callback, Preparing())
    assert callback.step_plan is not None
    assert callback.step_plan.shapes == ((64, 64),)


@dataclass
class Pair:
    ids: Tensor
    mask: Tensor | None = None


def test_shapes_of_any_batch_structure_are_found() -> None:
    x = torch.zeros(2, 3)
    batches = x, {"x": [x]}, UserDict(input_ids=x), Pair(x)  # Transformers' batches are UserDicts
    assert [batch_shapes(batch) for batch in batches] == [((2, 3),)] * 4
    assert growth(batch_shapes(torch.zeros(())), batch_shapes(torch.ones(()))) == 1.0
    assert batch_shapes([torch.nested.as_nested_tensor([x, x], layout=torch.jagged)]) == ((12,),)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return (self.query(x) @ self.key(x).mT).softmax(-1) @ x


def test_larger_batch_keeps_the_limit_of_the_first() -> None:
    callback, model = Limits("auto", budget=0.8), Wide()
    model.sizes = [64, 80]
    fit(callback, model)
    (first, limit), (second, limit_of_second) = callback.limits
    assert first != second
    assert limit == limit_of_second


@pytest.mark.parametrize("worst", [False, True])
def test_batches_of_two_shapes_stay_within_the_budget(worst: bool) -> None:
    class Sequences(Wide):
        blocks = 6

        def block(self) -> nn.Module:
            return Attention()

        def train_dataloader(self) -> DataLoader[Any]:
            shapes = [(32, 16), (1, 512), (32, 16), (1, 512)]
            return DataLoader([torch.randn(*shape, 16) for shape in shapes], batch_size=None)

    peaks = []

    class Measuring(ActivationCheckpointing):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            super().on_train_batch_start(trainer, module, batch, index)
            for parameter in module.parameters():
                parameter.grad = torch.zeros_like(parameter)
            with StorageMeter() as meter:
                module.training_step(batch, index).backward()
            assert self.step_plan is not None
            peaks.append((meter.mark(), self.step_plan.limit, id(self.plan)))

    settings = {"worst_batch": torch.randn(1, 512, 16)} if worst else {}
    fit(callback := Measuring("auto", budget_mb=4, **settings), Sequences(), max_steps=4)
    assert callback.step_plan is not None
    assert callback.step_plan.profile.unchecked_peak > callback.step_plan.limit
    assert all(peak <= limit for peak, limit, _ in peaks), peaks
    assert len({limit for _, limit, _ in peaks}) == 1
    assert peaks[0][2] == peaks[2][2], "each shape keeps its plan"


@pytest.mark.parametrize(
    ("make", "copies"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), 3),
        (lambda p: torch.optim.Adafactor(p), 50 / 600),  # a row and a column
        (lambda p: transformers.Adafactor(p, lr=0.1, relative_step=False), 50 / 600),
    ],
)
def test_size_of_optimizer_state_is_predicted(make: Any, copies: int) -> None:
    weight = nn.Parameter(torch.randn(20, 30))
    optimizer = make([weight])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # replaces the optimizer's `step`
    steps: list[Any] = []
    optimizer.register_step_pre_hook(lambda *args: steps.append(args))
    predicted = optimizer_state_bytes(optimizer)
    assert not steps
    assert predicted == pytest.approx(copies * 20 * 30 * 4)
    assert not optimizer.state
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    scheduler.step()
    assert abs(optimizer_state_bytes(optimizer) - predicted) <= 8


@pytest.mark.parametrize("kind", [Lookahead, BareLookahead])
def test_prediction_neither_steps_nor_patches_an_optimizer_of_others(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, "__getstate__", lambda self: self.__dict__, raising=False)
    weight = nn.Parameter(torch.ones(20, 30))
    weight.grad = torch.ones_like(weight)
    optimizer = kind([weight])
    step = kind.step
    assert optimizer_state_bytes(optimizer) == 20 * 30 * 4
    assert torch.equal(weight, torch.ones(20, 30))
    assert kind.step is step


def test_size_of_ddp_buckets_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DistributedDataParallel, "__init__", lambda self: nn.Module.__init__(self))
    model = DistributedDataParallel()
    model.module, model.gradient_as_bucket_view = nn.Linear(10, 10), False
    model.module.bias.requires_grad_(False)
    assert bucket_bytes(model) == 400
    model.gradient_as_bucket_view = True
    assert bucket_bytes(model) == bucket_bytes(model.module) == 0


# --- the knapsack, compared with a search of all plans -------------------------------------------

BLOCK = Block("", ())
RECOMPUTE, PART = frozenset[tuple[str, int]](), frozenset({("mm", 0)})


def random_items(generator: random.Random, count: int) -> list[Unit]:
    items = []
    for _ in range(count):
        nbytes, seconds = generator.randint(10**6, 10**8), generator.uniform(1, 10)
        held = int(nbytes * generator.uniform(0.1, 0.8))
        part = Option(PART, held, seconds * generator.uniform(0.1, 0.9))
        options = (Option(RECOMPUTE, 0, seconds), Option(None, nbytes, 0.0), part)
        items.append(Unit(BLOCK, options, generator.randint(10**7, 2 * 10**8)))
    return items


def all_plans(items: list[Unit], head_peak: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the peak and the seconds of every plan, by brute force."""
    held = peak = np.zeros(1, np.int64)
    seconds = np.zeros(1)
    for item in items:
        peak = np.tile(np.maximum(peak, held + item.peak), len(item.options))
        held = np.concatenate([held + option.nbytes for option in item.options])
        seconds = np.concatenate([seconds + option.seconds for option in item.options])
    return np.maximum(peak, held + head_peak), seconds


@pytest.mark.parametrize("seed", range(6))
def test_solution_is_as_fast_as_the_best_plan(seed: int) -> None:
    generator = random.Random(seed)
    items = random_items(generator, 12 if seed % 4 == 0 else generator.randint(1, 11))
    head = generator.randint(10**6, 10**8)
    peaks, seconds = all_plans(items, head)
    for share in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        limit = share * peaks.max()
        solution = solve(items, head, limit)
        assert (solution is None) == (peaks > limit).all()
        if solution is not None:
            assert solution.seconds <= 1.001 * seconds[peaks <= limit].min() + 1e-9
            assert solution.seconds == pytest.approx(sum(o.seconds for o in solution.options))
            assert len(solution.options) == len(items)
            assert solution.peak <= limit


def test_planned_batch_is_released_after_its_step():
    class Watching(Wide):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            alive.append([number for number, ref in enumerate(batches) if ref() is not None])
            return super().training_step(batch, batch_idx)

        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
            batches.append(weakref.ref(batch))

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(range(4), batch_size=None, collate_fn=lambda _: torch.randn(128, 64))

    batches, alive = list[weakref.ref[Tensor]](), list[list[int]]()
    fit(ActivationCheckpointing("auto", budget=0.6), Watching())
    assert alive[-1] == [len(batches) - 1] == [1]
