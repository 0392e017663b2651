"""What the tuner can switch on: additions to the Trainer's arguments, where they make sense."""

from __future__ import annotations

import difflib
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_opt.tuner.search.settings import (
    LISTS,
    clash,
    classes,
    is_written,
    join,
    join_made,
    plain,
)
from lightning_opt.tuner.trial import Switches
from lightning_opt.worker.recipes import Settings

Candidates = Sequence[str | Mapping[str, Settings]] | Mapping[str, Settings | bool | None]

INTERACTING = (
    {"compile", "checkpointing"},
    {"batch", "checkpointing"},
    {"compile", "layout"},
    {"compile", "runtime"},  # threads speed up products most, and so leave more to fusing
)
"""Kinds whose effects are known not to multiply; precision and a user's own meet everything."""


@dataclass(frozen=True)
class Facts:
    """What the baseline's process has found out about the model and the machine.

    Attributes:
        device: ``"cpu"``, ``"cuda"`` or another type of device.
        no_bf16: Why the device is not fast in bfloat16; empty if it is.
        threads: Threads that torch uses now.
        cpus: CPUs that this process may use.
        blocks: Repeated blocks of the model.
        convolutions: Convolutions of the model.
        fused: Whether all optimizers are fused already.
        automatic: Whether Lightning optimises, instead of the module.
        samples: Samples in a batch.
        wait: Share of a step that waits for data; None if unknown.
        loader: Whether the data comes from a ``torch.utils.data.DataLoader``.
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
    wait: float | None = None
    loader: bool = True


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
    part, quarter = max(1, facts.samples // 2), max(1, facts.samples // 4)
    no_cuda = _unless(facts.device == "cuda", f"it is for CUDA, and the device is {facts.device}")
    no_cpu = _unless(facts.device == "cpu", "the device is not a CPU")
    no_blocks = _unless(facts.blocks, "the model has no repeated blocks")
    all_on = f"torch uses {facts.threads} of {facts.cpus} CPUs already"
    no_parts = _unless(
        facts.automatic, "the module optimises by itself; micro_batches is for that"
    ) or _unless(facts.samples >= 4, f"a batch has {facts.samples} samples")
    seldom = facts.wait is not None and facts.wait < 0.03
    no_wait = _unless(facts.loader, "the data does not come from a DataLoader") or _unless(
        not seldom, f"training waits for data {facts.wait or 0:.1%} of the time"
    )
    return [
        Switch("fused", added("FusedOptimizer"), "optimizer", "one kernel for all updates",
               unfit=_unless(not facts.fused, "the optimizers are fused already")),
        Switch("channels_last", added("ChannelsLast"), "layout",
               "convolutions in channels_last", "throughput",
               _unless(facts.convolutions, "the model has no convolutions")),
        Switch("tf32", added("Runtime"), "runtime",
               "matrix products in TF32; results change by rounding", "throughput", no_cuda),
        Switch("one_thread", added("Runtime", threads=1, **quiet), "runtime", "torch uses one CPU",
               "throughput",
               no_cpu or _unless(facts.threads > 1, "torch uses one thread already")),
        Switch("all_threads", added("Runtime", threads=facts.cpus, **quiet), "runtime",
               "torch uses all CPUs that the process may use", "throughput",
               no_cpu or _unless(facts.threads < facts.cpus, all_on)),
        Switch("bf16", {"precision": "bf16-mixed"}, "precision",
               "autocast to bfloat16; results change by rounding", unfit=facts.no_bf16),
        Switch("fp16", {"plugins": [{"class_path": "lightning_opt.DynamicLossScale"}]},
               "precision", "autocast to float16 with a loss scale; results change by rounding",
               unfit=no_cuda or _unless(facts.no_bf16, "bfloat16 needs no loss scale")),
        Switch("data_pipeline", added("DataPipelineTuner", verbose=False), "data",
               "workers, prefetching and pinning of the loader", "throughput", no_wait),
        Switch("compile_regions", added("CompileModel", scope="regions"), "compile",
               "torch.compile for the repeated blocks; seconds before the first step",
               unfit=no_blocks),
        Switch("compile", added("CompileModel"), "compile",
               "torch.compile for the whole model; up to minutes before the first step"),
        Switch("half_batches", added("MicroBatching", size=part), "batch",
               "the gradient of a batch from two parts of it", "memory", no_parts),
        Switch("quarter_batches", added("MicroBatching", size=quarter), "batch",
               "the gradient of a batch from four parts of it", "memory", no_parts),
        Switch("checkpointing", added("ActivationCheckpointing", policy="every_layer"),
               "checkpointing", "each block is computed twice, and keeps its input only", "memory",
               no_blocks),
        Switch("checkpointing_sqrt", added("ActivationCheckpointing", policy="sqrt"),
               "checkpointing", "segments of blocks are computed twice, and keep their input only",
               "memory", no_blocks),
        Switch("checkpointing_selective", added("ActivationCheckpointing", policy="selective"),
               "checkpointing", "blocks are computed twice but for their dear operators", "memory",
               no_blocks),
    ]  # fmt: skip


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
        self.base: Settings = {} if base is None else base
        known = {switch.name: switch for switch in built_in(facts)}
        self.switches: dict[str, Switch] = {}
        self.left_out: dict[str, str] = {}
        for switch in choose(known, candidates, objective):
            if reason := switch.unfit or self._in_base(switch):
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

    def ordered(self, names: Iterable[str]) -> Switches:
        """Return the names without repetition, in the order of the space."""
        wanted = set(names)
        return tuple(name for name in self.switches if name in wanted)

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
        parts = [self.base, *(self.switches[name].settings for name in self.ordered(names)), *more]
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
    usual = {n: item for n, item in known.items() if item.objective in ("", objective)}
    if candidates is None:
        return list(usual.values())
    if isinstance(candidates, Mapping):
        for name, value in candidates.items():
            if value is None or value is False:
                usual.pop(_known(known, name).name, None)
            else:
                usual[name] = _known(known, name) if value is True else _own(name, value)
        return list(usual.values())
    if isinstance(candidates, str):
        raise ValueError(f"candidates must be a list or a mapping, got the string {candidates!r}.")
    found: list[Switch] = []
    for item in candidates:
        if isinstance(item, Mapping):
            found += [_own(name, value) for name, value in item.items()]
        else:
            found.append(_known(known, item))
    return found


def _known(known: Mapping[str, Switch], name: str) -> Switch:
    if name not in known:
        near = difflib.get_close_matches(str(name), known, n=1)
        raise ValueError(
            f"candidates names {name!r}, which the tuner does not know"
            + (f"; did you mean {near[0]!r}?" if near else ".")
            + f" It knows {', '.join(known)}; for one of your own give its Trainer arguments: "
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
