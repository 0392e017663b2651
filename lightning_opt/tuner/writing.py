"""Trainer arguments as YAML and as Python."""

from __future__ import annotations

import json
import keyword
from collections.abc import Mapping
from typing import Any


def to_yaml(settings: Mapping[str, Any], head: str = "") -> str:
    import yaml  # type: ignore[import-untyped]  # one of Lightning's own dependencies

    content = {"trainer": json.loads(json.dumps(settings))}  # tuples as lists
    return head + str(yaml.safe_dump(content, sort_keys=False, default_flow_style=False))


def to_python(settings: Mapping[str, Any], head: str = "") -> str:
    imports = {"import lightning as L"}
    arguments = "".join(
        f"    {name}={_source(value, imports, 1)},\n" for name, value in settings.items()
    )
    call = f"trainer = L.Trainer(\n{arguments})\n" if arguments else "trainer = L.Trainer()\n"
    lines = "\n".join(sorted(imports))
    return f"{head}{lines}\n\n{call}"


def _source(value: Any, imports: set[str], depth: int) -> str:
    if isinstance(value, Mapping) and "class_path" in value:
        path = str(value["class_path"])
        module, _, name = path.rpartition(".")
        if module == "lightning_opt":
            imports.add("import lightning_opt as lo")
            path = f"lo.{name}"
        elif module:
            imports.add(f"import {module}")
        arguments = value.get("init_args") or {}
        if any(not key.isidentifier() or keyword.iskeyword(key) for key in arguments):
            raise ValueError(f"The arguments of {path} cannot be written in Python: {arguments}.")
        inside = (f"{key}={_source(item, imports, depth)}" for key, item in arguments.items())
        return f"{path}({', '.join(inside)})"
    if isinstance(value, (list, tuple)):
        if not value:
            return "[]"
        space = "    " * (depth + 1)
        items = "".join(f"{space}{_source(item, imports, depth + 1)},\n" for item in value)
        return f"[\n{items}{'    ' * depth}]"
    if isinstance(value, Mapping):
        inside = (f"{key!r}: {_source(item, imports, depth)}" for key, item in value.items())
        return "{" + ", ".join(inside) + "}"
    return repr(value)
