"""Compressed DDP in real processes over gloo."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_opt.strategies.compression import two_stage
from lightning_opt.strategies.compression.compressed_ddp import (
    CompressedDDPStrategy,
)
from lightning_opt.strategies.compression.hooked_ddp import HookedDDPStrategy
from lightning_opt.strategies.compressors import Quantize, Threshold, TopK
from tests.helpers.models import SmallNet
from tests.helpers.processes import launch
from tests.helpers.trainers import MemoryLogger
from tests.strategies.runs import (
    SIZES,
    SMALL_BUCKETS,
    KeptResiduals,
    Ledger,
    LedgerByHand,
    Matrices,
    SaveAtEnd,
    assert_nothing_is_lost,
    dist_world,
    expected,
    fit,
    same_on_all_ranks,
)

pytestmark = pytest.mark.distributed

COMPRESSORS = [TopK(0.05), Threshold(3.0), Quantize(8), Quantize(4)]


def compressed(compressor: Any = None, **settings: Any) -> KeptResiduals:
    settings = {
        "warmup_steps": 3,
        "ramp_steps": 0,
        "bucket_cap_mb": SMALL_BUCKETS,
        **settings,
    }
    return KeptResiduals(compressor or TopK(0.05), **settings)


# --- nothing is lost ---------------------------------------------------------------------------


def _balance(steps: int) -> None:
    world = dist_world()
    runs: list[tuple[KeptResiduals, Ledger, dict[str, Any]]] = [
        *((compressed(compressor), Ledger(), {}) for compressor in COMPRESSORS),
        (compressed(TopK(0.01), ramp_steps=15), Ledger(), {}),
        (compressed(gradient_as_bucket_view=True), Ledger(), {}),
        (compressed(static_graph=True), Ledger(), {}),
        (compressed(bucket_cap_mb=25), Ledger(), {}),
    ]
    for strategy, model, settings in runs:
        fit(model, strategy, range(steps), **settings)
        assert_nothing_is_lost(model, strategy, expected(range(steps), world, model))


@pytest.mark.parametrize("processes", [2, 3])
def test_nothing_is_lost(processes):
    launch(_balance, 30, processes=processes)


def _balance_in_two_stages(steps: int) -> None:
    world = dist_world()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(two_stage, "MIN_SPARSE_SHARD", 100)
        patch.setattr(two_stage, "MIN_SPARSE_RANKS", 3)
        for compressor in (TopK(0.05), TopK(0.01)):
            strategy, model = (
                compressed(compressor, ramp_steps=15, every_n_steps=steps // 2),
                Ledger(),
            )
            trainer = fit(model, strategy, range(steps))
            assert_nothing_is_lost(model, strategy, expected(range(steps), world, model))
            # At most twice the message at any number of ranks.
            whole = compressor.codec(sum(SIZES), torch.device("cpu")).nbytes
            assert trainer.callback_metrics["comm/bytes"] < 2 * whole + 100 * world * len(SIZES)


@pytest.mark.parametrize("processes", [3, 4])
def test_two_stages_lose_nothing_of_sparse_messages(processes):
    launch(_balance_in_two_stages, 40, processes=processes)


def _accumulate() -> None:
    strategy, model = compressed(), Ledger(window=4)
    fit(model, strategy, range(40), accumulate_grad_batches=4)
    assert_nothing_is_lost(model, strategy, expected(range(40), 2, model))


def _unused() -> None:
    """Parameter 1 is sometimes unused on one rank or on all; parameter 3 most of the time."""

    def skip(step: int, rank: int, index: int) -> bool:
        return (
            (index == 1 and (step + rank) % 3 > 0) or (index == 3 and step % 10 < 8)
        ) and step > 3

    strategy, model = compressed(find_unused_parameters=True), Ledger(skip)
    fit(model, strategy, range(40))
    assert_nothing_is_lost(model, strategy, expected(range(40), 2, model))


def test_accumulation_loses_nothing():
    launch(_accumulate)


def test_residual_of_an_unused_parameter_is_kept():
    launch(_unused)


def _planted_infinity(bucket_cap_mb: float, compressor: Any) -> None:
    world = dist_world()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7)
    strategy = compressed(compressor, bucket_cap_mb=bucket_cap_mb)
    model = Ledger(bad=(12, 1, 3))
    fit(model, strategy, range(30), scaler=scaler)
    steps = [step for step in range(30) if step != 12]
    without = expected(steps, world, model)
    # The loss scale has grown meanwhile, and the scaler has skipped the bad step.
    assert scaler.get_scale() == 1024.0 * 2**3 / 2
    assert_nothing_is_lost(model, strategy, without)


@pytest.mark.parametrize("bucket_cap_mb", [25, SMALL_BUCKETS])
@pytest.mark.parametrize(("compressor", "processes"), [(TopK(0.05), 2), (Quantize(4), 3)])
def test_overflow_skips_the_step_on_all_ranks_and_keeps_residuals(
    bucket_cap_mb, compressor, processes
):
    launch(_planted_infinity, bucket_cap_mb, compressor, processes=processes)


# --- resume -------------------------------------------------------------------------------------


def _first_half(path: str, bits: int | None) -> None:
    strategy, model = compressed(bits and Quantize(bits)), Ledger()
    trainer = fit(model, strategy, range(20), callbacks=[SaveAtEnd(path)])
    assert trainer.global_step == 20


def _second_half(path: str, bits: int | None) -> None:
    strategy, model = compressed(bits and Quantize(bits)), Ledger()
    # The second epoch's batches continue the numbers of the first.
    fit(model, strategy, range(20, 40), ckpt_path=path, max_epochs=2)
    before = 2 if bits is None else 3
    first, second = expected(range(20), before, model), expected(range(20, 40), dist_world(), model)
    accounts = [one + other for one, other in zip(first, second, strict=True)]
    assert_nothing_is_lost(model, strategy, accounts)


@pytest.mark.parametrize(
    ("bits", "before", "after"), [(None, 2, 2), (None, 2, 3), (4, 3, 3), (4, 3, 2)]
)
def test_resumed_run_loses_nothing(tmp_path, bits, before, after):
    path = str(tmp_path / "half.ckpt")
    launch(_first_half, path, bits, processes=before)
    content = torch.load(path, weights_only=True)
    assert content[CompressedDDPStrategy.checkpoint_key]["step"] == 19
    assert CompressedDDPStrategy.checkpoint_key not in torch.load(
        path + ".weights", weights_only=True
    )
    launch(_second_half, path, bits, processes=after)


def _dense_half(path: str) -> None:
    fit(Ledger(), "ddp", range(20), callbacks=[SaveAtEnd(path)])


def _compressed_half(path: str) -> None:
    strategy, model = compressed(), Ledger()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(model, strategy, range(20, 40), ckpt_path=path, max_epochs=2)
    warned = any("written without compressed DDP" in str(warning.message) for warning in caught)
    assert warned == (model.global_rank == 0)
    assert_nothing_is_lost(model, strategy, expected(range(40), 2, model))


def test_checkpoint_of_plain_ddp_resumes_with_a_warning(tmp_path):
    launch(_dense_half, str(tmp_path / "dense.ckpt"))
    launch(_compressed_half, str(tmp_path / "dense.ckpt"))


# --- training -----------------------------------------------------------------------------------


class Student(SmallNet):
    """Learns a random teacher."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 8))
        teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
        self.inputs = torch.randn(2048, 32) * torch.logspace(-0.7, 0.3, 32)
        self.targets = teacher(self.inputs).detach() * 3

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(self.inputs, self.targets), batch_size=64)

    def final_loss(self) -> float:
        return nn.functional.mse_loss(self.layer(self.inputs), self.targets).item()


def _learn() -> dict[str, float]:
    losses = {}
    for name, strategy in {
        "dense": "ddp",
        "topk": CompressedDDPStrategy("topk", ratio=0.01),
        "no feedback": CompressedDDPStrategy("topk", ratio=0.01, error_feedback=False),
        "threshold": CompressedDDPStrategy("threshold"),
        "int8": CompressedDDPStrategy("int8"),
        "int4": CompressedDDPStrategy("int4"),
    }.items():
        model = Student()
        fit(model, strategy, max_epochs=-1, max_steps=400)
        assert same_on_all_ranks(model), name
        losses[name] = model.final_loss()
    return losses


@pytest.mark.slow
def test_training_with_error_feedback_comes_close_to_dense():
    losses = launch(_learn)[0]
    gap = {name: loss - losses["dense"] for name, loss in losses.items()}
    untrained = Student().final_loss() - losses["dense"]
    assert gap["topk"] < 0.1 * untrained
    assert gap["threshold"] < 0.1 * untrained
    assert gap["int8"] < 0.001 * untrained
    assert gap["int4"] < 0.01 * untrained
    assert gap["no feedback"] > 3 * gap["topk"]


def _by_hand() -> None:
    strategy, model = compressed(find_unused_parameters=True), LedgerByHand()
    fit(model, strategy, range(30))
    assert_nothing_is_lost(model, strategy, expected(range(30), 2, model))


def test_two_optimizers_by_hand_lose_nothing():
    launch(_by_hand)


class LossInFloat(SmallNet):
    """For torch 2.5, which has no loss in half precision on a CPU."""

    def loss(self, preds: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        return super().loss(preds.double(), None if labels is None else labels.double())


def _low_precision() -> None:
    for precision in ("bf16-true", "bf16-mixed", "64-true"):
        model = LossInFloat(widths=(50, 50))
        start = torch.cat([p.detach().flatten() for p in model.parameters()]).double()
        fit(model, CompressedDDPStrategy(TopK(0.3), warmup_steps=2), precision=precision)
        assert same_on_all_ranks(model)
        end = torch.cat([p.detach().flatten() for p in model.parameters()]).double()
        assert end.isfinite().all()
        assert (end - start).norm() > 0.01


def test_training_in_other_precisions():
    launch(_low_precision)


def _log() -> tuple[Any, ...]:
    logger = MemoryLogger()
    model = Ledger()
    trainer = fit(
        model,
        CompressedDDPStrategy(TopK(0.05), warmup_steps=10, ramp_steps=0, every_n_steps=10),
        range(30),
        logger=logger,
    )
    return logger.records, {key: float(value) for key, value in trainer.callback_metrics.items()}


def test_traffic_is_counted_and_logged():
    (records, metrics), (others, _) = launch(_log)
    assert not others or len(others) == len(records)
    assert [step for step, values in records if "comm/mode" in values] == [9, 19, 29]
    first, _, last = (values for _, values in records if "comm/mode" in values)
    numel = sum(p.numel() for p in Ledger().parameters())
    assert first["comm/mode"] == 0
    assert first["comm/bytes"] == 4 * numel  # two ranks: each sends two halves
    assert first["comm/ratio"] == 1
    assert first["comm/residual_norm"] == 0
    assert last["comm/mode"] == 3
    assert last["comm/bytes"] == TopK(0.05).codec(numel, torch.device("cpu")).nbytes
    assert last["comm/ratio"] == pytest.approx(4 * numel / last["comm/bytes"])
    assert 0.02 < last["comm/selected"] <= 0.0501
    assert last["comm/residual_norm"] > 0
    assert 0 < last["comm/seconds"] < 10
    assert metrics == pytest.approx(last)


# --- failures ------------------------------------------------------------------------------------


def _lose_a_rank(compressor: str) -> None:
    fit(Ledger(die_at=12), compressed(compressor), range(1000))


@pytest.mark.parametrize("compressor", ["topk", "auto"])  # "auto" is in its first trial
def test_lost_rank_ends_the_others(compressor):
    with pytest.raises(AssertionError, match=r"(?s)rank 0 ended with 1.*rank 1 ended with 3"):
        launch(_lose_a_rank, compressor, timeout=240)


# --- torch's hooks ------------------------------------------------------------------------------


def _baselines() -> dict[str, float]:
    losses = {}
    for name, strategy in {
        "dense": "ddp",
        "fp16": HookedDDPStrategy("fp16"),
        "bf16": HookedDDPStrategy("bf16"),
        "powersgd": CompressedDDPStrategy("powersgd", warmup_steps=5),
    }.items():
        model = Student()
        fit(model, strategy, max_epochs=-1, max_steps=60)
        assert same_on_all_ranks(model), name
        losses[name] = model.final_loss()
    return losses


def test_torchs_hooks_work_on_gloo():
    losses = launch(_baselines)[0]
    assert losses["fp16"] == pytest.approx(losses["dense"], rel=0.01)
    assert losses["bf16"] == pytest.approx(losses["dense"], rel=0.05)
    assert losses["fp16"] != losses["dense"] != losses["bf16"]
    assert losses["powersgd"] < 0.5 * Student().final_loss()


def _low_rank(path: str) -> None:
    """A NaN on one rank, a growing loss scale, and a resume: nothing is lost."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7)
    first, model = KeptResiduals("powersgd", warmup_steps=3), Matrices(bad=(12, 1, 3))
    fit(model, first, range(20), scaler=scaler, callbacks=[SaveAtEnd(path)])
    assert scaler.get_scale() == 1024.0 * 2**2 / 2
    steps = [step for step in range(20) if step != 12]
    assert_nothing_is_lost(model, first, expected(steps, 2, model))
    second, model = KeptResiduals("powersgd", warmup_steps=3), Matrices()
    fit(model, second, range(20, 40), ckpt_path=path, max_epochs=2)
    assert_nothing_is_lost(model, second, expected([*steps, *range(20, 40)], 2, model))


def test_powersgd_loses_nothing_with_nan_loss_scale_and_resume(tmp_path):
    launch(_low_rank, str(tmp_path / "half.ckpt"))
