"""How the package is built: small files, one folder a feature, no more code than can be carried."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from lightning.pytorch import Callback

import lightning_opt as lo

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_opt"
FILES = sorted(PACKAGE.rglob("*.py"))

TOGETHER = {"core", "trainer", "worker", "presets", "tuner", "cli"}
"""What is under or above the areas, and is no area of features itself."""

FEATURES = sorted(
    folder.relative_to(PACKAGE)
    for folder in {file.parent for file in PACKAGE.glob("*/*/*.py")}
    if folder.parent.name not in TOGETHER
)


def docstrings_of(tree: ast.AST) -> Iterator[ast.stmt]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            yield node.body[0]


def code_lines(text: str) -> int:
    """Count lines that are neither blank nor a comment nor of a docstring."""
    left_out = {
        number
        for number, line in enumerate(text.splitlines(), start=1)
        if not line.strip() or line.lstrip().startswith("#")
    }
    for docstring in docstrings_of(ast.parse(text)):
        left_out.update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(text.splitlines()) - len(left_out)


def test_lines_of_code_are_those_that_do_something():
    assert (
        code_lines('"""What\n\nit is."""\n\n# why\nx = """a\n# b"""\n\n\ndef f():\n    """F."""\n')
        == 2
    )


def test_no_file_is_longer_than_400_lines():
    lengths = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in FILES}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_there_is_no_more_code_than_this():
    """Something new pays with something old, or this number is raised by decision."""
    assert sum(code_lines(file.read_text()) for file in FILES) <= 23_500


@pytest.mark.parametrize("feature", FEATURES, ids=str)
def test_a_feature_has_its_tests_and_its_page_at_the_same_path(feature):
    page = ROOT / "docs" / f"{feature}.md"
    assert page.exists()
    assert list((ROOT / "tests" / feature).glob("test_*.py"))
    last = page.read_text().strip().rpartition("\n\n")[2]
    assert last.startswith("Code: ")
    for kind in ("lightning_opt", "tests"):
        assert f"../{kind}/{feature}" in last


CALLBACKS = [
    export
    for export in (getattr(lo, name) for name in lo.__all__)
    if inspect.isclass(export) and issubclass(export, Callback)
]


@pytest.mark.parametrize("callback", CALLBACKS)
def test_a_callback_stands_in_the_file_of_its_name(callback):
    words = re.findall(r"[A-Z][a-z]+", callback.__name__)
    assert "_".join(words).lower().endswith(callback.__module__.rpartition(".")[2])
