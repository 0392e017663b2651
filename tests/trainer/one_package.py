"""Runs any test with ``pytorch_lightning``: ``LIGHTNING=pytorch_lightning pytest tests/...``."""

import importlib
import importlib.abc
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class NotInstalled(importlib.abc.MetaPathFinder):
    """Makes imports of ``lightning`` fail."""

    def find_spec(self, fullname: str, *_: Any) -> None:
        if fullname.partition(".")[0] == "lightning":
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


class Renamed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports ``pytorch_lightning`` for ``lightning``, with the same module objects."""

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname.partition(".")[0] == "lightning" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        _, _, path = spec.name.partition(".")
        package, _, path = path.partition(".")
        name = "lightning_fabric" if package == "fabric" else "pytorch_lightning"
        module = importlib.import_module(f"{name}.{path}".rstrip("."))
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # importlib has set the one of the other name


def use_pytorch_lightning() -> None:
    """Load lightning_opt with ``pytorch_lightning`` alone, and let tests import it as usual."""
    hide = NotInstalled()
    sys.meta_path.insert(0, hide)
    importlib.import_module("lightning_opt.trainer.lightning")
    sys.meta_path.remove(hide)
    sys.meta_path.insert(0, Renamed())
