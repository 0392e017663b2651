"""Memory peaks against limits, with a simulated CUDA allocator."""

import pytest
import torch

from lightning_opt.batching.peaks import LimitMeter
from lightning_opt.core.measure.memory import PeakMeter

DEVICE = torch.device("cuda", 0)


class Allocator:
    """Simulates a device of 100 bytes behind torch.cuda's functions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.peaks = (0, 0, 0)
        patch = {
            "memory_allocated": lambda device: self.now[0],
            "max_memory_allocated": lambda device: self.peaks[0],
            "memory_reserved": lambda device: self.now[2],
            "max_memory_reserved": lambda device: self.peaks[2],
            "memory_stats": lambda device: {"inactive_split_bytes.all.peak": self.peaks[1]},
            "mem_get_info": lambda device: (100 - self.now[2], 100),
            "reset_peak_memory_stats": self._reset,
            "empty_cache": self._empty,
        }
        for name, function in patch.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def hold(self, allocated: int, split: int, reserved: int) -> None:
        self.now = (allocated, split, reserved)
        self.peaks = tuple(map(max, self.peaks, self.now))

    def _reset(self, device: torch.device) -> None:
        self.peaks = self.now

    def _empty(self) -> None:
        self.now = (*self.now[:2], sum(self.now[:2]))


@pytest.mark.parametrize(
    ("held", "share"),
    [
        ((40, 0, 40), 0.4),
        ((40, 30, 70), 0.7),  # 30 of fragments
        ((40, 0, 90), 0.4),  # free blocks, which the allocator returns
        ((40, 55, 60), 0.6),  # at most the reserved memory
    ],
)
def test_fragments_count_and_free_blocks_do_not(monkeypatch, held, share):
    allocator = Allocator(monkeypatch)
    allocator.hold(10, 0, 80)  # of an earlier, larger step
    meter, tensors = LimitMeter(DEVICE), PeakMeter(DEVICE)
    meter.start()
    allocator.hold(*held)
    allocator.hold(10, 0, held[2])
    peak = meter.read()
    assert peak.share == pytest.approx(share)
    assert peak.current == pytest.approx(0.1)
    assert tensors.read() == 40
    budget = LimitMeter(DEVICE, budget_mb=50 / 2**20)
    allocator.hold(*held)
    assert budget.read().share == pytest.approx(2 * share)
