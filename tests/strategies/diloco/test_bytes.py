"""The numbers of "Which strategy on which network" that are computed, not measured."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry

import lightning_opt as lo
from lightning_opt.strategies.diloco.exchange import CODECS

PAGE = (Path(__file__).parents[3] / "docs" / "which_strategy.md").read_text()

NUMEL = 8 * 1024**2
"""Elements of the model there, on two ranks."""

STEP = 0.055
"""Seconds of a step of it without any exchange, as the page says."""

DENSE = 4 * NUMEL
"""Bytes that a ring all-reduce between two ranks sends."""


def sent_in_a_step(strategy: lo.DiLoCoStrategy, numel: int) -> float:
    """Return the bytes of a step's share of messages between two ranks."""
    plan = strategy.plan
    compressor = CODECS[plan.compression]
    assert compressor is not None
    shard = -(-numel // plan.fragments // 2 // compressor.block) * compressor.block
    message = compressor.codec(shard, torch.device("cpu")).nbytes
    return 2 * plan.fragments * message / plan.sync_every


ROWS = {
    '`"diloco"`': StrategyRegistry.get("diloco"),
    '`DiLoCoStrategy(30, compression="int4")`': lo.DiLoCoStrategy(30, compression="int4"),
    '`"diloco_streaming"`': StrategyRegistry.get("diloco_streaming"),
}


@pytest.mark.parametrize("row", ROWS)
def test_what_the_page_computes_is_what_the_messages_take(row):
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| {row} |"))
    *times, fewer = line.strip("| ").split(" | ")[1:]
    plan, sent = ROWS[row].plan, sent_in_a_step(ROWS[row], NUMEL)
    assert fewer == f"{DENSE / sent:.0f} (computed)"
    for cell, bandwidth in zip(times, (1e9, 1e8), strict=True):
        on_the_way = 8 * sent * plan.sync_every / plan.fragments / bandwidth  # of one fragment
        waits = plan.fragments * max(0.0, on_the_way - plan.delay * STEP)
        assert cell == f"{1 + waits / plan.sync_every / STEP:.1f} (computed)"
