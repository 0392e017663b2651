"""Out-of-memory in a hook: no hook runs twice, and nothing is lost."""

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

HOOKS = ["on_before_zero_grad", "on_before_backward"]
MODULE_HOOKS = [*HOOKS, "optimizer_zero_grad", "backward"]

pytestmark = pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")


class Calls(Callback):
    """Records calls of hooks, and runs out of memory in one of them at one batch."""

    def __init__(self, failing: str = "", batch: int = -1) -> None:
        self.failing, self.batch = failing, batch
        self.calls: list[str] = []

    def record(self, hook: str, trainer: Any) -> None:
        if hook == self.failing and trainer.fit_loop.batch_idx == self.batch:
            self.batch = -1
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: planted")
        self.calls.append(hook)

    def on_before_zero_grad(self, trainer: Any, *args: Any) -> None:
        self.record("on_before_zero_grad", trainer)

    def on_before_backward(self, trainer: Any, *args: Any) -> None:
        self.record("on_before_backward", trainer)

    def on_after_backward(self, trainer: Any, *args: Any) -> None:
        self.record("on_after_backward", trainer)


def failing_in_hook(net: Net, hook: str, batch: int) -> Net:
    """Make a module run out of memory in one of its hooks, once."""
    net.record = Calls(hook, batch)

    def around(name: str, inner: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            net.record.record(name, net.trainer)
            return inner(*args, **kwargs)

        return wrapped

    for name in MODULE_HOOKS:
        setattr(net, name, around(name, getattr(net, name)))
    return net


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("owner", ["callback", "module"])
def test_out_of_memory_in_a_hook_changes_nothing(owner, hook, accumulate):
    batch = 3 if hook == "on_before_zero_grad" else 1
    settings = {"accumulate_grad_batches": accumulate}
    before, after = Calls(), Calls()
    expected = train(before, after, net=failing_in_hook(Net(), "", -1), **settings)
    callbacks = [Calls(), Calls(hook if owner == "callback" else "", batch), Calls()]
    net = failing_in_hook(Net(), hook if owner == "module" else "", batch)
    run = train(*callbacks, lo.MicroBatching(), net=net, **settings)
    assert -1 in (callbacks[1].batch, net.record.batch)
    assert_same_weights(run[0].layers, expected[0].layers, rtol=0.0, atol=1e-6)
    assert run[0].seen == expected[0].seen
    for callback in callbacks:
        assert callback.calls == before.calls
    assert run[1].called == expected[1].called
    assert run[1].norms == pytest.approx(expected[1].norms, rel=1e-6)


def train_rank(owner: str, hook: str, accumulate: int, micro: bool) -> dict[str, Any]:
    rank = int(os.environ["LOCAL_RANK"])
    batch = 2 if "zero_grad" in hook and accumulate > 1 else 1
    if hook == "backward":
        batch = 0  # later batches of this size reduce during the backward pass
    fails = micro and rank == 1
    callbacks = [Calls(), Calls(hook if fails and owner == "callback" else "", batch), Calls()]
    net = failing_in_hook(Shared((20, 19)), hook if fails and owner == "module" else "", batch)
    hooks = Hooks()
    trainer = quiet_trainer(
        devices=2,
        strategy="ddp",
        callbacks=[hooks, *callbacks, *([lo.MicroBatching()] if micro else [])],
        max_epochs=2,
        accumulate_grad_batches=accumulate,
    )
    trainer.fit(net)
    assert not fails or -1 in (callbacks[1].batch, net.record.batch)
    return {
        "weights": {name: value.clone() for name, value in net.layers.state_dict().items()},
        "seen": net.seen,
        "called": hooks.called,
        "calls": [callback.calls for callback in callbacks],
        "losses": hooks.losses,
        "norms": hooks.norms,
        "epoch loss": float(trainer.callback_metrics["loss_epoch"]),
    }


CASES = [
    (owner, hook, accumulate)
    for owner, hooks in (("callback", HOOKS), ("module", MODULE_HOOKS))
    for hook in hooks
    for accumulate in (1, 2)
]


def train_all() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(train_rank(*case, True), train_rank(*case, False)) for case in CASES]


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore:It is recommended to use `self.log")
def test_out_of_memory_in_a_hook_on_one_rank_changes_nothing():
    for rank in launch(train_all):
        for case, (run, bare) in zip(CASES, rank, strict=True):
            torch.testing.assert_close(run["weights"], bare["weights"], rtol=0.0, atol=1e-6)
            for same in ("seen", "called", "calls"):
                assert run[same] == bare[same], (case, same)
            for near in ("losses", "norms", "epoch loss"):
                assert run[near] == pytest.approx(bare[near], rel=1e-5), (case, near)
