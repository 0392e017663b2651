"""Every link of README, documentation, notebooks and changelog leads somewhere. No network."""

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import lightning_opt as lo
from tests.docs.pages import DOCS, PAGES, ROOT, anchors_of, links_of, text_of
from tests.matrix.subjects import find_subjects

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def broken(page: Path, link: str) -> str | None:
    """Return what is wrong with a link of a page."""
    parts = urlsplit(link)
    if parts.scheme:
        if parts.scheme not in ("https", "http", "mailto"):
            return f"{link}: unknown scheme"
        host = parts.hostname or ""
        fine = parts.scheme == "mailto" or re.fullmatch(r"([\w-]+\.)+[a-z]{2,}|localhost", host)
        return None if fine else f"{link}: no host"
    target = (page.parent / parts.path).resolve() if parts.path else page
    if not target.exists():
        return f"{link}: there is no {target}"
    if not target.is_relative_to(ROOT.resolve()):
        return f"{link}: leaves the project"
    readable = target.suffix in (".md", ".ipynb")
    if parts.fragment and readable and parts.fragment not in anchors_of(text_of(target)):
        return f"{link}: {target.name} has no heading of that name"
    return None


def test_there_is_something_to_look_at():
    links = [link for page in PAGES for link in links_of(text_of(page))]
    assert len(PAGES) > 30
    assert len(links) > 50


@each_page
def test_links(page):
    found = [broken(page, link) for link in links_of(text_of(page))]
    assert not [line for line in found if line]


@each_page
def test_what_is_called_lo_dot_something_exists(page):
    """In prose and in code: a name that was changed is not left behind in a text."""
    if page.name == "CHANGELOG.md":
        pytest.skip("tells of former names too")
    names = set(re.findall(r"\blo\.([A-Za-z_]\w*)", page.read_text()))
    assert sorted(name for name in names if not hasattr(lo, name)) == []


def test_changelog_names_every_plugin():
    text = (ROOT / "CHANGELOG.md").read_text()
    names = sorted({subject.name for subject in find_subjects()})
    assert [name for name in names if not re.search(rf"`{name}\b", text)] == []


def test_broken_links_are_found(tmp_path):
    page = DOCS / "index.md"
    assert broken(page, "nowhere.md")
    assert broken(page, "https://")
    assert broken(page, "quickstart.md#no-such-heading")
    assert broken(page, "htps://example.com")
    assert broken(page, "quickstart.md#without-lightning") is None
    assert broken(page, "https://example.com/a") is None
