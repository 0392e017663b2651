"""Generates pages and parts of pages from code and records: ``make pages``.

These are the parts between ``<!-- begin: NAME -->`` and ``<!-- end -->``, and the pages below
``docs/api``. They are committed, so that GitHub shows them.
"""

import inspect
import json
import os
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning_opt as lo
from lightning_opt import Report

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from evidence import evidence_table, strategy_table
from references import link_names, mentioned

from benchmarks.records import RESULTS, ROOT, script_of

DOCS = ROOT / "docs"

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
"""Titles of the packages of ``lightning_opt``, in the order of the pages."""

ALONE = "Demo, examples and advice"
"""Title of the scripts directly below ``benchmarks``."""

# --- features -----------------------------------------------------------------------------------


def feature_pages() -> dict[str, Path]:
    """Return the page of each feature, by the path of its folder below ``lightning_opt``."""
    found = {}
    for area in AREAS:
        for page in (DOCS / f"{area}.md", *sorted((DOCS / area).glob("*.md"))):
            if page.exists():
                found[str(page.relative_to(DOCS).with_suffix(""))] = page
    return found


START = ("installation", "quickstart", "recipes", "examples", "many_machines", "which_strategy")
COMING_FROM = tuple(f"migration/{page.stem}" for page in sorted((DOCS / "migration").glob("*.md")))
REFERENCE = ("api", "compatibility", "zoo", "clients", "changelog", "contributing")
MEASUREMENTS = ("benchmarks", "advice")
CONTRIBUTORS = ("capabilities", "planted_bugs", "private_names")
"""Pages below the one on contributing."""


def navigation() -> dict[str, list[str]]:
    """Return the pages under each caption of the navigation, as paths below ``docs``."""
    guides: dict[str, list[str]] = {}
    for name in feature_pages():
        guides.setdefault(AREAS[name.partition("/")[0]], []).append(name)
    notebooks = [f"../examples/{file.name}" for file in sorted((ROOT / "examples").glob("*.ipynb"))]
    return {
        "Start": list(START),
        "Notebooks": notebooks,
        "Coming from": list(COMING_FROM),
        **guides,
        "Reference": list(REFERENCE),
        "Measurements": list(MEASUREMENTS),
    }


def contents() -> str:
    """Return a list of links to every page of the navigation."""
    parts = []
    for caption, names in navigation().items():
        links = []
        for name in names:
            file = f"{name}.md" if "." not in name else name
            links.append(f"[{_title_of(DOCS / file)}]({file})")
        parts.append(f"**{caption}:** " + " · ".join(links) + "\n")
    return "\n".join(parts)


def _title_of(page: Path) -> str:
    text = page.read_text()
    if page.suffix == ".ipynb":
        text = "".join(json.loads(text)["cells"][0]["source"])
    return text[text.index("# ") + 2 :].partition("\n")[0]


# --- the public names ---------------------------------------------------------------------------


def public_classes() -> list[str]:
    """Return the exported classes."""
    return [name for name in lo.__all__ if inspect.isclass(getattr(lo, name))]


def public_functions() -> list[str]:
    """Return the exported functions."""
    return [name for name in lo.__all__ if inspect.isroutine(getattr(lo, name))]


def api_table() -> str:
    """Return a table of public names and their summaries per area."""
    parts = []
    areas: dict[str, list[str]] = {}
    for name in sorted((*public_classes(), *public_functions()), key=str.lower):
        areas.setdefault(AREAS.get(_area_of(name), "More"), []).append(name)
    for title in dict.fromkeys((*AREAS.values(), "More")):
        rows = [
            f"| [`{name}`]({_link(name)}) | {_summary(name)} |" for name in areas.get(title, [])
        ]
        if rows:
            parts.append("\n".join([f"## {title}", "", "| name | |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


def api_pages() -> dict[str, str]:
    """Return a page per public class and one page of all functions, by file name."""
    made = {f"{name}.md": f"# {name}\n\n{_reference(name)}" for name in public_classes()}
    functions = (f"## {name}\n\n{_reference(name)}" for name in public_functions())
    made["functions.md"] = "# Functions\n\n" + "\n".join(functions)
    return made


def _reference(name: str) -> str:
    found = getattr(lo, name)
    file = Path(inspect.getsourcefile(found) or "").relative_to(ROOT)
    feature = str(file.parent.relative_to("lightning_opt"))
    guides = [
        page for path, page in feature_pages().items() if f"{feature}/".startswith(f"{path}/")
    ]
    links = [f"[{_title_of(page)}](../{page.relative_to(DOCS)})" for page in guides]
    where = "Guide: " + ", ".join(links) + ". " if links else ""
    lines = [
        _summary(name),
        "",
        f"<!-- signature: {name} -->",
        f"```python\nlo.{name}{_signature(found)}\n```",
        "<!-- end -->",
        "",
        f"{where}Source and docstring: [{file}](../../{file}).",
    ]
    elsewhere = mentioned(inspect.getdoc(found) or "")
    if elsewhere:
        named = ", ".join(f"[`{name}`]({address})" for name, address in elsewhere.items())
        lines += ["", f"In torch and Lightning: {named}."]
    return "\n".join(lines) + "\n"


def _signature(found: Any) -> str:
    try:
        parameters = inspect.signature(found).parameters.values()
    except ValueError:
        return ""
    shown, keyword_only = [], False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            shown.append("*")
        hint = "" if parameter.annotation is parameter.empty else f": {parameter.annotation}"
        plain = parameter.replace(annotation=parameter.empty)
        default = "" if plain.default is plain.empty else f" = {plain.default!r}"
        shown.append(f"{str(plain).partition('=')[0]}{hint}{default}")
    one_line = f"({', '.join(shown)})"
    if len(one_line) < 80:
        return one_line
    return "(\n" + textwrap.indent(",\n".join(shown), "    ") + ",\n)"


def _summary(name: str) -> str:
    first = (inspect.getdoc(getattr(lo, name)) or "").partition("\n\n")[0].replace("\n", " ")
    first = re.sub(
        r":\w+:`~?(?:[^<`]*<)?([^>`]+)>?`", lambda role: f"`{role[1].split('.')[-1]}`", first
    )
    return first.replace("``", "`").replace("|", "\\|")


def _area_of(name: str) -> str:
    return str(getattr(lo, name).__module__).split(".")[1]


def _link(name: str) -> str:
    return f"api/{name}.md" if name in public_classes() else f"api/functions.md#{name}"


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
    "ddp_3": "DDP, three processes",
    "ddp_topk": "Compressed DDP (Top-K), two processes",
    "diloco": "DiLoCo, two processes",
    "fsdp1": "FSDP1, two processes",
    "fsdp2": "FSDP2, two processes",
    "fsdp2_3": "FSDP2, three processes",
    "tp": "Tensor parallelism with SequenceParallel, two processes",
}


def matrix_tables(rows: Mapping[str, Any]) -> str:
    """Return a table per strategy of ``docs/matrix.json``, errors of refused cells, and acts."""
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
    acts = [f"| `{label}` | {row['acts']} |" for label, row in rows.items() if "acts" in row]
    head = ["### What the features have to do", "", "| | |", "|---|---|"]
    parts.append("\n".join([*head, *acts]) + "\n")
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
    lines = ["### Errors of refused cells", "", "| | error |", "|---|---|"]
    for number, message in enumerate(refusals, start=1):
        text = message.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
        lines.append(f"| ✗{number} | {text} |")
    return "\n".join(lines) + "\n"


# --- benchmarks ---------------------------------------------------------------------------------


def benchmark_tables(folder: Path = RESULTS) -> str:
    """Return every recorded result, by area, and the machines."""
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
    for heading in dict.fromkeys((*AREAS.values(), ALONE, "More")):
        for number, (stem, content) in enumerate(found.get(heading, [])):
            if number == 0:
                parts.append(f"## {heading}\n")
            parts.append(_benchmark(stem, content, machines.index(_machine(content)) + 1))
    return "\n".join(parts)


def _heading_of(stem: str) -> str:
    area = script_of(stem).parent.name
    return ALONE if area == "benchmarks" else AREAS.get(area, "More")


def _benchmark(stem: str, content: Mapping[str, Any], machine: int) -> str:
    notes = [note for note in content["notes"] if not note.startswith("Machine: ")]
    table = Report("", content["rows"], notes).to_markdown().partition("\n")[2].strip()
    module = ".".join(script_of(stem).relative_to(ROOT).with_suffix("").parts)
    recorded = content["machine"]
    state = f"{recorded.get('date', 'no date')}, commit {recorded.get('commit', 'unknown')}"
    made = f"`python -m {module}`, machine {machine}, {state}."
    device = recorded.get("device", "cpu")
    where = "" if device == "cpu" else f", on an {device}"
    return f"### {content['title']}{where}\n\n{table}\n\n{made}\n"


def _machine(content: Mapping[str, Any]) -> str:
    machine = content["machine"]
    apart = ("cpu", "device", "lightning_opt", "date", "commit")
    parts = [f"{key} {value}" for key, value in machine.items() if key not in apart]
    where = machine.get("cpu", "")
    if machine.get("device", "cpu") != "cpu":
        where = f"{machine['device']}, {where}"
    return ", ".join([where, *parts])


def switch_table(switch: str) -> str:
    """Return the rows of one switch of ``compute.json``."""
    rows = [
        {name: row[name] for name in ("model", "switch", "time", "times faster", "peak")}
        for row in json.loads((RESULTS / "compute.json").read_text())["rows"]
        if row["switch"].startswith(switch)
    ]
    return Report("", rows).to_markdown().partition("\n")[2]


# --- writing ------------------------------------------------------------------------------------

BLOCK = re.compile(r"(?P<begin><!-- begin: (?P<name>\S+) -->\n).*?(?P<end><!-- end -->)", re.S)


def fill(page: Path) -> str:
    """Return a page with its generated parts and its links to torch and Lightning."""
    text = BLOCK.sub(
        lambda m: f"{m['begin']}\n{_part(m['name']).strip()}\n\n{m['end']}", page.read_text()
    )
    return text if page.stem in CONTRIBUTORS else link_names(text)


def _part(name: str) -> str:
    if name.startswith("benchmarks/results/"):
        return (ROOT / f"{name}.md").read_text()
    if name.startswith("compute:"):
        return switch_table(name.partition(":")[2].replace("_", " "))
    if name == "matrix":
        return matrix_tables(json.loads((DOCS / "matrix.json").read_text())["rows"])
    makers = {
        "contents": contents,
        "api": api_table,
        "benchmarks": benchmark_tables,
        "evidence": evidence_table,
        "strategies": strategy_table,
    }
    return makers[name]()


def sources() -> list[Path]:
    """Return the hand-written pages."""
    built = {"_build", "_generated", "api"}
    return [p for p in sorted(DOCS.rglob("*.md")) if not built & set(p.relative_to(DOCS).parts)]


def made() -> dict[Path, str]:
    """Return the current text of every generated page and every page with generated parts."""
    pages = {page: fill(page) for page in (*sources(), ROOT / "README.md")}
    return pages | {DOCS / "api" / name: text for name, text in api_pages().items()}


def main() -> None:
    """Write outdated pages."""
    wanted = made()
    (DOCS / "api").mkdir(exist_ok=True)
    for page in (DOCS / "api").glob("*.md"):
        if page not in wanted:
            page.unlink()
    for page, text in wanted.items():
        if not page.exists() or page.read_text() != text:
            page.write_text(text)
            print(os.path.relpath(page))


if __name__ == "__main__":
    main()
