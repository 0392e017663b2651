"""Tables for people and for programs."""

import json
import math

import pytest

from lightning_opt.core.output.report import Report

ROWS = [
    {"name": "wide | narrow", "count": 3, "share": 0.123456, "ok": True},
    {"name": "b", "count": 12, "share": None, "extra": "late"},
    {"name": "two\nlines", "count": -1, "share": math.nan, "ok": False},
]
REPORT = Report("A title", ROWS, notes=["first note", "second note"])


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    REPORT.print()
    assert capsys.readouterr().out == f"{REPORT}\n"
    assert str(REPORT).splitlines() == [
        "A title",
        "name           count   share  ok     extra",
        "-------------  -----  ------  -----  -----",
        "wide | narrow      3  0.1235  True",
        "b                 12                 late",
        "two lines         -1     nan  False",
        "first note",
        "second note",
    ]


def test_markdown_table() -> None:
    assert REPORT.to_markdown().splitlines() == [
        "**A title**",
        "",
        "| name | count | share | ok | extra |",
        "|---|---|---|---|---|",
        r"| wide \| narrow | 3 | 0.1235 | True |  |",
        "| b | 12 |  |  | late |",
        "| two lines | -1 | nan | False |  |",
        "",
        "first note",
        "",
        "second note",
    ]
    assert REPORT._repr_markdown_() == REPORT.to_markdown()


def test_json_is_strict() -> None:
    def fail(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    rows = [*ROWS, {"deep": [math.inf, {"x": -math.inf, "y": (1.0, math.nan)}], "digits": 0.1}]
    read = json.loads(Report("t", rows, ["n"]).to_json(), parse_constant=fail)
    assert (read["title"], read["notes"]) == ("t", ["n"])
    assert read["rows"][0] == ROWS[0]
    assert read["rows"][2]["share"] is None
    assert read["rows"][3] == {"deep": [None, {"x": None, "y": [1.0, None]}], "digits": 0.1}


def test_report_without_rows() -> None:
    empty = Report("Nothing", [], ["why"])
    assert empty.columns == []
    assert empty.to_text() == "Nothing\nwhy"
    assert empty.to_markdown() == "**Nothing**\n\nwhy"
