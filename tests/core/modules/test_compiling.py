"""Whether torch.compile runs a module, in each of the ways in which it can be asked to."""

import pytest
import torch
from torch import nn

from lightning_opt.core.modules.compiling import has_compiled_parts, hooks_are_compiled, is_compiled


def wrapped():
    return torch.compile(nn.Linear(2, 2), backend="eager")


def called():
    module = nn.Linear(2, 2)
    module.compile(backend="eager")
    return module


def unpacked_by_lightning():
    module = nn.Linear(2, 2)
    module._compiler_ctx = {"compiler": "dynamo"}
    return module


def replaced():
    module = nn.Linear(2, 2)
    module.forward = torch.compile(module.forward, backend="eager")
    return module


class Forward:
    def __init__(self, shadowed=None, *, is_compiled=False):
        self.shadowed, self.is_compiled = shadowed, is_compiled


def below_another_of_ours():
    module = nn.Linear(2, 2)
    module.forward = Forward(Forward(is_compiled=True))
    return module


@pytest.mark.parametrize(
    ("make", "with_hooks"),
    [
        (wrapped, True),
        (called, True),
        (unpacked_by_lightning, True),
        (replaced, False),
        (below_another_of_ours, False),
    ],
)
def test_each_way_is_known(make, with_hooks):
    module = make()
    assert is_compiled(module)
    assert hooks_are_compiled(module) is with_hooks
    around = nn.Sequential(nn.Linear(2, 2), module)
    assert not is_compiled(around)
    assert has_compiled_parts(around)


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
def test_what_is_not_compiled():
    checkpointed = nn.Linear(2, 2)
    checkpointed.forward = Forward(Forward())
    for module in (nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)]), checkpointed):
        assert not has_compiled_parts(module)
    assert not has_compiled_parts(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)))
