"""What stands in for a module's forward looks like it, and comes off in any order."""

import inspect
import pickle

import pytest
from torch import nn

from lightning_opt.core.replacing import Replacement, take_off


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
