"""Patches look like the original and can be undone in any order."""

import inspect
import pickle

import pytest
from torch import nn

from lightning_opt.core.modules.patching import ReplacedForward, replaced


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
    assert inspect.signature(pickle.loads(pickle.dumps(net)).forward) == expected


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


def test_inner_replacement_restores_the_value_set_in_between():
    owner = Owner()
    with replaced(owner, kind=1):
        owner.kind = 2
        with replaced(owner, kind=3):
            assert owner.kind == 3
        assert owner.kind == 2
    assert vars(owner) == {}


def test_value_set_since_is_kept_when_a_lower_replacement_ends():
    owner = Owner()
    lower, upper = replaced(owner, kind=1), replaced(owner, kind=2)
    for context in (lower, upper):
        context.__enter__()
    owner.kind = 3
    lower.__exit__(None, None, None)
    assert owner.kind == 3
    upper.__exit__(None, None, None)
    assert vars(owner) == {}
