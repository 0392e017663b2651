"""Models and data as they are written on a command line."""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial, update_wrapper
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any, NoReturn
from unittest import mock

from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from lightning_opt.cli.errors import UsageError
from lightning_opt.worker.recipes import find, instantiate

BASES: dict[str, type] = {"model": LightningModule, "data": LightningDataModule}
WORDS = {"model": "LightningModule", "data": "LightningDataModule"}
CONFIGURATIONS = (".yaml", ".yml", ".json")


class Recipe:
    """Makes a model or data anew, in this process or in another one.

    Args:
        target: ``"module:attribute"`` or ``"/path/to/file.py:attribute"``.
        settings: Its arguments, where ``class_path`` and ``init_args`` describe objects.
        optimizer: Of a model, as LightningCLI's ``--optimizer`` has it.
        scheduler: Of a model, as LightningCLI's ``--lr_scheduler`` has it.
    """

    def __init__(
        self,
        target: str,
        settings: Mapping[str, Any] | None = None,
        optimizer: Mapping[str, Any] | None = None,
        scheduler: Mapping[str, Any] | None = None,
    ) -> None:
        self.target, self.settings = target, dict(settings or {})
        self.optimizer, self.scheduler = optimizer, scheduler
        # A journal of the tuner is for this very file, and not for what it is edited to later.
        self.version = _version(target)

    def __call__(self) -> Any:
        """Make it."""
        made = find(self.target)(**instantiate(self.settings))
        if self.optimizer is not None:
            _set_optimizer(made, self.optimizer, self.scheduler)
        return made

    def __repr__(self) -> str:
        return self.target


def _version(target: str) -> str:
    try:
        content = Path(inspect.getfile(find(target))).read_bytes()
    except (OSError, TypeError):  # made in an interpreter, or compiled
        return ""
    return hashlib.sha256(content).hexdigest()[:16]


def no_data() -> None:
    """Stand for the loaders that the model brings itself."""


def _set_optimizer(
    model: LightningModule, optimizer: Mapping[str, Any], scheduler: Mapping[str, Any] | None
) -> None:
    """Do as LightningCLI does with an optimizer of its configuration."""
    from lightning.pytorch.cli import LightningCLI, instantiate_class

    made = instantiate_class((model.parameters(),), dict(optimizer))
    follows = instantiate_class((made,), dict(scheduler)) if scheduler else None
    configure = partial(LightningCLI.configure_optimizers, optimizer=made, lr_scheduler=follows)
    update_wrapper(configure, LightningCLI.configure_optimizers)
    model.configure_optimizers = MethodType(configure, model)  # type: ignore[method-assign]


class Targets:
    """Translates what a user writes into what LightningCLI reads, and remembers where it was.

    Attributes:
        functions: Functions that were named instead of classes, by ``"model"`` and ``"data"``.
    """

    def __init__(self) -> None:
        self.functions: dict[str, str] = {}
        self._places: dict[str, str] = {}
        self._alone: str | None = None

    def translate(self, words: Sequence[str]) -> list[str]:
        """Return the words with a first one that stands alone as an option, and targets resolved.

        ``file.py:Class`` becomes ``--model file.Class``, ``config.yaml`` ``--config config.yaml``.

        Raises:
            UsageError: For a target that is not there.
        """
        words = list(words)
        if words and not words[0].startswith("-"):
            is_configuration = words[0].lower().endswith(CONFIGURATIONS)
            words.insert(0, "--config" if is_configuration else "--model")
        found: list[str] = []
        while words:
            word = words.pop(0)
            option, equals, value = word.partition("=")
            if option not in ("--model", "--data"):
                found.append(word)
                continue
            if not equals:
                if not words:
                    raise UsageError(f"{option} must be followed by module:Class or a path.")
                value = words.pop(0)
            path = self._resolve(option[2:], value)
            found += [option, path] if path is not None else []
        if self._alone is not None and not any(word.split("=")[0] == "--data" for word in found):
            path = self._only(find_module(self._alone), "data", self._alone, required=False)
            found += ["--data", path] if path is not None else []
        return found

    def recipe(self, kind: str, entry: Any, **more: Any) -> Recipe | None:
        """Return how to make what the parsed configuration has under ``"model"`` or ``"data"``."""
        if kind in self.functions:
            return Recipe(self.functions[kind])
        if entry is None:
            return None
        path = entry["class_path"]
        module, _, name = path.rpartition(".")
        place = self._places.get(path, f"{module}:{name}")
        return Recipe(place, entry.get("init_args"), **more)

    def _resolve(self, kind: str, value: str) -> str | None:
        """Return an import path for jsonargparse; None for a function, which is kept apart."""
        if value.endswith(".py"):
            if kind == "model":
                self._alone = value
            return self._only(find_module(value), kind, value)
        if ":" not in value or value.startswith("{"):
            return value  # as LightningCLI takes it: an import path, a name, JSON
        found, (place, _, name) = look_up(value), value.rpartition(":")
        target = f"{Path(place).resolve()}:{name}" if place.endswith(".py") else value
        if not inspect.isclass(found) or not issubclass(found, BASES[kind]):
            if not callable(found):
                raise UsageError(f"{value} is no class and no function, so it makes no {kind}.")
            self.functions[kind] = target
            return None
        return self._remember(found, target)

    def _only(self, module: ModuleType, kind: str, path: str, required: bool = True) -> str | None:
        own = [
            value
            for value in vars(module).values()
            if inspect.isclass(value)
            and issubclass(value, BASES[kind])
            and value.__module__ == module.__name__
            and not inspect.isabstract(value)
        ]
        if len(own) == 1:
            return self._remember(own[0], f"{Path(path).resolve()}:{own[0].__qualname__}")
        if not required:
            return None
        names = ", ".join(f"{path}:{kind.__name__}" for kind in own)
        raise UsageError(
            f"{path} has {'no' if not own else 'more than one'} {WORDS[kind]}"
            + (f"; name one of {names}." if own else f"; name a function: {path}:make_{kind}.")
        )

    def _remember(self, kind: type, target: str) -> str:
        path = f"{kind.__module__}.{kind.__qualname__}"
        self._places[path] = target
        return path


def look_up(target: str) -> Any:
    """Return what a target names.

    Raises:
        UsageError: If it is not there.
        ImportError: If there is a module, but it cannot be imported.
    """
    place, _, name = target.rpartition(":")
    module = find_module(place)
    for part in name.split("."):
        if not hasattr(module, part):
            known = [
                key
                for key, value in vars(module).items()
                if inspect.isclass(value) and value.__module__ == module.__name__
            ]
            raise UsageError(
                f"There is no {name!r} in {place}"
                + (f"; its classes are {', '.join(known)}." if known else ".")
            )
        module = getattr(module, part)
    return module


def find_module(place: str) -> Any:
    """Import a module by its name or its file.

    Raises:
        UsageError: If there is none.
        ImportError: If it cannot be imported.
    """
    load: Callable[[], Any]
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise UsageError(f"There is no file {place}.")
        load = partial(find, f"{Path(place).resolve()}:__name__")
    else:
        load = partial(importlib.import_module, place)
    try:
        with mock.patch.object(Trainer, "fit", partial(_refuse_to_train, place)):
            found: Any = load()
    except UsageError:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(f"{error.name}.")):
            raise UsageError(
                f"There is no module {error.name!r} here. Run the command in the folder that has "
                "it, or give the path to its file: path/to/file.py:Class."
            ) from error
        raise ImportError(f"{place} cannot be imported: {error}.") from error
    except Exception as error:
        raise ImportError(f"{place} cannot be imported: {type(error).__name__}: {error}") from error
    return importlib.import_module(found) if place.endswith(".py") else found


def _refuse_to_train(place: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise UsageError(
        f"{place} trains when it is imported, and would do so in each process. Put its call of "
        "fit, and what goes with it, under: if __name__ == '__main__':"
    )
