"""Memory that runs out in a hook: what was done is not done twice, and nothing is lost."""

import os
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

import lightning_opt as lo
from tests.batching.micro_batching.test_distributed import Shared
from tests.batching.nets import Hooks, Net, train
from tests.helpers.models import assert_same_weights
from tests.helpers.processes import launch
from tests.helpers.trainers import quiet_trainer

CLOSE = {"rtol": 0.0, "atol": 1e-6}
HOOKS = ["on_before_zero_grad", "on_before_backward", "on_after_backward"]

pytestmark = pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")


class Told(Callback):
    """Counts how often it is told of each hook, and runs out of memory in one at one batch."""

    def __init__(self, failing: str = "", batch: int = -1) -> None:
        self.failing, self.batch = failing, batch
        self.told: list[str] = []

    def _tell(self, hook: str, batch_idx: int) -> None:
        if hook == self.failing and batch_idx == self.batch:
            self.batch = -1
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: planted")
        self.told.append(hook)

    def on_before_zero_grad(self, trainer: Any, *args: Any) -> None:
        self._tell("on_before_zero_grad", trainer.fit_loop.batch_idx)

    def on_before_backward(self, trainer: Any, *args: Any) -> None:
        self._tell("on_before_backward", trainer.fit_loop.batch_idx)

    def on_after_backward(self, trainer: Any, *args: Any) -> None:
        self._tell("on_after_backward", trainer.fit_loop.batch_idx)


class HookedNet(Net):
    """Runs out of memory in a hook of its own, once."""

    def __init__(self, failing: str, batch: int) -> None:
        super().__init__()
        self.teller = Told(failing, batch)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.teller.on_before_zero_grad(self.trainer)

    def on_before_backward(self, loss: Any) -> None:
        self.teller.on_before_backward(self.trainer)

    def on_after_backward(self) -> None:
        self.teller.on_after_backward(self.trainer)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_callback_that_runs_out_of_memory_changes_nothing(hook, accumulate):
    batch = 3 if hook == "on_before_zero_grad" else 1
    settings = {"accumulate_grad_batches": accumulate}
    before, after = Told(), Told("", -2)
    expected = train(before, after, **settings)
    told = [Told(), Told(hook, batch), Told("", -2)]
    run = train(*told, lo.MicroBatching(), **settings)
    assert told[1].batch == -1
    assert_same_weights(run[0].layers, expected[0].layers, **CLOSE)
    assert run[0].seen == expected[0].seen
    for callback in told:
        assert callback.told == before.told
    assert run[1].called == expected[1].called
    assert run[1].norms == pytest.approx(expected[1].norms, rel=1e-6)


@pytest.mark.parametrize("hook", HOOKS)
def test_a_module_that_runs_out_of_memory_in_its_hook_changes_nothing(hook):
    settings = {"accumulate_grad_batches": 3}
    expected = train(net=HookedNet("", -1), **settings)
    net = HookedNet(hook, 3 if hook == "on_before_zero_grad" else 1)
    run = train(lo.MicroBatching(), net=net, **settings)
    assert net.teller.batch == -1
    assert_same_weights(net.layers, expected[0].layers, **CLOSE)
    assert run[1].called == expected[1].called


class SharedHooks(Shared):
    """The module of a rank, which runs out of memory in a hook of its own, once."""

    def __init__(self, failing: str, batch: int) -> None:
        super().__init__((20, 19))
        self.teller = Told(failing, batch)
        for hook in MODULE_HOOKS:
            setattr(self, hook, self._around(hook, getattr(self, hook)))

    def _around(self, name: str, hook: Any) -> Any:
        def around(*args: Any, **kwargs: Any) -> Any:
            self.teller._tell(name, self.trainer.fit_loop.batch_idx)
            return hook(*args, **kwargs)

        return around


MODULE_HOOKS = [*HOOKS, "optimizer_zero_grad", "backward"]


def train_rank(who: str, hook: str, accumulate: int, micro: bool) -> dict[str, Any]:
    rank = int(os.environ["LOCAL_RANK"])
    batch = 2 if "zero_grad" in hook and accumulate > 1 else 1
    if hook == "backward":
        batch = 0  # once such a batch has passed, it is reduced while the backward pass goes on
    fails = micro and rank == 1
    told = [Told("", -2), Told(hook if fails and who == "callback" else "", batch), Told("", -2)]
    net = SharedHooks(hook if fails and who == "module" else "", batch)
    hooks = Hooks()
    trainer = quiet_trainer(
        devices=2,
        strategy="ddp",
        callbacks=[hooks, *told, *([lo.MicroBatching()] if micro else [])],
        max_epochs=2,
        accumulate_grad_batches=accumulate,
    )
    trainer.fit(net)
    assert not fails or -1 in (told[1].batch, net.teller.batch)
    return {
        "weights": {name: value.clone() for name, value in net.layers.state_dict().items()},
        "seen": net.seen,
        "called": hooks.called,
        "told": [callback.told for callback in told],
        "losses": hooks.losses,
        "norms": hooks.norms,
        "epoch loss": float(trainer.callback_metrics["loss_epoch"]),
    }


CASES = [
    (who, hook, accumulate)
    for who, hooks in (("callback", HOOKS), ("module", MODULE_HOOKS))
    for hook in hooks
    for accumulate in (1, 2)
]


def train_all() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(train_rank(*case, True), train_rank(*case, False)) for case in CASES]


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore:It is recommended to use `self.log")
def test_a_hook_that_runs_out_of_memory_on_one_rank_changes_nothing():
    for rank in launch(train_all):
        for case, (run, bare) in zip(CASES, rank, strict=True):
            torch.testing.assert_close(run["weights"], bare["weights"], rtol=0.0, atol=1e-6)
            for same in ("seen", "called", "told"):
                assert run[same] == bare[same], (case, same)
            for near in ("losses", "norms", "epoch loss"):
                assert run[near] == pytest.approx(bare[near], rel=1e-5), (case, near)
