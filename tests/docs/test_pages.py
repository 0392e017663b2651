"""Generated pages are current and complete, and the navigation lists every page."""

import importlib.util
import pkgutil
import re
import sys
from types import ModuleType

import pytest

import lightning_opt as lo
from tests.docs.pages import DOCS, ROOT
from tests.matrix.subjects import find_subjects


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    """The module ``docs/pages.py``."""
    spec = importlib.util.spec_from_file_location("pages", DOCS / "pages.py")
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def test_generated_parts_are_current(pages):
    wanted = pages.made()
    old = [
        str(page) for page, text in wanted.items() if not page.exists() or page.read_text() != text
    ]
    assert old == [], "run: make pages"
    assert sorted((DOCS / "api").glob("*.md")) == sorted(
        p for p in wanted if p.parent.name == "api"
    )


@pytest.fixture(scope="module")
def references(pages) -> ModuleType:
    """The module ``docs/references.py``."""
    return sys.modules["references"]


def test_names_of_torch_and_lightning_exist_and_have_an_address(references):
    for name in references.NAMES:
        assert pkgutil.resolve_name(name) is not None
        assert references.address_of(name).startswith("https://")
    assert set(references.PAGES) | set(references.PLAIN.values()) <= set(references.NAMES)
    assert references.address_of("torch.nn.Linear") is None


def test_every_page_is_in_the_navigation_once_and_a_feature_under_its_area(pages):
    listed = [name for names in pages.navigation().values() for name in names]
    for page in (*DOCS.glob("*.md"), *DOCS.glob("*/*.md")):
        name = str(page.relative_to(DOCS).with_suffix(""))
        if name != "index" and not name.startswith(("api/", "_")):
            assert [*listed, *pages.CONTRIBUTORS].count(name) == 1, name
    for caption, names in pages.navigation().items():
        for name in names if caption in pages.AREAS.values() else ():
            assert pages.AREAS[name.partition("/")[0]] == caption
            assert (ROOT / "lightning_opt" / name).is_dir(), f"{name}.md is at no feature's path"


def test_changelog_names_every_plugin():
    text = (ROOT / "CHANGELOG.md").read_text()
    names = {subject.name for subject in find_subjects()}
    assert sorted(name for name in names if not re.search(rf"`{name}\b", text)) == []


def test_the_decision_table_names_every_feature_page(pages):
    index = (DOCS / "index.md").read_text()
    table = index[: index.index("What holds for every feature")]
    assert [name for name in pages.feature_pages() if f"({name}.md)" not in table] == []


def test_every_export_has_a_page(pages):
    shown = {*pages.public_classes(), *pages.public_functions()}
    assert shown == set(lo.__all__)
    assert len({name.lower() for name in pages.public_classes()}) == len(pages.public_classes())
    table = (DOCS / "api.md").read_text()
    functions = (DOCS / "api" / "functions.md").read_text()
    for name in pages.public_classes():
        assert f"(api/{name}.md)" in table
        assert f"<!-- signature: {name} -->" in (DOCS / "api" / f"{name}.md").read_text()
    for name in pages.public_functions():
        assert f"(api/functions.md#{name})" in table
        assert f"<!-- signature: {name} -->" in functions
