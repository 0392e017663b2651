"""One rank of two runs out of memory: real processes over gloo, started as Lightning's are."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import lightning_opt as lo
from tests.batching.micro_batching.test_distributed import Shared
from tests.batching.nets import Hooks
from tests.gradients.clipping.test_distributed import FSDPOnCPU
from tests.helpers.models import SmallNet
from tests.helpers.processes import launch
from tests.helpers.trainers import quiet_trainer

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`"),
    pytest.mark.filterwarnings("ignore:It is recommended to use `self.log"),
]


class OneFails(Shared):
    """A rank of which batches do not fit, beside one that has no trouble.

    Args:
        fits: Samples that fit, by rank.
        where: Memory runs out, see ``Net``.
        counts: Samples of each rank.
        unused: Whether there is a layer that no loss depends on.
    """

    def __init__(
        self, fits: tuple[int, int], where: str, counts: tuple[int, int], unused: bool = False
    ) -> None:
        super().__init__(counts)
        self.fits_by_rank, self.where = fits, where
        if unused:
            self.unused = nn.Linear(2, 2)

    def on_fit_start(self) -> None:
        self.fits = self.fits_by_rank[self.global_rank]


def counting_ddp(reductions: list[int], **settings: Any) -> DDPStrategy:
    """Return DDP whose communication hook writes down each bucket that it is given."""

    class Strategy(DDPStrategy):
        def configure_ddp(self) -> None:
            super().configure_ddp()

            def count(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
                reductions.append(1)
                return allreduce_hook(None, bucket)

            self.model.register_comm_hook(None, count)

    return Strategy(**settings)


def train(
    size: Any,
    fits: tuple[int, int],
    where: str = "forward",
    counts: tuple[int, int] = (20, 20),
    accumulate: int = 1,
    unused: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    model, hooks, reductions = OneFails(fits, where, counts, unused), Hooks(), []
    micro = lo.MicroBatching(size, regrow_every=4) if size is not None else None
    trainer = quiet_trainer(
        devices=2,
        strategy=counting_ddp(reductions, find_unused_parameters=unused, **settings),
        callbacks=[hooks] if micro is None else [hooks, micro],
        max_epochs=2,
        accumulate_grad_batches=accumulate,
    )
    trainer.fit(model)
    state = {} if micro is None else micro.state_dict()
    return {
        "weights": {
            name: value.clone()
            for name, value in model.state_dict().items()
            if name.startswith("layers")
        },
        "seen": model.seen,
        "called": hooks.called,
        "losses": hooks.losses,
        "norms": hooks.norms,
        "reductions": len(reductions),
        "epoch loss": float(trainer.callback_metrics["loss_epoch"]),
        "state": state,
    }


FREE = (10**9, 10**9)
CASES: list[dict[str, Any]] = [
    {"fits": (10**9, 2), "where": "forward"},
    {"fits": (3, 10**9), "where": "loss", "accumulate": 3},
    {"fits": (10**9, 2), "where": "backward"},
    {"fits": (1, 4), "where": "backward", "accumulate": 2, "counts": (20, 17)},
    {"fits": (10**9, 3), "where": "backward", "gradient_as_bucket_view": True, "accumulate": 3},
    {"fits": (10**9, 3), "where": "backward", "unused": True},
    {"fits": FREE},  # reduces while the backward pass goes on, from the second batch on
]


def train_all() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(train("auto", **case), train(None, **{**case, "fits": FREE})) for case in CASES]


def test_all_ranks_take_back_what_does_not_fit_on_one():
    ranks = launch(train_all)
    for case, *pairs in zip(CASES, *ranks, strict=True):
        states = [run["state"] for run, _ in pairs]
        assert states[0] == states[1], case  # what one learns, all know
        assert bool(states[0]["retries"]) == (case["fits"] != FREE)
        for run, free in pairs:
            torch.testing.assert_close(run["weights"], free["weights"], rtol=0.0, atol=1e-6)
            for same in ("seen", "called", "reductions"):  # none lost, none twice
                assert run[same] == free[same], (case, same)
            for near in ("losses", "norms", "epoch loss"):
                assert run[near] == pytest.approx(free[near], rel=1e-5), (case, near)


def end_badly(how: str) -> str:
    """Return how this rank ended."""

    class Fails(Shared):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            output = super().training_step(batch, batch_idx)
            if self.global_rank == 1 and batch_idx == 1:
                if how == "error":
                    raise ArithmeticError("planted")
                if how == "reduction":  # where nobody expects it any more
                    output["loss"].register_hook(run_out)
            return output

    def run_out(gradient: Tensor) -> None:
        raise torch.OutOfMemoryError("planted in the reduction")

    model = OneFails((10**9, 0), "forward", (20, 20)) if how == "hopeless" else Fails((20, 20))
    trainer = quiet_trainer(devices=2, strategy="ddp", callbacks=[lo.MicroBatching()])
    try:
        trainer.fit(model)
    except (ArithmeticError, MemoryError, RuntimeError) as error:
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
        ("reduction", "RuntimeError", "while gradients were being reduced"),
    ],
)
def test_no_rank_waits_for_one_that_has_failed(how, here, there):
    ends = launch(end_badly, how)
    assert here in ends[0]
    assert there in ends[1]


class Synchronised(Callback):
    """Puts a layer into the model that DDP itself refuses on a CPU."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.norm = nn.SyncBatchNorm(4)


def refuse_all() -> list[str]:
    found = []
    for strategy, before in (
        (DDPStrategy(static_graph=True), []),
        (FSDPOnCPU(), []),
        ("ddp", [Synchronised()]),
    ):
        callbacks = [*before, lo.MicroBatching()]
        trainer = quiet_trainer(callbacks=callbacks, devices=2, strategy=strategy)
        with pytest.raises(ValueError, match="MicroBatching") as error:
            trainer.fit(SmallNet())
        found.append(str(error.value))
    return found


def train_without_gloo() -> tuple[bool, list[str]]:
    """Train where no second process group can be made."""

    def new_subgroups(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("planted: no interface")

    dist.new_subgroups = new_subgroups
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = train("auto", FREE)
    said = [str(w.message) for w in caught if "MicroBatching" in str(w.message)]
    return len(run["losses"]) == 6, said


def test_refuses_what_cannot_be_taken_back():
    for static, fsdp, synchronised in launch(refuse_all):
        assert "static_graph" in static
        assert "MicroBatching(size=8)" in fsdp
        assert "SyncBatchNorm" in synchronised


def test_is_off_where_no_process_group_of_the_hosts_can_be_made():
    (complete, said), (other, _) = launch(train_without_gloo)
    assert complete
    assert other
    assert len(said) == 1
    assert "planted: no interface" in said[0]
