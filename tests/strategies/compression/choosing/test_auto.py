"""The choice in real processes: on the loopback interface, and over links that take their time."""

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core import rank_zero
from torch import Tensor, nn

from lightning_opt.strategies.compression.choosing import auto
from lightning_opt.strategies.compression.choosing import measurements as measuring
from lightning_opt.strategies.compression.choosing.cost_model import (
    LATE_MARGIN,
    LATE_MARGIN_FOR_ADAM,
    MARGIN,
)
from lightning_opt.strategies.compression.choosing.network_probe import agree, probe
from lightning_opt.strategies.compression.codecs.compressors import Quantize
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
SECONDS_A_BYTE = 5e-6
"""Of the slow link: 200 KB a second, so that the 10 KB of gradients take 50 ms."""


class Later:
    """A collective under way."""

    def __init__(self) -> None:
        self.future: torch.futures.Future[Any] = torch.futures.Future()

    def get_future(self) -> Any:
        return self.future


class SlowLink:
    """Lets every collective of gradients take as long as its bytes would over a slow network.

    The time is real, and goes by beside the backward pass, one collective after the other.

    Args:
        patch: Undoes it.
        seconds_a_byte: How slow.
        beside: False to hold the backward pass up instead, for DDP settings with collectives of
            their own, which would overtake.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        seconds_a_byte: float = SECONDS_A_BYTE,
        *,
        beside: bool = True,
    ) -> None:
        self.seconds_a_byte = seconds_a_byte
        self._beside = beside
        self._wire = ThreadPoolExecutor(1)
        self._all_reduce, self._all_gather = dist.all_reduce, transport.all_gather
        patch.setattr(dist, "all_reduce", self.all_reduce)
        patch.setattr(transport, "all_gather", self.all_gather)

    def _send(self, nbytes: int, result: Tensor, collective: Any, async_op: bool) -> Any:
        def travel() -> Any:
            time.sleep(self.seconds_a_byte * nbytes)
            return collective(async_op=async_op and not self._beside)

        if not async_op or not self._beside:
            return travel()
        later = Later()

        def run() -> None:
            try:
                travel()
                later.future.set_result([result])
            except Exception as error:  # noqa: BLE001
                later.future.set_exception(error)

        self._wire.submit(run)
        return later

    def all_reduce(
        self, tensor: Tensor, *arguments: Any, async_op: bool = False, **rest: Any
    ) -> Any:
        # What the ranks agree on is no gradient.
        nbytes = 0 if tensor.dtype is torch.float64 else tensor.nbytes
        call = partial(self._all_reduce, tensor, *arguments, **rest)
        return self._send(nbytes, tensor, call, async_op)

    def all_gather(self, gathered: Tensor, own: Tensor, async_op: bool = False, **rest: Any) -> Any:
        call = partial(self._all_gather, gathered, own, **rest)
        return self._send(own.nbytes, gathered, call, async_op)


def make_compression_dear(patch: pytest.MonkeyPatch, seconds: float = 0.02) -> None:
    """Let compressing a bucket seem to take so long that a busy machine's noise decides nothing."""
    measure = measuring.measure_costs

    def dear(scheme: Any, *arguments: Any) -> measuring.Costs:
        costs = measure(scheme, *arguments)
        extra = 0.0 if scheme is None else seconds
        return replace(costs, compress=replace(costs.compress, fixed=costs.compress.fixed + extra))

    patch.setattr(measuring, "measure_costs", dear)


def chooser(compressor: Any = "auto", **settings: Any) -> KeptResiduals:
    settings = {
        "warmup_steps": 7,
        "ramp_steps": 0,
        "bucket_cap_mb": SMALL_BUCKETS,
        "ratio": 0.05,
        **settings,
    }
    return KeptResiduals(compressor, **settings)


class Course(Callback):
    """Notes at each step what was chosen, and how many bytes were sent."""

    def __init__(self) -> None:
        self.best: list[int | None] = []
        self.plans: list[list[int]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        choice = trainer.strategy._auto.choice
        self.best.append(None if choice is None else choice.best)
        self.plans.append([] if choice is None else choice.plan)


def on_all_ranks(course: Course) -> bool:
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (course.best, course.plans))
    return all(other == everywhere[0] for other in everywhere)


def books_balance(model: Ledger, strategy: KeptResiduals, steps: int, *, owed: bool) -> None:
    accounts = expected(range(steps), dist_world(), model)
    if owed:
        assert_nothing_is_lost(model, strategy, accounts)
    else:
        assert same_on_all_ranks(model)
        for weight, account in zip(model.weights, accounts, strict=True):
            # bfloat16 loses a part in 500, with no residual to keep it.
            torch.testing.assert_close(weight.detach().double(), account, rtol=0, atol=0.5)


# --- loopback -------------------------------------------------------------------------------------


def _fast() -> None:
    with pytest.MonkeyPatch.context() as patch:
        make_compression_dear(patch)
        for strategy in (chooser("topk"), chooser("auto")):
            course, model = Course(), Ledger()
            fit(model, strategy, range(30), callbacks=[course])
            assert course.best[:7] == [None] * 7
            assert course.best[-1] == 0
            assert on_all_ranks(course)
            assert not strategy.kept  # nothing was ever compressed
            assert "fallback='never' would compress" in strategy.told.notes[0]


def test_where_there_is_nothing_to_win_gradients_stay_dense():
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
        make_compression_dear(patch)
        for kind in (Ledger, Sparse):
            weights = []
            for strategy in ("ddp", chooser("topk"), chooser("topk", fallback="always")):
                model = kind()
                fit(model, strategy, range(20))
                weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
            assert torch.equal(weights[0], weights[1])
            assert torch.equal(weights[0], weights[2])


def test_uncompressed_steps_leave_the_bits_of_plain_ddp():
    launch(_same_as_ddp)


# --- a slow link ----------------------------------------------------------------------------------


def _slow() -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    rank_zero.log.addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        SlowLink(patch, 6 * SECONDS_A_BYTE)
        for compressor in ("auto", "topk"):
            course, model, logger = Course(), Ledger(), MemoryLogger()
            # So little that int4 does not come near it.
            strategy = chooser(compressor, ratio=0.01, every_n_steps=5)
            fit(model, strategy, range(40), callbacks=[course], logger=logger)
            assert course.best == [None] * 7 + [len(strategy.schemes) - 1] * 33
            assert on_all_ranks(course)
            books_balance(model, strategy, 40, owed=True)
            modes = logger.series("comm/mode")
            if dist.get_rank() == 0:
                assert modes[0] == 0
                assert modes[-1] == 3
                assert logger.series("comm/bytes")[-1] < 0.9 * logger.series("comm/bytes")[0]
            report = strategy.told
            assert [row["buckets"] for row in report.rows] == [
                course.plans[-1].count(index) for index in range(len(strategy.schemes))
            ]
    return said


def test_a_slow_link_is_found_and_used_sparingly():
    said, *others = launch(_slow, processes=3)
    assert len([line for line in said if "Chosen for the" in line]) == 2
    assert not any(others)


class Ratios(Callback):
    """Notes at each step the largest share of a bucket that was sent."""

    def __init__(self) -> None:
        self.largest: list[float] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        buckets = trainer.strategy._reduction._buckets.values()
        self.largest.append(max((getattr(b.scheme, "ratio", 1.0) for b in buckets), default=1.0))


def _ramped() -> None:
    with pytest.MonkeyPatch.context() as patch:
        SlowLink(patch)
        # A run of 72 steps: half of them are the ramp, in two stages.
        ratios, model, strategy = Ratios(), Ledger(), chooser("topk", ramp_steps=None)
        fit(model, strategy, range(72), callbacks=[ratios])
        trial = auto.TRIAL + 1
        sent = [1.0] * 7 + [0.05] * trial + [0.25] * 18 + [0.0625] * 18
        assert ratios.largest == sent + [0.05] * (72 - len(sent))
        assert "after a ramp of 36 steps: TopK(0.25), TopK(0.0625)." in strategy.told.notes[0]
        books_balance(model, strategy, 72, owed=True)


def test_the_trial_is_of_the_last_ratio_and_the_ramp_comes_after_it():
    launch(_ramped)


class LedgerOfAdam(Ledger):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Margins(Callback):
    """Keeps what each way of sending must save."""

    def on_train_end(self, trainer: Any, *args: Any) -> None:
        measured = trainer.strategy._auto.measured
        self.margins = [way.margin for way in [*measured.options, *measured.stages]]


def _adam() -> None:
    for kind, late in ((Ledger, LATE_MARGIN), (LedgerOfAdam, LATE_MARGIN_FOR_ADAM)):
        margins = Margins()
        fit(kind(), chooser("auto", ramp_steps=9), range(9), callbacks=[margins])
        assert margins.margins == [MARGIN] * 4 + [late] * 3  # two stages lead to 5%


def test_top_k_must_save_more_where_lateness_costs_more():
    launch(_adam)


def _changing() -> None:
    """A link that becomes slow, then fast again; looked at every 10 steps."""
    with pytest.MonkeyPatch.context() as patch:
        make_compression_dear(patch, 0.005)
        link = SlowLink(patch, 0.0)

        class Weather(Callback):
            def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, *_: Any) -> None:
                link.seconds_a_byte = SECONDS_A_BYTE if 20 <= int(batch) < 60 else 0.0

        course, model = Course(), Ledger()
        strategy = chooser("topk", examine_every_n_steps=10)
        fit(model, strategy, range(90), callbacks=[Weather(), course])
        assert set(course.best[7:20]) == {0}
        # Noticed at the first look or, where processors are busy just then, at the second.
        assert set(course.best[40:60]) == {1}
        assert course.best[-1] == 0
        assert on_all_ranks(course)
        books_balance(model, strategy, 90, owed=False)
        # What was owed went out with the first dense step.
        assert all(not rest.any() for rest in strategy.kept.values())


def test_a_network_that_changes_is_noticed():
    launch(_changing)


def _disappointing() -> None:
    """Compressing takes longer than it took on trial."""
    with pytest.MonkeyPatch.context() as patch:
        SlowLink(patch)
        compress = transport.GatherChannel.start

        def slow_start(self: Any, *arguments: Any) -> Any:
            time.sleep(0.06)  # what no measurement has told
            return compress(self, *arguments)

        patch.setattr(transport.GatherChannel, "start", slow_start)
        course, model = Course(), Ledger()
        strategy = chooser("topk", examine_every_n_steps=10)
        fit(model, strategy, range(60), callbacks=[course])
        assert course.best[7] == 1
        assert course.best[7 + auto.TRIAL] == 1
        # Taken back after the trial, and not tried again on the same network.
        assert set(course.best[7 + auto.TRIAL + 1 :]) == {0}
        assert on_all_ranks(course)
        books_balance(model, strategy, 60, owed=False)


def test_a_choice_that_does_not_pay_is_taken_back():
    launch(_disappointing)


# --- several things at once -----------------------------------------------------------------------


def _mixed() -> None:
    """A plan of every kind of bucket, with an overflow in the middle."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    for bad_index in (1, 3, 4):
        strategy = chooser("auto", bucket_cap_mb=SMALL_BUCKETS / 10)
        model = Ledger(bad=(20, 1, bad_index))
        planner = Planner()
        fit(model, strategy, range(40), scaler=scaler, callbacks=[planner])
        assert same_on_all_ranks(model)
        assert len(planner.kinds) == 2
        assert all(set(kinds) == {"DenseChannel", "GatherChannel"} for kinds in planner.kinds)
        # The step was skipped everywhere; buckets that would have sent it keep it for later, those
        # that were flagged or went uncompressed drop it.
        whole, without = (
            expected([s for s in range(40) if s != left_out], dist_world(), model)
            for left_out in (None, 20)
        )
        for index, weight in enumerate(model.weights):
            account = weight.detach().double() - strategy.kept[f"weights.{index}"]
            assert any(
                torch.allclose(account, one[index], rtol=0, atol=1e-3) for one in (whole, without)
            ), index
        bad = model.weights[bad_index].detach().double() - strategy.kept[f"weights.{bad_index}"]
        torch.testing.assert_close(bad, without[bad_index], rtol=0, atol=1e-3)


class Planner(Callback):
    """Gives the buckets options by hand, once the choice is made: dense, int8 and Top-K.

    At the step with the overflow others become dense, and send what they owe in vain.
    """

    def __init__(self) -> None:
        self.kinds: list[list[str]] = []

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        choice = trainer.strategy._auto.choice
        if choice is not None:
            turn = 1 if batch_idx >= 19 else 0
            assert len(choice.plan) >= 3
            object.__setattr__(choice, "best", 4)
            choice.plan[:] = [(0, 2, 4)[(place + turn) % 3] for place in range(len(choice.plan))]
            trainer.strategy._auto._on_trial = False
            trainer.strategy._auto._due = -1
            launched = trainer.strategy._reduction._launched
            kinds = [type(channel).__name__ for channel in launched]
            if kinds and kinds not in self.kinds:
                self.kinds.append(kinds)


def test_buckets_of_every_kind_skip_an_overflow_together():
    launch(_mixed)


def _by_hand() -> None:
    with pytest.MonkeyPatch.context() as patch:
        SlowLink(patch, beside=False)
        # Time that holds the backward pass up is not seen as the network's.
        patch.setattr(measuring, "calibrate", lambda *_: 1.0)
        strategy, model = chooser("topk", find_unused_parameters=True), LedgerByHand()
        fit(model, strategy, range(30))
        books_balance(model, strategy, 30, owed=True)
        assert strategy.told is not None


def test_two_optimizers_by_hand_choose_too():
    launch(_by_hand)


def _first_half(path: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        SlowLink(patch)
        fit(Ledger(), chooser("topk"), range(20), callbacks=[SaveAtEnd(path)])


def _second_half(path: str) -> None:
    strategy, model, course = chooser("topk"), Ledger(), Course()
    with pytest.MonkeyPatch.context() as patch:
        make_compression_dear(patch)
        fit(model, strategy, range(20, 40), ckpt_path=path, max_epochs=2, callbacks=[course])
    # Decided anew, on a network that is fast now; what was owed has been sent.
    assert course.best == [None] * 7 + [0] * 13
    first, second = expected(range(20), 2, model), expected(range(20, 40), dist_world(), model)
    for weight, one, other in zip(model.weights, first, second, strict=True):
        torch.testing.assert_close(weight.detach().double(), one + other, rtol=0, atol=2e-4)
    assert same_on_all_ranks(model)


def test_a_resumed_run_decides_anew(tmp_path):
    path = str(tmp_path / "half.ckpt")
    launch(_first_half, path)
    launch(_second_half, path, processes=3)


# --- probes ---------------------------------------------------------------------------------------


def _probe() -> list[tuple[float, float]]:
    import os

    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=dist_world())
    rank = dist.get_rank()
    assert agree([float(rank), -float(rank)], CPU) == [dist_world() - 1, 0]
    with pytest.MonkeyPatch.context() as patch:
        # Ranks that take different times must probe equally often.
        SlowLink(patch, 2e-8 * (1 + rank))
        return probe(CPU, 300_000, 0.5)


@pytest.mark.parametrize("processes", [2, 3])
def test_all_ranks_probe_alike(processes):
    samples = launch(_probe, processes=processes)
    assert all(other == samples[0] for other in samples)
    world = processes
    assert [sent for sent, _ in samples[0]] == [
        2 * (world - 1) * n // world for n in (4096, 32768, 262144)
    ]
    assert samples[0][-1][1] >= 2e-8 * world * 262144


def test_what_there_is_to_choose_from():
    def names(**settings: Any) -> list[str]:
        return [type(s).__name__ for s in CompressedDDPStrategy(**settings).schemes]

    assert names(compressor="auto") == ["NoneType", "dtype", "Quantize", "Quantize", "TopK"]
    assert names(compressor="auto", fallback="never") == ["dtype", "Quantize", "Quantize", "TopK"]
    assert names(compressor="topk") == ["NoneType", "TopK"]
    assert names(compressor=Quantize(4)) == ["NoneType", "Quantize"]
    assert names(compressor="topk", fallback="never") == ["TopK"]
    assert names(compressor="topk", fallback="always") == ["NoneType"]
    assert names(compressor="auto", fallback="always") == ["NoneType"]
    assert CompressedDDPStrategy("auto", ratio=0.02).schemes[-1].ratio == 0.02
