"""What the tuner can switch on: additions to the Trainer's arguments, where they make sense."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_opt.tuner.search.settings import (
    LISTS,
    Joined,
    clash,
    classes,
    is_written,
    join,
    plain,
)
from lightning_opt.worker.recipes import Settings

Switches = tuple[str, ...]
"""Names of what is switched on, in the order of the space."""

Candidates = Sequence[str | Mapping[str, Settings]] | Mapping[str, Settings | bool | None]

MANY = frozenset({"throughput", "time_to_loss"})
MEMORY = frozenset({"memory"})

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
        bf16: Whether the device computes in bfloat16.
        threads: Threads that torch uses now.
        cpus: CPUs that this process may use.
        blocks: Repeated blocks of the model.
        convolutions: Convolutions of the model.
        optimizers: Class names of the optimizers.
        fused: Whether all of them are fused already.
        automatic: Whether Lightning optimises, instead of the module.
        samples: Samples in a batch.
        wait: Share of a step that waits for data; None if unknown.
        loader: Whether the data comes from a ``torch.utils.data.DataLoader``.
    """

    device: str = "cpu"
    bf16: bool = True
    threads: int = 1
    cpus: int = 1
    blocks: int = 0
    convolutions: int = 0
    optimizers: tuple[str, ...] = ()
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
        wanted: Objectives for which it is tried unless asked otherwise.
        unfit: Why it makes no sense here, or None; from the facts.
    """

    name: str
    settings: Settings
    kind: str = ""
    about: str = ""
    wanted: frozenset[str] = MANY | MEMORY
    unfit: Callable[[Facts], str | None] = lambda facts: None


def added(name: str, **arguments: Any) -> dict[str, Any]:
    """Return a callback of this package as in a LightningCLI configuration."""
    callback: dict[str, Any] = {"class_path": f"lightning_opt.{name}"}
    if arguments:
        callback["init_args"] = arguments
    return {"callbacks": [callback]}


def _no_blocks(facts: Facts) -> str | None:
    return None if facts.blocks else "the model has no repeated blocks"


def _not_cuda(facts: Facts) -> str | None:
    return None if facts.device == "cuda" else f"it is for CUDA, and the device is {facts.device}"


def _no_bf16(facts: Facts) -> str | None:
    return None if facts.bf16 else "the device does not compute in bfloat16"


def _not_for_half(facts: Facts) -> str | None:
    return _not_cuda(facts) or ("bfloat16 needs no loss scale" if facts.bf16 else None)


def _no_convolutions(facts: Facts) -> str | None:
    return None if facts.convolutions else "the model has no convolutions"


def _fused_already(facts: Facts) -> str | None:
    return "the optimizers are fused already" if facts.fused else None


def _one_thread_already(facts: Facts) -> str | None:
    if facts.device != "cpu":
        return "the device is not a CPU"
    return "torch uses one thread already" if facts.threads == 1 else None


def _all_threads_already(facts: Facts) -> str | None:
    if facts.device != "cpu":
        return "the device is not a CPU"
    if facts.threads >= facts.cpus:
        return f"torch uses {facts.threads} of {facts.cpus} CPUs already"
    return None


def _no_wait(facts: Facts) -> str | None:
    if not facts.loader:
        return "the data does not come from a DataLoader"
    if facts.wait is not None and facts.wait < 0.03:
        return f"training waits for data {facts.wait:.1%} of the time"
    return None


def _no_parts(facts: Facts) -> str | None:
    if not facts.automatic:
        return "the module optimises by itself; micro_batches is for that"
    return None if facts.samples >= 4 else f"a batch has {facts.samples} samples"


def built_in(facts: Facts) -> list[Switch]:
    """Return all switches that the tuner knows, those that cost little to try first."""
    quiet: dict[str, Any] = {"matmul_precision": None, "cudnn_benchmark": None, "allocator": None}
    part = max(1, facts.samples // 2)
    quarter = max(1, facts.samples // 4)
    return [
        Switch("fused optimizer", added("FusedOptimizer"), "optimizer",
               "one kernel for all updates", unfit=_fused_already),
        Switch("channels_last", added("ChannelsLast"), "layout",
               "convolutions and images in channels_last", MANY, _no_convolutions),
        Switch("TF32", added("Runtime"), "runtime",
               "matrix products in TF32; results change by rounding", MANY, _not_cuda),
        Switch("one thread", added("Runtime", threads=1, **quiet), "runtime",
               "torch uses one CPU", MANY, _one_thread_already),
        Switch("all threads", added("Runtime", threads=facts.cpus, **quiet), "runtime",
               "torch uses all CPUs that the process may use", MANY, _all_threads_already),
        Switch("bf16-mixed", {"precision": "bf16-mixed"}, "precision",
               "autocast to bfloat16; results change by rounding", unfit=_no_bf16),
        Switch("16-mixed", {"plugins": [{"class_path": "lightning_opt.DynamicLossScale"}]},
               "precision", "autocast to float16 with a loss scale; results change by rounding",
               unfit=_not_for_half),
        Switch("data pipeline", added("DataPipelineTuner", verbose=False), "data",
               "workers, prefetching and pinning of the loader", MANY, _no_wait),
        Switch("compile regions", added("CompileModel", scope="regions"), "compile",
               "torch.compile for the repeated blocks; seconds before the first step",
               unfit=_no_blocks),
        Switch("compile", added("CompileModel"), "compile",
               "torch.compile for the whole model; up to minutes before the first step"),
        Switch("half batches", added("MicroBatching", size=part), "batch",
               "the gradient of a batch from two parts of it", MEMORY, _no_parts),
        Switch("quarter batches", added("MicroBatching", size=quarter), "batch",
               "the gradient of a batch from four parts of it", MEMORY, _no_parts),
        Switch("checkpointing", added("ActivationCheckpointing", policy="every_layer"),
               "checkpointing", "each block is computed twice, and keeps its input only", MEMORY,
               _no_blocks),
        Switch("checkpointing sqrt", added("ActivationCheckpointing", policy="sqrt"),
               "checkpointing", "segments of blocks are computed twice, and keep their input only",
               MEMORY, _no_blocks),
        Switch("checkpointing selective", added("ActivationCheckpointing", policy="selective"),
               "checkpointing", "blocks are computed twice but for their dear operators", MEMORY,
               _no_blocks),
    ]  # fmt: skip


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
        for switch in _chosen(known, candidates, objective):
            if reason := switch.unfit(facts) or self._in_base(switch):
                self.left_out[switch.name] = reason
            else:
                self.switches[switch.name] = switch
        self._refused = {
            frozenset((one, other)): reason
            for one in self.switches
            for other in self.switches
            if one < other and (reason := _refusal(self.switches[one], self.switches[other]))
        }

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
        return not any(self.refusals(names))

    def refusals(self, names: Iterable[str]) -> list[str]:
        """Return why some of the switches exclude each other."""
        wanted = set(names)
        return [
            f"{' and '.join(sorted(pair))}: {reason}"
            for pair, reason in self._refused.items()
            if pair <= wanted
        ]

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
        return join(fixed) if len(fixed) == len(parts) else Joined(parts)

    def is_written(self, names: Iterable[str]) -> bool:
        """Return whether the arguments can be written into a configuration file."""
        settings = self.settings(names)
        return isinstance(settings, Mapping) and is_written(settings)


def _chosen(
    known: Mapping[str, Switch], candidates: Candidates | None, objective: str
) -> list[Switch]:
    if candidates is None:
        return [switch for switch in known.values() if objective in switch.wanted]
    if isinstance(candidates, Mapping):
        chosen = {name: item for name, item in known.items() if objective in item.wanted}
        for name, value in candidates.items():
            if value is None or value is False:
                chosen.pop(_known(known, name).name, None)
            elif value is True:
                chosen[name] = _known(known, name)
            else:
                chosen[name] = _own(name, value)
        return list(chosen.values())
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
        raise ValueError(
            f"candidates names {name!r}, which the tuner does not know. It knows "
            f"{', '.join(map(repr, known))}; for one of your own give its Trainer arguments: "
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


def _refusal(one: Switch, other: Switch) -> str | None:
    if one.kind and one.kind == other.kind:
        return f"both are about {one.kind}"
    if {one.kind, other.kind} == {"compile", "checkpointing"} and "checkpointing selective" in (
        one.name,
        other.name,
    ):
        return "it looks at single operators, which a compiled graph does not have"
    return clash(one.settings, other.settings)
