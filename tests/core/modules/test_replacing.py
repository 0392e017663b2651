"""What stands in for a module's forward looks like it, and comes off in any order."""

import inspect
import pickle

import pytest
from torch import nn

from lightning_opt.core.modules.preserve import replaced
from lightning_opt.core.modules.replacing import Replacement, take_off


class Net(nn.Module):
    def forward(self, x, attention_mask=None, *, scale: float = 1.0):
        return x * scale


class Other(Replacement):
    def __init__(self, module):
        self.module, self.shadowed = module, vars(module).get("forward")
        module.forward = self

    def __call__(self, *args, **kwargs):
        below = self.shadowed
        return type(self.module).forward(self.module, *args, **kwargs) if below is None else below()


def test_the_signature_is_that_of_the_model():
    net = Net()
    expected = inspect.signature(net.forward)
    for _ in range(2):
        Other(net)
        assert inspect.signature(net.forward) == expected
    assert inspect.signature(pickle.loads(pickle.dumps(net)).forward) == expected


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_they_come_off_in_any_order(order):
    net = Net()
    both = [Other(net), Other(net)]
    for place in order:
        take_off(both[place])
        take_off(both[place])
    assert "forward" not in vars(net)


class Owner:
    kind = "the class's"


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_replaced_attributes_come_off_in_any_order(order, own):
    """As those of several callbacks do, whose teardown comes in the order of the list."""
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
