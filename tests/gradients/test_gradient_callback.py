"""Loss scale, names, shared norms and cost of gradient callbacks."""

import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn

import lightning_opt as lo
from lightning_opt.gradients.gradient_callback import GradientCallback, plain_name
from tests.helpers.models import AdversarialNet, SmallNet, load_changed_state
from tests.helpers.trainers import GradientSpy, fit


class Listener(GradientCallback):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, float]] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        index, step = self.measure(trainer, optimizer)
        self.seen.append((index, step.norms.total))
        self.known = {name: parameter for parameter, name in step.names.items()}


def test_names_omit_wrappers():
    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self._fsdp_wrapped_module = inner

        def forward(self, x: Any) -> Any:
            return self._fsdp_wrapped_module(x)

    model, tested = SmallNet(), Listener()
    expected = [name for name, _ in model.named_parameters()]
    model.layer[0] = Wrapped(model.layer[0])
    fit(model, tested)
    assert list(tested.known) == expected
    assert plain_name("_orig_mod.net._fsdp_wrapped_module.0.weight") == "net.0.weight"
    assert plain_name("net._orig_mod") == "net"
    assert plain_name("_orig_mod") == ""


class StepsTheRawOptimizer(SmallNet):
    def optimizer_step(self, epoch: Any, batch_idx: Any, optimizer: Any, closure: Any) -> None:
        closure()
        optimizer.optimizer.step()


def test_first_callback_warns_once_if_lightning_does_not_call_it() -> None:
    model, callbacks = StepsTheRawOptimizer(), (lo.NonFiniteGuard(), lo.AdaptiveClipping())
    with pytest.warns(UserWarning, match="NonFiniteGuard and later gradient") as records:
        fit(model, *callbacks)
    assert len([one for one in records if "gradient callbacks do not act" in str(one.message)]) == 1
    assert not model.trainer.optimizers[0]._optimizer_step_post_hooks


def test_parameter_outside_the_model_has_a_name():
    class Foreign(SmallNet):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([*self.parameters(), foreign], lr=0.1)

    foreign, tested = nn.Parameter(torch.ones(1)), Listener()
    fit(Foreign(), tested)
    assert tested.known["optimizer_0.4"] is foreign


class Writes(Callback):
    """Multiplies gradients without changing their version counter."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for parameter in pl_module.parameters():
            if self.how == "replaced":
                parameter.grad = parameter.grad * 100
            else:
                parameter.grad.data.mul_(100)


@pytest.mark.parametrize("how", ["replaced", "data"])
def test_gradients_changed_by_other_callbacks_are_measured_again(how):
    """No norm exceeds the bound after clipping."""
    spy = GradientSpy()
    fit(SmallNet(), Listener(), Writes(how), lo.AdaptiveClipping(lo.FixedNorm(1.0)), spy)
    assert max(spy.norms[0]) <= 1.0 + 1e-6


class CallCounter(Callback):
    """Counts the Python calls of this package in the last of ten steps, and the operators."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.operators: Counter[str] = Counter()

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 9:
            sys.setprofile(self._note)

    def on_train_batch_end(self, *_: Any) -> None:
        sys.setprofile(None)

    def _note(self, frame: Any, event: str, function: Any) -> None:
        if "/lightning_opt/" not in frame.f_code.co_filename:
            return
        if event == "call":
            self.calls[frame.f_code.co_name] += 1
        elif event == "c_call" and "_foreach_" in function.__name__:
            self.operators[function.__name__] += 1


def test_three_callbacks_pass_over_the_gradients_once():
    """With 200 parameters on a CPU, counted instead of timed."""
    counter = CallCounter()
    first = [lo.GradientHealth(every_n_steps=1000), lo.NonFiniteGuard(), lo.AdaptiveClipping()]
    fit(SmallNet(widths=(2,) * 99), counter, *first, limit_train_batches=10)
    assert counter.calls["collect_gradients"] == counter.calls["measure_norms"] == 1
    assert counter.operators == {"_foreach_norm": 1}
    assert counter.calls.total() <= 80, counter.calls


@pytest.mark.parametrize("before", [lo.NonFiniteGuard, lo.AdaptiveClipping])
def test_gradients_of_a_step_are_freed(before):
    class Look(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            gradients.extend(ref(parameter.grad) for parameter in pl_module.parameters())

        def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            pl_module.zero_grad()
            held.append(any(gradient() is not None for gradient in gradients))

    gradients: list[Any] = []
    held: list[bool] = []
    fit(SmallNet(), lo.GradientHealth(), before(), Look())
    assert held == [False] * 12


@pytest.mark.parametrize("make", [lambda: lo.GradientHealth(every_n_steps=5), lo.AdaptiveClipping])
def test_state_of_each_optimizer_is_loaded(make):
    callback = make()
    fit(AdversarialNet(), callback)
    load_changed_state(callback)


def test_two_clipping_rules_keep_two_states(tmp_path):
    rules = [lo.AdaptiveClipping(lo.UnitWise()), lo.AdaptiveClipping(lo.FixedNorm(1.0))]
    trainer = fit(SmallNet(), *rules)
    trainer.save_checkpoint(tmp_path / "both.ckpt")
    assert [len(rule.report().rows) for rule in rules] == [1, 1]


def test_lbfgs_and_deepspeed_raise_with_the_name_of_the_callback():
    with pytest.raises(ValueError, match=r"^Listener does not work with torch\.optim\.LBFGS"):
        fit(SmallNet("LBFGS"), Listener())
    trainer = SimpleNamespace(strategy=object.__new__(DeepSpeedStrategy), callbacks=[])
    with pytest.raises(ValueError, match=r"^Listener does not work with the DeepSpeed strategy"):
        Listener().setup(trainer, SmallNet(), "fit")  # type: ignore[arg-type]


class GrowingNet(SmallNet):
    """Gets an empty parameter at the start, and another one in the third step."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0))
        self.added = nn.Parameter(torch.ones(()), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            self.added = nn.Parameter(torch.ones(()))
            self.trainer.optimizers[0].add_param_group({"params": [self.added]})
        return super().training_step(batch, batch_idx)["loss"] * self.added + self.empty.sum()


@pytest.mark.parametrize(
    "callback",
    [
        lo.AdaptiveClipping(lo.PerParameter(warmup=1)),
        lo.AdaptiveClipping(lo.UnitWise()),
        lo.CurvaturePreconditioner(every_n_steps=2),
        lo.GradientHealth(every_n_steps=3),
        lo.NonFiniteGuard("rollback"),
    ],
    ids=lambda callback: type(callback).__name__,
)
def test_parameter_added_in_training_has_its_name(callback: GradientCallback) -> None:
    listener, model = Listener(), GrowingNet()
    fit(model, callback, listener, max_epochs=1)
    assert listener.known["added"] is model.added
    assert model.added != 1.0
