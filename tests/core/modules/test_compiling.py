"""Whether torch.compile runs a module, in each of the ways in which it can be asked to."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_opt.core.modules.compiling import (
    has_checkpointed_parts,
    has_compiled_parts,
    hooks_are_compiled,
    is_checkpointed,
    is_compiled,
)
from lightning_opt.core.modules.patching import ReplacedForward


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


class CompiledForward(ReplacedForward):
    is_compiled = True


class RecomputingForward(ReplacedForward):
    recomputes = True


def below_another_replacement():
    module = nn.Linear(2, 2)
    CompiledForward(module).apply()
    RecomputingForward(module).apply()
    return module


@pytest.mark.parametrize(
    ("make", "with_hooks"),
    [
        (wrapped, True),
        (called, True),
        (unpacked_by_lightning, True),
        (replaced, False),
        (below_another_replacement, False),
    ],
)
def test_compiled_module_is_recognized(make, with_hooks):
    module = make()
    assert is_compiled(module)
    assert hooks_are_compiled(module) is with_hooks
    around = nn.Sequential(nn.Linear(2, 2), module)
    assert not is_compiled(around)
    assert has_compiled_parts(around)


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
def test_other_modules_are_not_taken_for_compiled():
    checkpointed = nn.Linear(2, 2)
    RecomputingForward(checkpointed).apply()
    for module in (nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)]), checkpointed):
        assert not has_compiled_parts(module)
    assert not has_compiled_parts(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)))


def wrapped_by_torch():
    return checkpoint_wrapper(nn.Linear(2, 2))


def set_by_transformers():
    module = nn.Linear(2, 2)
    module.gradient_checkpointing = True
    return module


def below_compiled_code():
    module = nn.Linear(2, 2)
    RecomputingForward(module).apply()
    CompiledForward(module).apply()
    return module


@pytest.mark.parametrize("make", [wrapped_by_torch, set_by_transformers, below_compiled_code])
def test_checkpointed_module_is_recognized(make):
    around = nn.Sequential(nn.Linear(2, 2), make())
    assert [is_checkpointed(module) for module in around] == [False, True]
    assert has_checkpointed_parts(around)
    assert not has_checkpointed_parts(nn.Linear(2, 2))
