"""The choice in real processes: on the loopback interface, and over links that take their time."""

import logging
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning_utilities.core import rank_zero
from torch import Tensor, nn

import lightning_opt as lo
from lightning_opt.strategies.compression.choosing import auto, network_probe
from lightning_opt.strategies.compression.choosing import measurements as measuring
from lightning_opt.strategies.compression.choosing.network_probe import agree, probe
from lightning_opt.strategies.compression.compressed_ddp import CompressedDDPStrategy
from lightning_opt.strategies.compression.exchange import channels as transport
from tests.helpers.processes import launch
from tests.helpers.trainers import MemoryLogger
from tests.strategies.runs import (
    SMALL_BUCKETS,
    KeptResiduals,
    Ledger,
    LedgerByHand,
    SaveAtEnd,
    assert_nothing_is_lost,
    dist_world,
    expected,
    fit,
    same_on_all_ranks,
)

pytestmark = pytest.mark.distributed

CPU = torch.device("cpu")
SECONDS_A_BYTE = 3e-5
"""Of the slow link: 33 KB a second, so that the 10 KB of gradients take 0.3 s."""


class SlowLink:
    """Lets every collective of gradients take as long as its bytes would over a slow network.

    The time is pretended. It stands still during the backward pass, beside which messages travel
    one after the other, and goes on to the arrival of the last one before the next step begins.

    Args:
        patch: Undoes it.
        seconds_a_byte: How slow.
    """

    def __init__(self, patch: pytest.MonkeyPatch, seconds_a_byte: float = SECONDS_A_BYTE) -> None:
        self.now = self.arrival = 0.0
        self._seconds_a_byte = seconds_a_byte
        self._all_reduce, self._all_gather = dist.all_reduce, transport.all_gather
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        for module in (measuring, network_probe):
            patch.setattr(module, "time", clock)
        patch.setattr(auto, "time", SimpleNamespace(perf_counter=self._arrive))
        patch.setattr(dist, "all_reduce", self.all_reduce)
        patch.setattr(transport, "all_gather", self.all_gather)

    def _arrive(self) -> float:
        self.now = max(self.now, self.arrival)
        return self.now

    def _send(self, tensor: Tensor, async_op: bool) -> None:
        seconds = self._seconds_a_byte * tensor.numel() * tensor.element_size()
        self.arrival = max(self.now, self.arrival) + seconds
        if not async_op:
            self._arrive()

    def all_reduce(self, tensor: Tensor, *arguments: Any, **rest: Any) -> Any:
        if tensor.dtype is not torch.float64:  # what the ranks agree on is no gradient
            self._send(tensor, rest.get("async_op", False))
        return self._all_reduce(tensor, *arguments, **rest)

    def all_gather(self, gathered: Tensor, own: Tensor, **rest: Any) -> Any:
        self._send(own, rest.get("async_op", False))
        return self._all_gather(gathered, own, **rest)


def make_compression_dear(patch: pytest.MonkeyPatch, seconds: float = 0.02) -> None:
    """Let compressing a bucket seem to take that long."""
    measure = measuring.measure_costs

    def dear(scheme: Any, *arguments: Any) -> measuring.Costs:
        compress, *others = measure(scheme, *arguments)
        extra = 0.0 if scheme is None else seconds
        return [replace(compress, fixed=compress.fixed + extra), *others]

    patch.setattr(measuring, "measure_costs", dear)


def chooser(**settings: Any) -> KeptResiduals:
    settings = {
        "warmup_steps": 7,
        "ramp_steps": 0,
        "bucket_cap_mb": SMALL_BUCKETS,
        "ratio": 0.01,
        "every_n_steps": 1,
        **settings,
    }
    return KeptResiduals("auto", **settings)


def run(model: LightningModule, strategy: Any, steps: range, **settings: Any) -> list[float]:
    """Train, and return ``comm/mode`` of each step, which all ranks agree on."""
    logger = MemoryLogger()
    fit(model, strategy, steps, logger=logger, log_every_n_steps=1, **settings)
    modes = [logger.series("comm/mode")]
    dist.broadcast_object_list(modes)
    return modes[0]


def books_balance(model: Ledger, strategy: KeptResiduals, steps: int, *, owed: bool) -> None:
    accounts = expected(range(steps), dist_world(), model)
    if owed:
        assert_nothing_is_lost(model, strategy, accounts)
    else:
        assert same_on_all_ranks(model)
        for weight, account in zip(model.weights, accounts, strict=True):
            torch.testing.assert_close(weight.detach().double(), account, rtol=0, atol=2e-4)


WARM, TOPK = [0.0] * 7, 3.0


# --- loopback -------------------------------------------------------------------------------------


def _fast() -> None:
    with pytest.MonkeyPatch.context() as patch:
        SlowLink(patch, 0.0)
        make_compression_dear(patch)
        model, strategy = Ledger(), chooser()
        assert run(model, strategy, range(30)) == [0.0] * 30
        books_balance(model, strategy, 30, owed=False)
        assert not strategy.kept  # nothing was ever compressed
        report = strategy.describe()
        assert [row["chosen"] for row in report.rows] == [True] + [False] * 4
        assert report.notes[0].endswith("Chosen: uncompressed.")
        # Which is as good as a choice: named, each of these compresses.
        for name, mode in {"topk": 3.0, "threshold": 2.0, "int8": 1.0, "int4": 1.0}.items():
            named = KeptResiduals(name, warmup_steps=2, ramp_steps=0, every_n_steps=1)
            assert run(Ledger(), named, range(12)) == [0.0] * 2 + [mode] * 10
            assert named.describe() is None


def test_only_the_one_that_chooses_stays_dense_where_there_is_nothing_to_win():
    launch(_fast)


class Sparse(LightningModule):
    """Nothing but gradients that are sparse of themselves, for which there is nothing to choose."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 3, sparse=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.table(torch.tensor([int(batch) + self.global_rank])).square().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _same_as_ddp() -> None:
    with pytest.MonkeyPatch.context() as patch:
        SlowLink(patch, 0.0)
        make_compression_dear(patch)
        for kind in (Ledger, Sparse):
            weights = []
            for strategy in ("ddp", chooser()):
                model = kind()
                fit(model, strategy, range(20))
                weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
            assert torch.equal(*weights)


def test_uncompressed_steps_leave_the_bits_of_plain_ddp():
    launch(_same_as_ddp)


# --- a slow link ----------------------------------------------------------------------------------


class LedgerOfAdam(Ledger):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def _slow() -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    rank_zero.log.addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        # So slow that int4 does not come near Top-K.
        SlowLink(patch)
        model, strategy = Ledger(), chooser()
        assert run(model, strategy, range(30)) == WARM + [TOPK] * 23
        books_balance(model, strategy, 30, owed=True)
        assert [row["chosen"] for row in strategy.describe().rows] == [False] * 4 + [True]
        # Late gradients suit neither what divides by second moments nor what clips afterwards.
        for kind, callbacks in ((LedgerOfAdam, []), (Ledger, [lo.AdaptiveClipping()])):
            strategy = chooser()
            assert set(run(kind(), strategy, range(12), callbacks=callbacks)[7:]) <= {1.0, 5.0}
            assert [row["scheme"] for row in strategy.describe().rows] == [
                *("uncompressed", "bfloat16", "Quantize(8)", "Quantize(4)")
            ]
    return said


def test_a_slow_link_is_found_and_used_sparingly():
    said, *others = launch(_slow, processes=3)
    assert len([line for line in said if "Chosen: " in line]) == 3
    assert not any(others)


def _ramped() -> None:
    with pytest.MonkeyPatch.context() as patch:
        SlowLink(patch)
        # A run of 72 steps: half of them are the ramp, in two stages.
        logger, model, strategy = MemoryLogger(), Ledger(), chooser(ratio=0.05, ramp_steps=None)
        fit(model, strategy, range(72), logger=logger, log_every_n_steps=1)
        books_balance(model, strategy, 72, owed=True)
        if dist.get_rank() == 0:
            sent = logger.series("comm/bytes")
            trial, ramp = sent[7 : 7 + auto.TRIAL + 1], sent[7 + auto.TRIAL + 1 :]
            assert set(trial) == set(ramp[36:])
            assert len(set(ramp[:18])) == len(set(ramp[18:36])) == 1
            assert ramp[0] > 3 * ramp[18] > 3.5 * ramp[36]


def test_the_trial_is_of_the_last_ratio_and_the_ramp_comes_after_it():
    launch(_ramped)


def _disappointing() -> None:
    """Compressing takes longer than it took on trial."""
    with pytest.MonkeyPatch.context() as patch:
        link = SlowLink(patch)
        compress = transport.GatherChannel.start

        def slow_start(self: Any, *arguments: Any) -> Any:
            link.now += 0.4  # what no measurement has told
            return compress(self, *arguments)

        patch.setattr(transport.GatherChannel, "start", slow_start)
        model, strategy = Ledger(), chooser()
        trial = auto.TRIAL + 1
        assert run(model, strategy, range(24)) == WARM + [TOPK] * trial + [0.0] * (17 - trial)
        books_balance(model, strategy, 24, owed=False)
        assert strategy.describe().rows[0]["chosen"]


def test_a_choice_that_does_not_pay_is_taken_back():
    launch(_disappointing)


def _by_hand() -> None:
    with pytest.MonkeyPatch.context() as patch:
        SlowLink(patch)
        strategy, model = chooser(find_unused_parameters=True), LedgerByHand()
        fit(model, strategy, range(30))
        books_balance(model, strategy, 30, owed=True)
        assert strategy.describe() is not None


def test_two_optimizers_by_hand_choose_too():
    launch(_by_hand)


# --- resume ---------------------------------------------------------------------------------------


def _first_half(path: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        SlowLink(patch)
        fit(Ledger(), chooser(), range(12), callbacks=[SaveAtEnd(path)])


def _second_half(path: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # On a network that is fast now, where a new choice would be another one.
        SlowLink(patch, 0.0)
        make_compression_dear(patch)
        strategy, model = chooser(), Ledger()
        modes = run(model, strategy, range(12, 24), ckpt_path=path, max_epochs=2)
    assert modes == [TOPK] * 12
    assert strategy.describe() is None  # nothing was measured
    first, second = expected(range(12), 2, model), expected(range(12, 24), dist_world(), model)
    accounts = [one + other for one, other in zip(first, second, strict=True)]
    assert_nothing_is_lost(model, strategy, accounts)


def test_a_resumed_run_keeps_to_the_choice(tmp_path):
    path = str(tmp_path / "half.ckpt")
    launch(_first_half, path)
    assert (
        torch.load(path, weights_only=True)[CompressedDDPStrategy.checkpoint_key]["choice"]
        == "TopK(0.01)"
    )
    launch(_second_half, path, processes=3)


# --- probes ---------------------------------------------------------------------------------------


def _probe() -> list[tuple[float, float]]:
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=dist_world())
    rank = dist.get_rank()
    assert agree([float(rank), -float(rank)], CPU) == [dist_world() - 1, 0]
    with pytest.MonkeyPatch.context() as patch:
        # Ranks that take different times must probe equally often.
        SlowLink(patch, 2e-8 * (1 + rank))
        return probe(CPU, 300_000)


@pytest.mark.parametrize("processes", [2, 3])
def test_all_ranks_probe_alike(processes):
    samples = launch(_probe, processes=processes)
    assert all(other == samples[0] for other in samples)
    world = processes
    assert [sent for sent, _ in samples[0]] == [
        2 * (world - 1) * n // world for n in (4096, 32768, 262144)
    ]
    assert samples[0][-1][1] >= 2e-8 * world * 262144
