"""CompileModel under DDP and FSDP2, in real processes."""

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_opt.kernels.compiling.compile_model import CompileModel
from tests.helpers.models import shard
from tests.helpers.processes import launch
from tests.kernels.compiling.runs import (
    QUIET,
    Net,
    assert_same,
    fails,
    fails_in_backward,
    messages_of,
    on_rank_0,
    train,
)

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    *QUIET,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
]

SHORT = {"max_epochs": 1, "limit_val_batches": 1, "devices": 2}


class Split(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = [part[self.global_rank :: 2] for part in batch]
        return super().training_step(rows, batch_idx)


class Sharded(Split):
    def configure_model(self) -> None:
        shard(self, *self.blocks)


def under_ddp() -> list[Any]:
    settings = {"strategy": "ddp", **SHORT}
    expected = train(model=Split(), **settings)
    found = []
    for scope in ("model", "regions"):
        callback = CompileModel(backend="aot_eager", scope=scope)
        assert_same(train(callback, model=Split(), **settings), expected)
        found.append({row["mode"] for row in callback.report().rows})
        assert torch._dynamo.config.optimize_ddp
    for backend in (fails, fails_in_backward):
        callback = CompileModel(backend=on_rank_0(backend))
        actual, messages = messages_of(lambda c=callback: train(c, model=Split(), **settings))
        assert_same(actual, expected)
        found.append((messages, {row["region"]: row["mode"] for row in callback.report().rows}))
    return found


def under_fsdp2() -> list[Any]:
    def run(*callbacks: CompileModel) -> Any:
        return train(*callbacks, model=Sharded(), strategy=ModelParallelStrategy(2, 1), **SHORT)

    expected, found = run(), []
    for scope, backend in (("regions", "aot_eager"), ("model", "aot_eager"), ("regions", fails)):
        callback = CompileModel(backend=backend, scope=scope)
        actual, messages = messages_of(lambda c=callback: run(c))
        assert_same(actual, expected)
        found.append((messages, callback.report().rows))
    return found


def under_both() -> tuple[list[Any], list[Any]]:
    replicated = under_ddp()
    torch._dynamo.reset()
    return replicated, under_fsdp2()


def test_training_is_identical_also_if_compilation_fails() -> None:
    (first, *sharded), (second, *others) = launch(under_both)
    assert first[:2] == second[:2] == [{"default"}, {"default"}]
    for (mine, modes), (theirs, other_modes) in zip(first[2:], second[2:], strict=True):
        assert len(mine) == 1
        assert "on rank 0" in mine[0]
        assert theirs == []
        assert modes["forward"] == "eager"
        assert other_modes["forward"] == "default"
    for regions, whole, failing in (*sharded, *others):
        messages, [row] = regions
        assert messages == whole[0] == []
        assert (row["modules"], row["graphs"], row["graph breaks"]) == (2, 2, 0)
        assert len(failing[0]) == 1
