"""Callbacks, strategies and plugins that make a Lightning Trainer faster, smaller and safer."""

import lazy_loader
import wrapt

__version__ = "0.1.0"

# The exports stand in `__init__.pyi`. Each is imported when it is first used: torch and Lightning
# take seconds, which a command line that only shows its help need not.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


@wrapt.when_imported("lightning.pytorch")
def _register_strategies(_: object) -> None:
    """Make the strategy strings known as soon as there is a Lightning that could be given one."""
    from lightning_opt.strategies.strategy_strings import register_strategies

    register_strategies()
