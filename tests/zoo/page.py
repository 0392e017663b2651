"""The page ``docs/zoo.md``, generated from ``docs/zoo.json``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[2] / "docs" / "zoo.md"

SIGNS = {"identical": "=", "close": "≈", "changed": "≠", "refused": "✗", "fails": "**!**"}

HEAD = """# Third-party models

Every feature on third-party models: tiny random configurations of `transformers`, `diffusers`,
`peft`, `torch_geometric`, torch and Lightning, with batches as their users have them
(`BatchEncoding` padded and bucketed, dataclasses, graphs of different sizes). Each cell compares a
fit of four batches on a CPU with the same fit without the feature; strategies run on two processes.
`make matrix` runs all cells and writes this page; `make test` runs a sample. {count}

{signs}

Versions: {versions}.
"""

LEGEND = """| sign | |
|---|---|
| = | the final weights are bit-identical |
| ≈ | equal up to rounding (always, for features that change the order of summation) |
| ≠ | different, as the feature intends |
| ✗ | refused before the first step; the errors are listed below |
| | not run |"""


def render(content: Mapping[str, Any], head: str = HEAD) -> str:
    """Return the page for the content of ``docs/zoo.json`` or ``docs/clients.json``."""
    rows: Mapping[str, Mapping[str, str]] = content["rows"]
    features = list(dict.fromkeys(label for cells in rows.values() for label in cells))
    refusals: dict[str, list[str]] = {}
    lines = []
    for feature in features:
        signs = []
        for model, cells in rows.items():
            kind, _, message = cells.get(feature, "").partition(": ")
            signs.append(SIGNS.get(kind, ""))
            if kind == "refused":
                where = refusals.setdefault(message, [])
                where.append(f"`{feature}` on {model}")
        lines.append(f"| `{feature}` | " + " | ".join(signs) + " |")
    found = [cell.partition(":")[0] for cells in rows.values() for cell in cells.values()]
    fails = found.count("fails")
    count = f"Of {len(found)} cells {fails or 'none'} fail{'s' if fails == 1 else ''}."
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    parts = [
        head.format(count=count, versions=versions, signs=LEGEND),
        "## Outcome of each feature on each model\n",
        f"| | {' | '.join(rows)} |",
        "|---|" + ":---:|" * len(rows),
        *lines,
    ]
    if refusals:
        parts += ["\n## Errors of refused features\n"]
        for message, where in refusals.items():
            text = message.replace("``", "`")
            parts.append(f"- {', '.join(where)}: `` {text} ``")
    return "\n".join(parts) + "\n"
