"""The search space: switches, each an addition to the Trainer's arguments."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_opt.core.arguments import did_you_mean
from lightning_opt.tuner.probe import Facts
from lightning_opt.worker.recipes import Settings, as_list, as_mapping, class_names

Candidates = Sequence[str | Mapping[str, Settings]] | Mapping[str, Settings | bool | None]

LISTS = ("callbacks", "plugins")
"""Trainer arguments that are joined by concatenation. For all others, the last value is used."""


@dataclass(frozen=True)
class Switch:
    """One change of the Trainer's arguments.

    Attributes:
        name: A unique name.
        kind: At most one switch of a kind can be on. Kind ``""`` has no such limit.
        settings: The Trainer arguments that it adds.
        about: A phrase that states its effect and its cost.
        objective: The only objective for which it is tried by default; ``""`` for all.
        unsuitable: The reason why it cannot help this model on this machine, or ``""``.
    """

    name: str
    kind: str
    settings: Settings
    about: str
    objective: str = ""
    unsuitable: str = ""


def added(name: str, **arguments: Any) -> dict[str, Any]:
    """Return Trainer arguments that add the callback ``lightning_opt.<name>``."""
    callback: dict[str, Any] = {"class_path": f"lightning_opt.{name}"}
    if arguments:
        callback["init_args"] = arguments
    return {"callbacks": [callback]}


def built_in_switches(facts: Facts) -> list[Switch]:
    """Return all built-in switches, including unsuitable ones."""
    # Each string is the reason why a switch is unsuitable, or "" if it is suitable.
    not_cuda = "" if facts.device == "cuda" else f"it is for CUDA, and the device is {facts.device}"
    not_cpu = "" if facts.device == "cpu" else "the device is not a CPU"
    no_blocks = "" if facts.blocks else "the model has no repeated blocks"
    no_convolutions = "" if facts.convolutions else "the model has no convolutions in 2D or 3D"
    already_single = "" if facts.threads > 1 else "torch uses one thread already"
    already_all = "" if facts.threads < facts.cpus else "torch uses all CPUs already"
    bf16_is_fast = "" if facts.why_no_bf16 else "bfloat16 needs no loss scale"
    small_batch = "" if facts.samples >= 4 else f"a batch has {facts.samples} samples"
    # None keeps Runtime from changing these settings.
    only_threads = dict.fromkeys(("matmul_precision", "cudnn_benchmark", "allocator"))
    loader = added("DataPipelineTuner", verbose=False)
    single_thread = added("Runtime", threads=1, **only_threads)
    return [
        Switch("fused", "optimizer", added("FusedOptimizer"), "one kernel for all updates"),
        # "always", because the trial decides instead of the kinds of layers.
        Switch("channels_last", "layout", added("ChannelsLast", policy="always"),
               "convolutions in channels_last", "throughput", no_convolutions),
        Switch("tf32", "runtime", added("Runtime"),
               "products in TF32; results change by rounding", "throughput", not_cuda),
        Switch("one_thread", "runtime", single_thread, "torch uses one CPU", "throughput",
               not_cpu or already_single),
        Switch("all_threads", "runtime", added("Runtime", threads=facts.cpus, **only_threads),
               "torch uses all CPUs that the process may use", "throughput",
               not_cpu or already_all),
        Switch("bf16", "precision", {"precision": "bf16-mixed"},
               "autocast to bfloat16; results change by rounding", "", facts.why_no_bf16),
        Switch("fp16", "precision",
               {"plugins": [{"class_path": "lightning_opt.DynamicLossScale"}]},
               "autocast to float16 with a loss scale; results change by rounding", "",
               not_cuda or bf16_is_fast),
        Switch("data_pipeline", "data", loader, "workers and prefetching of the loader",
               "throughput"),
        # On a CPU, workers may help only if torch leaves a core free.
        Switch("data_pipeline_one_thread", "data", join([loader, single_thread]),
               "workers of the loader, and torch uses one CPU", "throughput",
               not_cpu or already_single),
        Switch("compile_regions", "compile", added("CompileModel", scope="regions"),
               "torch.compile for the repeated blocks; seconds before the first step", "",
               no_blocks),
        Switch("compile", "compile", added("CompileModel"),
               "torch.compile for the whole model; up to minutes before the first step"),
        *(Switch(name, "batch", added("MicroBatching", size=max(1, facts.samples // count)),
                 f"each batch is processed in {count} parts", "memory", small_batch)
          for name, count in (("half_batches", 2), ("quarter_batches", 4))),
        Switch("checkpointing", "checkpointing",
               added("ActivationCheckpointing", policy="every_layer"),
               "activations inside blocks are recomputed instead of kept", "memory", no_blocks),
        Switch("checkpointing_selective", "checkpointing",
               added("ActivationCheckpointing", policy="selective"),
               "activations of cheap operators are recomputed instead of kept", "memory",
               no_blocks),
    ]  # fmt: skip


class Space:
    """The search space: the switches to try, and which of them can be combined.

    Args:
        objective: ``"throughput"`` or ``"memory"``.
        facts: Facts about the model and the machine.
        candidates: See :func:`~lightning_opt.autotune`.
        base: Trainer arguments of all trials.

    Attributes:
        facts: Facts about the model and the machine.
        switches: The switches to try, by name.
        left_out: The skipped switches, and the reason for each.

    Raises:
        ValueError: If a name is unknown, or settings are not Trainer arguments.
    """

    def __init__(
        self,
        objective: str,
        facts: Facts,
        candidates: Candidates | None = None,
        base: Settings | None = None,
    ) -> None:
        self.facts, self.base = facts, {} if base is None else base
        known = {switch.name: switch for switch in built_in_switches(facts)}
        self.switches: dict[str, Switch] = {}
        self.left_out: dict[str, str] = {}
        for switch in _choose(known, candidates, objective):
            reason = switch.unsuitable or self._why_redundant(switch)
            if reason:
                self.left_out[switch.name] = reason
            else:
                self.switches[switch.name] = switch
        self._incompatible = [
            {one.name, other.name}
            for one, other in itertools.combinations(self.switches.values(), 2)
            if _exclude_each_other(one, other)
        ]

    def _why_redundant(self, switch: Switch) -> str:
        """Return a reason if the base already has the switch's settings, else ""."""
        base, settings = as_mapping(self.base), as_mapping(switch.settings)
        if shared := classes_in(base) & classes_in(settings):
            return f"base has {', '.join(sorted(shared))} already"
        if settings and all(base.get(name) == value for name, value in settings.items()):
            return "base sets " + ", ".join(f"{name}={value!r}" for name, value in settings.items())
        return ""

    def allows(self, names: Iterable[str]) -> bool:
        wanted = set(names)
        return not any(pair <= wanted for pair in self._incompatible)

    def settings(self, names: Iterable[str], *others: Settings) -> Settings:
        """Join the Trainer arguments of the base, of these switches, and ``others``.

        Returns a mapping if all parts are mappings, else a function that returns one.
        """
        parts = [self.base, *(self.switches[name].settings for name in names), *others]
        if all(isinstance(part, Mapping) for part in parts):
            return join(parts)
        return functools.partial(join, parts)


def check_candidates(candidates: Candidates | None) -> None:
    _choose({switch.name: switch for switch in built_in_switches(Facts())}, candidates, "")


def _choose(
    known: Mapping[str, Switch], candidates: Candidates | None, objective: str
) -> list[Switch]:
    """Select the switches by objective and by the user's candidates. Include unsuitable ones."""
    chosen = {name: switch for name, switch in known.items() if switch.objective in ("", objective)}
    if isinstance(candidates, str):
        raise ValueError(f"candidates must be a list or a mapping, got the string {candidates!r}.")
    if candidates is not None and not isinstance(candidates, Mapping):
        mappings = [item if isinstance(item, Mapping) else {item: True} for item in candidates]
        chosen = {}
        candidates = {name: value for mapping in mappings for name, value in mapping.items()}
    for name, value in (candidates or {}).items():
        if value is None or value is False:
            chosen.pop(_known_switch(known, name).name, None)
        else:
            chosen[name] = _known_switch(known, name) if value is True else _own_switch(name, value)
    return list(chosen.values())


def _known_switch(known: Mapping[str, Switch], name: str) -> Switch:
    if name not in known:
        raise ValueError(
            f"candidates contains {name!r}, not a built-in switch{did_you_mean(name, known)} "
            f"The built-in switches are {', '.join(known)}. To add your own, pass its Trainer "
            "arguments: candidates={'my own': {'callbacks': [...]}}."
        )
    return known[name]


def _own_switch(name: str, settings: Any) -> Switch:
    if not (callable(settings) or (isinstance(settings, (str, Mapping)) and settings)):
        raise ValueError(
            f"candidates[{name!r}] must be Trainer arguments such as {{'precision': "
            "'bf16-mixed'}, a function without arguments that returns them, True or None, got "
            f"{settings!r}."
        )
    return Switch(name, "", settings, "your own switch")


def _exclude_each_other(one: Switch, other: Switch) -> bool:
    if one.kind and one.kind == other.kind:
        return True
    first, second = as_mapping(one.settings), as_mapping(other.settings)
    arguments = first.keys() & second.keys() - set(LISTS)
    differ = any(first[name] != second[name] for name in arguments)
    return differ or bool(classes_in(first) & classes_in(second))


# --- Trainer arguments as plain values -----------------------------------------------------------


def join(parts: Iterable[Settings]) -> dict[str, Any]:
    """Join Trainer arguments: ``LISTS`` are concatenated, other values replace earlier ones."""
    joined: dict[str, Any] = {}
    for part in map(as_mapping, parts):
        for name, value in part.items():
            joined[name] = [*joined.get(name, []), *as_list(value)] if name in LISTS else value
    return joined


def classes_in(settings: Mapping[str, Any]) -> set[str]:
    """Return the class names of all callbacks and plugins."""
    items = [item for name in LISTS for item in as_list(settings.get(name))]
    return {class_names(item)[0] for item in items if not isinstance(item, str)}
