"""Patches look like the original and can be undone in any order."""

import copy
import inspect
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

import lightning_opt as lo
from lightning_opt.core.modules.patching import ReplacedForward, replaced
from tests.helpers.models import SmallNet, assert_same_weights, loader_of
from tests.helpers.trainers import quiet_trainer


class Net(nn.Module):
    def forward(self, x, attention_mask=None, *, scale: float = 1.0):
        return x * scale


class Doubled(ReplacedForward):
    def __call__(self, *args, **kwargs):
        return 2 * self.original(*args, **kwargs)


def test_replaced_forward_keeps_the_signature():
    net = Net()
    expected = inspect.signature(net.forward)
    for _ in range(2):
        Doubled(net).apply()
        assert inspect.signature(net.forward) == expected


def test_pickled_module_has_its_own_forward_and_does_not_need_this_package():
    net = nn.Sequential(Net(), Net())
    net[1].forward = partial(net[1].forward, scale=3)
    for part in (*net, *net):
        Doubled(part).apply()
    assert copy.deepcopy(net)(1) == net(1) == 4 * 4 * 3
    data = pickle.dumps(net)
    assert not any(word in data for word in (b"lightning_opt", b"Doubled"))
    assert pickle.loads(data)(1) == 3


@pytest.mark.filterwarnings("ignore:Attribute 'part' is an instance of `nn.Module`")
@pytest.mark.parametrize(
    "callback",
    [lo.CompileModel(backend="eager"), lo.ActivationCheckpointing("custom", modules=["layer"])],
)
def test_patched_module_can_be_saved_and_exported(callback, tmp_path):
    class Given(SmallNet):
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = part

        def on_train_epoch_end(self) -> None:
            x = torch.ones(2, 6)
            exported = torch.export.export(self.layer, (x,), strict=False).module()
            torch.testing.assert_close(exported(x), self.layer(x), rtol=0, atol=0)

    model = Given(SmallNet().layer)
    saved = ModelCheckpoint(tmp_path, save_last=True)
    quiet_trainer(callbacks=[callback, saved], enable_checkpointing=True).fit(model, loader_of(4))
    loaded = Given.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=False)
    assert_same_weights(loaded, model)
    quiet_trainer(callbacks=[callback]).fit(loaded, loader_of(4))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_replaced_forwards_are_removed_in_any_order(order):
    net, forwards = Net(), []
    for _ in order:
        forwards.append(Doubled(net))
        forwards[-1].apply()
    for left, place in zip((4, 2, 1), order, strict=True):
        forwards[place].remove()
        forwards[place].remove()
        assert net(1) == left
    assert "forward" not in vars(net)


def test_forward_that_other_code_has_wrapped_is_kept():
    net = Net()
    ours = Doubled(net)
    ours.apply()
    net.forward = foreign = lambda x: ours(x) + 1
    ours.remove()
    assert net.forward is foreign


class Owner:
    kind = "the class's"


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_attributes_are_restored_in_any_order(order, own):
    owner = Owner()
    if own:
        owner.kind = "the user's"
    before = dict(vars(owner))
    contexts = [replaced(owner, kind=number) for number in range(3)]
    for context in contexts:
        context.__enter__()
    left = [0, 1, 2]
    for number in order:
        contexts[number].__exit__(None, None, None)
        left.remove(number)
        assert owner.kind == (left[-1] if left else before.get("kind", "the class's"))
    assert vars(owner) == before


class ScriptedNet(SmallNet):
    """Has a part by ``torch.jit.script``, and calls a layer under ``torch.vmap``."""

    def __init__(self) -> None:
        super().__init__()
        self.scripted, self.mapped = torch.jit.script(nn.Linear(6, 6)), nn.Linear(6, 6)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        inputs = torch.vmap(self.mapped)(self.scripted(inputs))
        return super().training_step((inputs, targets), batch_idx)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize(
    "settings",
    [
        {"callbacks": [lo.GradientHealth(every_n_steps=2, activations=True)]},
        {"callbacks": [lo.MemoryProfiler(every_n_steps=2, modules=True)]},
        {"profiler": lo.StepProfiler()},
    ],
)
def test_hooks_leave_out_scripted_modules_and_vmap(settings):
    weights = []
    for one in (settings, {}):
        torch.manual_seed(0)
        quiet_trainer(max_epochs=1, **one).fit(model := ScriptedNet())
        weights.append(model.state_dict().values())
    assert all(map(torch.equal, *weights))
