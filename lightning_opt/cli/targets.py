"""Models and data named on a command line, and how to create them."""

from __future__ import annotations

import importlib
import inspect
import operator
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, update_wrapper
from itertools import pairwise
from pathlib import Path
from types import MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from lightning_opt.cli.main import UsageError
from lightning_opt.trainer.lightning import (
    DEFAULT,
    LightningDataModule,
    LightningModule,
    package_of,
)
from lightning_opt.worker.recipes import create, import_attribute, import_source

if TYPE_CHECKING:
    import lightning.pytorch as pl

BASES = {"--model": LightningModule, "--data": LightningDataModule}
CONFIGURATIONS = (".yaml", ".yml", ".json")

IMPORT_HINTS = {
    ": SystemExit": "Call what parses arguments or exits under if __name__ == '__main__'.",
    "no known parent package": "Name it as a module of its package: package.module:Class. "
    "If the package is in src, first set PYTHONPATH=src or run pip install -e .",
}
"""Advice by words in the error of an import."""


@dataclass(eq=False)
class Recipe:
    """Creates a model or data, in this process or in another one.

    Args:
        target: ``"module:attribute"`` or ``"/path/to/file.py:attribute"``.
        entry: The class's entry in the parsed configuration.
        optimizer: The model's optimizer, in the format of LightningCLI's ``--optimizer``.
        scheduler: Its scheduler, in the format of LightningCLI's ``--lr_scheduler``.
    """

    target: str
    entry: Mapping[str, Any]
    optimizer: Mapping[str, Any] | None = None
    scheduler: Mapping[str, Any] | None = None

    def __call__(self) -> Any:
        instance = create(import_attribute(self.target), self.entry)
        if self.optimizer is not None:
            _set_optimizer(instance, self.optimizer, self.scheduler)
        return instance


def no_data() -> None:
    """Return None, for a model with its own loaders."""


def _set_optimizer(
    model: pl.LightningModule, optimizer: Mapping[str, Any], scheduler: Mapping[str, Any] | None
) -> None:
    """Set the optimizer as LightningCLI does."""
    cli = cli_of(package_of(model))
    original = cli.LightningCLI.configure_optimizers
    instance = cli.instantiate_class((model.parameters(),), dict(optimizer))
    lr_scheduler = cli.instantiate_class((instance,), dict(scheduler)) if scheduler else None
    configure = partial(original, optimizer=instance, lr_scheduler=lr_scheduler)
    model.configure_optimizers = MethodType(update_wrapper(configure, original), model)  # type: ignore[method-assign]


class Targets:
    """Translates the command line's models and data into import paths for LightningCLI.

    A first argument ``file.py:Class`` becomes ``--model file.Class``; ``config.yaml`` becomes
    ``--config config.yaml``.

    Attributes:
        argv: The command line in LightningCLI's notation.
        package: The model's Lightning package.

    Raises:
        UsageError: If a model or data does not exist.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self._targets: dict[str, str] = {}
        self.argv = self._translate(argv)
        self.package = self._package()

    def _translate(self, argv: Sequence[str]) -> list[str]:
        argv = list(argv)
        if argv and not argv[0].startswith("-"):
            is_configuration = argv[0].lower().endswith(CONFIGURATIONS)
            argv.insert(0, "--config" if is_configuration else "--model")
        translated: list[str] = []
        arguments = iter(argv)
        for argument in arguments:
            option, equals, value = argument.partition("=")
            if option not in BASES:
                translated.append(argument)
                continue
            translated += self._resolve(option, value if equals else next(arguments, ""))
        return translated

    def _package(self) -> Any:
        import yaml  # type: ignore[import-untyped]  # one of Lightning's own dependencies

        path, arguments = None, ""
        for option, following in pairwise([*self.argv, ""]):
            option, _, value = option.partition("=")
            value = value or following
            with suppress(OSError, AttributeError, yaml.YAMLError):  # the parser raises later
                if option == "--model":
                    model = yaml.safe_load(value)
                elif option in ("--config", "-c"):
                    model = yaml.safe_load(Path(value).read_text(encoding="utf-8")).get("model")
                else:
                    continue
                if isinstance(model, Mapping) and "class_path" not in model:
                    arguments = value
                elif model:
                    path = model["class_path"] if isinstance(model, Mapping) else model
        if arguments and path is None:
            raise UsageError(
                f"{arguments} has arguments of the model but no class_path. Name the class first: "
                f"path/to/file.py:Class --config {arguments}"
            )
        try:
            return package_of(look_up(as_target(str(path))))
        except (ImportError, UsageError, ValueError):
            return DEFAULT  # the parser raises later

    def recipe(self, entry: Mapping[str, Any] | None, *more: Any) -> Recipe | None:
        """Return a recipe for an entry of the parsed configuration."""
        if entry is None:
            return None
        path = entry["class_path"]
        return Recipe(self._targets.get(path, as_target(path)), entry, *more)

    def _resolve(self, option: str, value: str) -> list[str]:
        """Return the option and its value as an import path."""
        if value.endswith(".py"):
            names = ", ".join(f"{value}:{name}" for name in class_names(find_module(value)))
            advice = names or "none. Give the file that defines it: path/to/file.py:Class."
            raise UsageError(f"{option} {value} names a file; name a class in it: {advice}")
        if ":" not in value or value.startswith("{"):
            return [option, value]  # in LightningCLI's own notation: an import path, a name or JSON
        found, base, (place, _, name) = look_up(value), BASES[option], value.rpartition(":")
        if not (inspect.isclass(found) and issubclass(found, base)):
            raise UsageError(f"{value} is not a class that inherits from {base[0].__name__}.")
        path = f"{found.__module__}.{found.__qualname__}"
        self._targets[path] = f"{Path(place).resolve()}:{name}" if place.endswith(".py") else value
        return [option, path]


def cli_of(package: ModuleType) -> Any:
    """Import a Lightning package's module that defines LightningCLI."""
    return importlib.import_module(f"{package.__name__}.cli")


def as_target(class_path: str) -> str:
    """Convert ``module.Class`` to ``module:Class``."""
    return ":".join(class_path.rsplit(".", 1))


def class_names(module: ModuleType) -> list[str]:
    classes = {name: value for name, value in vars(module).items() if inspect.isclass(value)}
    return [name for name, value in classes.items() if value.__module__ == module.__name__]


def look_up(target: str) -> Any:
    """Import the object ``module:attribute`` or ``file.py:attribute``."""
    place, _, name = target.rpartition(":")
    module = find_module(place)
    try:
        return operator.attrgetter(name)(module)
    except AttributeError as error:
        known = ", ".join(class_names(module))
        raise UsageError(
            f"There is no {name!r} in {place}" + (f"; its classes are {known}." if known else ".")
        ) from error


def find_module(place: str) -> ModuleType:
    """Import a module by its name or its file."""
    if place.endswith(".py") and not Path(place).is_file():
        raise UsageError(f"There is no file {place}.")
    try:
        return import_source(place)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{place}.".startswith(f"{error.name}."):
            raise UsageError(
                f"There is no module {error.name!r} here. Run the command in the folder that "
                "contains it, add that folder to PYTHONPATH, or give path/to/file.py:Class."
            ) from error
        text = f"{place} cannot be imported: {type(error).__name__}: {error}".rstrip(": ")
        hints = [hint for words, hint in IMPORT_HINTS.items() if words in text]
        raise ImportError(". ".join([text, *hints])) from error
