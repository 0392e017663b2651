"""Markdown as the tests of the documentation read it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

FENCE = re.compile(
    r"^(?P<fence>`{3,}|:{3,})(?P<info>[^\n]*)\n(?P<body>.*?)^(?P=fence)\s*$", re.M | re.S
)
PAGES = sorted(
    page
    for page in (
        *ROOT.glob("*.md"),
        *DOCS.rglob("*.md"),
        *ROOT.glob("examples/**/*.md"),
        *ROOT.glob("examples/*.ipynb"),
    )
    if not {"_build", "_generated", ".ipynb_checkpoints"} & set(page.relative_to(ROOT).parts)
)
"""Everything that a reader reads."""


def text_of(page: Path) -> str:
    """Return a page as Markdown; of a notebook, its Markdown cells."""
    if page.suffix != ".ipynb":
        return page.read_text()
    cells = json.loads(page.read_text())["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def blocks_of(text: str, *languages: str) -> list[str]:
    """Return the code blocks in these languages."""
    return [
        found["body"]
        for found in FENCE.finditer(text)
        if found["info"].partition(" ")[0] in languages
    ]


def prose_of(text: str) -> str:
    """Return the text without its code blocks, and without what is in backticks."""
    return re.sub(r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)", "", FENCE.sub("", text))


def links_of(text: str) -> Iterator[str]:
    """Yield the targets of links and pictures, inline and by reference."""
    prose = prose_of(text)
    for found in re.finditer(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)", prose):
        yield found[1]
    for found in re.finditer(r"^\[[^\]]+\]:\s*(\S+)", prose, re.M):
        yield found[1]
    for found in re.finditer(r"<(https?://[^>\s]+)>", prose):
        yield found[1]


def anchors_of(text: str) -> set[str]:
    """Return the anchors of the headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#{1,6} +(.+?) *$", FENCE.sub("", text), re.M)
    plain = (
        re.sub(r"\{[^}]*\}|[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}
