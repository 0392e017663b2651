"""Every page reads on GitHub: plain Markdown whose links, anchors and names exist. No network."""

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from markdown_it import MarkdownIt

import lightning_opt as lo
from tests.docs.pages import PAGES, ROOT, anchors_of, text_of

SPHINX_ONLY = re.compile(
    r"\{[a-z][\w:+-]*\}`"  # roles
    r"|^\s*(?:`{3,}|~{3,}|:{3,})\s*\{"  # directives
    r"|^\([\w-]+\)=\s*$",  # labels
    re.M,
)
LEFT_AS_TEXT = re.compile(r"\]\(|\]\[|`{2}|^\|.*\|$|^:{3}|\{[a-z][\w:+-]*\}$|^\([\w-]+\)=$")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def fault_of(page: Path, link: str) -> str | None:
    """Return the fault of a link, if it has one."""
    parts = urlsplit(link)
    if parts.scheme:
        host = parts.hostname or ""
        is_host = re.fullmatch(r"([\w-]+\.)+[a-z]{2,}|localhost", host)
        is_fine = parts.scheme == "mailto" or (parts.scheme in ("https", "http") and is_host)
        return None if is_fine else f"{link}: unknown scheme or no host"
    target = (page.parent / parts.path).resolve() if parts.path else page
    if not target.exists() or not target.is_relative_to(ROOT.resolve()):
        return f"{link}: {target} is no file of the project"
    has_anchors = target.suffix in (".md", ".ipynb")
    if parts.fragment and has_anchors and parts.fragment not in anchors_of(text_of(target)):
        return f"{link}: {target.name} has no such heading"
    return None


@each_page
def test_plain_renderer_shows_no_broken_link_and_no_markup(page: Path) -> None:
    text = text_of(page)
    faults = [found[0] for found in SPHINX_ONLY.finditer(text)]
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    for token in (part for whole in tokens for part in (whole, *(whole.children or ()))):
        link = token.attrs.get("href") or token.attrs.get("src")
        if link and (fault := fault_of(page, str(link))):
            faults.append(fault)
        if token.type == "text" and LEFT_AS_TEXT.search(token.content):
            faults.append(token.content)
    assert faults == []


@each_page
def test_names_of_the_package_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        pytest.skip("contains former names")
    names = set(re.findall(r"\blo\.([A-Za-z_]\w*)", page.read_text()))
    assert sorted(name for name in names if not hasattr(lo, name)) == []
