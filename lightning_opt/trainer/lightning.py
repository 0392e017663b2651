"""Lightning from its packages ``lightning`` and ``pytorch_lightning``: either one, or both.

The packages have the same code but different classes, and a Trainer of one rejects objects of the
other. So the rest of lightning_opt imports Lightning from here:

- A name such as ``LightningModule`` is a tuple of both packages' classes, for ``isinstance``.
- A class whose name begins with ``Base`` inherits from both packages' classes.
- Functions come from one package, if they work with objects of both.
- Everything else comes from ``package_of(trainer)``, the Trainer's package.
"""

from __future__ import annotations

import copyreg
import importlib
import sys
from abc import ABC, ABCMeta
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import lightning_utilities.core.rank_zero as rank_zero
from lightning_utilities.core.overrides import is_overridden as overrides

T = TypeVar("T")

NAMES = ("lightning.pytorch", "pytorch_lightning")


def _load() -> dict[str, ModuleType]:
    """Import both packages. The one that the user has imported comes first.

    Raises:
        ImportError: If neither is installed.
    """
    loaded: dict[str, ModuleType] = {}
    for name in sorted(NAMES, key=lambda name: name not in sys.modules):
        messages = rank_zero.log, rank_zero.rank_zero_deprecation_category
        try:
            loaded[name] = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
        if len(loaded) > 1:  # each package sets these two; keep those of the user's package
            rank_zero.log, rank_zero.rank_zero_deprecation_category = messages
    if not loaded:
        raise ImportError(
            "lightning_opt needs PyTorch Lightning, and neither of its packages is installed. "
            "Install the one that your code imports: pip install lightning, or "
            "pip install pytorch-lightning."
        )
    return loaded


_LOADED = _load()

PACKAGES = [_LOADED[name] for name in NAMES if name in _LOADED]
"""``lightning.pytorch`` and ``pytorch_lightning``, or the one that is installed."""

DEFAULT: Any = next(iter(_LOADED.values()))
"""The package that was imported first, usually by the user."""

if TYPE_CHECKING:
    import lightning.pytorch as pl
else:
    pl = PACKAGES[0]


def package_of(owner: object) -> Any:
    """Return the package of an object, a class or a module; ``DEFAULT`` if it has none."""
    owner = getattr(owner, "_orig_mod", owner)  # torch.compile wraps a module
    kind = owner if isinstance(owner, type) else type(owner)
    names = [base.__module__ for base in kind.__mro__]
    # `lightning` itself has the classes of `lightning.pytorch`.
    packages = {package.__name__.partition(".")[0]: package for package in PACKAGES}
    for name in [owner.__name__] if isinstance(owner, ModuleType) else names:
        if (first := name.partition(".")[0]) in packages:
            return packages[first]
    return DEFAULT


def _both(kind: Callable[..., T]) -> tuple[type[T], ...]:
    """Return a class and its counterpart in the other package."""
    path = kind.__module__.removeprefix(pl.__name__)
    modules = [importlib.import_module(package.__name__ + path) for package in PACKAGES]
    return tuple(getattr(module, kind.__name__) for module in modules)


Callback = _both(pl.Callback)
LightningDataModule = _both(pl.LightningDataModule)
LightningModule = _both(pl.LightningModule)

BatchSizeFinder = _both(pl.callbacks.BatchSizeFinder)
Checkpoint = _both(pl.callbacks.Checkpoint)
EarlyStopping = _both(pl.callbacks.EarlyStopping)
GradientAccumulationScheduler = _both(pl.callbacks.GradientAccumulationScheduler)
LearningRateFinder = _both(pl.callbacks.LearningRateFinder)

DDPStrategy = _both(pl.strategies.DDPStrategy)
DeepSpeedStrategy = _both(pl.strategies.DeepSpeedStrategy)
FSDPStrategy = _both(pl.strategies.FSDPStrategy)
ModelParallelStrategy = _both(pl.strategies.ModelParallelStrategy)
ParallelStrategy = _both(pl.strategies.ParallelStrategy)
SingleDeviceStrategy = _both(pl.strategies.SingleDeviceStrategy)
MultiProcessingLauncher = _both(pl.strategies.launchers._MultiProcessingLauncher)

Accelerator = _both(pl.accelerators.Accelerator)
MixedPrecision = _both(pl.plugins.MixedPrecision)
Precision = _both(pl.plugins.Precision)
Profiler = _both(pl.profilers.Profiler)

if TYPE_CHECKING:
    BaseCallback = pl.Callback
    BaseDDPStrategy = pl.strategies.DDPStrategy
    BaseMixedPrecision = pl.plugins.MixedPrecision
    BaseProfiler = pl.profilers.Profiler
else:

    class BaseCallback(*Callback):
        """A callback for the Trainers of both packages."""

    class BaseMixedPrecision(*MixedPrecision):
        """A precision plugin for the Trainers of both packages."""

    class BaseProfiler(*Profiler):
        """A profiler for the Trainers of both packages."""

    class OrderOfBases(ABCMeta):
        """Metaclass of strategies: puts the bases from one package before those from the other.

        A strategy checks objects against classes of its own package, so it must run the code of the
        Trainer's package: its class is replaced by a subclass whose ``package`` is the Trainer's.
        """

        def mro(cls) -> list[type]:
            order, package = super().mro(), vars(cls).get("package")
            if package is None:
                return order
            others = [other.__name__ for other in PACKAGES if other is not package]
            last = [base for base in order if base in (ABC, object)]
            first = [base for base in order if base not in last]
            first.sort(key=lambda base: base.__module__.startswith(tuple(others)))
            return [*first, *last]

    class BaseDDPStrategy(*DDPStrategy, metaclass=OrderOfBases):
        """A strategy for the Trainers of both packages."""

        def _configure_launcher(self) -> None:
            # The Trainer calls this method first, after it has set the accelerator.
            self.__class__ = strategy_for(type(self), package_of(self.accelerator).__name__)
            super()._configure_launcher()

    def strategy_for(kind: type, package: str) -> type:
        """Return ``kind``, or its subclass that puts the package's bases first."""
        kind = kind.__base__ if "package" in vars(kind) else kind
        return kind if package == PACKAGES[0].__name__ else _subclass(kind, sys.modules[package])

    @cache
    def _subclass(kind: type, package: ModuleType) -> type:
        names = ("__module__", "__qualname__", "__doc__")
        content = {name: getattr(kind, name) for name in names}
        return type(kind)(kind.__name__, (kind,), {**content, "package": package})

    def _reduce(kind: type) -> str | tuple[Any, ...]:
        if "package" in vars(kind):
            return strategy_for, (kind.__base__, kind.package.__name__)
        return kind.__qualname__

    copyreg.pickle(OrderOfBases, _reduce)


AbstractClosure = pl.loops.optimization.closure.AbstractClosure
Closure = pl.loops.optimization.automatic.Closure
ClosureResult = pl.loops.optimization.automatic.ClosureResult
GradClipAlgorithmType = pl.utilities.GradClipAlgorithmType
is_param_in_hook_signature = pl.utilities.signature_utils.is_param_in_hook_signature
optimizer_handles_unscaling = pl.plugins.precision.amp._optimizer_handles_unscaling  # type: ignore[attr-defined]
prepare_for_backward = pl.overrides.distributed.prepare_for_backward  # type: ignore[attr-defined]
seed_everything = pl.seed_everything


def is_overridden(hook: str, owner: object) -> bool:
    """Return whether a callback, module or datamodule overrides a hook of Lightning's class."""
    for base in (*Callback, *LightningModule, *LightningDataModule):
        if isinstance(owner, base) and hasattr(base, hook):
            return overrides(hook, owner, base)
    return hasattr(owner, hook)
