"""Callbacks, strategies and plugins that make a Lightning Trainer faster, smaller and safer."""

import importlib.machinery
import sys

import lazy_loader

__version__ = "0.1.0"

# The exports stand in `__init__.pyi`. Each is imported when it is first used: torch and Lightning
# take seconds, which a command line that only shows its help need not.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


class _StrategyStrings(importlib.machinery.PathFinder):
    """Makes the strategy strings known as soon as there is a Lightning that could be given one."""

    @classmethod
    def find_spec(cls, fullname: str, *where: object) -> importlib.machinery.ModuleSpec | None:
        """Find Lightning, and nothing else."""
        if fullname != "lightning.pytorch":
            return None
        found = super().find_spec(fullname, *where)  # type: ignore[arg-type]
        if found is not None and found.loader is not None:
            load = found.loader.exec_module
            found.loader.exec_module = lambda module: cls.register(load(module))  # type: ignore[method-assign]
        return found

    @staticmethod
    def register(_: object = None) -> None:
        """Register them."""
        from lightning_opt.strategies.strategy_strings import register_strategies

        register_strategies()


if "lightning.pytorch" in sys.modules:
    _StrategyStrings.register()
else:
    sys.meta_path.insert(0, _StrategyStrings)
