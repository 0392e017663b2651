"""Tables as text, markdown, HTML or JSON, and verdicts for the doctor."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import IO, Any, Literal, TypeAlias

from lightning_opt.core.arguments import is_number


class Report:
    """A table: rows with the same columns, a title, and notes.

    Args:
        title: One line above the table.
        rows: One mapping per row, from column name to a number, a string, a bool or None.
        notes: Sentences below the table: units, machine, caveats.

    Example:
        >>> report = Report("Norms", [{"layer": "in", "norm": 0.25}, {"layer": "out", "norm": 3}])
        >>> print(report)
        Norms
        layer  norm
        -----  ----
        in     0.25
        out       3
        >>> print(report.to_markdown())
        **Norms**
        <BLANKLINE>
        | layer | norm |
        |---|---|
        | in | 0.25 |
        | out | 3 |
    """

    def __init__(
        self, title: str, rows: Sequence[Mapping[str, Any]], notes: Sequence[str] = ()
    ) -> None:
        self.title = title
        self.rows = [dict(row) for row in rows]
        self.notes = list(notes)

    @property
    def columns(self) -> list[str]:
        """The column names, in order of appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def to_dict(self) -> dict[str, Any]:
        """Return title, rows and notes as plain types."""
        return {"title": self.title, "rows": self.rows, "notes": self.notes}

    def to_json(self) -> str:
        """Return the report as strict JSON; numbers that are not finite become null."""
        return json.dumps(finite(self.to_dict()), indent=2, allow_nan=False)

    def to_markdown(self) -> str:
        """Return the report as a markdown table."""
        lines = [f"**{self.title}**"]
        if self.rows:
            rule = "|" + "---|" * len(self.columns)
            lines += ["", _row(self.columns), rule, *map(_row, self._cells())]
        for note in self.notes:
            lines += ["", note]
        return "\n".join(lines)

    def to_html(self) -> str:
        """Return the report as an HTML table with its notes, without the title."""
        kinds = [" class=number" * numeric for numeric in self._numeric()]
        lines = [("th", self.columns), *(("td", cells) for cells in self._cells())]
        table = ""
        for tag, cells in lines if self.rows else ():
            pairs = zip(cells, kinds, strict=True)
            html = (f"<{tag}{kind}>{escape(cell)}</{tag}>" for cell, kind in pairs)
            table += f"<tr>{''.join(html)}</tr>"
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return (f"<table>{table}</table>" if table else "") + notes

    def to_text(self) -> str:
        """Return the report as aligned plain text, numbers to the right."""
        lines = [self.title]
        if self.rows:
            cells = self._cells()
            widths = [max(map(len, column)) for column in zip(self.columns, *cells, strict=True)]
            for line in (self.columns, ["-" * width for width in widths], *cells):
                padded = (
                    cell.rjust(width) if to_right else cell.ljust(width)
                    for cell, width, to_right in zip(line, widths, self._numeric(), strict=True)
                )
                lines.append("  ".join(padded).rstrip())
        return "\n".join([*lines, *self.notes])

    def print(self, file: IO[str] | None = None) -> None:
        """Print the report as text."""
        print(self.to_text(), file=file)

    def _cells(self) -> list[list[str]]:
        return [[_cell(row.get(name)) for name in self.columns] for row in self.rows]

    def _numeric(self) -> list[bool]:
        """Return for each column whether it holds only numbers."""
        columns = [[row.get(name) for row in self.rows] for name in self.columns]
        return [all(value is None or is_number(value) for value in own) for own in columns]

    def __str__(self) -> str:
        return self.to_text()

    def _repr_markdown_(self) -> str:
        return self.to_markdown()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("\n", " ")


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


# --- verdicts -------------------------------------------------------------------------------------

State: TypeAlias = Literal["ok", "look", "unknown"]

TOPICS: dict[str, str] = {
    "profile": "Where does a step's time go?",
    "memory": "What is the peak of memory, and is there room?",
    "batch size": "Is the batch as large as memory allows?",
    "data": "Does training wait for data?",
    "throughput": "Does training stay as fast as it began?",
    "precision": "Does training use the fastest precision of the device?",
    "optimizer": "Is the optimizer the fused one?",
    "compilation": "Is the model compiled?",
    "gradients": "Are the gradients healthy?",
    "stability": "Are NaN, infinity and spikes caught?",
    "clipping": "Is clipping on, and does it rarely act?",
    "convergence": "Does the loss go down?",
    "leaks": "Does memory grow without end?",
    "determinism": "Would a second run give the same result?",
    "checkpoints": "Can training resume after a crash?",
    "monitoring": "Are metrics logged?",
    "baseline": "Has the setup been compared with plain Lightning?",
}
"""The questions of a diagnosis, in its order."""


@dataclass(frozen=True)
class Verdict:
    """The answer to one question.

    Attributes:
        topic: The question's key in :data:`TOPICS`.
        state: ``"ok"``, ``"look"`` if something needs attention, or ``"unknown"`` if it was not
            measured.
        finding: The measurement, in a sentence.
        advice: What to do; empty if there is nothing to do.
        gain: The share of the run's time that the advice may save, 1 if the run's result is at
            stake, 0 if unknown.
    """

    topic: str
    state: State
    finding: str
    advice: str = ""
    gain: float = 0.0
