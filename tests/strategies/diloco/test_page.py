"""The numbers of "Which strategy on which network" equal the records of the benchmarks."""

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "which_strategy.md").read_text()

ROWS = {
    '`"ddp"`': ("compression", "dense"),
    '`"ddp_int8"`': ("compression", "ddp_int8"),
    '`"ddp_int4"`': ("compression", "ddp_int4"),
    '`"ddp_topk"`': ("compression", "ddp_topk 1%"),
    '`"diloco"`': ("diloco", "diloco, H=16"),
    "`DiLoCoStrategy(30)`": ("diloco", "diloco, H=30"),
    '`"diloco_streaming"`': ("diloco", "diloco_streaming, H=30"),
}
ALONE = {"compression": "no exchange", "diloco": "no network"}


def recorded(file: str, network: str, strategy: str) -> dict[str, Any]:
    rows = json.loads((ROOT / "benchmarks" / "results" / f"{file}.json").read_text())["rows"]
    wanted = {"ranks": 2, "network": network, "strategy": strategy}
    return next(row for row in rows if wanted.items() <= row.items())


@pytest.mark.parametrize("row", ROWS)
def test_page_equals_the_records(row: str) -> None:
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| {row} |"))
    *times, fewer = line.strip("| ").split(" | ")[1:]
    file, strategy = ROWS[row]
    for cell, network in zip(times, ("1 Gbit/s", "100 Mbit/s"), strict=True):
        ms = [recorded(file, network, name)["ms"] for name in (strategy, ALONE[file])]
        assert cell == f"{ms[0] / ms[1]:.2g}"
    found = recorded(file, "1 Gbit/s", strategy)["fewer bytes"]
    assert fewer == f"{float(format(found, '.2g')):g}"
