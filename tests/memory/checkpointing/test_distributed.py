"""The same exactness under DDP, FSDP2 and FSDP1, in real processes."""

from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.utils.data import DataLoader

from lightning_opt.core.measure.memory import MB, MemoryLimits
from lightning_opt.core.modules.blocks import find_blocks
from lightning_opt.memory.checkpointing.activation_checkpointing import ActivationCheckpointing
from tests.helpers.processes import launch
from tests.helpers.trainers import FSDPOnCPU, warnings_of
from tests.memory.architectures import ARCHITECTURES, Architecture, assert_identical, train

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Both mixed precision and an auto_wrap_policy"),
    # Nothing writes to that view. Some models are too small for the budget.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
    pytest.mark.filterwarnings("ignore:ActivationCheckpointing cannot meet budget=0.6"),
]

UNDER_DDP = [name for name in ARCHITECTURES if name != "Adversarial"]
# A second derivative under FSDP2 fails in torch itself, also without checkpointing: the parameters
# are freed after the first backward pass. functional_call gets parameters that it would not gather.
WITHOUT_FSDP2 = {"GradientPenalty", "MetaLearning", "Hypernetwork", "InputGradients"}
UNDER_FSDP2 = [name for name in ARCHITECTURES if name not in WITHOUT_FSDP2]
UNDER_FSDP1 = ["Transformer", "Residual"]
AUTO = {"budget": 0.6, "strict": False}


def callback(number: int) -> ActivationCheckpointing:
    """Return the policies in turn."""
    policy = ("every_layer", "sqrt", "selective", "auto")[number % 4]
    return ActivationCheckpointing(policy, **(AUTO if policy == "auto" else {}))


def compare(names: list[str], make_strategy: Any) -> None:
    settings = {"devices": 2, "max_steps": 2, "limit_val_batches": 0}
    for number, name in enumerate(names):
        expected = train(name, None, strategy=make_strategy(), **settings)
        actual = train(name, callback(number), strategy=make_strategy(), **settings)
        assert_identical(actual, expected)


def under_ddp() -> None:
    for names, settings in (
        (UNDER_DDP, {"find_unused_parameters": True}),
        (UNDER_DDP[:4], {}),
        (["Transformer", "Residual", "SharedBlock"], {"static_graph": True}),
    ):
        compare(names, partial(DDPStrategy, process_group_backend="gloo", **settings))


def under_fsdp1() -> None:
    for name in UNDER_FSDP1:
        kind = type(find_blocks(ARCHITECTURES[name]())[0].modules[0])

        def gradients(callback: Any, name: str = name, kind: Any = kind) -> Any:
            strategy = FSDPOnCPU(auto_wrap_policy={kind}, use_orig_params=True)
            settings = {"strategy": strategy, "devices": 2, "max_steps": 2, "limit_val_batches": 0}
            model = train(name, callback, **settings)
            return [[g for g in step if g is not None and g.numel()] for step in model.gradients]

        expected = gradients(None)
        assert expected[1]
        for policy, settings in (("every_layer", {}), ("selective", {}), ("auto", AUTO)):
            callback = ActivationCheckpointing(policy, **settings)
            torch.testing.assert_close(gradients(callback), expected, rtol=0, atol=0)
            assert callback.plan or policy == "auto"


def configure_model(self: Architecture) -> None:
    from torch.distributed.fsdp import fully_shard

    if hasattr(self, "sharded"):
        return
    self.sharded = True
    mesh = self.device_mesh["data_parallel"]
    for block in find_blocks(self):
        if len(block.modules) == 1:
            fully_shard(block.modules[0], mesh=mesh)
    fully_shard(self, mesh=mesh)


def under_fsdp2() -> None:
    for name in UNDER_FSDP2:
        ARCHITECTURES[name].configure_model = configure_model  # type: ignore[attr-defined]
    compare(UNDER_FSDP2, partial(ModelParallelStrategy, 2, 1))


@pytest.mark.parametrize("compare_all", [under_ddp, under_fsdp1, under_fsdp2])
def test_training_is_bit_identical(compare_all: Any) -> None:
    launch(compare_all)


class Uneven(ARCHITECTURES["Transformer"]):  # type: ignore[misc]
    """Larger batches on rank 1, from the batch ``first_large`` on."""

    sizes: ClassVar = (8, 16)
    first_large = 0

    def train_dataloader(self) -> Any:
        rank = torch.distributed.get_rank()
        generator = torch.Generator().manual_seed(rank)
        sizes = [self.sizes[rank and number >= self.first_large] for number in range(3)]
        batches = [torch.randn(size, 4, 8, generator=generator) for size in sizes]
        return DataLoader(batches, batch_size=None)


class Growing(Uneven):
    sizes = (2, 16)
    first_large = 1


UNEVEN = {"devices": 2, "use_distributed_sampler": False, "limit_val_batches": 0}


def plan_for_uneven_batches() -> tuple[float, float, int, float]:
    """Return this rank's peak, its limit, the number of recomputed blocks, and the free memory."""
    ARCHITECTURES["Uneven"] = Uneven

    def plan(budget_mb: float | None) -> Any:
        callback = ActivationCheckpointing("auto", budget_mb=budget_mb)
        strategy = DDPStrategy(process_group_backend="gloo")
        train("Uneven", callback, max_steps=1, strategy=strategy, **UNEVEN)
        return callback.step_plan

    found = plan(1000)
    persistent = 1000 * MB - found.limit
    peaks = [0.0, 0.0]
    torch.distributed.all_gather_object(peaks, found.profile.unchecked_peak)
    assert peaks[0] < 0.6 * peaks[1]
    found = plan((persistent + 0.75 * peaks[1]) / MB)
    with pytest.MonkeyPatch.context() as patch:
        rooms = (2.0**40, 2.0**30)
        patch.setattr(MemoryLimits, "room", lambda self: rooms[torch.distributed.get_rank()])
        free = plan(None).limit
    return found.peak + found.profile.reserve, found.limit, len(found.plan), free


def test_plan_fits_the_rank_with_the_largest_peak() -> None:
    """The other rank would keep everything within the same budget."""
    first, second = launch(plan_for_uneven_batches)
    for peak, limit, recomputed, free in (first, second):
        assert 0 < peak <= limit
        assert recomputed > 0
        assert free <= 2**30  # of rank 1
    assert first[2] == second[2]


def train_with_a_larger_batch_on_one_rank() -> list[tuple[list[int], list[str]]]:
    """Return the plan's length after each step, and warnings of it, under DDP and FSDP2."""
    ARCHITECTURES["Growing"] = Growing
    return [
        follow_plan(partial(DDPStrategy, process_group_backend="gloo")),
        follow_plan(partial(ModelParallelStrategy, 2, 1), configure_model),
    ]


def follow_plan(make_strategy: Any, configure: Any = None) -> tuple[list[int], list[str]]:
    def run(callback: Any) -> Architecture:
        return train("Growing", callback, strategy=make_strategy(), max_steps=3, **UNEVEN)

    plans = []

    class Recording(ActivationCheckpointing):
        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            plans.append(len(self.plan))

    if configure:
        Growing.configure_model = configure
    expected = run(None)
    found, warned = warnings_of(lambda: run(Recording("auto", budget=1.5)), "so the plan is kept")
    assert_identical(found, expected)
    return plans, warned


def test_larger_batch_on_one_rank_does_not_block_the_others() -> None:
    (replicated, sharded), others = launch(train_with_a_larger_batch_on_one_rank)
    assert replicated[0] == sharded[0] == [0, 0, 0]
    plans, _ = others[0]
    assert plans[0] == 0
    assert plans[1] > 0
    plans, warned = others[1]
    assert plans == [0, 0, 0]
    assert warned
