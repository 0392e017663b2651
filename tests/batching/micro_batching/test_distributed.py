"""Micro-batches on several ranks: real processes over gloo, started as Lightning starts them."""

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, default_collate

import lightning_opt as lo
from lightning_opt.batching.micro_batching import ranks as ranks_module
from tests.batching.nets import Hooks, Net, Samples, counting_ddp, run_out
from tests.helpers.models import SmallNet, shard, whole
from tests.helpers.processes import launch
from tests.helpers.trainers import FSDPOnCPU, quiet_trainer

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`"),
    pytest.mark.filterwarnings("ignore:.*. it was not possible to check"),
    pytest.mark.filterwarnings("ignore:It is recommended to use `self.log"),
]


class Shared(Net):
    """Each rank has its own samples, and its own largest batch that ``fits``.

    With ``drops``, batches come from a DistributedSampler, and rank 1 drops a sample of each.
    """

    def __init__(
        self,
        counts: tuple[int, int],
        fits: tuple[int, int] = (10**9, 10**9),
        where: str = "forward",
        unused: bool = False,
        sharded: bool = False,
        drops: bool = False,
    ) -> None:
        super().__init__()
        self.counts, self.fits_by_rank, self.where = counts, fits, where
        self.sharded, self.drops = sharded, drops
        if unused:
            self.unused = nn.Linear(2, 2)

    def on_fit_start(self) -> None:
        self.fits = self.fits_by_rank[self.global_rank]

    def configure_model(self) -> None:
        if self.sharded:
            shard(self, self.layers[0], self.layers[2])

    def train_dataloader(self) -> Any:
        first = sum(self.counts[: self.global_rank])
        own = range(first, first + self.counts[self.global_rank])
        data: Any = Subset(Samples(sum(self.counts)), own)
        sampler = None
        if self.drops:
            data = Samples(sum(self.counts))
            sampler = DistributedSampler(data, shuffle=False)
        return DataLoader(data, batch_size=8, sampler=sampler, collate_fn=self.collate)

    def collate(self, samples: list[Any]) -> Any:
        """Make a batch whose shape belongs to its rank."""
        samples = samples[self.global_rank :] if self.drops else samples
        return default_collate(samples) | {"of": torch.zeros(len(samples), 1 + self.global_rank)}


def train(
    size: Any,
    fits: tuple[int, int] = (10**9, 10**9),
    where: str = "forward",
    counts: tuple[int, int] = (20, 20),
    accumulate: int = 1,
    unused: bool = False,
    kind: str = "ddp",
    drops: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    model = Shared(counts, fits, where, unused, sharded=kind == "fsdp2", drops=drops)
    hooks, reductions = Hooks(), []
    micro = lo.MicroBatching(size, regrow_every=4) if size is not None else None
    strategy: Any = counting_ddp(reductions, find_unused_parameters=unused, **settings)
    if kind == "fsdp1":
        strategy = FSDPOnCPU(use_orig_params=True)
    elif kind == "fsdp2":
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    trainer = quiet_trainer(
        devices=2,
        strategy=strategy,
        callbacks=[hooks] if micro is None else [hooks, micro],
        max_epochs=2,
        accumulate_grad_batches=accumulate,
    )
    first = model.layers[0].weight
    first.register_hook(lambda gradient: gradient)
    with warnings.catch_warnings():
        if kind == "ddp" and min(fits) > 1:
            warnings.filterwarnings("error", ".*it was not possible to check")
        trainer.fit(model)
    assert kind != "ddp" or first._backward_hooks
    return {
        "weights": {
            name: whole(value).detach().clone()
            for name, value in model.named_parameters()  # under FSDP1 this rank's shards
            if name.startswith("layers")
        },
        "seen": model.seen,
        "called": hooks.called,
        "losses": hooks.losses,
        "norms": hooks.norms if kind == "ddp" else [],
        "reductions": len(reductions),
        "epoch loss": float(trainer.callback_metrics["loss_epoch"]) if kind == "ddp" else 0.0,
        "state": {} if micro is None else micro.state_dict(),
    }


def assert_same(run: dict[str, Any], bare: dict[str, Any], case: Any) -> None:
    torch.testing.assert_close(run["weights"], bare["weights"], rtol=0.0, atol=1e-6)
    for same in ("seen", "called", "reductions"):
        assert run[same] == bare[same], (case, same)
    for near in ("losses", "norms", "epoch loss"):
        assert run[near] == pytest.approx(bare[near], rel=1e-5), (case, near)


FREE = (10**9, 10**9)


@functools.cache
def train_bare(**settings: Any) -> dict[str, Any]:
    """Train on whole batches, once for all cases with the same settings."""
    return train(None, **settings)


def train_both(size: Any, **case: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    bare = {name: value for name, value in case.items() if name not in ("fits", "where")}
    return train(size, **case), train_bare(**bare)


# The last batches have 4 and 4 samples, 4 and 1, or 8 and 2: no rank may wait for another.
FIXED: list[dict[str, Any]] = [
    {"size": 1, "accumulate": 3},
    {"size": 3, "counts": (20, 17)},
    {"size": 2, "counts": (24, 18), "accumulate": 2, "fits": (4, 2)},
    {"size": 7, "counts": (16, 16), "drops": True},
]


def train_fixed(kind: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    cases = FIXED if kind == "ddp" else FIXED[:2]
    return [train_both(kind=kind, **case) for case in cases]


@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2"])
def test_fixed_size_equals_whole_batches_on_two_ranks(kind):
    for results in launch(train_fixed, kind):
        for case, (run, bare) in zip(FIXED, results, strict=False):
            assert_same(run, bare, case)


AUTO: list[dict[str, Any]] = [
    {"fits": (10**9, 2), "where": "forward"},
    {"fits": (3, 2), "where": "forward"},
    {"fits": (3, 10**9), "where": "loss", "accumulate": 3},
    {"fits": (10**9, 2), "where": "backward"},
    {"fits": (1, 4), "where": "backward", "accumulate": 2, "counts": (20, 17)},
    {"fits": (10**9, 3), "where": "backward", "gradient_as_bucket_view": True, "accumulate": 3},
    {"fits": (10**9, 3), "where": "backward", "unused": True},
    {"fits": FREE},  # reduces during the backward pass from the second batch on
]


def train_auto() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    results = [train_both("auto", **case) for case in AUTO]
    # A size that failed does not count as proven, also when nothing is distrusted for a while.
    ranks_module.CAUTIOUS_BATCHES = 0
    return [*results, train_both("auto", fits=(10**9, 7), where="backward", counts=(64, 64))]


def test_all_ranks_roll_back_if_one_runs_out_of_memory():
    ranks = launch(train_auto)
    for case, *pairs in zip([*AUTO, {"fits": None}], *ranks, strict=True):
        states = [run["state"] for run, _ in pairs]
        assert states[0] == states[1], case  # all ranks learn the same
        assert bool(states[0]["retries"]) == (case["fits"] != FREE)
        for run, bare in pairs:
            assert_same(run, bare, case)


def end_badly(how: str) -> str:
    """Return how this rank's training ended."""

    class Fails(Shared):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            output = super().training_step(batch, batch_idx)
            if how == "parts" and self.global_rank == 1 and len(batch["x"]) <= 4:
                raise ArithmeticError("planted")
            if self.global_rank == 1 and batch_idx == 1:
                if how == "error":
                    raise ArithmeticError("planted")
                if how == "reduction":  # in a size that has fitted before
                    output["loss"].register_hook(run_out)
            return output

    model = Shared((20, 20), (10**9, 0)) if how == "hopeless" else Fails((20, 20))

    def split(batch: Any, parts: int) -> Any:
        if model.global_rank == 1:
            raise ArithmeticError("planted")
        size = -(-len(batch["x"]) // parts)
        return [(part, len(part["x"])) for part in lo.split_batch(batch, size)]

    micro = lo.MicroBatching(
        4 if how in ("parts", "fixed split") else "auto", split=split if "split" in how else None
    )
    trainer = quiet_trainer(devices=2, strategy="ddp", callbacks=[micro])
    try:
        trainer.fit(model)
    except (ArithmeticError, MemoryError, RuntimeError, ValueError) as error:
        end = f"{type(error).__name__}: {error}"
    else:
        end = "completed"
    if how != "hopeless":
        dist.destroy_process_group()  # as at the end of a process
    return end


@pytest.mark.parametrize(
    ("how", "here", "there"),
    [
        ("hopeless", "Even one sample does not fit", "Even one sample does not fit"),
        ("error", "Another rank exited", "planted"),
        ("split", "Another rank failed to split", "planted"),
        ("fixed split", "Another rank failed to split", "planted"),
        ("parts", "another rank could not run parts", "fails on a part of the batch"),
        ("reduction", "RuntimeError", "while gradients were being reduced"),
    ],
)
def test_no_rank_waits_for_a_failed_one(how, here, there):
    ends = launch(end_badly, how)
    assert here in ends[0]
    assert there in ends[1]


class Synchronised(Callback):
    """Adds a layer that DDP itself does not accept on a CPU."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.norm = nn.SyncBatchNorm(4)


def train_incompatible() -> list[str]:
    found = []
    for strategy, before in (
        (DDPStrategy(static_graph=True), []),
        (FSDPOnCPU(), []),
        ("ddp", [Synchronised()]),
    ):
        size = 2 if isinstance(strategy, DDPStrategy) else "auto"  # no size works with static_graph
        callbacks = [*before, lo.MicroBatching(size)]
        trainer = quiet_trainer(callbacks=callbacks, devices=2, strategy=strategy)
        with pytest.raises(ValueError, match="MicroBatching") as error:
            trainer.fit(SmallNet())
        found.append(str(error.value))
    return found


def test_auto_raises_where_ranks_cannot_agree():
    for static, fsdp, synchronised in launch(train_incompatible):
        assert "static_graph" in static
        assert "MicroBatching(size=8)" in fsdp
        assert "SyncBatchNorm" in synchronised
