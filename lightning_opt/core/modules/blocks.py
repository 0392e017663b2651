"""The repeated blocks of a model, found by structure and parameter shapes, never by name.

A block is either one module (a transformer layer, a residual block) or a group of plain layers that
repeats within an ``nn.Sequential`` (linear, norm, activation; linear, norm, activation; ...).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn
from torch.nn.parameter import is_lazy

from lightning_opt.core.modules.patching import takes_hooks

MIN_LAYER_REPEATS = 4
"""Plain layers in a Sequential are blocks if they repeat at least this many times."""

Signature: TypeAlias = tuple[Any, ...]
"""A value that is equal for modules of the same classes, structure and parameter shapes."""


@dataclass(frozen=True)
class Block:
    """One repetition: a module, or several layers of a Sequential, which are named ``net.3-5``."""

    name: str
    modules: tuple[nn.Module, ...]


def find_blocks(model: nn.Module) -> list[Block]:
    """Return the repeated blocks of ``model``, in order of registration; none contains another.

    Children of one module form a run if they have the same class and contain more than a plain
    layer. The members of a run are blocks, so experts and attention heads stay inside their layer.
    There are two exceptions, where the smaller blocks inside the members are returned: if a member
    contains a run that is longer than its own (an encoder next to a decoder), or if the members
    contain runs and differ in shape (the stages of a hierarchical vision model).
    """
    return list(_collect(model, "", set()))


def signature(module: nn.Module) -> Signature:
    """Return a value that is equal for modules of the same classes, structure and shapes."""
    return (
        type(module),
        tuple((name, _shape(p)) for name, p in module.named_parameters(recurse=False)),
        tuple((name, signature(child)) for name, child in module.named_children()),
    )


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    return () if is_lazy(parameter) else tuple(parameter.shape)


def _collect(module: nn.Module, name: str, seen: set[nn.Module]) -> Iterator[Block]:
    runs = {member: run for run in _runs(module) for member in run}
    layers = {
        block.modules[0]: block
        for block in _layer_blocks(module, name)
        if not seen.intersection(block.modules)
    }
    inside = {layer for block in layers.values() for layer in block.modules}
    for child_name, child in _children(module):
        if child in seen:
            continue  # registered under two names, or repeated with shared weights
        seen.add(child)
        qualified = f"{name}.{child_name}" if name else child_name
        if child in layers:
            yield layers[child]
        if child in inside:
            continue
        if child in runs and not _is_stack(runs[child]):
            yield Block(qualified, (child,))
        else:
            yield from _collect(child, qualified, seen)


def _runs(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield the children of ``module`` by class, for classes with two or more children."""
    by_class: dict[type[nn.Module], list[nn.Module]] = {}
    for _, child in _children(module):
        if _can_be_block(child):
            by_class.setdefault(type(child), []).append(child)
    yield from (members for members in by_class.values() if len(members) > 1)


def _is_stack(run: list[nn.Module]) -> bool:
    inner = max(_longest_run(member) for member in run)
    if inner == 0:
        return False
    most_common = Counter(signature(member) for member in run).most_common(1)[0][1]
    return inner > len(run) or most_common <= len(run) / 2


def _longest_run(module: nn.Module) -> int:
    """Return the length of the longest run at any depth inside ``module``, or 0."""
    lengths = [len(run) for run in _runs(module)]
    lengths.append(len(_layer_blocks(module, "")))
    lengths.extend(_longest_run(child) for _, child in _children(module))
    return max(lengths)


def _layer_blocks(module: nn.Module, name: str) -> list[Block]:
    """Return the repeated groups of plain layers in a Sequential, if there are enough."""
    if type(module) is not nn.Sequential:
        return []  # in other modules the layers may not run in sequence
    children = list(_children(module))
    if len({child for _, child in children}) < len(children):
        return []
    signatures = [signature(child) for _, child in children]
    plain = [takes_hooks(child) and not _can_be_block(child) for _, child in children]
    start, period, repeats = _longest_repetition(signatures, plain)
    if repeats < MIN_LAYER_REPEATS:
        return []
    blocks = []
    for begin in range(start, start + period * repeats, period):
        names, modules = zip(*children[begin : begin + period], strict=True)
        label = f"{names[0]}-{names[-1]}"
        blocks.append(Block(f"{name}.{label}" if name else label, modules))
    has_weights = any(True for layer in blocks[0].modules for _ in layer.parameters())
    return blocks if has_weights else []


def _longest_repetition(signatures: list[Signature], allowed: list[bool]) -> tuple[int, int, int]:
    """Return start, period (at least 2) and count of the repetition that covers the most layers."""
    best = (0, 1, 0)
    for period in range(2, len(signatures) // MIN_LAYER_REPEATS + 1):
        start = 0
        while start + period < len(signatures):
            end = start
            while (
                end < len(signatures)
                and allowed[end]
                and (end < start + period or signatures[end] == signatures[end - period])
            ):
                end += 1
            repeats = (end - start) // period
            if repeats >= 2 and repeats * period > best[1] * best[2]:
                best = (start, period, repeats)
            start = max(end - period + 1, start + 1)
    return best


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside the wrappers of FSDP1 and torch.compile."""
    while True:
        children = dict(module._modules.items())  # a ScriptModule's children have no `get`
        inner = children.get("_fsdp_wrapped_module") or children.get("_orig_mod")
        if inner is None:
            return module
        module = inner


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all children, unwrapped. Unlike ``named_children``, it repeats shared children."""
    children = unwrapped(module)._modules.items()
    return ((name, unwrapped(child)) for name, child in children if child is not None)


def _can_be_block(module: nn.Module) -> bool:
    """Return whether ``module`` is callable, has weights and contains more than a plain layer.

    False for modules of torch.jit, whose ``forward`` cannot be replaced.
    """
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)):
        return False
    if not takes_hooks(module) or not any(True for _ in module.parameters()):
        return False
    if any(True for _ in module.children()):
        return True
    # A linear, a convolution or a norm has at most one matrix; an LSTM has more.
    return sum(len(_shape(parameter)) > 1 for parameter in module.parameters()) > 1
