"""What "Which strategy on which network" says is what was measured, and the bytes add up."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry

import lightning_opt as lo
from lightning_opt.strategies.diloco.exchange import CODECS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "which_strategy.md").read_text()

NUMEL = 8 * 1024**2
"""Elements of the model there, on two ranks."""

ROWS = {
    '`"ddp"`': ("compression", "dense"),
    '`"ddp_int8"`': ("compression", "ddp_int8"),
    '`"ddp_int4"`': ("compression", "ddp_int4"),
    '`"ddp_powersgd"`': ("compression", "PowerSGD rank 1"),
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
def test_the_page_says_what_was_measured(row: str) -> None:
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| {row} |"))
    *times, fewer = line.strip("| ").split(" | ")[1:]
    file, strategy = ROWS[row]
    for cell, network in zip(times, ("1 Gbit/s", "100 Mbit/s"), strict=True):
        ms = [recorded(file, network, name)["ms"] for name in (strategy, ALONE[file])]
        assert cell == f"{ms[0] / ms[1]:.2g}"
    found = recorded(file, "1 Gbit/s", strategy)["fewer bytes"]
    assert fewer == f"{float(format(found, '.2g')):g}"


@pytest.mark.parametrize("row", [row for row in ROWS if ROWS[row][0] == "diloco"])
def test_the_messages_are_as_long_as_was_measured(row: str) -> None:
    found = lo.DiLoCoStrategy(30) if "30" in row else StrategyRegistry.get(row.strip('`"'))
    plan, compressor = found.plan, CODECS[found.plan.compression]
    assert compressor is not None
    shard = -(-NUMEL // plan.fragments // 2 // compressor.block) * compressor.block
    message = compressor.codec(shard, torch.device("cpu")).nbytes
    sent = 2 * plan.fragments * message / plan.sync_every
    measured = recorded("diloco", "1 Gbit/s", ROWS[row][1])["fewer bytes"]
    # Headers of the network, and what ranks tell each other besides.
    assert 0.92 * 4 * NUMEL / sent < measured < 4 * NUMEL / sent
