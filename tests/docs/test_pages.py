"""What the documentation is made of: generated pages, the list of features, the API page."""

import importlib.util
import json
import re
import sys
from types import ModuleType

import pytest

import lightning_opt as lo
from tests.docs.pages import DOCS, ROOT
from tests.matrix import record
from tests.matrix.cells import PRECISIONS, STEPS, STRATEGIES


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    """The module that makes pages, which lies beside the configuration of Sphinx."""
    spec = importlib.util.spec_from_file_location("pages", DOCS / "pages.py")
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def test_every_feature_page_is_listed_once_under_an_area(pages):
    listed = re.findall(r"^[a-z_/]+$", pages.feature_lists(), re.M)
    folders = [page for page in DOCS.glob("*/*.md") if page.parent.name in pages.AREAS]
    alone = [page for page in DOCS.glob("*.md") if page.stem in pages.AREAS]
    assert sorted(listed) == sorted(
        str(page.relative_to(DOCS).with_suffix("")) for page in (*folders, *alone)
    )
    for name in listed:
        assert (ROOT / "lightning_opt" / name).is_dir(), f"{name}.md is at no feature's path"


def test_every_page_is_in_a_list_of_the_index(pages):
    index = (DOCS / "index.md").read_text() + pages.feature_lists()
    for page in (*DOCS.glob("*.md"), *(DOCS / "migration").glob("*.md")):
        name = str(page.relative_to(DOCS).with_suffix(""))
        assert name == "index" or re.search(rf"^{name}$", index, re.M), name


def test_the_decision_table_names_every_feature_page(pages):
    index = (DOCS / "index.md").read_text()
    table = index[: index.index("What holds for every feature")]
    assert [name for name in pages.feature_pages() if f"({name}.md)" not in table] == []


def test_the_matrix_shows_every_cell(pages):
    rows = record.read()
    text = pages.matrix_tables(rows)
    assert text.count("\n### ") + 1 == len(STRATEGIES) + 1
    shown = dict.fromkeys(("=", "≈", "≠", "✗", "!"), 0)
    for line in re.findall(r"^\| `.*\|$", text, re.M):
        for sign in shown:
            shown[sign] += sum(sign in part for part in line.split("` |")[1].split())
    cells = [cell for row in rows.values() for cell in row["cells"].values()]
    assert shown["="] == cells.count("identical")
    assert shown["≈"] == cells.count("close")
    assert shown["≠"] == cells.count("changed")
    assert shown["✗"] == sum(cell.startswith("refused: ") for cell in cells)
    assert shown["!"] == 0
    assert tuple(pages.STEPS) == tuple(sorted(STEPS, key=tuple(pages.STEPS).index))
    assert pages.PRECISIONS == PRECISIONS


def test_the_matrix_gives_every_refusal_its_message(pages):
    label = "Planted()"
    cells = {
        "single / 32-true / plain": "refused: one | two",
        "single / bf16-mixed / plain": "identical",
        "ddp / 32-true / plain": "refused: three",
    }
    text = pages.matrix_tables({label: {"cells": cells}})
    assert "| `Planted()` | ✗1 = · |" in text
    assert "| ✗1 | one \\| two |" in text
    assert "| ✗2 | three |" in text


def test_the_benchmarks_page_has_every_record_its_machine_and_its_script(pages, tmp_path):
    text = pages.benchmark_tables()
    for file in (ROOT / "benchmarks/results").glob("*.json"):
        content = json.loads(file.read_text())
        if "rows" in content:
            assert f"### {content['title']}\n" in text
            assert pages.script_of(file.stem), f"no script writes {file.name}"
            assert content["machine"]["torch"] in text
    assert "### More" not in text
    assert "## More" not in text, "the script of a record is in no area's folder"
    assert "make bench" in pages.benchmark_tables(tmp_path)


def test_the_api_page_shows_every_export_with_its_docstring(tmp_path):
    """``automodule`` follows ``__all__``; what has no docstring it would leave out."""
    page = (DOCS / "api.md").read_text()
    assert re.search(r"automodule:: lightning_opt\n +:members:", page)
    assert [name for name in lo.__all__ if not getattr(lo, name).__doc__] == []
    assert sys.modules["lightning_opt"].__all__ == lo.__all__
