"""The pages that are made from what is recorded: the feature list, the matrix, the benchmarks."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_opt import Report

DOCS = Path(__file__).parent
ROOT = DOCS.parent
RESULTS = ROOT / "benchmarks" / "results"

AREAS = {
    "presets": "Choosing",
    "tuner": "Choosing",
    "cli": "Choosing",
    "gradients": "Stable training",
    "memory": "Memory",
    "batching": "Batches",
    "kernels": "Speed",
    "precision": "Speed",
    "strategies": "Many processes",
    "data": "Data",
    "profiling": "Measuring",
}
"""What the packages of ``lightning_opt`` are called for a reader, in the order of the pages."""

# --- features -----------------------------------------------------------------------------------


def feature_pages() -> dict[str, Path]:
    """Return the page of each feature, by the path of its folder below ``lightning_opt``."""
    found = {}
    for area in AREAS:
        for page in (DOCS / f"{area}.md", *sorted((DOCS / area).glob("*.md"))):
            if page.exists():
                found[str(page.relative_to(DOCS).with_suffix(""))] = page
    return found


def feature_lists() -> str:
    """Return a toctree for each heading of :data:`AREAS`."""
    pages: dict[str, list[str]] = {}
    for name in feature_pages():
        pages.setdefault(AREAS[name.partition("/")[0]], []).append(name)
    return "\n".join(
        "\n".join(["```{toctree}", ":maxdepth: 1", f":caption: {title}", "", *names, "```", ""])
        for title, names in pages.items()
    )


# --- the matrix ---------------------------------------------------------------------------------

SIGNS = {"identical": "=", "close": "≈", "changed": "≠"}
PRECISIONS = ("32-true", "bf16-mixed", "float16")
STEPS = {
    "plain": "one batch a step",
    "accumulation": "accumulation",
    "manual": "manual, two optimizers",
    "resume": "resume",
}
STRATEGIES = {
    "single": "One process",
    "ddp": "DDP, two processes",
    "ddp_topk": "Compressed DDP (Top-K), two processes",
    "fsdp1": "FSDP1, two processes",
    "fsdp2": "FSDP2, two processes",
}


def matrix_tables(rows: Mapping[str, Any]) -> str:
    """Return the tables of ``docs/matrix.json``, a strategy each, and what refusals say."""
    refusals: dict[str, list[str]] = {}
    parts = []
    for strategy, title in STRATEGIES.items():
        lines = []
        for label, row in rows.items():
            cells = [_cell(row["cells"], strategy, steps, refusals, label) for steps in STEPS]
            if any(cell.strip("· ") for cell in cells):
                lines.append(f"| `{label}` | " + " | ".join(cells) + " |")
        head = "| | " + " | ".join(STEPS.values()) + " |\n|---|" + "---|" * len(STEPS)
        parts.append(f"### {title}\n\n{head}\n" + "\n".join(lines) + "\n")
    parts.append(_refusals(refusals))
    return "\n".join(parts)


def _cell(
    cells: Mapping[str, str], strategy: str, steps: str, refusals: dict[str, list[str]], label: str
) -> str:
    signs = []
    for precision in PRECISIONS:
        found = cells.get(f"{strategy} / {precision} / {steps}")
        kind, _, message = (found or "untested").partition(": ")
        if kind == "refused":
            where = refusals.setdefault(message, [])
            where.append(f"`{label}`: {strategy}, {STEPS[steps]}")
            signs.append(f"✗{list(refusals).index(message) + 1}")
        else:
            signs.append(SIGNS.get(kind, "·" if kind == "untested" else "!"))
    return " ".join(signs)


def _refusals(refusals: Mapping[str, Sequence[str]]) -> str:
    lines = ["### What the refusals say", "", "| | error |", "|---|---|"]
    for number, message in enumerate(refusals, start=1):
        text = message.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
        lines.append(f"| ✗{number} | {text} |")
    return "\n".join(lines) + "\n"


# --- benchmarks ---------------------------------------------------------------------------------


def benchmark_tables(folder: Path = RESULTS) -> str:
    """Return every recorded result, by area, with the machines that they were measured on."""
    found: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for file in sorted(folder.glob("*.json")):
        content = json.loads(file.read_text())
        if "rows" in content and "machine" in content:
            found.setdefault(_heading_of(file.stem), []).append((file.stem, content))
    if not found:
        return "No results are recorded in this source tree: run `make bench`.\n"
    machines = list(
        dict.fromkeys(_machine(content) for group in found.values() for _, content in group)
    )
    parts = ["Measured on:\n", *(f"{n}. {machine}" for n, machine in enumerate(machines, 1)), ""]
    for heading in dict.fromkeys((*AREAS.values(), "More")):
        for number, (stem, content) in enumerate(found.get(heading, [])):
            if number == 0:
                parts.append(f"## {heading}\n")
            parts.append(_benchmark(stem, content, machines.index(_machine(content)) + 1))
    return "\n".join(parts)


def _heading_of(stem: str) -> str:
    script = script_of(stem)
    area = script.split("/")[0].removesuffix(".py") if script else ""
    return AREAS.get(area, "More")


def _benchmark(stem: str, content: Mapping[str, Any], machine: int) -> str:
    notes = [note for note in content["notes"] if not note.startswith("Machine: ")]
    table = Report("", content["rows"], notes).to_markdown().partition("\n")[2].strip()
    script = script_of(stem)
    module = (script or "").removesuffix(".py").replace("/", ".")
    made = f"`python -m benchmarks.{module}`, machine {machine}" if script else f"Machine {machine}"
    return f"### {content['title']}\n\n{table}\n\n{made}.\n"


def script_of(stem: str) -> str | None:
    """Return the script that writes these results, from ``benchmarks/`` on."""
    quoted = f'"{stem.removesuffix("_cuda")}"'
    for script in sorted((ROOT / "benchmarks").rglob("*.py")):
        if quoted in script.read_text():
            return str(script.relative_to(ROOT / "benchmarks"))
    return None


def _machine(content: Mapping[str, Any]) -> str:
    machine = content["machine"]
    parts = [f"{key} {value}" for key, value in machine.items() if key not in ("cpu", "device")]
    where = machine.get("cpu", "")
    if machine.get("device", "cpu") != "cpu":
        where = f"{machine['device']}, {where}"
    return ", ".join([where, *parts])
