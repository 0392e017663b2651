"""Reads pages of Markdown and notebooks for the tests of the documentation."""

import json
import re
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
"""All pages and notebooks."""


def text_of(page: Path) -> str:
    """Return the Markdown of a page or of a notebook's cells."""
    if page.suffix != ".ipynb":
        return page.read_text()
    cells = json.loads(page.read_text())["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def blocks_of(text: str, *languages: str) -> list[str]:
    return [
        found["body"]
        for found in FENCE.finditer(text)
        if found["info"].partition(" ")[0] in languages
    ]


def anchors_of(text: str) -> set[str]:
    """Return the anchors of the headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#{1,6} +(.+?) *$", FENCE.sub("", text), re.M)
    plain = (
        re.sub(r"\{[^}]*\}|[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}
