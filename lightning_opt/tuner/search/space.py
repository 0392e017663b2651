"""What the tuner can switch on: additions to the Trainer's arguments, where they make sense."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_opt.core.arguments import did_you_mean
from lightning_opt.tuner.account import BACKWARD, FORWARD, OPTIMIZER, WAITING
from lightning_opt.tuner.search.settings import (
    LISTS,
    clash,
    classes,
    is_written,
    join,
    join_made,
    plain,
)
from lightning_opt.worker.recipes import Settings

Candidates = Sequence[str | Mapping[str, Settings]] | Mapping[str, Settings | bool | None]

INTERACTING = (
    {"compile", "checkpointing"},
    {"batch", "checkpointing"},
    {"compile", "layout"},
    {"compile", "runtime"},  # threads speed up products most, and so leave more to fusing
    {"compile", "optimizer"},  # more of what is left of a step is the optimizer's
)
"""Kinds whose effects are known not to multiply; precision and a user's own meet everything."""

BEARS_ON = {
    "optimizer": (OPTIMIZER,),
    "data": (WAITING,),
    **dict.fromkeys(("layout", "precision", "compile"), (FORWARD, BACKWARD)),
    "runtime": (FORWARD, BACKWARD, OPTIMIZER),
}
"""What changes of a kind can make shorter."""

PAYS = 0.03
"""Share of a step below which it does not pay to make it shorter."""

STARVED = 0.5
"""Share of a step from which on waiting for data matters most."""


@dataclass(frozen=True)
class Facts:
    """What the baseline's process has found out about the model and the machine.

    Attributes:
        device: ``"cpu"``, ``"cuda"`` or another type of device.
        no_bf16: Why the device is not fast in bfloat16; empty if it is.
        threads: Threads that torch uses now.
        cpus: CPUs that this process may use.
        blocks: Repeated blocks of the model.
        convolutions: Convolutions over two or three dimensions.
        fused: Whether all optimizers are fused already.
        automatic: Whether Lightning optimises, instead of the module.
        samples: Samples in a batch.
        loader: Whether the data comes from a ``torch.utils.data.DataLoader``.
        workers: Of that.
        eager: Whether it trains in float32, and nothing is compiled.
        account: Seconds of a step by what they go into; empty if unknown.
        busy: Share of the CPUs that was used in these steps.
        room: Bytes of memory that are free.
        steady: Whether the account is that of steps as they go on.
    """

    device: str = "cpu"
    no_bf16: str = ""
    threads: int = 1
    cpus: int = 1
    blocks: int = 0
    convolutions: int = 0
    fused: bool = False
    automatic: bool = True
    samples: int = 0
    loader: bool = True
    workers: int = 0
    eager: bool = True
    account: dict[str, float] = field(default_factory=dict)
    busy: float = 0.0
    room: float = math.inf
    steady: bool = True

    def share(self, *groups: str) -> float | None:
        """Return the share of a step that goes into some groups, None if unknown."""
        total = sum(self.account.values())
        return sum(self.account[group] for group in groups) / total if total else None

    @property
    def starved(self) -> bool:
        """Whether data are what a step waits for."""
        return (self.share(WAITING) or 0.0) > STARVED


@dataclass(frozen=True)
class Switch:
    """One change of the Trainer's arguments.

    Attributes:
        name: Unique within a space.
        settings: What it adds.
        kind: What it is about; two of one kind exclude each other, unless it is ``""``.
        about: What it does and costs, in one sentence.
        objective: For which it is tried unless asked otherwise; ``""`` for all.
        unfit: Why it makes no sense here; empty if it does.
    """

    name: str
    settings: Settings
    kind: str = ""
    about: str = ""
    objective: str = ""
    unfit: str = ""


def added(name: str, **arguments: Any) -> dict[str, Any]:
    """Return a callback of this package as in a LightningCLI configuration."""
    callback: dict[str, Any] = {"class_path": f"lightning_opt.{name}"}
    if arguments:
        callback["init_args"] = arguments
    return {"callbacks": [callback]}


def built_in(facts: Facts) -> list[Switch]:
    """Return all switches that the tuner knows, those that cost little to try first."""
    quiet: dict[str, Any] = {"matmul_precision": None, "cudnn_benchmark": None, "allocator": None}
    no_cuda = _unless(facts.device == "cuda", f"it is for CUDA, and the device is {facts.device}")
    no_cpu = _unless(facts.device == "cpu", "the device is not a CPU")
    no_blocks = _unless(facts.blocks, "the model has no repeated blocks")
    one, every = "torch uses one thread already", "torch uses all CPUs already"
    parts = _unless(facts.automatic, "the module optimises by itself; micro_batches is for that")
    parts = parts or _unless(facts.samples >= 4, f"a batch has {facts.samples} samples")
    return [
        Switch("fused", added("FusedOptimizer"), "optimizer", "one kernel for all updates", "",
               _unless(not facts.fused, "the optimizers are fused already")),
        # Not by ChannelsLast's own measurement, three steps: the trial is there to measure it.
        Switch("channels_last", added("ChannelsLast", policy="always"), "layout",
               "convolutions in channels_last", "throughput",
               _unless(facts.convolutions, "the model has no convolutions in 2D or 3D")),
        Switch("tf32", added("Runtime"), "runtime", "products in TF32; results change by rounding",
               "throughput", no_cuda),
        Switch("one_thread", added("Runtime", threads=1, **quiet), "runtime", "torch uses one CPU",
               "throughput", no_cpu or _unless(facts.threads > 1, one)),
        Switch("all_threads", added("Runtime", threads=facts.cpus, **quiet), "runtime",
               "torch uses all CPUs that the process may use", "throughput",
               no_cpu or _unless(facts.threads < facts.cpus, every)),
        Switch("bf16", {"precision": "bf16-mixed"}, "precision",
               "autocast to bfloat16; results change by rounding", "", facts.no_bf16),
        Switch("fp16", {"plugins": [{"class_path": "lightning_opt.DynamicLossScale"}]},
               "precision", "autocast to float16 with a loss scale; results change by rounding",
               "", no_cuda or _unless(facts.no_bf16, "bfloat16 needs no loss scale")),
        Switch("data_pipeline", added("DataPipelineTuner", verbose=False), "data",
               "workers, prefetching and pinning of the loader", "throughput",
               _unless(facts.loader, "the data does not come from a DataLoader")),
        Switch("compile_regions", added("CompileModel", scope="regions"), "compile",
               "torch.compile for the repeated blocks; seconds before the first step", "",
               no_blocks),
        Switch("compile", added("CompileModel"), "compile",
               "torch.compile for the whole model; up to minutes before the first step"),
        *(Switch(name, added("MicroBatching", size=max(1, facts.samples // count)), "batch",
                 f"the gradient of a batch from {count} parts of it", "memory", parts)
          for name, count in (("half_batches", 2), ("quarter_batches", 4))),
        *(Switch(name, added("ActivationCheckpointing", policy=policy), "checkpointing",
                 f"{what} computed twice, and not kept", "memory", no_blocks)
          for name, policy, what in CHECKPOINTING),
    ]  # fmt: skip


CHECKPOINTING = (
    ("checkpointing", "every_layer", "what is in a block is"),
    ("checkpointing_sqrt", "sqrt", "what is in a segment of blocks is"),
    ("checkpointing_selective", "selective", "but for dear operators, what is in a block is"),
)


def cannot_pay(kind: str, facts: Facts) -> str:
    """Return why changes of a kind cannot make a step faster here; empty if they may."""
    groups = BEARS_ON.get(kind, ())
    share = facts.share(*groups)
    if not groups or share is None or share >= PAYS:
        return ""
    return f"only {share:.1%} of a step goes into {' and '.join(groups)}"


def _unless(fits: object, reason: str) -> str:
    return "" if fits else reason


class Space:
    """The switches that can be tried, and what can be joined with what.

    Args:
        objective: What is tuned for.
        facts: Of the model and the machine.
        candidates: None for what the tuner knows for the objective. A list says exactly which:
            names of the tuner's switches, and mappings from own names to settings. A mapping
            changes the tuner's own choice: from a name to settings for a switch of one's own, to
            True for one of the tuner's that is not tried by itself, to None or False for one to
            leave out.
        base: The Trainer's arguments that hold for all.

    Attributes:
        facts: Of the model and the machine.
        switches: By name, in the order in which they are tried.
        left_out: Why those that were thought of are not there, by name.

    Raises:
        ValueError: For a name that the tuner does not know, and settings that are none.
    """

    def __init__(
        self,
        objective: str,
        facts: Facts,
        candidates: Candidates | None = None,
        base: Settings | None = None,
    ) -> None:
        self.facts, self.base = facts, {} if base is None else base
        known = {switch.name: switch for switch in built_in(facts)}
        self.switches: dict[str, Switch] = {}
        self.left_out: dict[str, str] = {}
        for switch in choose(known, candidates, objective):
            idle = cannot_pay(switch.kind, facts) if objective == "throughput" else ""
            if reason := switch.unfit or self._in_base(switch) or idle:
                self.left_out[switch.name] = reason
            else:
                self.switches[switch.name] = switch
        self._refused = [
            {one.name, other.name}
            for one, other in itertools.combinations(self.switches.values(), 2)
            if _exclude_each_other(one, other)
        ]

    def _in_base(self, switch: Switch) -> str | None:
        base, settings = plain(self.base), plain(switch.settings)
        if shared := classes(base) & classes(settings):
            return f"base has {', '.join(sorted(shared))} already"
        values = {name: value for name, value in settings.items() if name not in LISTS}
        if values and all(base.get(name) == value for name, value in values.items()):
            return "base sets " + ", ".join(f"{name}={value!r}" for name, value in values.items())
        return None

    def allows(self, names: Iterable[str]) -> bool:
        """Return whether the switches can all be on at once."""
        wanted = set(names)
        return not any(pair <= wanted for pair in self._refused)

    def interacts(self, one: str, other: str) -> bool:
        """Return whether the effect of two switches together may be far from the product."""
        kinds = {self.switches[one].kind, self.switches[other].kind}
        return bool({"precision", ""} & kinds) or kinds in INTERACTING

    def settings(self, names: Iterable[str], *more: Settings) -> Settings:
        """Return the Trainer's arguments with these switches on, and with more added.

        A mapping where all parts are mappings, else a function that returns it anew.
        """
        parts = [self.base, *(self.switches[name].settings for name in names), *more]
        fixed = [part for part in parts if isinstance(part, Mapping)]
        return join(fixed) if len(fixed) == len(parts) else functools.partial(join_made, parts)

    def is_written(self, names: Iterable[str]) -> bool:
        """Return whether the arguments can be written into a configuration file."""
        settings = self.settings(names)
        return isinstance(settings, Mapping) and is_written(settings)


def check_candidates(candidates: Candidates | None) -> None:
    """Refuse candidates that are none, before anything is trained.

    Raises:
        ValueError: For a name that the tuner does not know, and settings that are none.
    """
    choose({switch.name: switch for switch in built_in(Facts())}, candidates, "")


def choose(
    known: Mapping[str, Switch], candidates: Candidates | None, objective: str
) -> list[Switch]:
    """Return the switches that are wanted, whether or not they make sense here."""
    goals = ("", "memory" if objective == "batch" else objective)
    # Batches in parts fit at any size.
    never = "batch" if objective == "batch" else None
    usual = {n: s for n, s in known.items() if s.objective in goals and s.kind != never}
    if isinstance(candidates, str):
        raise ValueError(f"candidates must be a list or a mapping, got the string {candidates!r}.")
    if candidates is not None and not isinstance(candidates, Mapping):
        given = [item if isinstance(item, Mapping) else {item: True} for item in candidates]
        usual, candidates = {}, {name: value for item in given for name, value in item.items()}
    for name, value in (candidates or {}).items():
        if value is None or value is False:
            usual.pop(_known(known, name).name, None)
        else:
            usual[name] = _known(known, name) if value is True else _own(name, value)
    return list(usual.values())


def _known(known: Mapping[str, Switch], name: str) -> Switch:
    if name not in known:
        raise ValueError(
            f"candidates names {name!r}, which the tuner does not know{did_you_mean(name, known)} "
            f"It knows {', '.join(known)}; for one of your own give its Trainer arguments: "
            "candidates={'my own': {'callbacks': [...]}}."
        )
    return known[name]


def _own(name: str, value: Any) -> Switch:
    if not (callable(value) or (isinstance(value, (str, Mapping)) and value)):
        raise ValueError(
            f"candidates[{name!r}] must be Trainer arguments such as {{'precision': "
            "'bf16-mixed'}, a function without arguments that returns them, True or None, got "
            f"{value!r}."
        )
    return Switch(name, value, about="one of your own")


def _exclude_each_other(one: Switch, other: Switch) -> bool:
    if one.kind and one.kind == other.kind:
        return True
    # It looks at single operators, which a compiled graph does not have.
    kinds, selective = {one.kind, other.kind}, "checkpointing_selective"
    if kinds == {"compile", "checkpointing"} and selective in (one.name, other.name):
        return True
    return clash(one.settings, other.settings)
