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

Settings = dict[str, Any]

INSTEAD_OF_DEFAULTS: dict[str, Settings] = {
    # Inductor takes seconds per run.
    "CompileModel": {"backend": "eager"},
    # The processes of the tests may not start workers.
    "DataPipelineTuner": {"max_workers": 0, "verbose": False},
    # The default overflows in the first steps, which skips updates.
    "DynamicLossScale": {"init_scale": 1024.0},
}

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

CHANGES = {
    "Accumulation": "fewer, larger steps",
    "AdaptiveClipping": "clips",
    "CurvaturePreconditioner": "divides gradients by the curvature",
    "CompressedDDPStrategy": "gradients lose digits on the wire",
    "DiLoCoStrategy": "replicas train by themselves for some steps",
    "HookedDDPStrategy": "gradients lose digits on the wire",
}
"""Plugins that change the weights, and why. All others must not."""

_MEAN = "a checkpoint holds the mean of what the ranks have not sent yet"
RESUMES_OTHERWISE = {
    **dict.fromkeys(("ddp_int4", "ddp_int8", "ddp_powersgd", "ddp_threshold", "ddp_topk"), _MEAN),
}
"""Strategies whose resumed run differs from the uninterrupted run, and why."""

OF_A_REPLICA = {"CurvaturePreconditioner"}
"""Plugins with a state per replica under DiLoCo; a checkpoint holds only rank 0's."""

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
        kind = getattr(lo, self.name)
        if self.strategy:
            known = StrategyRegistry[self.strategy]["init_params"]
            known = {key: value for key, value in known.items() if key != "start_method"}
            return {"strategy": kind(**{**known, **AT_ONCE.get(self.name, {})})}
        takes = inspect.signature(kind).parameters
        # To act within a few steps, without importing matplotlib.
        usual = {"every_n_steps": 2, "figure": None}
        plugin = kind(**{key: usual[key] for key in usual if key in takes} | self.settings)
        wrap: dict[str, Callable[[], Settings]] = {
            "callback": lambda: {"callbacks": [plugin]},
            "precision": lambda: {"plugins": [plugin]},
            "profiler": lambda: {"profiler": plugin},
        }
        return wrap[self.kind]()


def find_subjects() -> list[Subject]:
    """Return the rows, by area and name."""
    kinds = {"callback": Callback, "precision": Precision, "profiler": Profiler}
    found = []
    for name in lo.__all__:
        export = getattr(lo, name)
        if not inspect.isclass(export):
            continue
        area = export.__module__.split(".")[1]
        for kind, base in kinds.items():
            if issubclass(export, base):
                first = INSTEAD_OF_DEFAULTS.get(name, {})
                found += [
                    Subject(name, kind, area, settings) for settings in (first, *MORE.get(name, []))
                ]
        if issubclass(export, Strategy):
            found += [
                Subject(name, "strategy", area, strategy=string)
                for string in strategy_strings(export)
            ]
    return sorted(found, key=lambda subject: (subject.area, subject.label))


def strategy_strings(kind: type[Strategy]) -> list[str]:
    """Return the strategy strings of a class, without variants of the launcher."""
    variants = ("_spawn", "_fork", "_notebook")
    return [
        name
        for name, data in StrategyRegistry.items()
        if data["strategy"] is kind and not name.endswith(variants)
    ]
