"""docs/private_names.md lists each private name of other packages that is used, with a reason."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_opt"
PAGE = ROOT / "docs" / "private_names.md"

DOCUMENTED = "torch._foreach_"
"""Documented as public by torch in spite of the underscore."""


def own_names(trees: list[ast.Module]) -> set[str]:
    """Return every name that the package defines or assigns, attributes included."""
    names = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.update([node.attr] if ast.unparse(node.value) in ("self", "cls") else [])
    return names


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names_of(tree: ast.Module, own: set[str]) -> list[str]:
    """Return each use of a private name that is not in ``own``."""
    found, inner = [], set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("lightning_opt"):
            module = node.module or ""
            found += [f"{module}.{name.name}" for name in node.names if is_private(name.name)]
            if any(map(is_private, module.split("."))):
                found += [module for name in node.names if not is_private(name.name)][:1]
        elif isinstance(node, ast.Import):
            names = [name.name for name in node.names]
            found += [name for name in names if any(map(is_private, name.split(".")))]
        elif isinstance(node, ast.Attribute) and node not in inner:
            chain = [part for part in ast.walk(node) if isinstance(part, ast.Attribute)]
            private = [part for part in chain if is_private(part.attr) and part.attr not in own]
            by_self = [p for p in private if ast.unparse(p.value) in ("self", "cls")]
            if private and private != by_self:
                inner.update(chain)
                text = ast.unparse(private[0])
                found.append(text if text.startswith("torch.") else private[0].attr)
    return [name for name in found if not name.startswith(DOCUMENTED)]


def private_names() -> dict[str, list[str]]:
    """Return the files of each use, by private name."""
    trees = {
        str(file.relative_to(PACKAGE)): ast.parse(file.read_text())
        for file in sorted(PACKAGE.rglob("*.py"))
    }
    own, places = own_names(list(trees.values())), dict[str, list[str]]()
    for file, tree in trees.items():
        for name in private_names_of(tree, own):
            places.setdefault(name, []).append(file)
    return places


def test_page_lists_every_private_name_with_its_folders_and_reason():
    rows = re.findall(r"^\| `([\w.]+)` \| ([^|]+) \| ([^|]{10,}) \|$", PAGE.read_text(), re.M)
    listed = {name: set(re.findall(r"`([\w/]+)`", where)) for name, where, _ in rows}
    used = {
        name: {str(Path(file).parent) for file in files} for name, files in private_names().items()
    }
    assert listed == used


if __name__ == "__main__":  # the rows without their reasons
    for name, files in private_names().items():
        where = ", ".join(f"`{folder}`" for folder in sorted({str(Path(f).parent) for f in files}))
        print(f"| `{name}` | {where} | |")
