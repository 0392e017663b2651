"""Top-K's ramp, and the trials of ``"auto"`` in real processes over simulated links."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

import lightning_opt as lo
from lightning_opt.strategies.compression import choice, exchange
from lightning_opt.strategies.compression.choice import (
    UNTIMED_STEPS,
    AutoChoice,
    Ramp,
    gentlest_that_pays,
)
from lightning_opt.strategies.compression.compressed_ddp import CompressedDDPStrategy
from lightning_opt.strategies.compressors import Quantize, TopK
from tests.helpers.models import assert_same_weights
from tests.helpers.processes import launch
from tests.helpers.trainers import MemoryLogger
from tests.strategies.runs import (
    SMALL_BUCKETS,
    KeptResiduals,
    Ledger,
    SaveAtEnd,
    assert_nothing_is_lost,
    dist_world,
    expected,
    fit,
    same_on_all_ranks,
)

SECONDS_PER_BYTE = 3e-5
"""The slow link carries 33 KB per second: the 10 KB of gradients take 0.3 s."""

TIMED_STEPS = 2
"""Timed steps of each trial in these tests, where every step takes exactly as long."""

UNCOMPRESSED = 2 + UNTIMED_STEPS + TIMED_STEPS
"""Steps of the warm-up and of the trial without compression."""

TRIALS = 3 * (UNTIMED_STEPS + TIMED_STEPS)
"""Steps of the trials of int8, int4 and Top-K."""

TOPK = 3.0  # as logged in comm/mode

INT8, INT4 = "Quantize(bits=8, block=1024)", "Quantize(bits=4, block=1024)"


class SlowLink:
    """A fake clock that advances by the time that messages take on a simulated network.

    Messages are sent one after the other. The clock is constant during the backward pass, and
    advances to the arrival of the last message before the next step.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, seconds_per_byte: float = SECONDS_PER_BYTE
    ) -> None:
        self.now = self.arrival = 0.0
        self._seconds_per_byte = seconds_per_byte
        patch.setattr(choice, "TIMED_STEPS", TIMED_STEPS)
        patch.setattr(choice, "time", SimpleNamespace(perf_counter=self._step_end))
        patch.setattr(dist, "all_reduce", self._slowed(dist.all_reduce, 0))
        patch.setattr(dist, "isend", self._slowed(dist.isend, 0))
        patch.setattr(exchange, "all_gather", self._slowed(exchange.all_gather, 1))

    def _step_end(self) -> float:
        self.now = max(self.now, self.arrival) + 0.001
        return self.now

    def _slowed(self, collective: Any, sent: int) -> Any:
        """Return a collective that delays the arrival of argument number ``sent``."""

        def call(*arguments: Any, **rest: Any) -> Any:
            if arguments[sent].dtype is not torch.float64:  # float64 is a maximum over ranks
                seconds = self._seconds_per_byte * arguments[sent].nbytes
                self.arrival = max(self.now, self.arrival) + seconds
            return collective(*arguments, **rest)

        return call


def auto_ddp(**settings: Any) -> KeptResiduals:
    settings = {
        "warmup_steps": 2,
        "ramp_steps": 0,
        "bucket_cap_mb": SMALL_BUCKETS,
        "ratio": 0.01,
        "every_n_steps": 1,
        **settings,
    }
    return AutoWithoutBfloat16("auto", **settings)


class AutoWithoutBfloat16(KeptResiduals):
    """Does not try bfloat16, whose rounding has no error feedback."""

    def _register_ddp_hooks(self) -> None:
        super()._register_ddp_hooks()
        self._auto.schemes.remove(torch.bfloat16)  # type: ignore[union-attr]


def run(model: LightningModule, strategy: Any, steps: range, **settings: Any) -> list[float]:
    """Train, and return ``comm/mode`` of each step on rank 0."""
    logger = MemoryLogger()
    fit(model, strategy, steps, logger=logger, log_every_n_steps=1, **settings)
    modes = [logger.series("comm/mode")]
    dist.broadcast_object_list(modes)
    return modes[0]


def assert_conserved(model: Ledger, strategy: KeptResiduals, steps: int) -> None:
    assert_nothing_is_lost(model, strategy, expected(range(steps), dist_world(), model))


# --- the rule -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ([1.0, 0.95, 0.91], 0),  # no scheme saves 10%
        ([1.0, 0.85, 0.8], 1),
        ([1.0, 0.85, 0.7], 1),  # the third must save 25% of the second's time
        ([1.0, 0.85, 0.6], 2),
        ([1.0, 1.2, 0.7], 2),
    ],
)
def test_gentlest_scheme_that_pays_is_chosen(seconds, chosen):
    assert gentlest_that_pays(seconds, [0.1, 0.1, 0.25]) == chosen


def test_choice_ignores_untimed_steps(monkeypatch):
    """The warm-up and the first steps of each trial are much slower."""
    now, warmup, length = 0.0, 3, UNTIMED_STEPS + TIMED_STEPS
    monkeypatch.setattr(choice, "TIMED_STEPS", TIMED_STEPS)
    monkeypatch.setattr(choice, "time", SimpleNamespace(perf_counter=lambda: now))
    schemes = [None, Quantize(8), TopK(0.3)]
    auto = AutoChoice(schemes, warmup, torch.device("cpu"))
    sent = []
    for number in range(warmup + 3 * length + 1):
        sent.append(auto.begin_step())
        trial, step = divmod(number - warmup, length)
        now += 9.0 if step < UNTIMED_STEPS else {0: 1.0, 1: 0.5, 2: 0.6}.get(trial, 9.0)
    trials = [scheme for scheme in schemes for _ in range(length)]
    assert sent == [None] * warmup + trials + [schemes[1]]
    assert [row["step ms"] for row in auto.report().rows] == pytest.approx([1000, 500, 600])
    assert auto.name == INT8
    auto.restore("TopK(ratio=0.3)")  # of a checkpoint
    assert auto.begin_step() is schemes[2]
    auto.restore("a scheme that is no longer tried")
    assert auto.begin_step() is None


@pytest.mark.parametrize(
    ("compressor", "steps", "planned", "ratios"),
    [
        (TopK(0.01), 0, 100, {0: 0.01}),
        (TopK(0.001), 500, 100, {0: 0.25, 124: 0.25, 125: 0.0625, 499: 0.25**4, 500: 0.001}),
        (TopK(0.01), None, 900, {149: 0.25, 150: 0.0625, 449: 0.25**3, 450: 0.01}),
        (TopK(0.01), None, 10**6, {999: 0.25, 1000: 0.0625, 2999: 0.25**3, 3000: 0.01}),
        (TopK(0.01), None, -1, {999: 0.25, 3000: 0.01}),  # the length of the run is unknown
        (TopK(0.5), None, 100, {0: 0.5}),
    ],
)
def test_ramp_sends_fewer_elements_stage_by_stage(compressor, steps, planned, ratios):
    ramp = Ramp(compressor, steps)
    ramp.set_length(planned)
    sent = [ramp.next() for _ in range(max(ratios) + 1)]
    assert {step: sent[step].ratio for step in ratios} == ratios
    # One object per stage, because a new object needs new buffers.
    assert len(set(map(id, sent))) <= len(ramp.stages) + 1
    assert Ramp(Quantize(), None).next().bits == 8


# --- a fast link ----------------------------------------------------------------------------------


def _choice_on_fast_link() -> None:
    with pytest.MonkeyPatch.context() as patch:
        SlowLink(patch, 0.0)
        model, strategy = Ledger(), auto_ddp()
        steps = UNCOMPRESSED + TRIALS + 5
        modes = run(model, strategy, range(steps))
        assert modes[:UNCOMPRESSED] == [0.0] * UNCOMPRESSED
        assert modes[UNCOMPRESSED + TRIALS :] == [0.0] * 5
        assert same_on_all_ranks(model)
        accounts = expected(range(steps), dist_world(), model)
        for weight, account in zip(model.weights, accounts, strict=True):
            torch.testing.assert_close(weight.detach().double(), account, rtol=0, atol=2e-4)
        assert strategy.describe().notes[0].endswith("Chosen: uncompressed.")
        strategy = KeptResiduals("auto", warmup_steps=2, bucket_cap_mb=SMALL_BUCKETS)
        fit(Ledger(), strategy, range(steps + UNTIMED_STEPS + TIMED_STEPS))
        found = [row["scheme"] for row in strategy.describe().rows]
        assert found == ["uncompressed", "bfloat16", INT8, INT4, "TopK(ratio=0.01)"]
        named = KeptResiduals("int8", warmup_steps=2, every_n_steps=1)  # always compresses
        assert run(Ledger(), named, range(6)) == [0.0] * 2 + [1.0] * 4
        assert named.describe() is None


def _unused_on_one_rank() -> None:
    """After the choice, rank 1 stops using a parameter, and keeps its residual of the trials."""
    chosen, steps = UNCOMPRESSED + TRIALS, UNCOMPRESSED + TRIALS + 5
    with pytest.MonkeyPatch.context() as patch:
        SlowLink(patch, 0.0)
        model = Ledger(lambda step, rank, index: step >= chosen and rank == index == 1)
        strategy = auto_ddp(find_unused_parameters=True)
        modes = run(model, strategy, range(steps))
    assert modes[chosen:] == [0.0] * 5
    assert strategy.kept["weights.1"].any()
    for index, account in enumerate(expected(range(steps), 2, model)):
        rest = strategy.kept.get(f"weights.{index}", torch.zeros(()))
        found = model.weights[index].detach().double() - rest
        torch.testing.assert_close(found, account, rtol=0, atol=2e-4)


class Sparse(LightningModule):
    """Has only sparse gradients, which are never compressed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 3, sparse=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.table(torch.tensor([int(batch) + self.global_rank])).square().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Complex(Sparse):
    """Has only complex gradients, which are never compressed."""

    def __init__(self) -> None:
        super().__init__()
        del self.table
        self.weight = nn.Parameter(torch.ones(5, 2, dtype=torch.complex64))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        shift = complex(float(batch), self.global_rank + 1.0)
        return (self.weight + shift).abs().square().sum()


def _same_as_ddp() -> None:
    kinds = {Ledger: UNCOMPRESSED, Sparse: UNCOMPRESSED + 3, Complex: UNCOMPRESSED + 3}
    for kind, steps in kinds.items():
        models = kind(), kind()
        for model, strategy in zip(models, ("ddp", auto_ddp()), strict=True):
            fit(model, strategy, range(steps))
        assert_same_weights(*models)


def _fast_link() -> None:
    _choice_on_fast_link()
    _unused_on_one_rank()
    _same_as_ddp()


@pytest.mark.distributed
def test_uncompressed_is_chosen_on_a_fast_link_and_equals_ddp():
    launch(_fast_link)


# --- a slow link ----------------------------------------------------------------------------------


class AdamLedger(Ledger):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def _choice_on_slow_link() -> list[str]:
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "rank_zero_info", lines.append)
        SlowLink(patch)  # so slow that Top-K is far faster than int4
        model, strategy = Ledger(), auto_ddp()
        steps = UNCOMPRESSED + TRIALS + 10
        modes = run(model, strategy, range(steps))
        assert modes[:UNCOMPRESSED] == [0.0] * UNCOMPRESSED
        assert modes[UNCOMPRESSED + TRIALS :] == [TOPK] * 10
        assert_conserved(model, strategy, steps)
        assert [row["chosen"] for row in strategy.describe().rows] == [False] * 3 + [True]
        # Adam and AdaptiveClipping exclude Top-K, which sends gradients late.
        quantized = UNCOMPRESSED + 2 * TRIALS // 3 + 1
        for kind, callbacks in ((AdamLedger, []), (Ledger, [lo.AdaptiveClipping()])):
            strategy = auto_ddp()
            assert TOPK not in run(kind(), strategy, range(quantized), callbacks=callbacks)
            found = [row["scheme"] for row in strategy.describe().rows]
            assert found == ["uncompressed", INT8, INT4]
    return lines


@pytest.mark.distributed
def test_top_k_is_chosen_on_a_slow_link():
    for lines in launch(_choice_on_slow_link, processes=3):
        assert len([line for line in lines if "Chosen: " in line]) == 3


def _ramped() -> None:
    with pytest.MonkeyPatch.context() as patch:
        SlowLink(patch)
        # Half of the 64 steps are the ramp, in two stages. Rank 1 expects more steps.
        expects = 64.0 * (1 + int(os.environ["RANK"]))
        patch.setattr(Trainer, "estimated_stepping_batches", expects)
        logger, model = MemoryLogger(), Ledger()
        strategy = auto_ddp(ratio=0.05, ramp_steps=None)
        fit(model, strategy, range(64), logger=logger, log_every_n_steps=1)
        assert_conserved(model, strategy, 64)
        if dist.get_rank() == 0:
            sent = logger.series("comm/bytes")[UNCOMPRESSED + TRIALS - TIMED_STEPS :]
            trial, ramp = sent[:TIMED_STEPS], sent[TIMED_STEPS:]
            assert set(trial) == set(ramp[32:])
            assert len(set(ramp[:16])) == len(set(ramp[16:32])) == 1
            assert ramp[0] > 3 * ramp[16] > 3.5 * ramp[32]


def _ramp_and_slow_rank() -> str:
    """Only rank 1's link is slow."""
    _ramped()
    with pytest.MonkeyPatch.context() as patch:
        SlowLink(patch, SECONDS_PER_BYTE * int(os.environ["RANK"]))
        strategy = auto_ddp()
        fit(Ledger(), strategy, range(UNCOMPRESSED + TRIALS + 2))
        return strategy.describe().notes[0]


@pytest.mark.distributed
def test_ramp_follows_the_trials_and_slowest_rank_decides():
    first, second = launch(_ramp_and_slow_rank)
    assert first == second
    assert first.endswith("Chosen: TopK(ratio=0.01).")


# --- resume ---------------------------------------------------------------------------------------


STOP = UNCOMPRESSED + TRIALS + 4


def _first_half(path: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        SlowLink(patch)
        fit(Ledger(), auto_ddp(), range(STOP), callbacks=[SaveAtEnd(path)])


def _second_half(path: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        SlowLink(patch, 0.0)  # new trials would choose another scheme
        strategy, model = auto_ddp(), Ledger()
        batches = range(STOP, 2 * STOP)
        modes = run(model, strategy, batches, ckpt_path=path, max_epochs=2)
    assert modes == [TOPK] * STOP
    assert strategy.describe() is None  # nothing was measured
    first, second = expected(range(STOP), 2, model), expected(batches, dist_world(), model)
    accounts = [one + other for one, other in zip(first, second, strict=True)]
    assert_nothing_is_lost(model, strategy, accounts)


@pytest.mark.distributed
def test_resumed_run_keeps_the_choice(tmp_path):
    path = str(tmp_path / "half.ckpt")
    launch(_first_half, path)
    state = torch.load(path, weights_only=True)[CompressedDDPStrategy.checkpoint_key]
    assert state["choice"] == "TopK(ratio=0.01)"
    launch(_second_half, path, processes=3)
