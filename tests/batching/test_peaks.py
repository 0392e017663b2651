"""Memory peaks against limits, with simulated numbers of the CUDA allocator."""

from unittest import mock

import pytest
import torch

from lightning_opt.batching.peaks import LimitMeter


@pytest.mark.parametrize(
    ("allocated", "fragments", "reserved", "share"),
    [
        (40, 0, 40, 0.4),
        (40, 30, 70, 0.7),
        (40, 0, 90, 0.4),  # free blocks, which the allocator returns
        (40, 55, 60, 0.6),  # at most the reserved memory
    ],
)
def test_fragments_count_and_free_blocks_do_not(monkeypatch, allocated, fragments, reserved, share):
    for name, value in {
        "memory_allocated": 10,
        "max_memory_allocated": allocated,
        "memory_reserved": reserved,
        "max_memory_reserved": reserved,
        "memory_stats": {"inactive_split_bytes.all.peak": fragments},
        "mem_get_info": (100 - reserved, 100),
        "reset_peak_memory_stats": None,
        "empty_cache": None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
    for budget_mb, limit, fraction in ((None, 100, 1.0), (50 / 2**20, 50, 1.0), (None, 40, 0.4)):
        read = mock.Mock(return_value=fraction)
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", read, raising=False)
        meter = LimitMeter(torch.device("cuda", 0), budget_mb)
        meter.start()
        peak = meter.read()
        assert peak.share == pytest.approx(share * 100 / limit)
        assert peak.current == pytest.approx(10 / limit)
