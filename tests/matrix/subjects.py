"""The rows of the matrix: every callback, precision plugin, strategy and profiler of the package.

They are collected from ``lightning_opt.__all__``.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy, StrategyRegistry

import lightning_opt as lo
from lightning_opt.strategies.strategy_strings import STRATEGIES as STRINGS

Settings = dict[str, Any]

INSTEAD_OF_DEFAULTS: dict[str, Settings] = {
    # Inductor takes seconds per run.
    "CompileModel": {"backend": "eager"},
    # The processes of the tests may not start workers.
    "DataPipelineTuner": {"max_workers": 0, "verbose": False},
    # The default overflows in the first steps, which skips updates.
    "DynamicLossScale": {"init_scale": 1024.0},
}

TO_ACT: dict[str, Settings] = {
    "ActivationCheckpointing": {"budget": 0.6, "strict": False},
    "AdaptiveClipping": {"rule": "fixed_norm"},
    "MemoryCleanup": {"threshold": 0.02, "release": 0.01},
}
"""Settings for the matrix only, where the defaults would find nothing to do."""

AT_ONCE: dict[str, Settings] = {
    "CompressedDDPStrategy": {"warmup_steps": 2, "ramp_steps": 0},
    "DiLoCoStrategy": {"sync_every": 6},
}
"""Settings that make strategies exchange within the few steps of a cell."""

MORE: dict[str, list[Settings]] = {
    "Accumulation": [{"schedule": 2}],
    "ActivationCheckpointing": [{"policy": "every_layer"}, {"policy": "selective"}],
    "AdaptiveClipping": [{"rule": "unit_wise"}],
    "ChannelsLast": [{"policy": "always"}],
    "MicroBatching": [{"size": 2}],
}
"""Further settings that get their own row, because other conditions refuse them."""


@dataclass(frozen=True)
class Act:
    """What a feature has to do in its row, and the run without it that gives the same weights.

    Attributes:
        text: What happens, for the page.
        plants: Arguments of the model, without which the feature would have nothing to do.
        instead: Arguments of the model in the run without the feature, on one process; None for a
            run with the feature on one process.
        steps: Where it acts; elsewhere it must change nothing.
        never: Strategies under which it does not act.
    """

    text: str
    plants: Settings = field(default_factory=dict)
    instead: Settings | None = None
    steps: tuple[str, ...] = ("plain", "accumulation", "manual")
    never: tuple[str, ...] = ()


IDLE = Act("", steps=())
WHOLE_WINDOW = "the last window is short; compared with one large batch per step"
ACTS = {
    "Accumulation()": Act(WHOLE_WINDOW, instead={"merge": 2}, steps=("accumulation",)),
    "Accumulation(schedule=2)": Act(WHOLE_WINDOW, instead={"merge": 2}),
    'AdaptiveClipping(rule="fixed_norm")': Act(
        "clips; compared with a run that clips by hand", instead={"clip": 1.0}
    ),
    'AdaptiveClipping(rule="unit_wise")': Act("clips; compared with one process"),
    "DynamicBatchSize()": Act(WHOLE_WINDOW, instead={"merge": 2}, steps=("accumulation",)),
    "MicroBatching()": Act(
        "whole batches run out of memory; compared with a run in which they do not",
        plants={"memory": True},
        instead={},
        never=("fsdp1", "fsdp2", "fsdp2_3", "tp"),  # they plan sizes instead, or raise an error
    ),
    "NonFiniteGuard()": Act(
        "two batches are NaN; compared with a run without them",
        plants={"bad": True},
        instead={"leave_out": True},
    ),
}
"""The acts of rows, by label."""

CHANGES = {
    "Accumulation",
    "AdaptiveClipping",
    "CompressedDDPStrategy",
    "CurvaturePreconditioner",
    "DiLoCoStrategy",
    "HookedDDPStrategy",
}
"""Plugins that may change the weights where they have no act. All others must not."""

ROUNDS = {"ChannelsLast", "CompileModel", "FusedOptimizer", "MicroBatching"}
"""Plugins that change the order of summation: their rounding depends on the processor."""


@dataclass(frozen=True)
class Subject:
    """One row.

    Attributes:
        name: The class in ``lightning_opt``.
        kind: ``"callback"``, ``"precision"``, ``"strategy"`` or ``"profiler"``.
        area: The package of its feature.
        settings: Constructor arguments.
        strategy: The strategy string, if it is a strategy.
    """

    name: str
    kind: str
    area: str
    settings: Settings = field(default_factory=dict)
    strategy: str = ""

    @property
    def label(self) -> str:
        """The row's name: the call or argument as a user writes it."""
        if self.strategy:
            return f'strategy="{self.strategy}"'
        arguments = ", ".join(f"{key}={value!r}" for key, value in self.settings.items())
        return f"{self.name}({arguments})".replace("'", '"')

    def trainer_settings(self) -> Settings:
        """Return Trainer arguments with a new instance."""
        if not self.name:
            return {}
        kind = getattr(lo, self.name)
        if self.strategy:
            known = StrategyRegistry[self.strategy]["init_params"]
            known = {key: value for key, value in known.items() if key != "start_method"}
            return {"strategy": kind(**{**known, **AT_ONCE.get(self.name, {}), **self.settings})}
        takes = inspect.signature(kind).parameters
        # To act within a few steps.
        usual = {"every_n_steps": 2} if "every_n_steps" in takes else {}
        plugin = kind(**usual | self.settings)
        wrap: dict[str, Callable[[], Settings]] = {
            "callback": lambda: {"callbacks": [plugin]},
            "precision": lambda: {"plugins": [plugin]},
            "profiler": lambda: {"profiler": plugin},
        }
        return wrap[self.kind]()


NO_PLUGIN = Subject("", "", "")
"""The Trainer alone."""


def find_subjects(to_act: bool = False) -> list[Subject]:
    """Return the rows, by area and name.

    Args:
        to_act: With the settings of :data:`TO_ACT` instead of the defaults.
    """
    kinds = {"callback": Callback, "precision": Precision, "profiler": Profiler}
    first = INSTEAD_OF_DEFAULTS | (TO_ACT if to_act else {})
    found = []
    for name in lo.__all__:
        export = getattr(lo, name)
        if not inspect.isclass(export):
            continue
        area = export.__module__.split(".")[1]
        for kind, base in kinds.items():
            if issubclass(export, base):
                settings = [first.get(name, {}), *MORE.get(name, [])]
                found += [Subject(name, kind, area, each) for each in settings]
        if issubclass(export, Strategy):
            strings = [string for string, (owner, _) in STRINGS.items() if owner == name]
            found += [Subject(name, "strategy", area, strategy=string) for string in strings]
    return sorted(found, key=lambda subject: (subject.area, subject.label))
