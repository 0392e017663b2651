"""The rows of the matrix: every callback, precision plugin, strategy and profiler of the package.

They are found in ``lightning_opt.__all__``, so a new one is in the matrix once it is regenerated.
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
    # Inductor takes seconds for each run; what a backend does is torch's.
    "CompileModel": {"backend": "eager"},
    # The processes of the tests may have no children.
    "DataPipelineTuner": {"max_workers": 0, "verbose": False},
    # The default overflows, and leaves out updates, in the first steps.
    "DynamicLossScale": {"init_scale": 1024.0},
}

AT_ONCE: dict[str, Settings] = {
    "CompressedDDPStrategy": {"warmup_steps": 2, "ramp_steps": 0},
    "DiLoCoStrategy": {"sync_every": 6},
}
"""What makes strategies exchange within the few steps of a cell, on a network that needs it not."""

MORE: dict[str, list[Settings]] = {
    "Accumulation": [{"schedule": 2}],
    "ActivationCheckpointing": [{"policy": "every_layer"}, {"policy": "selective"}],
    "AdaptiveClipping": [{"rule": "unit_wise"}],
    "ChannelsLast": [{"policy": "always"}],
    "MicroBatching": [{"size": 2}],
}
"""Further settings that are a row of their own, because they are refused elsewhere."""

CHANGES = {
    "Accumulation": "fewer, larger steps",
    "AdaptiveClipping": "clips",
    "CurvaturePreconditioner": "divides gradients by the curvature",
    "CompressedDDPStrategy": "gradients lose digits on the wire",
    "DiLoCoStrategy": "replicas train by themselves for some steps",
    "HookedDDPStrategy": "gradients lose digits on the wire",
}
"""Those that are meant to change weights. All others must end with those of a run without them."""

_MEAN = "a checkpoint holds the mean of what the ranks have not sent yet"
RESUMES_OTHERWISE = {
    **dict.fromkeys(("ddp_int4", "ddp_int8", "ddp_powersgd", "ddp_threshold", "ddp_topk"), _MEAN),
}
"""Those whose resumed run is not that in one piece."""

OF_A_REPLICA = {"CurvaturePreconditioner"}
"""Those whose state is each replica's own under DiLoCo, of which a checkpoint holds rank 0's."""

ROUNDS = {"ChannelsLast", "CompileModel", "FusedOptimizer", "MicroBatching"}
"""Those that add up in another order, so that their last digits may depend on the processor."""


@dataclass(frozen=True)
class Subject:
    """One row.

    Attributes:
        name: Of the class in ``lightning_opt``.
        kind: ``"callback"``, ``"precision"``, ``"strategy"`` or ``"profiler"``.
        area: The feature package in which it is.
        settings: What it is made with.
        strategy: The strategy string, of a strategy.
    """

    name: str
    kind: str
    area: str
    settings: Settings = field(default_factory=dict)
    strategy: str = ""

    @property
    def label(self) -> str:
        """How the row is called: as one would write it."""
        if self.strategy:
            return f'strategy="{self.strategy}"'
        arguments = ", ".join(f"{key}={value!r}" for key, value in self.settings.items())
        return f"{self.name}({arguments})".replace("'", '"')

    def trainer_settings(self) -> Settings:
        """Return what the Trainer is given, made anew at each call."""
        kind = getattr(lo, self.name)
        if self.strategy:
            known = StrategyRegistry[self.strategy]["init_params"]
            known = {key: value for key, value in known.items() if key != "start_method"}
            return {"strategy": kind(**{**known, **AT_ONCE.get(self.name, {})})}
        takes = inspect.signature(kind).parameters
        # So that it does something within a few steps, and does not import matplotlib.
        usual = {"every_n_steps": 2, "figure": None}
        made = kind(**{key: usual[key] for key in usual if key in takes} | self.settings)
        wrap: dict[str, Callable[[], Settings]] = {
            "callback": lambda: {"callbacks": [made]},
            "precision": lambda: {"plugins": [made]},
            "profiler": lambda: {"profiler": made},
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
                for string in own_strategies(export)
            ]
    return sorted(found, key=lambda subject: (subject.area, subject.label))


def own_strategies(kind: type[Strategy]) -> list[str]:
    """Return the strategy strings that make this class, without the variants of its launcher."""
    variants = ("_spawn", "_fork", "_notebook")
    return [
        name
        for name, data in StrategyRegistry.items()
        if data["strategy"] is kind and not name.endswith(variants)
    ]
