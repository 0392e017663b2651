"""`CompileModel(measure=True)` keeps or reverts compiled steps, on a fake clock."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

from lightning_opt.core.measure import timing
from lightning_opt.kernels.compiling.compile_model import CompileModel
from tests.helpers.processes import launch
from tests.kernels.compiling.runs import Net, assert_same, fails, messages_of, on_rank_0, train

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


class Timed(Net):
    """Advances the fake clock by the seconds of a compiled or an uncompiled step."""

    now = 0.0

    def __init__(self, compiled: float, eager: float = 10.0, steps: int = 20) -> None:
        super().__init__(steps=steps)
        self.compiled, self.eager = compiled, eager
        self.modes: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        mode = (
            next(c for c in self.trainer.callbacks if isinstance(c, CompileModel)).regions[0].mode
        )
        self.modes.append(mode)
        Timed.now += self.eager if mode == "eager" else self.compiled
        return super().training_step(batch, batch_idx)


@pytest.fixture(autouse=True)
def fake_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing.time, "perf_counter", lambda: Timed.now)


def run(model: Timed, **settings: Any) -> CompileModel:
    """Train, and compare with a run without the callback."""
    callback = CompileModel(backend="aot_eager", measure=True)
    expected = train(model=Net(steps=model.steps), **settings)
    assert_same(train(callback, model=model, **settings), expected)
    return callback


def test_faster_compiled_steps_are_kept() -> None:
    model = Timed(compiled=5.0)
    callback = run(model)
    assert model.modes == ["eager"] * 7 + ["default"] * 33
    [note] = callback.report().notes
    assert note == "Measured: kept: a step takes 5e+03 ms, and 1e+04 ms uncompiled."
    assert callback.diagnose()[0].state == "ok"


def test_compiled_steps_that_are_not_faster_are_reverted() -> None:
    model = Timed(compiled=9.9)
    callback = run(model)
    assert model.modes == ["eager"] * 7 + ["default"] * 7 + ["eager"] * 26
    assert "Measured: reverted: a step takes" in callback.report().notes[0]
    verdict = callback.diagnose()[0]
    assert (verdict.state, "reverted" in verdict.finding) == ("ok", True)


@pytest.mark.parametrize(("accumulated", "remaining"), [(1, 33), (2, 34)])
def test_nothing_is_compiled_for_few_remaining_steps(accumulated: int, remaining: int) -> None:
    model = Timed(compiled=0.01, eager=0.1)
    callback = run(model, accumulate_grad_batches=accumulated)
    assert set(model.modes) == {"eager"}
    assert sum(row["graphs"] for row in callback.report().rows) == 0
    [note] = callback.report().notes
    assert note.startswith(f"Measured: not compiled: {remaining} steps of 100 ms remain")


def test_second_fit_keeps_the_decision() -> None:
    model, callback = Timed(compiled=9.9), CompileModel(backend="aot_eager", measure=True)
    train(callback, model=model)
    model.modes.clear()
    train(callback, model=model)
    assert set(model.modes) == {"eager"}


def modes_on_each_rank() -> list[str]:
    timing.time.perf_counter = lambda: Timed.now  # type: ignore[assignment]
    found = []
    for mine, theirs in ((12.0, 6.0), (14.0, 9.0)):  # one rank alone would revert
        model = Timed(compiled=mine if dist.is_initialized() and dist.get_rank() else theirs)
        callback = CompileModel(backend="aot_eager", measure=True)
        torch.manual_seed(0)
        strategy = DDPStrategy(process_group_backend="gloo")
        train(callback, model=model, strategy=strategy, devices=2, max_epochs=1)
        found.append(model.modes[-1])
    return found


def failure_on_rank_0() -> tuple[list[str], list[str]]:
    """Compilation fails on one rank; all ranks measure again in a second fit."""
    decisions = modes_on_each_rank()
    model = Timed(compiled=5.0)
    callback = CompileModel(backend=on_rank_0(fails), measure=True)
    for _ in range(2):
        ddp = DDPStrategy(process_group_backend="gloo")
        settings = {"strategy": ddp, "devices": 2, "max_epochs": 1}
        messages_of(lambda: train(callback, model=model, **settings))  # noqa: B023
    return decisions, model.modes


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_decide_alike_and_measure_again_if_compilation_has_failed_on_one() -> None:
    (mine, first), (theirs, second) = launch(failure_on_rank_0, timeout=120)
    assert mine == theirs == ["default", "eager"]
    assert first[20:] == ["eager"] * 20
    assert second[20:] == ["eager"] * 7 + ["default"] * 13
