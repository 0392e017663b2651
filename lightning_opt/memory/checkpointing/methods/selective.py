"""What the operators inside of a block cost, and which of their outputs are worth keeping.

A selection names operators by their kind and their place among those of that kind in one run of the
block: of three matrix products it can keep the second.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from lightning_opt.core.modules.batches import tensors_of
from lightning_opt.core.modules.trial import returns_views, written_by

ContextPair: TypeAlias = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

Place: TypeAlias = tuple[str, int]
"""An operator's name, and how many of that name ran before it in the block."""

aten = torch.ops.aten


@dataclass
class Operator:
    """One operator in one run of a block.

    Attributes:
        place: Which one it is.
        flops: Floating-point operations as torch counts them: matrix products, convolutions and
            attention.
        nbytes: Size of its outputs.
        seconds: What it took, the dispatch included; asynchronous devices are waited for.
        keepable: Whether its output can stand in for running it again: not for views and in-place
            operators, for random ones (those after it would draw other numbers) and where the
            output is written afterwards.
        computes: Whether it is more than another view of its input.
    """

    place: Place
    flops: int
    nbytes: int
    seconds: float
    keepable: bool
    computes: bool


@dataclass
class OperatorProfile:
    """The operators of one run of a block, in order, and how many of them a recomputation runs.

    Attributes:
        operators: In order of execution.
        recomputed: How many of them run again: up to the last tensor that is saved. ``None`` until
            there was a recomputation.
        runs: How many first runs there were.
        repetitions: How many recomputations.
    """

    operators: list[Operator] = field(default_factory=list)
    recomputed: int | None = None
    runs: int = 0
    repetitions: int = 0

    def forward(self) -> AbstractContextManager[Any]:
        """Return the context of a first run, in which operators are recorded."""
        self.runs += 1
        return _Recorder(self)

    def recompute(self) -> AbstractContextManager[Any]:
        """Return the context of its recomputations, in which operators are counted."""
        return _Counter(self)

    def again(self) -> list[Operator]:
        """Return the operators that a recomputation runs; none before there was one."""
        return self.operators[: self.recomputed or 0]

    @property
    def walked_twice(self) -> bool:
        """Whether one run was recomputed more than once, as for a gradient penalty.

        Torch hands out what selective checkpointing has kept only once.
        """
        return self.repetitions > self.runs

    @property
    def remakes_output(self) -> bool:
        """Whether a recomputation gets as far as the last operator that computes something."""
        computing = [i for i, operator in enumerate(self.operators) if operator.computes]
        return bool(computing) and (self.recomputed or 0) > computing[-1]


class _Counter(TorchDispatchMode):
    def __init__(self, profile: OperatorProfile) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._profile = profile

    def __enter__(self) -> Any:
        self._profile.repetitions += 1
        self._profile.recomputed = 0
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # A dispatch ends before autograd saves its result, but begins after it saved its inputs:
        # what was counted here is what ran until the last tensor was saved.
        if func is not aten.detach.default:
            self._profile.recomputed = (self._profile.recomputed or 0) + 1
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    def __init__(self, profile: OperatorProfile) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators = profile.operators = []
        self._counts: Counter[str] = Counter()
        self._makers: dict[int, Operator] = {}  # by the address of an output's memory
        self._alive: list[Tensor] = []  # so that no address is given to another tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.detach.default:
            return func(*args, **kwargs)
        device = next((tensor.device for tensor in tensors_of(args)), None)
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        before = _generator_state(device) if seeded else None
        start = _now(device)
        output = func(*args, **kwargs)
        seconds = _now(device) - start
        drew = before is not None and not torch.equal(before, _generator_state(device))
        written = list(written_by(func, args, kwargs))
        for tensor in written:
            maker = self._makers.get(tensor.untyped_storage().data_ptr())
            if maker is not None:
                maker.keepable = False
        aliases = returns_views(func)
        outputs = list(tensors_of(output))
        # `_unsafe_view` and its like say that their output is new memory, which it is not.
        fresh = [leaf for leaf in outputs if leaf.untyped_storage().data_ptr() not in self._makers]
        place = (str(func), self._counts[str(func)])
        self._counts[str(func)] += 1
        operator = Operator(
            place=place,
            flops=count_flops(func, args, kwargs, output),
            nbytes=0 if aliases else sum(leaf.untyped_storage().nbytes() for leaf in fresh),
            seconds=seconds,
            keepable=bool(fresh) and not aliases and not drew,
            computes=bool(written) or not aliases,
        )
        self.operators.append(operator)
        if operator.keepable:
            for leaf in fresh:
                self._makers[leaf.untyped_storage().data_ptr()] = operator
                self._alive.append(leaf.detach())
        return output


def count_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> int:
    """Return what ``torch.utils.flop_counter`` counts for one operator.

    Torch counts the attention kernels of CUDA, but not the one of the CPU; here both are counted.
    """
    packet = getattr(func, "_overloadpacket", None)
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=output))
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        query, key, value = args[:3]
        return int(sdpa_flop_count(query.shape, key.shape, value.shape))
    return 0


def _generator_state(device: torch.device | None) -> Tensor:
    if device is not None and device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def _now(device: torch.device | None) -> float:
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Selection:
    """Keeps what a rule picks, once the block has run and been recomputed once.

    The first run keeps nothing but the inputs: it records the operators that the rule then judges.

    Args:
        rule: From the operators that would run again to the places of those to keep; or
        kept: the places, if they are known already.
    """

    def __init__(
        self,
        rule: Callable[[Sequence[Operator]], frozenset[Place]] | None = None,
        kept: frozenset[Place] | None = None,
    ) -> None:
        assert (rule is None) != (kept is None)
        self.rule, self.kept = rule, kept
        self.profile = OperatorProfile()

    def contexts(self) -> ContextPair:
        """Return the contexts of the forward pass and of its recomputation."""
        if self.rule is not None and self.kept is None and self.profile.recomputed is not None:
            again = [] if self.profile.walked_twice else self.profile.again()
            self.kept = self.rule(again)
        if self.kept is None:
            return self.profile.forward(), self.profile.recompute()
        if not self.kept:
            return nullcontext(), nullcontext()
        pair: ContextPair = create_selective_checkpoint_contexts(_Policy(self.kept))
        return pair


class _Policy:
    """Torch's question, operator by operator, answered from a list of places."""

    def __init__(self, kept: frozenset[Place]) -> None:
        self._kept = kept
        # Until torch 2.6 the recomputation asks too.
        self._counts: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        counts, name = self._counts[context.is_recompute], str(op)
        place = (name, counts[name])
        counts[name] += 1
        keep = place in self._kept
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


@dataclass(frozen=True)
class KeepDear:
    """Keeps what takes at least so many operations.

    Attributes:
        min_flops: A number of operations from 1 on, a share of the block's operations below 1, or
            ``None`` for every operator that torch counts operations of.
    """

    min_flops: float | None = None

    def __call__(self, operators: Sequence[Operator]) -> frozenset[Place]:
        """Return the places of the operators to keep."""
        least = self.min_flops or 1
        if least < 1:
            least *= sum(operator.flops for operator in operators)
        return frozenset(op.place for op in operators if op.keepable and op.flops >= least)
