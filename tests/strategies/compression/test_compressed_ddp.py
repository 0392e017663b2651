"""Compressed DDP in real processes over gloo."""

import itertools
import os
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_opt.strategies.compression import exchange
from lightning_opt.strategies.compression.buckets import Buckets
from lightning_opt.strategies.compression.compressed_ddp import (
    CompressedDDPStrategy,
    HookedDDPStrategy,
)
from lightning_opt.strategies.compressors import Quantize, Threshold, TopK
from tests.helpers.models import SmallNet
from tests.helpers.processes import launch
from tests.helpers.trainers import MemoryLogger
from tests.strategies.runs import (
    SHORT_WAIT,
    SMALL_BUCKETS,
    Ledger,
    LedgerByHand,
    SaveAtEnd,
    State,
    assert_nothing_is_lost,
    compressed,
    dist_world,
    expected,
    fit,
    same_on_all_ranks,
)

pytestmark = pytest.mark.distributed


# --- nothing is lost ---------------------------------------------------------------------------


def _balance(*strategies: Any) -> None:
    for strategy in strategies:
        model = Ledger()
        fit(model, strategy, range(16))
        assert_nothing_is_lost(model, strategy, expected(range(16), dist_world(), model))


def _other_runs() -> None:
    """Accumulation, unused parameters, and two optimizers by hand."""

    def skip(step: int, rank: int, index: int) -> bool:
        """Parameter 1 is sometimes unused on one rank or on all; 3 most of the time."""
        return (
            (index == 1 and (step + rank) % 3 > 0) or (index == 3 and step % 10 < 8)
        ) and step > 3

    unused = {"find_unused_parameters": True}
    for strategy, model, settings in (
        (compressed(), Ledger(window=4), {"accumulate_grad_batches": 4}),
        (compressed(**unused), Ledger(skip), {}),
        (compressed(**unused), LedgerByHand(), {}),
    ):
        fit(model, strategy, range(24), **settings)
        assert_nothing_is_lost(model, strategy, expected(range(24), 2, model))


def _planted_infinity(compressor: Any) -> None:
    world = dist_world()
    for bucket_cap_mb in (25, SMALL_BUCKETS):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
        strategy = compressed(compressor, bucket_cap_mb=bucket_cap_mb)
        model = Ledger(bad=(6, 1, 3))
        fit(model, strategy, range(13), scaler=scaler)
        steps = [step for step in range(13) if step != 6]
        # The loss scale has grown meanwhile, and the scaler has skipped the bad step.
        assert scaler.get_scale() == 1024.0 * 2**2 / 2
        assert_nothing_is_lost(model, strategy, expected(steps, world, model))


class LossInFloat(SmallNet):
    """For torch 2.5, which has no loss in half precision on a CPU."""

    def loss(self, preds: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        return super().loss(preds.double(), None if labels is None else labels.double())


def _variants() -> None:
    for precision in ("bf16-true", "bf16-mixed", "64-true"):
        model = LossInFloat(widths=(50, 50))
        start = torch.cat([p.detach().flatten() for p in model.parameters()]).double()
        fit(model, CompressedDDPStrategy(TopK(0.3), warmup_steps=2), precision=precision)
        assert same_on_all_ranks(model)
        end = torch.cat([p.detach().flatten() for p in model.parameters()]).double()
        assert end.isfinite().all()
        assert (end - start).norm() > 0.01
    strategy = compressed(error_feedback=False)
    fit(Ledger(), strategy, range(9))
    assert not any(rest.any() for rest in strategy.kept.values())
    for hook, tolerance in (("fp16", 1e-3), ("bf16", 8e-3)):  # of one rounding
        model = Ledger()
        fit(model, HookedDDPStrategy(hook), range(1))
        exact = torch.cat(expected(range(1), dist_world(), model)).float()
        found = torch.cat([weight.detach() for weight in model.weights])
        torch.testing.assert_close(found, exact, rtol=tolerance, atol=tolerance)
        assert not torch.equal(found, exact)


def _two_processes() -> None:
    _balance(
        *map(compressed, (TopK(0.05), Threshold(3.0), Quantize(8), Quantize(4))),
        compressed(TopK(0.01), ramp_steps=8),
        compressed(gradient_as_bucket_view=True),
        compressed(static_graph=True),
        compressed(bucket_cap_mb=25),
    )
    _other_runs()
    _planted_infinity(TopK(0.05))
    _variants()


def _three_processes() -> None:
    _balance(*map(compressed, (TopK(0.05), Quantize(8))))
    groups = dist.get_pg_count()
    _balance(compressed(Quantize(4)))
    _planted_infinity(Quantize(4))
    assert dist.get_pg_count() == groups  # later runs open no further process group


def test_nothing_is_lost_and_overflow_skips_the_step_on_all_ranks():
    launch(_two_processes)
    launch(_three_processes, processes=3)


def _lose_a_rank() -> None:
    """Rank 1 dies after it has sent some of a step's buckets."""
    sent = itertools.count()

    def die_or_send(send: Any, *arguments: Any, **settings: Any) -> Any:
        if int(os.environ["RANK"]) == 1 and next(sent) == 4:
            os._exit(3)
        return send(*arguments, **settings)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("start_all_to_all", "all_to_all"):
            patch.setattr(exchange, name, partial(die_or_send, getattr(exchange, name)))
        fit(Ledger(), compressed(Quantize(8), timeout=SHORT_WAIT), range(1000))


@pytest.mark.parametrize("processes", [2, 3])
def test_lost_rank_ends_the_others(processes):
    with pytest.raises(AssertionError, match=r"(?s)rank 0 ended with 1.*rank 1 ended with 3"):
        launch(_lose_a_rank, processes=processes)


# --- resume -------------------------------------------------------------------------------------


def _first_half(folder: str, strategies: dict[str, Any]) -> None:
    for name, strategy in strategies.items():
        own = "ddp" if strategy == "ddp" else compressed(**strategy)
        trainer = fit(Ledger(), own, range(20), callbacks=[SaveAtEnd(f"{folder}/{name}")])
        assert trainer.global_step == 20


def _second_half(folder: str, strategies: dict[str, Any]) -> dict[str, Any]:
    """Resume each checkpoint: the second epoch's batches continue the numbers of the first."""
    states = {}
    for name, (settings, before) in strategies.items():
        strategy, model, steps = compressed(**settings), Ledger(), range(20, 40)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            within = State(5)  # a checkpoint in between loses nothing either
            path = f"{folder}/{name}"
            fit(model, strategy, steps, callbacks=[within], ckpt_path=path, max_epochs=2)
        warned = any("written without compressed DDP" in str(w.message) for w in caught)
        assert warned == (name == "dense" and model.global_rank == 0)
        first, second = expected(range(20), before, model), expected(steps, dist_world(), model)
        accounts = [one + other for one, other in zip(first, second, strict=True)]
        assert_nothing_is_lost(model, strategy, accounts)
        states[name] = strategy.state
    return states


def _both_halves(folder: str, first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    _first_half(folder, first)
    return _second_half(folder, second)


def test_resumed_run_loses_nothing_at_any_number_of_ranks(tmp_path):
    topk = {"compressor": TopK(0.05), "ramp_steps": 60}
    int4 = {"compressor": Quantize(4)}
    auto = {"compressor": Threshold("auto"), "bucket_cap_mb": 25}
    folder = str(tmp_path)
    launch(_first_half, folder, {"topk": topk, "dense": "ddp", "auto": auto})
    three = {"topk": (topk, 2), "auto": (auto, 2), "int4": (int4, 3)}
    of_three = launch(_both_halves, folder, {"int4": int4}, three, processes=3)
    key = CompressedDDPStrategy.checkpoint_key
    saved = torch.load(tmp_path / "topk", weights_only=True)[key]
    assert saved["step"] == 19
    assert key not in torch.load(tmp_path / "topk.weights", weights_only=True)
    bounds = torch.load(tmp_path / "auto", weights_only=True)[key]["bounds"]
    assert len(bounds) == 1
    launch(_second_half, folder, {"topk": (topk, 2), "dense": (topk, 2), "int4": (int4, 3)})
    for states in of_three:
        assert states["auto"]["bounds"] == bounds
        assert states["topk"]["ramped"] == saved["ramped"] + 20


def test_restored_residuals_are_counted_once():
    buckets, parameter = Buckets(), torch.zeros(2)
    buckets.load({"a": torch.tensor([3.0, 4.0])})
    for _ in range(2):  # before and after the first step
        assert buckets.norm() == 5
        buckets.get({"a": parameter}, parameter)


# --- reports ------------------------------------------------------------------------------------


def _log() -> list[Any]:
    found = []
    for compressor in (Quantize(8), TopK(0.05)):
        logger = MemoryLogger()
        strategy = CompressedDDPStrategy(
            compressor, warmup_steps=10, ramp_steps=0, every_n_steps=10
        )
        trainer = fit(Ledger(), strategy, range(30), logger=logger)
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        found.append((logger.records, metrics))
    return found


def test_traffic_is_counted_and_logged():
    numel, device = sum(p.numel() for p in Ledger().parameters()), torch.device("cpu")
    ((_, metrics), (records, last_metrics)), (_, (others, _)), _ = launch(_log, processes=3)
    # Two stages, in each of which a rank sends a third to two others.
    third = Quantize(8).codec(-(-numel // (3 * Quantize(8).block)) * Quantize(8).block, device)
    assert metrics["comm/bytes"] == 4 * third.nbytes
    assert not others or len(others) == len(records)
    assert [step for step, values in records if "comm/mode" in values] == [9, 19, 29]
    first, _, last = (values for _, values in records if "comm/mode" in values)
    assert first["comm/mode"] == 0
    assert first["comm/bytes"] == pytest.approx(4 * 4 * numel / 3, abs=8)
    assert first["comm/ratio"] == 1
    assert first["comm/residual_norm"] == 0
    assert last["comm/mode"] == 3
    assert last["comm/bytes"] == 2 * TopK(0.05).codec(numel, device).nbytes
    assert last["comm/ratio"] == pytest.approx(16 * numel / 3 / last["comm/bytes"], rel=1e-3)
    assert 0.02 < last["comm/selected"] <= 0.0501
    assert last["comm/residual_norm"] > 0
    assert 0 < last["comm/seconds"] < 10
    assert last_metrics == pytest.approx(last)
