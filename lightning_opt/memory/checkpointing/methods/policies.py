"""Which blocks are recomputed, alone or together: small functions from blocks to stretches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import TypeAlias

from torch import nn

from lightning_opt.core.modules.blocks import Block
from lightning_opt.memory.checkpointing.methods.forward import CheckpointedForward, Probe
from lightning_opt.memory.checkpointing.methods.segments import Chain
from lightning_opt.memory.checkpointing.methods.selective import KeepDear, Selection


@dataclass(frozen=True)
class Stretch:
    """Consecutive blocks that are recomputed together.

    They are joined while the model runs, where one block's output is the next one's input. Where
    the model does something else in between, they are recomputed one by one, which is as correct.

    Attributes:
        blocks: One or more.
        choice: Makes the rule for what is kept inside; for single modules only.
    """

    blocks: tuple[Block, ...]
    choice: Callable[[], Selection] | None = None

    @property
    def treatment(self) -> str:
        """What happens to each of its blocks, in words."""
        if len(self.blocks) > 1:
            return f"recomputed with {self.blocks[0].name} to {self.blocks[-1].name}"
        return "recomputed" if self.choice is None else "recomputed in part"

    def forwards(self) -> list[CheckpointedForward]:
        """Return what to put onto its modules."""
        modules = [module for block in self.blocks for module in block.modules]
        if len(modules) == 1:
            choice = self.choice() if self.choice is not None else None
            return [CheckpointedForward(modules[0], choice=choice)]
        chain = Chain(limit=len(modules))
        return [CheckpointedForward(module, chain=chain) for module in modules]


Plan: TypeAlias = list[Stretch]
"""What is recomputed; all other modules run as they are."""


def count_recomputed(plan: Plan) -> int:
    """Return how many blocks a plan recomputes, in part or whole."""
    return sum(len(stretch.blocks) for stretch in plan)


class AppliedPlan:
    """A plan on the model, until it is undone or its context ends."""

    def __init__(self, plan: Plan) -> None:
        self.forwards: list[CheckpointedForward] = []
        try:
            for stretch in plan:
                for forward in stretch.forwards():
                    forward.apply()
                    self.forwards.append(forward)
        except BaseException:
            self.undo()
            raise

    def __enter__(self) -> AppliedPlan:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def watch(self, probe: Probe, keep_all: bool = False) -> None:
        """Have ``probe`` told what runs from now on; with ``keep_all`` nothing is recomputed."""
        for forward in self.forwards:
            forward.probe, forward.keep_all = probe, keep_all

    def undo(self) -> None:
        """Leave the model as it was; more than once does no harm."""
        while self.forwards:
            self.forwards.pop().remove()


def every_layer(blocks: Sequence[Block]) -> Plan:
    """Recompute each block, alone."""
    return [Stretch((block,)) for block in blocks]


def segments(blocks: Sequence[Block], interval: int) -> Plan:
    """Recompute ``interval`` blocks at a time: only every ``interval``-th input is kept."""
    return [
        Stretch(tuple(blocks[start : start + interval]))
        for start in range(0, len(blocks), interval)
    ]


def square_root(blocks: Sequence[Block]) -> Plan:
    """Recompute about as many segments as there are blocks in one: Chen et al. (2016)."""
    count = max(1, round(math.sqrt(len(blocks))))
    return segments(blocks, math.ceil(len(blocks) / count)) if blocks else []


def selective(blocks: Sequence[Block], min_flops: float | None) -> Plan:
    """Recompute each block, but for the operators that :class:`KeepDear` picks in single modules.

    Layers of a Sequential that make a block together are recomputed as a whole.
    """
    choice = partial(Selection, KeepDear(min_flops))
    return [Stretch((block,), choice if len(block.modules) == 1 else None) for block in blocks]


def make_plan(
    policy: str, blocks: Sequence[Block], interval: int | None, min_flops: float | None = None
) -> Plan:
    """Return what ``policy``, any but ``"auto"``, recomputes of ``blocks``."""
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


def select_modules(model: nn.Module, wanted: Iterable[str | type[nn.Module]]) -> list[Block]:
    """Return the modules that are called for, by qualified name, pattern, class or class name.

    Of a module and one inside of it, the outer is taken. A pattern is one of the shell
    (``encoder.*``), in which ``*`` crosses dots.

    Raises:
        ValueError: For an entry that fits no module.
    """
    named = [(name, module) for name, module in model.named_modules() if name]  # without the model
    found: set[nn.Module] = set()
    for entry in wanted:
        fitting = [module for name, module in named if _fits(entry, name, module)]
        if not fitting:
            names = ", ".join(repr(name) for name, _ in named[:3])
            raise ValueError(
                f"ActivationCheckpointing(modules=...): {entry!r} fits no module of "
                f"{type(model).__name__}. Give qualified names as in named_modules() (such as "
                f"{names}), shell patterns ('encoder.*'), classes or their names."
            )
        for module in fitting:
            # A ModuleList is never called itself: its members are meant.
            found.update(module.children() if isinstance(module, nn.ModuleList) else [module])
    inner = {inside for module in found for inside in module.modules() if inside is not module}
    outer = found - inner
    return [Block(name, (module,)) for name, module in named if module in outer]


def _fits(entry: str | type[nn.Module], name: str, module: nn.Module) -> bool:
    if not isinstance(entry, str):
        return isinstance(module, entry)
    kind = type(module)
    names = (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
    return entry in names or fnmatchcase(name, entry)
