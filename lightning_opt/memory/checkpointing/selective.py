"""The operators inside a block: their cost, and the selection of outputs to keep."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from lightning_opt.core.measure.flops import operator_flops
from lightning_opt.core.modules.batches import tensors_of
from lightning_opt.core.modules.trial import returns_views, storages_of, written_by

ContextPair: TypeAlias = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

# An operator's name, and the number of earlier operators of that name in the block.
OperatorKey: TypeAlias = tuple[str, int]

aten = torch.ops.aten


@dataclass
class Operator:
    """One operator in one run of a block.

    Attributes:
        key: Its name and position.
        flops: Operations as torch counts them: matrix products, convolutions and attention.
        nbytes: Size of its outputs.
        keepable: Whether its output can be kept instead of running it again. False for views, for
            in-place and random operators (later ones would draw other numbers), and for outputs
            that are written afterwards.
    """

    key: OperatorKey
    flops: int
    nbytes: int
    keepable: bool


class _RepeatCounter(TorchDispatchMode):
    def __init__(self, selection: Selection) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._selection = selection

    def __enter__(self) -> Any:
        self._selection.recomputations += 1
        self._selection.repeated = 0
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # torch stops a recomputation at the last saved tensor, so later operators are not counted.
        if func is not aten.detach.default:
            self._selection.repeated = (self._selection.repeated or 0) + 1
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    def __init__(self, selection: Selection) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators = selection.operators = []
        self._counts: Counter[str] = Counter()
        # By the storage of an output, because addresses are reused.
        self._producers: WeakKeyDictionary[torch.UntypedStorage, Operator] = WeakKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.detach.default:
            return func(*args, **kwargs)
        device = next((tensor.device for tensor in tensors_of(args)), None)
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        before = _generator_state(device) if seeded else None
        output = func(*args, **kwargs)
        is_random = before is not None and not torch.equal(before, _generator_state(device))
        for tensor in written_by(func, args, kwargs):
            for storage in storages_of(tensor):
                if storage in self._producers:
                    self._producers[storage].keepable = False
        storages = [storage for leaf in tensors_of(output) for storage in storages_of(leaf)]
        # `_unsafe_view` and similar operators wrongly declare their output as new memory.
        new = [storage for storage in storages if storage not in self._producers]
        if returns_views(func):
            new = []
        flops = 0
        with suppress(Exception):  # an error in a custom formula must not stop a run
            flops = operator_flops(func, args, kwargs, output)
        operator = Operator(
            key=(str(func), self._counts[str(func)]),
            flops=flops,
            nbytes=sum(storage.nbytes() for storage in new),
            keepable=bool(new) and not is_random,
        )
        self._counts[str(func)] += 1
        self.operators.append(operator)
        if operator.keepable:
            self._producers.update((storage, operator) for storage in new)
        return output


def _generator_state(device: torch.device | None) -> Tensor:
    if device is not None and device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


class Selection:
    """Keeps the outputs of some operators of a block.

    Args:
        min_flops: Keep operators with at least this number of operations; below 1, it is a share of
            the block's operations; ``None`` selects every operator whose operations torch counts.
            The first run keeps only the inputs and records the operators.
        kept: The operators to keep, if they are selected already.

    Attributes:
        operators: The operators of the latest recorded run, in order.
        repeated: Number of operators that a recomputation runs: all up to the one whose output is
            saved last. ``None`` before the first recomputation.
    """

    def __init__(
        self, min_flops: float | None = None, kept: frozenset[OperatorKey] | None = None
    ) -> None:
        self.min_flops = min_flops
        self.kept = kept
        self.operators: list[Operator] = []
        self.repeated: int | None = None
        self.runs = self.recomputations = 0

    def repeated_operators(self) -> list[Operator]:
        """Return the operators that a recomputation runs; none before the first one."""
        return self.operators[: self.repeated or 0]

    def chosen(self) -> tuple[Operator, ...]:
        """Return the operators to keep, among those that a recomputation would run.

        The result is empty if a run was recomputed more than once, for example for a gradient
        penalty: torch returns each kept output only once.
        """
        if self.recomputations > self.runs:
            return ()
        operators = self.repeated_operators()
        min_flops = self.min_flops or 1
        if min_flops < 1:
            min_flops *= sum(operator.flops for operator in operators)
        return tuple(op for op in operators if op.keepable and op.flops >= min_flops)

    def contexts(self) -> ContextPair:
        """Return the contexts of a run and of its recomputation."""
        if self.kept is None and self.repeated is not None:
            self.kept = frozenset(operator.key for operator in self.chosen())
        if self.kept is None:
            self.runs += 1
            return _Recorder(self), _RepeatCounter(self)
        if not self.kept:
            return nullcontext(), nullcontext()
        pair: ContextPair = create_selective_checkpoint_contexts(_saving(self.kept))
        return pair


def _saving(kept: frozenset[OperatorKey]) -> Callable[..., CheckpointPolicy]:
    """Return a policy for torch's checkpoint that saves the outputs of the operators ``kept``."""
    # Up to torch 2.6 the recomputation calls the policy too.
    counts: defaultdict[tuple[bool, str], int] = defaultdict(int)
    names = {name for name, _ in kept}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = _name_of(op)
        if name not in names:
            return CheckpointPolicy.PREFER_RECOMPUTE
        place = context.is_recompute, name
        keep = (name, counts[place]) in kept
        counts[place] += 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


# Cached, because building the text takes as long as some operators.
_name_of = functools.cache(str)
