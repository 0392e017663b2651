"""Memory that runs out in a hook: what was done is not done twice, and nothing is lost."""

from typing import Any

import pytest
from lightning.pytorch import Callback

import lightning_opt as lo
from tests.batching.nets import Net, train
from tests.helpers.models import assert_same_weights

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
