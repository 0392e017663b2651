"""Compiling is weighed against what is left, and taken back; by clocks that are pretended."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

from lightning_opt.kernels.compiling import measuring
from lightning_opt.kernels.compiling.compile_model import CompileModel
from lightning_opt.kernels.compiling.measuring import AT_BEST, START, may_pay
from tests.helpers.processes import launch
from tests.kernels.compiling.runs import Net, assert_same, train

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


class Timed(Net):
    """Takes ten seconds a step on a clock of its own, and another time if it is compiled."""

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
def pretended_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: Timed.now)


def run(model: Timed, **settings: Any) -> CompileModel:
    """Train, with the result of a run without."""
    callback = CompileModel(backend="aot_eager", measure=True)
    expected = train(model=Net(steps=model.steps), **settings)
    assert_same(train(callback, model=model, **settings), expected)
    return callback


def test_what_is_faster_stays() -> None:
    model = Timed(compiled=5.0)
    callback = run(model)
    assert model.modes == ["eager"] * 7 + ["default"] * 33
    [note] = callback.report().notes
    assert note == "Measured: kept: a step takes 5e+03 ms, and 1e+04 ms uncompiled."
    assert callback.diagnose()[0].state == "ok"


def test_what_is_no_faster_is_taken_back() -> None:
    model = Timed(compiled=9.9)
    callback = run(model)
    assert model.modes == ["eager"] * 7 + ["default"] * 7 + ["eager"] * 26
    assert "Measured: taken back: a step takes" in callback.report().notes[0]
    verdict = callback.diagnose()[0]
    assert (verdict.state, "taken back" in verdict.finding) == ("ok", True)


def test_few_steps_that_are_left_compile_nothing() -> None:
    model = Timed(compiled=0.01, eager=0.1)
    callback = run(model)
    assert set(model.modes) == {"eager"}
    assert sum(row["graphs"] for row in callback.report().rows) == 0
    [note] = callback.report().notes
    assert note.startswith("Measured: not compiled: 33 steps of 100 ms are left, which would not")


def test_accumulated_batches_count_as_steps() -> None:
    model = Timed(compiled=0.01, eager=0.1)
    notes = run(model, accumulate_grad_batches=2).report().notes
    assert "not compiled: 34 steps" in notes[0]


def test_a_second_fit_keeps_to_what_was_decided() -> None:
    model, callback = Timed(compiled=9.9), CompileModel(backend="aot_eager", measure=True)
    train(callback, model=model)
    model.modes.clear()
    train(callback, model=model)
    assert set(model.modes) == {"eager"}


def test_what_may_pay() -> None:
    assert may_pay(1.0, 2 * START / AT_BEST)
    assert not may_pay(1.0, 0.5 * START / AT_BEST)
    assert may_pay(0.001, float("inf"))


def ranks() -> list[str]:
    measuring.time.perf_counter = lambda: Timed.now  # type: ignore[assignment]
    found = []
    for mine, theirs in ((12.0, 6.0), (14.0, 9.0)):  # one rank alone would take it back
        model = Timed(compiled=mine if dist.is_initialized() and dist.get_rank() else theirs)
        callback = CompileModel(backend="aot_eager", measure=True)
        torch.manual_seed(0)
        strategy = DDPStrategy(process_group_backend="gloo")
        train(callback, model=model, strategy=strategy, devices=2, max_epochs=1)
        found.append(model.modes[-1])
    return found


@pytest.mark.slow
@pytest.mark.distributed
def test_all_ranks_decide_alike() -> None:
    assert launch(ranks) == [["default", "eager"]] * 2
