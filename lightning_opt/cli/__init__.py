"""The command ``lightning-opt``."""

from lightning_opt.cli.main import main

__all__ = ["main"]
