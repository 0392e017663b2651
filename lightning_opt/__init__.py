"""Callbacks, strategies and plugins that make a Lightning Trainer faster, smaller and safer."""

import importlib
import importlib.machinery
import sys

import lazy_loader

__version__ = "0.1.0"

# The exports are listed in `__init__.pyi`. Each is imported on first use: importing torch and
# Lightning takes seconds, and `lightning-opt --help` needs neither.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


class _StrategyStrings(importlib.machinery.PathFinder):
    """Registers the strategy strings with each package of Lightning when it is imported."""

    packages = ("lightning.pytorch", "pytorch_lightning")

    @classmethod
    def find_spec(cls, fullname: str, *where: object) -> importlib.machinery.ModuleSpec | None:
        """Find the packages of Lightning, and nothing else."""
        if fullname not in cls.packages:
            return None
        found = super().find_spec(fullname, *where)  # type: ignore[arg-type]
        if found is not None and found.loader is not None:
            load = found.loader.exec_module
            found.loader.exec_module = lambda module: cls.register(fullname, load(module))  # type: ignore[method-assign]
        return found

    @staticmethod
    def register(package: str, _: object = None) -> None:
        """Register the strategy strings with one package."""
        from lightning_opt.strategies.strategy_strings import register_strategies

        register_strategies(importlib.import_module(f"{package}.strategies").StrategyRegistry)


for _package in _StrategyStrings.packages:
    if _package in sys.modules:
        _StrategyStrings.register(_package)
sys.meta_path.insert(0, _StrategyStrings)
