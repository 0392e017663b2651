"""Every page reads on GitHub: plain Markdown, in which nothing waits for Sphinx."""

import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.docs.pages import PAGES, ROOT, text_of
from tests.docs.test_links import broken

ROLE = re.compile(r"\{[a-z][\w:+-]*\}`")
DIRECTIVE = re.compile(r"^\s*(?:`{3,}|~{3,}|:{3,})\s*\{", re.M)
TARGET = re.compile(r"^\([\w-]+\)=\s*$", re.M)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def unresolved(text: str) -> list[str]:
    """Return what only Sphinx understands: roles, directives and labels."""
    return [found[0].strip() for rule in (ROLE, DIRECTIVE, TARGET) for found in rule.finditer(text)]


def tokens_of(text: str) -> list[Token]:
    """Read Markdown as CommonMark with GitHub's tables, and return it flat."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    return [part for token in tokens for part in (token, *(token.children or ()))]


def test_roles_and_directives_are_found():
    text = "{py:class}`~lightning_opt.Report`\n```{include} a.md\n```\n(label)=\n:::{note}\n:::\n"
    assert len(unresolved(text)) == 4
    assert unresolved("[`Report`](api/Report.md)\n```python testcode\n{}\n```\n") == []


@each_page
def test_no_role_and_no_directive(page: Path):
    assert unresolved(text_of(page)) == []


@each_page
def test_what_a_plain_renderer_shows(page: Path):
    """Links and pictures lead somewhere, and no mark-up is left in what is read as text."""
    tokens = tokens_of(text_of(page))
    links = [token.attrs.get("href") or token.attrs.get("src") for token in tokens]
    assert [wrong for link in links if link and (wrong := broken(page, str(link)))] == []
    texts = [token.content for token in tokens if token.type == "text"]
    assert [text for text in texts if re.search(r"\]\(|\]\[|`{2}|^\|.*\|$", text)] == []
