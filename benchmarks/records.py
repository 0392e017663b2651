"""Which script and which code a record is of, and whether that code has changed since.

The code of a record is its script with the benchmarks, examples and test helpers that it imports,
the folder of each feature that these name, and the package's shared code. Each part has a hash,
without comments, docstrings and layout. It is derived from the sources, so that code which only
other processes load is included, and so that a record without hashes has the same parts.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_opt"
RESULTS = ROOT / "benchmarks" / "results"
WAIVERS = ROOT / "benchmarks" / "waivers.json"
HARNESS = ROOT / "benchmarks" / "harness.py"

SHARED = ("lightning_opt/core", "lightning_opt/trainer", "lightning_opt/worker")
"""Code behind every record."""

Code = dict[str, str]
"""A hash per file or folder."""


@cache
def records() -> dict[str, dict[str, Any]]:
    """Return the committed records by name."""
    found = {file.stem: json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))}
    return {name: record for name, record in found.items() if "machine" in record}


@cache
def waivers() -> dict[str, dict[str, Any]]:
    """Return the signed waivers by record."""
    return json.loads(WAIVERS.read_text()) if WAIVERS.exists() else {}


@cache
def script_of(name: str) -> Path:
    """Return the script that publishes a record.

    Raises:
        LookupError: If there is none.
    """
    quoted = f'"{name.removesuffix("_cuda")}"'
    call = re.compile(rf"publish\(\s*{quoted}")
    scripts = {file: file.read_text() for file in sorted((ROOT / "benchmarks").rglob("*.py"))}
    published = [file for file, text in scripts.items() if call.search(text)]
    # Some names are arguments of functions that publish.
    for script in published or [file for file, text in scripts.items() if quoted in text]:
        return script
    raise LookupError(f"no script publishes {name}")


@cache
def code_of(script: Path) -> Code:
    """Return the hashes of the code behind the records of a script."""
    files, features, waiting = {script}, set[Path](), [script]
    while waiting:
        for part in _mentioned(waiting.pop()) - files - features:
            if part.is_dir():
                features.add(part)
            elif part != HARNESS:  # it prints and writes, but measures nothing
                files.add(part)
                waiting.append(part)
    found = {_name(file): _hash((file,)) for file in files}
    for feature in features:
        if not _name(feature).startswith(SHARED):
            # Files that several features of an area need stand in the area's folder.
            area = PACKAGE / feature.relative_to(PACKAGE).parts[0]
            own = {*area.glob("*.py"), *(feature.rglob("*.py") if feature != area else ())}
            found[_name(feature)] = _hash(tuple(sorted(own)))
    for part in SHARED:
        found[part] = _hash(tuple(sorted((ROOT / part).rglob("*.py"))))
    return dict(sorted(found.items()))


def changed_parts(name: str) -> set[str]:
    """Return the parts that changed since a record was measured or signed."""
    now = code_of(script_of(name))
    known = [records()[name].get("code", {}), waivers().get(name, {}).get("code", {})]
    changes = [{p for p in {*now, *code} if now.get(p) != code.get(p)} for code in known]
    return min(changes, key=len)


def files_of(code: Code) -> Iterator[Path]:
    """Return all files whose hashes these are."""
    for part in code:
        path = ROOT / part
        yield from path.rglob("*.py") if path.is_dir() else (path,)


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def _hash(files: tuple[Path, ...]) -> str:
    found = hashlib.sha256()
    for file in files:
        found.update(f"{file.name} {_content(_tree(file))}\n".encode())
    return found.hexdigest()[:12]


def _content(node: object) -> object:
    """Return a syntax tree without docstrings and empty fields, alike in all versions of Python."""
    if isinstance(node, list):
        return [_content(one) for one in node if not _is_docstring(one)]
    if isinstance(node, ast.AST):
        fields = [(name, _content(value)) for name, value in ast.iter_fields(node)]
        return type(node).__name__, [
            (name, value) for name, value in fields if value not in ([], None)
        ]
    return repr(node)


def _is_docstring(node: object) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


@cache
def _exports() -> dict[str, Path]:
    """Return the folder of each public name and of each strategy string."""
    found = {
        alias.name: PACKAGE / node.module.replace(".", "/")
        for node in ast.walk(_tree(PACKAGE / "__init__.pyi"))
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    found = {name: module.parent for name, module in found.items()}
    strings = (PACKAGE / "strategies" / "strategy_strings.py").read_text()
    return found | {text: found[name] for text, name in re.findall(r'"(\w+)": \("(\w+)"', strings)}


@cache
def _mentioned(file: Path) -> set[Path]:
    """Return the files that a file imports, and the folders of the package that it uses."""
    modules, names = set[str](), set[str]()
    imports_by_name = "import_module" in file.read_text()
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported = {alias.name for alias in node.names}
            names |= imported
            modules |= {node.module or "", *(f"{node.module}.{name}" for name in imported)}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "lo":
            names.add(node.attr)
        elif isinstance(node, ast.Constant) and str(node.value).isidentifier():
            text = str(node.value)
            if not text.islower() or text.startswith(("ddp_", "diloco")):  # a class or a strategy
                names.add(text)
            if imports_by_name:
                modules.add(text.removeprefix("example_"))
    found = {_exports()[name] for name in names & set(_exports())}
    for module in modules:
        for folder in (ROOT, ROOT / "examples"):
            path = folder / f"{module.replace('.', '/')}.py"
            if path.exists():
                found.add(path.parent if path.is_relative_to(PACKAGE) else path)
    return found
