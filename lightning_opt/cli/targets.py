"""Models and data named on a command line, and how to create them."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any, NoReturn
from unittest import mock

from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from lightning_opt.cli.main import UsageError
from lightning_opt.worker.recipes import import_attribute, instantiate

BASES: dict[str, type] = {"model": LightningModule, "data": LightningDataModule}
CONFIGURATIONS = (".yaml", ".yml", ".json")


@dataclass(repr=False, eq=False)
class Recipe:
    """Creates a model or data, in this process or in another one.

    Args:
        target: ``"module:attribute"`` or ``"/path/to/file.py:attribute"``.
        settings: Constructor arguments; ``class_path`` and ``init_args`` describe objects.
        optimizer: The model's optimizer, in the format of LightningCLI's ``--optimizer``.
        scheduler: Its scheduler, in the format of LightningCLI's ``--lr_scheduler``.
    """

    target: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] | None = None
    scheduler: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        # The tuner does not continue a journal after the file has been edited.
        self.version = _version(self.target)

    def __call__(self) -> Any:
        """Create the object."""
        instance = import_attribute(self.target)(**instantiate(self.settings))
        if self.optimizer is not None:
            _set_optimizer(instance, self.optimizer, self.scheduler)
        return instance

    def __repr__(self) -> str:
        return self.target


def _version(target: str) -> str:
    try:
        content = Path(inspect.getfile(import_attribute(target))).read_bytes()
    except (OSError, TypeError):  # defined in an interpreter, or an extension module
        return ""
    return hashlib.sha256(content).hexdigest()[:16]


def no_data() -> None:
    """Return None, for a model with its own loaders."""


def _set_optimizer(
    model: LightningModule, optimizer: Mapping[str, Any], scheduler: Mapping[str, Any] | None
) -> None:
    """Set the optimizer as LightningCLI does."""
    from lightning.pytorch.cli import LightningCLI, instantiate_class

    instance = instantiate_class((model.parameters(),), dict(optimizer))
    lr_scheduler = instantiate_class((instance,), dict(scheduler)) if scheduler else None
    configure = partial(
        LightningCLI.configure_optimizers, optimizer=instance, lr_scheduler=lr_scheduler
    )
    update_wrapper(configure, LightningCLI.configure_optimizers)
    model.configure_optimizers = MethodType(configure, model)  # type: ignore[method-assign]


class Targets:
    """Translates targets of the command line into import paths for LightningCLI.

    Attributes:
        functions: Targets that are functions instead of classes, by ``"model"`` and ``"data"``.
    """

    def __init__(self) -> None:
        self.functions: dict[str, str] = {}
        self._places: dict[str, str] = {}

    def translate(self, argv: Sequence[str]) -> list[str]:
        """Return the command line in LightningCLI's notation.

        A first argument ``file.py:Class`` becomes ``--model file.Class``; ``config.yaml`` becomes
        ``--config config.yaml``.

        Raises:
            UsageError: For a target that does not exist.
        """
        argv = list(argv)
        if argv and not argv[0].startswith("-"):
            is_configuration = argv[0].lower().endswith(CONFIGURATIONS)
            argv.insert(0, "--config" if is_configuration else "--model")
        translated: list[str] = []
        model_file: str | None = None
        arguments = iter(argv)
        for argument in arguments:
            option, equals, value = argument.partition("=")
            if option not in ("--model", "--data"):
                translated.append(argument)
                continue
            value = value if equals else next(arguments, "")
            if not value:
                raise UsageError(f"{option} must be followed by module:Class or a path.")
            if option == "--model" and value.endswith(".py"):
                model_file = value
            translated += self._resolve(option, value)
        if model_file is not None and "--data" not in translated:
            datamodules = classes_of(find_module(model_file), LightningDataModule)
            if len(datamodules) == 1:
                name = datamodules[0].__qualname__
                translated += self._resolve("--data", f"{model_file}:{name}")
        return translated

    def recipe(self, kind: str, entry: Any, **more: Any) -> Recipe | None:
        """Return a recipe for the entry ``"model"`` or ``"data"`` of the parsed configuration."""
        if kind in self.functions:
            return Recipe(self.functions[kind])
        if entry is None:
            return None
        path = entry["class_path"]
        module, _, name = path.rpartition(".")
        place = self._places.get(path, f"{module}:{name}")
        return Recipe(place, entry.get("init_args") or {}, **more)

    def _resolve(self, option: str, value: str) -> list[str]:
        """Return the option with an import path; nothing for a function, which is stored."""
        kind = option.removeprefix("--")
        if value.endswith(".py"):
            value = only_class(kind, value)
        if ":" not in value or value.startswith("{"):
            return [option, value]  # LightningCLI's own notation: an import path, a name, JSON
        found, (place, _, name) = look_up(value), value.rpartition(":")
        target = f"{Path(place).resolve()}:{name}" if place.endswith(".py") else value
        if inspect.isclass(found) and issubclass(found, BASES[kind]):
            path = f"{found.__module__}.{found.__qualname__}"
            self._places[path] = target
            return [option, path]
        if not callable(found):
            raise UsageError(f"{value} is not a class or function, so it cannot create a {kind}.")
        self.functions[kind] = target
        return []


def only_class(kind: str, path: str) -> str:
    """Return the target of the only class of a kind in a file.

    Raises:
        UsageError: If there is none, or more than one.
    """
    own = classes_of(find_module(path), BASES[kind])
    if len(own) == 1:
        return f"{path}:{own[0].__qualname__}"
    names = ", ".join(f"{path}:{found.__name__}" for found in own)
    raise UsageError(
        f"{path} has {'more than one' if own else 'no'} {BASES[kind].__name__}; "
        + (f"name one of {names}." if own else f"name a function: {path}:make_{kind}.")
    )


def classes_of(module: ModuleType, base: type = object) -> list[type]:
    """Return the classes that a module defines, except abstract ones."""
    return [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and value.__module__ == module.__name__
        and issubclass(value, base)
        and not inspect.isabstract(value)
    ]


def look_up(target: str) -> Any:
    """Return the object that a target names.

    Raises:
        UsageError: If it does not exist.
        ImportError: If its module exists but cannot be imported.
    """
    place, _, name = target.rpartition(":")
    module = find_module(place)
    try:
        return operator.attrgetter(name)(module)
    except AttributeError as error:
        known = ", ".join(found.__name__ for found in classes_of(module))
        raise UsageError(
            f"There is no {name!r} in {place}" + (f"; its classes are {known}." if known else ".")
        ) from error


def find_module(place: str) -> ModuleType:
    """Import a module by its name or its file.

    Raises:
        UsageError: If it does not exist.
        ImportError: If it cannot be imported.
    """
    is_file = place.endswith(".py")
    if is_file and not Path(place).is_file():
        raise UsageError(f"There is no file {place}.")
    try:
        with mock.patch.object(Trainer, "fit", partial(_raise_on_fit, place)):
            name = import_attribute(f"{Path(place).resolve()}:__name__") if is_file else place
            return importlib.import_module(name)
    except UsageError:
        raise
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{place}.".startswith(f"{missing}."):
            raise UsageError(
                f"There is no module {missing!r} here. Run the command in the folder that has "
                "it, or give the path to its file: path/to/file.py:Class."
            ) from error
        raise ImportError(f"{place} cannot be imported: {type(error).__name__}: {error}") from error


def _raise_on_fit(place: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise UsageError(
        f"{place} trains when it is imported, and would do so in each process. Put its call of "
        "fit, and the code that prepares it, under: if __name__ == '__main__':"
    )
