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
README = ROOT / "README.md"

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def unresolved(text: str) -> list[str]:
    """Return what only Sphinx understands: roles, directives and labels."""
    return [found[0].strip() for rule in (ROLE, DIRECTIVE, TARGET) for found in rule.finditer(text)]


def tokens_of(text: str) -> list[Token]:
    """Read Markdown as CommonMark with GitHub's tables, and return it flat."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    return [part for token in tokens for part in (token, *(token.children or ()))]


def faults(page: Path, text: str) -> list[str]:
    """Return what a plain renderer shows wrongly: dead links and pictures, mark-up left as text."""
    found = []
    for token in tokens_of(text):
        link = token.attrs.get("href") or token.attrs.get("src")
        if link and (wrong := broken(page, str(link))):
            found.append(wrong)
        if token.type == "fence" and token.info.strip().startswith("{"):
            found.append(token.info)
        if token.type == "text" and re.search(
            r"\]\(|\]\[|`{2}|^\|.*\|$|^:{3}|\{[a-z][\w:+-]*\}$|^\([\w-]+\)=$", token.content
        ):
            found.append(token.content)
    return found


def test_roles_and_directives_are_found():
    text = "{py:class}`~lightning_opt.Report`\n```{include} a.md\n```\n(label)=\n:::{note}\n:::\n"
    assert len(unresolved(text)) == 4
    assert unresolved("[`Report`](api/Report.md)\n```python testcode\n{}\n```\n") == []


@pytest.mark.parametrize(
    "planted",
    [
        "See {py:class}`~lightning_opt.Report`.",
        "See {doc}`quickstart`.",
        "```{include} docs/index.md\n```",
        "~~~{toctree}\ndocs/index\n~~~",
        ":::{note}\nRead this.\n:::",
        "(a-label)=\n## A heading",
        "[a page that is gone](docs/gone.md)",
        "[a heading that is gone](docs/index.md#gone)",
        "[a heading of this page](#gone)",
        "![a picture](docs/_static/gone.png)",
        "[a reference][gone]",
        "text\n| not | a table |",
        "an ``open literal",
    ],
)
def test_a_fault_in_the_readme_is_seen(planted: str):
    text = text_of(README)
    assert faults(README, text) == []
    assert len(faults(README, f"{text}\n\n{planted}\n")) >= 1


def test_no_role_and_no_fence_of_all_pages_waits_for_sphinx():
    assert README in PAGES
    assert sum(len(unresolved(text_of(page))) for page in PAGES) == 0


@each_page
def test_a_plain_renderer_shows_the_page(page: Path):
    text = text_of(page)
    assert unresolved(text) + faults(page, text) == []
