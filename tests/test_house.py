"""Rules of the source tree: short files, one folder per feature, a limit on code."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_opt as lo
from tests.mutants import MUTANTS, matches
from tests.test_contracts import CALLBACKS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_opt"
FILES = sorted(PACKAGE.rglob("*.py"))

NO_AREAS = {"core", "trainer", "worker", "presets", "tuner", "cli"}
"""Packages below or above the areas of features."""

FEATURES = sorted(
    folder.relative_to(PACKAGE)
    for folder in {file.parent for file in PACKAGE.glob("*/*/*.py")}
    if folder.parent.name not in NO_AREAS
)


def docstrings_of(tree: ast.AST) -> Iterator[ast.stmt]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            yield node.body[0]


def code_lines(text: str) -> int:
    """Count lines except blank lines, comments and docstrings."""
    skipped = {
        number
        for number, line in enumerate(text.splitlines(), start=1)
        if not line.strip() or line.lstrip().startswith("#")
    }
    for docstring in docstrings_of(ast.parse(text)):
        skipped.update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(text.splitlines()) - len(skipped)


def test_no_file_is_longer_than_400_lines():
    lengths = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in FILES}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_lines_of_code_are_within_the_limit():
    """Remove code to add code, or decide to raise the limit."""
    assert sum(code_lines(file.read_text()) for file in FILES) <= 20_245


@pytest.mark.parametrize("feature", FEATURES, ids=str)
def test_feature_has_tests_and_a_page_at_the_same_path(feature):
    page = ROOT / "docs" / f"{feature}.md"
    assert page.exists()
    assert list((ROOT / "tests" / feature).glob("test_*.py"))
    last = page.read_text().strip().rpartition("\n\n")[2]
    assert last.startswith("Code: ")
    for kind in ("lightning_opt", "tests"):
        assert f"../{kind}/{feature}" in last


@pytest.mark.parametrize("name", CALLBACKS)
def test_callback_is_in_the_file_of_its_name(name):
    words = re.findall(r"[A-Z][a-z]+", name)
    assert "_".join(words).lower().endswith(CALLBACKS[name].__module__.rpartition(".")[2])


def test_every_planted_bug_has_one_place_and_tests_of_its_words():
    for one in MUTANTS:
        assert len(matches(one, ROOT)) == 1, one.promise
        paths, _, words = one.tests.partition(" -k ")
        files = [f for path in paths.split() for f in [ROOT / path, *(ROOT / path).rglob("*.py")]]
        text = " ".join(file.read_text() for file in files if file.is_file())
        assert all(word in text for word in words.replace(" or ", " ").split()), one


@pytest.mark.parametrize("name", lo.__all__)
def test_every_public_name_has_a_docstring(name):
    export = getattr(lo, name)
    if inspect.isclass(export) or callable(export):
        assert inspect.getdoc(export)
    if inspect.isclass(export):
        own = [
            method
            for key, method in vars(export).items()
            if inspect.isfunction(method) and not key.startswith("_")
        ]
        assert [method.__qualname__ for method in own if not inspect.getdoc(method)] == []
