"""The switches: additions to the Trainer's arguments that may pay for a model."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.plugins import Precision

from lightning_opt.core.arguments import did_you_mean
from lightning_opt.kernels.compiling.compile_model import CompileModel
from lightning_opt.tuner.facts import (
    BACKWARD,
    CALLBACKS,
    FORWARD,
    OPTIMIZER,
    REST,
    WAITING,
    Facts,
)
from lightning_opt.worker.recipes import Settings, make_settings, plain

Candidates = Sequence[str | Mapping[str, Settings]] | Mapping[str, Settings | bool | None]

LISTS = ("callbacks", "plugins")
"""Arguments whose values are concatenated; of other arguments the last value counts."""

INTERACTING = (
    {"compile", "checkpointing"},
    {"batch", "checkpointing"},
    {"compile", "layout"},
    {"compile", "runtime"},  # threads speed up products, so fusing matters more
    {"compile", "optimizer"},  # the optimizer's share of a compiled step is larger
)
"""Kinds whose effects do not multiply; precision and the user's own interact with all kinds."""

SHORTENS = {
    "optimizer": (OPTIMIZER,),
    "data": (WAITING,),
    **dict.fromkeys(("layout", "precision", "compile"), (FORWARD, BACKWARD)),
    "runtime": (FORWARD, BACKWARD, OPTIMIZER),
}
"""The groups of a step that switches of a kind can shorten."""

MIB = 2**20

MIN_SHARE = 0.03
"""Share of a step below which shortening a group does not pay."""


@dataclass(frozen=True)
class Switch:
    """One change of the Trainer's arguments.

    Attributes:
        name: Unique within a space.
        settings: Trainer arguments that it adds.
        kind: Its topic; two of one kind exclude each other, unless it is ``""``.
        about: Its effect and its cost, in one phrase.
        objective: The objective for which it is tried by default; ``""`` for all.
        unsuitable: Why it is useless here; empty if it is not.
    """

    name: str
    settings: Settings
    kind: str = ""
    about: str = ""
    objective: str = ""
    unsuitable: str = ""


def added(name: str, **arguments: Any) -> dict[str, Any]:
    callback: dict[str, Any] = {"class_path": f"lightning_opt.{name}"}
    if arguments:
        callback["init_args"] = arguments
    return {"callbacks": [callback]}


def built_in(facts: Facts) -> list[Switch]:
    quiet: dict[str, Any] = {"matmul_precision": None, "cudnn_benchmark": None, "allocator": None}
    no_cuda = _unless(facts.device == "cuda", f"it is for CUDA, and the device is {facts.device}")
    no_cpu = _unless(facts.device == "cpu", "the device is not a CPU")
    no_blocks = _unless(facts.blocks, "the model has no repeated blocks")
    one, every = "torch uses one thread already", "torch uses all CPUs already"
    parts = _unless(
        facts.automatic_optimization, "the module uses manual optimization; use micro_batches"
    )
    parts = parts or _unless(facts.samples >= 4, f"a batch has {facts.samples} samples")
    return [
        Switch("fused", added("FusedOptimizer"), "optimizer", "one kernel for all updates", "",
               _unless(not facts.fused, "the optimizers are fused already")),
        # "always": the trial measures it better than ChannelsLast's own three steps.
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
               "autocast to bfloat16; results change by rounding", "", facts.why_no_bf16),
        Switch("fp16", {"plugins": [{"class_path": "lightning_opt.DynamicLossScale"}]},
               "precision", "autocast to float16 with a loss scale; results change by rounding",
               "", no_cuda or _unless(facts.why_no_bf16, "bfloat16 needs no loss scale")),
        Switch("data_pipeline", added("DataPipelineTuner", verbose=False), "data",
               "workers, prefetching and pinning of the loader", "throughput",
               _unless(facts.uses_dataloader, "the data does not come from a DataLoader")),
        Switch("compile_regions", added("CompileModel", scope="regions"), "compile",
               "torch.compile for the repeated blocks; seconds before the first step", "",
               no_blocks),
        Switch("compile", added("CompileModel"), "compile",
               "torch.compile for the whole model; up to minutes before the first step"),
        *(Switch(name, added("MicroBatching", size=max(1, facts.samples // count)), "batch",
                 f"the gradient of a batch from {count} parts of it", "memory", parts)
          for name, count in (("half_batches", 2), ("quarter_batches", 4))),
        *(Switch(name, added("ActivationCheckpointing", policy=policy), "checkpointing",
                 f"{part} recomputed instead of kept", "memory", no_blocks)
          for name, policy, part in CHECKPOINTING),
    ]  # fmt: skip


CHECKPOINTING = (
    ("checkpointing", "every_layer", "activations inside blocks are"),
    ("checkpointing_sqrt", "sqrt", "activations inside segments of blocks are"),
    ("checkpointing_selective", "selective", "except for expensive operators, activations are"),
)


def _cannot_pay(kind: str, facts: Facts) -> str:
    """Return why switches of a kind cannot make a step faster here; empty if they may."""
    groups = SHORTENS.get(kind, ())
    share = facts.share(*groups)
    if not groups or share is None or share >= MIN_SHARE:
        return ""
    return f"only {share:.1%} of a step goes into {' and '.join(groups)}"


def _unless(fits: object, reason: str) -> str:
    return "" if fits else reason


class Space:
    """The switches to try, and which of them can be combined.

    Args:
        objective: The objective.
        facts: Of the model and the machine.
        candidates: None for the tuner's switches for the objective. A list is exact: names of the
            tuner's switches, and mappings from own names to settings. A mapping changes the default
            choice: from a name to settings for an own switch, to True for a switch of the tuner
            that is not tried by default, to None or False to exclude one.
        base: Trainer arguments of all trials.

    Attributes:
        facts: Of the model and the machine.
        switches: By name, in the order in which they are tried.
        left_out: Reasons why other switches are not tried, by name.

    Raises:
        ValueError: For an unknown name, and for settings that are not Trainer arguments.
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
        for switch in _choose(known, candidates, objective):
            idle = _cannot_pay(switch.kind, facts) if objective == "throughput" else ""
            if reason := switch.unsuitable or self._in_base(switch) or idle:
                self.left_out[switch.name] = reason
            else:
                self.switches[switch.name] = switch
        self._incompatible = [
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
        wanted = set(names)
        return not any(pair <= wanted for pair in self._incompatible)

    def interacts(self, one: str, other: str) -> bool:
        """Return whether the effect of two switches together may be far from the product."""
        kinds = {self.switches[one].kind, self.switches[other].kind}
        return bool({"precision", ""} & kinds) or kinds in INTERACTING

    def describe(self, seconds: float, peak: int) -> str:
        """Return where the baseline's step spends its time, and the switches to try."""
        facts, switches = self.facts, f"Tried will be: {', '.join(self.switches) or 'nothing'}."
        if not facts.seconds_by_group:
            return switches
        shares = ", ".join(
            f"{group} {facts.share(group) or 0:.0%}" for group in facts.seconds_by_group
        )
        used = f"{facts.busy:.0%} of {facts.cpus} CPU{'s' * (facts.cpus > 1)}"
        if facts.device != "cpu":
            idle = facts.share(WAITING, CALLBACKS, REST) or 0.0
            used = f"the device ({facts.device}) {1 - idle:.0%} of the time"
        return "\n".join(
            [
                f"A step takes {1e3 * seconds:.3g} ms: {shares}.",
                "The bottleneck is {} ({:.0%}).".format(*facts.bottleneck),
                f"It uses {used}.",
                f"It takes {peak / MIB:,.0f} MiB at its peak; "
                f"{facts.free_bytes / MIB:,.0f} MiB are free.",
                switches,
            ]
        )

    def settings(self, names: Iterable[str], *more: Settings) -> Settings:
        """Return the Trainer's arguments with these switches on, and with more added.

        A mapping if all parts are mappings, else a function that returns new arguments.
        """
        parts = [self.base, *(self.switches[name].settings for name in names), *more]
        fixed = [part for part in parts if isinstance(part, Mapping)]
        return join(fixed) if len(fixed) == len(parts) else functools.partial(join_made, parts)

    def is_written(self, names: Iterable[str]) -> bool:
        settings = self.settings(names)
        return isinstance(settings, Mapping) and is_written(settings)


def check_candidates(candidates: Candidates | None) -> None:
    _choose({switch.name: switch for switch in built_in(Facts())}, candidates, "")


def _choose(
    known: Mapping[str, Switch], candidates: Candidates | None, objective: str
) -> list[Switch]:
    """Return the chosen switches, suitable here or not."""
    goals = ("", "memory" if objective == "batch" else objective)
    # Split batches fit at any size, so they are no candidates for the largest batch.
    excluded = "batch" if objective == "batch" else None
    chosen = {n: s for n, s in known.items() if s.objective in goals and s.kind != excluded}
    if isinstance(candidates, str):
        raise ValueError(f"candidates must be a list or a mapping, got the string {candidates!r}.")
    if candidates is not None and not isinstance(candidates, Mapping):
        given = [item if isinstance(item, Mapping) else {item: True} for item in candidates]
        chosen = {}
        candidates = {name: value for item in given for name, value in item.items()}
    for name, value in (candidates or {}).items():
        if value is None or value is False:
            chosen.pop(_known(known, name).name, None)
        else:
            chosen[name] = _known(known, name) if value is True else _own(name, value)
    return list(chosen.values())


def _known(known: Mapping[str, Switch], name: str) -> Switch:
    if name not in known:
        raise ValueError(
            f"candidates names {name!r}, not a switch of the tuner{did_you_mean(name, known)} "
            f"It has {', '.join(known)}; for one of your own give its Trainer arguments: "
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
    # Selective checkpointing works on single operators, which a compiled graph does not have.
    kinds, selective = {one.kind, other.kind}, "checkpointing_selective"
    if kinds == {"compile", "checkpointing"} and selective in (one.name, other.name):
        return True
    return clash(one.settings, other.settings)


# --- Trainer arguments as plain values -----------------------------------------------------------


def join_made(parts: Sequence[Settings]) -> dict[str, Any]:
    """Return Trainer arguments joined from parts, after calling those that are functions."""
    return join(map(plain, parts))


def join(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return Trainer arguments with lists concatenated and other values replaced by later ones."""
    joined: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if name in LISTS:
                value = [*joined.get(name, []), *listed(value)]
            joined[name] = value
    return joined


def in_float32(settings: Settings) -> dict[str, Any]:
    """Return objects for the Trainer with eager float32; to be called in the training process."""
    if hasattr(torch.compiler, "set_stance"):  # from torch 2.6 on
        torch.compiler.set_stance("force_eager")  # for parts that the model compiles itself
    arguments = make_settings(settings)
    plugins = [
        plugin for plugin in listed(arguments.get("plugins")) if not isinstance(plugin, Precision)
    ]
    callbacks = [
        one for one in listed(arguments.get("callbacks")) if not isinstance(one, CompileModel)
    ]
    return {**arguments, "precision": "32-true", "plugins": plugins, "callbacks": callbacks}


def listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def classes(settings: Mapping[str, Any]) -> set[str]:
    items = [item for name in LISTS for item in listed(settings.get(name))]
    return {
        str(item["class_path"]).rpartition(".")[2]
        if isinstance(item, Mapping)
        else type(item).__name__
        for item in items
        if not isinstance(item, str)
    }


def clash(one: Settings, other: Settings) -> bool:
    """Return whether two parts differ in an argument, or both add a callback of one class."""
    first, second = plain(one), plain(other)
    shared = first.keys() & second.keys() - set(LISTS)
    return any(first[name] != second[name] for name in shared) or bool(
        classes(first) & classes(second)
    )


def is_written(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_written(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(is_written, value))
    return value is None or isinstance(value, (bool, int, float, str))
