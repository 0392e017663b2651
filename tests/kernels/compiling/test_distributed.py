"""CompileModel under DDP and FSDP2, in real processes."""

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from lightning_opt.kernels.compiling.compile_model import CompileModel
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
    """Each rank trains on its own rows."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = [part[self.global_rank :: 2] for part in batch]
        return super().training_step(rows, batch_idx)


class Sharded(Split):
    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        mesh = self.device_mesh["data_parallel"]
        for block in self.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self, mesh=mesh)


def ddp() -> dict[str, Any]:
    return {"strategy": DDPStrategy(process_group_backend="gloo"), **SHORT}


def fsdp2() -> dict[str, Any]:
    return {"strategy": ModelParallelStrategy(2, 1), **SHORT}


def under_ddp() -> list[Any]:
    expected = train(model=Split(), **ddp())
    found = []
    for scope in ("model", "regions"):
        callback = CompileModel(backend="aot_eager", scope=scope)
        assert_same(train(callback, model=Split(), **ddp()), expected)
        found.append({row["mode"] for row in callback.report().rows})
        assert torch._dynamo.config.optimize_ddp
    for backend in (fails, fails_in_backward):
        callback = CompileModel(backend=on_rank_0(backend))
        actual, messages = messages_of(lambda c=callback: train(c, model=Split(), **ddp()))
        assert_same(actual, expected)
        found.append((messages, {row["region"]: row["mode"] for row in callback.report().rows}))
    return found


def test_ddp_is_identical_also_if_compilation_fails_on_one_rank() -> None:
    first, second = launch(under_ddp)
    assert first[:2] == second[:2] == [{"default"}, {"default"}]
    for (mine, modes), (theirs, others) in zip(first[2:], second[2:], strict=True):
        assert len(mine) == 1
        assert "on rank 0" in mine[0]
        assert theirs == []
        assert modes["forward"] == "eager"
        assert others["forward"] == "default"


def under_fsdp2() -> list[Any]:
    expected = train(model=Sharded(), **fsdp2())
    found = []
    for scope, backend in (("regions", "aot_eager"), ("model", "aot_eager"), ("regions", fails)):
        callback = CompileModel(backend=backend, scope=scope)
        run = messages_of(lambda c=callback: train(c, model=Sharded(), **fsdp2()))
        assert_same(run[0], expected)
        found.append((len(run[1]), run[1], callback.report().rows))
    return found


def test_fsdp2_is_identical_with_and_without_failures() -> None:
    for regions, whole, failing in launch(under_fsdp2):
        [row] = regions[2]
        assert regions[0] == 0, regions[1]
        assert (row["modules"], row["graphs"], row["graph breaks"]) == (2, 2, 0)
        assert whole[0] == 0, whole[1]
        assert failing[0] == 1
