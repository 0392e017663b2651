"""Makes plans of the blocks to recompute, and applies them to a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import TypeAlias

from torch import nn

from lightning_opt.core.modules.blocks import Block
from lightning_opt.core.modules.lazy import raise_if_lazy
from lightning_opt.core.modules.patching import takes_hooks
from lightning_opt.memory.checkpointing.forward import CheckpointedForward, Probe
from lightning_opt.memory.checkpointing.segments import Chain
from lightning_opt.memory.checkpointing.selective import OperatorKey, Selection


@dataclass(frozen=True)
class BlockGroup:
    """Consecutive blocks that are recomputed together.

    They form segments at run time, if the output of one is the input of the next. Otherwise each is
    recomputed on its own; the results are the same.

    Attributes:
        blocks: At least one block.
        selection: Makes the rule for the operators to keep. Only for a block of one module.
    """

    blocks: tuple[Block, ...]
    selection: Callable[[], Selection] | None = None

    @property
    def treatment(self) -> str:
        if len(self.blocks) > 1:
            return f"recomputed with {self.blocks[0].name} to {self.blocks[-1].name}"
        return "recomputed" if self.selection is None else "recomputed in part"

    def checkpointed_forwards(self) -> list[CheckpointedForward]:
        """Return the replacements of ``forward``, one for each module."""
        modules = [module for block in self.blocks for module in block.modules]
        if len(modules) == 1:
            selection = self.selection() if self.selection is not None else None
            return [CheckpointedForward(modules[0], selection=selection)]
        chain = Chain(limit=len(modules))
        return [CheckpointedForward(module, chain=chain) for module in modules]


# The blocks to recompute; all other modules run unchanged.
Plan: TypeAlias = list[BlockGroup]


def count_recomputed(plan: Plan) -> int:
    return sum(len(group.blocks) for group in plan)


class AppliedPlan:
    """Applies a plan to the model, until :meth:`undo` or the end of the context."""

    def __init__(self, plan: Plan) -> None:
        self.forwards = [forward for group in plan for forward in group.checkpointed_forwards()]
        for forward in self.forwards:
            forward.apply()

    def __enter__(self) -> AppliedPlan:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def attach(self, probe: Probe) -> None:
        """Call ``probe`` around each later run."""
        for forward in self.forwards:
            forward.probe = probe

    def undo(self) -> None:
        """Restore the model. Calling it again has no effect."""
        while self.forwards:
            self.forwards.pop().remove()


def recompute(block: Block, kept: frozenset[OperatorKey] = frozenset()) -> BlockGroup:
    """Return a group that recomputes one block, except the outputs of the operators ``kept``."""
    return BlockGroup((block,), partial(Selection, None, kept) if kept else None)


def every_layer(blocks: Sequence[Block]) -> Plan:
    return [recompute(block) for block in blocks]


def segments(blocks: Sequence[Block], interval: int) -> Plan:
    """Recompute ``interval`` blocks at a time: only every ``interval``-th input is kept."""
    return [
        BlockGroup(tuple(blocks[start : start + interval]))
        for start in range(0, len(blocks), interval)
    ]


def square_root(blocks: Sequence[Block]) -> Plan:
    """Recompute about sqrt(n) segments of sqrt(n) blocks: Chen et al. (2016)."""
    count = max(1, round(math.sqrt(len(blocks))))
    return segments(blocks, math.ceil(len(blocks) / count)) if blocks else []


def selective(blocks: Sequence[Block], min_flops: float | None) -> Plan:
    """Recompute each block except its expensive operators.

    A block that consists of several layers of a Sequential is recomputed fully.
    """
    selection = partial(Selection, min_flops)
    return [
        BlockGroup((block,), selection if len(block.modules) == 1 else None) for block in blocks
    ]


def make_plan(
    policy: str, blocks: Sequence[Block], interval: int | None, min_flops: float | None = None
) -> Plan:
    """Return the plan of a ``policy`` other than ``"auto"``."""
    rules: dict[str, Callable[[], Plan]] = {
        "none": list,
        "every_layer": lambda: every_layer(blocks),
        "custom": lambda: every_layer(blocks),
        "sqrt": lambda: square_root(blocks),
        "block": lambda: segments(blocks, interval or 1),
        "every_nth": lambda: every_layer(blocks[:: interval or 1]),
        "selective": lambda: selective(blocks, min_flops),
    }
    return rules[policy]()


def select_modules(model: nn.Module, entries: Iterable[str | type[nn.Module]]) -> list[Block]:
    """Return modules by qualified name, shell pattern, class or class name, as blocks.

    If one selected module contains another, only the outer one is returned. In a pattern
    (``encoder.*``), ``*`` also matches dots.

    Raises:
        ValueError: For an entry that matches no module, or one that cannot be recomputed.
    """
    named = [(name, module) for name, module in model.named_modules() if name]
    selected: set[nn.Module] = set()
    for entry in entries:
        matching = [module for name, module in named if _matches(entry, name, module)]
        if not matching:
            names = ", ".join(repr(name) for name, _ in named[:3])
            raise ValueError(
                f"ActivationCheckpointing(modules=...): {entry!r} matches no module of "
                f"{type(model).__name__}. Give qualified names as in named_modules() (such as "
                f"{names}), shell patterns ('encoder.*'), classes or their names."
            )
        for module in matching:
            # A ModuleList is never called itself, so select its children instead.
            selected.update(module.children() if isinstance(module, nn.ModuleList) else [module])
    inner = {inside for module in selected for inside in module.modules() if inside is not module}
    outer = selected - inner
    named = [(name, module) for name, module in named if module in outer]
    for name, module in named:
        raise_if_lazy(f"ActivationCheckpointing(modules=[{name!r}])", module)
        if not takes_hooks(module):
            raise ValueError(
                f"ActivationCheckpointing cannot recompute {name!r}, which is a torch.jit module."
                " Give a Python module that contains it."
            )
    return [Block(name, (module,)) for name, module in named]


def _matches(entry: str | type[nn.Module], name: str, module: nn.Module) -> bool:
    if not isinstance(entry, str):
        return isinstance(module, entry)
    cls = type(module)
    names = (cls.__name__, f"{cls.__module__}.{cls.__qualname__}")
    return entry in names or fnmatchcase(name, entry)
