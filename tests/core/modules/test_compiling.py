"""Whether torch.compile runs a module, in each of the ways in which it can be asked to."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_opt.core.modules.compiling import (
    STANCE,
    has_checkpointed_parts,
    has_compiled_parts,
    hooks_are_compiled,
    is_checkpointed,
    is_compiled,
    run_eagerly,
)
from lightning_opt.core.modules.patching import ReplacedForward


class CompiledForward(ReplacedForward):
    is_compiled = True


class RecomputingForward(ReplacedForward):
    recomputes = True


def linear(**attributes):
    module = nn.Linear(2, 2)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def test_modules_run_eagerly_only_inside():
    with run_eagerly():
        assert STANCE.eager
    assert not STANCE.eager


def replaced(*kinds):
    module = nn.Linear(2, 2)
    for kind in kinds:
        kind(module).apply()
    return module


def compiled_in_place():
    module = nn.Linear(2, 2)
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize(
    ("make", "with_hooks"),
    [
        (lambda: torch.compile(nn.Linear(2, 2), backend="eager"), True),
        (compiled_in_place, True),
        (lambda: linear(_compiler_ctx={"compiler": "dynamo"}), True),  # set by Lightning
        (lambda: linear(forward=torch.compile(nn.Linear(2, 2).forward, backend="eager")), False),
        (lambda: replaced(CompiledForward, RecomputingForward), False),
    ],
)
def test_compiled_module_is_recognized(make, with_hooks):
    module = make()
    assert is_compiled(module)
    assert hooks_are_compiled(module) is with_hooks
    around = nn.Sequential(nn.Linear(2, 2), module)
    assert not is_compiled(around)
    assert has_compiled_parts(around)


@torch.compile(backend="eager")
def scaled(x):
    return 2 * x


class CallsCompiled(nn.Linear):
    def forward(self, x):
        return scaled(super().forward(x))


@pytest.mark.parametrize("module", [CallsCompiled(2, 2), linear(activation=scaled)])
def test_compiled_function_is_a_compiled_part(module):
    assert not is_compiled(module)
    assert has_compiled_parts(nn.Sequential(nn.Linear(2, 2), module))


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
def test_other_modules_are_not_taken_for_compiled():
    traced = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    for module in (nn.ModuleList([nn.Linear(2, 2)]), replaced(RecomputingForward), traced):
        assert not has_compiled_parts(module)


@pytest.mark.parametrize(
    "make",
    [
        lambda: checkpoint_wrapper(nn.Linear(2, 2)),
        lambda: linear(gradient_checkpointing=True),  # set by transformers
        lambda: replaced(RecomputingForward, CompiledForward),
    ],
)
def test_checkpointed_module_is_recognized(make):
    around = nn.Sequential(nn.Linear(2, 2), make())
    assert [is_checkpointed(module) for module in around] == [False, True]
    assert has_checkpointed_parts(around)
    assert not has_checkpointed_parts(nn.Linear(2, 2))
