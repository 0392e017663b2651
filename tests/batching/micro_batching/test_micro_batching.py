"""Compares micro-batches with whole batches, in one process."""

import functools
import gc
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import DataLoader, TensorDataset

import lightning_opt as lo
from lightning_opt.batching.micro_batching import batch_runner
from lightning_opt.batching.micro_batching.logs_and_outputs import combine, merge_outputs
from tests.batching.nets import Hooks, LinearNet, Net, Samples, SharpnessAware, train
from tests.helpers.models import SmallNet, assert_same_weights
from tests.helpers.trainers import MemoryLogger, quiet_trainer

UNCHECKED = "ignore:MicroBatching. it was not possible to check"

CLOSE = {"rtol": 0.0, "atol": 1e-6}

# Lightning takes the length of a string in the batch for `batch_size`, with any callback.
pytestmark = pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")


def assert_same_run(run: Any, expected: Any, rounding: float = 1e-6) -> None:
    (net, hooks, logger), (other, other_hooks, other_logger) = run, expected
    close = {"rtol": rounding, "atol": rounding}
    assert_same_weights(net, other, **close)
    assert (net.seen, net.steps) == (other.seen, other.steps)
    assert hooks.called == other_hooks.called
    assert hooks.losses == pytest.approx(other_hooks.losses, rel=rounding, abs=rounding)
    assert hooks.norms == pytest.approx(other_hooks.norms, rel=rounding, abs=rounding)
    torch.testing.assert_close(hooks.outputs, other_hooks.outputs, **close)
    # Only some steps log the callback's own keys.
    records = [
        (step, {k: v for k, v in metrics.items() if not k.startswith("micro_batching/")})
        for step, metrics in logger.records
    ]
    records = [record for record in records if record[1]]
    assert len(records) == len(other_logger.records)
    for (step, metrics), (other_step, others) in zip(records, other_logger.records, strict=True):
        assert (step, metrics) == (other_step, pytest.approx(others, rel=rounding, abs=rounding))


@functools.cache
def train_whole(kind: type[Net] = Net, **settings: Any) -> tuple[Net, Hooks, MemoryLogger]:
    """Train on whole batches, once for all tests with the same settings."""
    return train(net=kind(), **settings)


class Sharp(Net):
    def training_step(self, batch, batch_idx):
        return super().training_step(dict(batch), batch_idx)

    def configure_optimizers(self):
        return SharpnessAware(self.parameters(), lr=0.05)


# --- a fixed size -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7])
def test_windows_equal_training_on_whole_batches(size):
    settings = {"accumulate_grad_batches": 3}
    assert_same_run(train(lo.MicroBatching(size), **settings), train_whole(**settings))


def test_run_equals_whole_batches_after_fifty_steps():
    settings = {"max_epochs": 10, "gradient_clip_val": 0.5}
    run = train(lo.MicroBatching(3), **settings)
    assert_same_run(run, train_whole(**settings))
    assert run[1].called.count("step") == 50


def test_weights_equal_whole_batches_in_bfloat16():
    settings = {"max_epochs": 4, "gradient_clip_val": 0.5, "precision": "bf16-mixed"}
    net, *_ = train(lo.MicroBatching(3), **settings)
    # bf16 has 8 bits, and sums over micro-batches are rounded differently.
    assert_same_weights(net.layers, train(**settings)[0].layers, rtol=0.0, atol=5e-3)


def run_in_float16(init_scale: float, *callbacks: Callback) -> tuple[Net, Hooks, float]:
    scale = lo.DynamicLossScale(init_scale=init_scale, growth_interval=4)
    net, hooks, _ = train(*callbacks, plugins=[scale], gradient_clip_val=0.5)
    assert scale.scaler is not None
    return net, hooks, scale.scaler.get_scale()


def test_weights_equal_whole_batches_with_a_loss_scale_in_float16():
    net, hooks, scale = run_in_float16(2.0**10, lo.MicroBatching(3))
    other, other_hooks, other_scale = run_in_float16(2.0**10)
    # float16 has 11 bits, and sums over micro-batches are rounded differently.
    assert_same_weights(net.layers, other.layers, rtol=0.0, atol=1e-3)
    assert hooks.called == other_hooks.called
    assert scale == other_scale == 2.0**12  # ten updates, none skipped

    # A part overflows at a larger scale than the whole batch; the whole update is then skipped.
    net, hooks, scale = run_in_float16(2.0**24, lo.MicroBatching(3))
    assert other_scale < scale < 2.0**24
    assert hooks.called == other_hooks.called
    assert all(p.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize(("size", "fits"), [(3, 10**9), ("auto", 10**9), ("auto", 5)])
def test_gradients_are_zeroed_at_each_evaluation_of_the_closure(size, fits):
    assert_same_run(train(lo.MicroBatching(size), net=Sharp(fits)), train_whole(Sharp))


class Graphs:
    """A batch type that only the user can split, like a batch of graphs."""

    is_nested = True

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def values(self) -> torch.Tensor:
        return self.rows

    def size(self, dim: int) -> int:
        return len(self.rows)


class ListedNet(LinearNet):
    """Its batches are ``batch``, which cannot be cut; more than ``fits`` samples run out."""

    def __init__(self, batch: Any, fits: int = 8) -> None:
        super().__init__()
        self.batch, self.fits = batch, fits

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = batch.values() if batch.is_nested else batch.to_dense()
        if batch.size(0) > self.fits:
            raise torch.OutOfMemoryError("planted")
        return self.layer(rows).square().mean()

    def train_dataloader(self) -> Any:
        return DataLoader([self.batch] * 2, batch_size=None)


def batch_of(layout: str, rows: torch.Tensor) -> Any:
    if layout == "sparse":
        return rows.to_sparse()
    if layout == "jagged":
        return torch.nested.nested_tensor(list(rows.unsqueeze(1)), layout=torch.jagged)
    return Graphs(rows)


ROWS = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("size", "fits"), [(3, 8), ("auto", 4)])
@pytest.mark.parametrize("layout", ["sparse", "jagged", "graphs"])
def test_sparse_and_nested_batches_need_a_split(layout, size, fits):
    def split(batch: Any, parts: int) -> Any:
        dense = batch.to_dense() if layout == "sparse" else batch.values()
        return [(batch_of(layout, part), len(part)) for part in dense.tensor_split(parts)]

    batch = batch_of(layout, ROWS)
    with pytest.raises(lo.UnsplittableBatchError, match="split="):
        quiet_trainer(callbacks=[lo.MicroBatching(size)]).fit(ListedNet(batch, fits))
    nets = [ListedNet(batch), ListedNet(batch, fits)]
    quiet_trainer().fit(nets[0])
    quiet_trainer(callbacks=[lo.MicroBatching(size, split=split)]).fit(nets[1])
    assert_same_weights(nets[1], nets[0], **CLOSE)


def test_split_of_the_user_must_return_all_parts():
    micro = lo.MicroBatching(3, split=lambda batch, parts: [])
    with pytest.raises(ValueError, match="must return"):
        quiet_trainer(callbacks=[micro]).fit(ListedNet(batch_of("graphs", ROWS)))


class Sometimes(Net):
    """The loss is None for parts with a sample of ``skipped``."""

    skipped = range(16, 32)

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        return output if set(self.skipped).isdisjoint(batch["id"].tolist()) else None


def test_none_for_some_micro_batches_raises():
    (net := Sometimes()).skipped = range(1)
    with pytest.raises(RuntimeError, match="None for some micro-batches"):
        train(lo.MicroBatching(3), net=net)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("size", ["auto", 3])
def test_batch_may_be_skipped_within_a_window(size):
    settings = {"accumulate_grad_batches": 3}
    run = train(lo.MicroBatching(size), net=Sometimes(), **settings)
    assert_same_weights(run[0].layers, train(net=Sometimes(), **settings)[0].layers, **CLOSE)


# --- out of memory ------------------------------------------------------------------------------


@pytest.mark.filterwarnings(UNCHECKED)
@pytest.mark.parametrize(
    ("where", "fits", "accumulate"),
    [
        ("forward", 5, 1),
        ("loss", 5, 3),
        ("backward", 5, 3),
        ("backward", 1, 3),
    ],
)
def test_run_with_rollbacks_equals_training_on_whole_batches(where, fits, accumulate):
    settings = {"accumulate_grad_batches": accumulate}
    run = train(lo.MicroBatching("auto"), net=Net(fits, where), **settings)
    assert_same_run(run, train_whole(**settings))


@pytest.mark.filterwarnings("ignore:MicroBatching. BatchNorm")
def test_rollback_restores_random_state_and_statistics():
    """Bit-identical to a run with the right size from the start."""
    settings = {"batch": 16, "samples": 64}
    expected, *_ = train(lo.MicroBatching(4), net=Net(dropout=0.5, norm=True), **settings)
    for where in ("forward", "loss", "backward"):
        net = Net(4, where, dropout=0.5, norm=True)
        train(lo.MicroBatching(), net=net, **settings)
        assert_same_weights(net, expected)
        assert net.seen == expected.seen


def test_run_without_out_of_memory_is_bit_identical():
    expected = train(net=Net(dropout=0.5))
    run = train(lo.MicroBatching(), net=Net(dropout=0.5))
    assert_same_run(run, expected, rounding=0.0)


@pytest.mark.filterwarnings(UNCHECKED)
@pytest.mark.parametrize("where", ["forward", "loss", "backward"])
def test_failed_attempt_holds_no_memory_before_the_retry(where, monkeypatch):
    made: list[StorageWeakRef] = []
    alive: list[int] = []

    def count_alive(device: torch.device) -> None:
        alive.append(sum(not storage.expired() for storage in made))
        made.clear()

    monkeypatch.setattr(batch_runner, "recover_memory", count_alive)
    net = Net(4, where)
    net.layers[1].register_forward_hook(
        lambda layer, args, output: made.append(StorageWeakRef(output.untyped_storage()))
    )
    gc.disable()  # neither a cycle nor a traceback may hold them
    try:
        train(lo.MicroBatching(), net=net)
    finally:
        gc.enable()
    assert alive == [0, 0]


@pytest.mark.filterwarnings(UNCHECKED)
def test_one_sample_that_does_not_fit_raises_memory_error():
    micro, net = lo.MicroBatching(), Net(fits=0)
    with pytest.raises(MemoryError, match=r"Even one sample does not fit.*planted"):
        train(micro, net=net)
    assert [event["size"] for event in micro.events] == [8, 4, 2, 1]
    net.fits = 10**9
    _, _, logger = train(micro, net=net)
    assert logger.series("micro_batching/size") == []  # it changed in the run that failed


def test_other_errors_and_fixed_sizes_are_not_retried_and_lbfgs_raises():
    with pytest.raises(ValueError, match="LBFGS"):
        quiet_trainer(callbacks=[lo.MicroBatching()]).fit(SmallNet("LBFGS"))
    with pytest.raises(ArithmeticError, match="planted"):
        quiet_trainer(callbacks=[lo.MicroBatching()]).fit(SmallNet(fail_at=2))
    with pytest.raises(RuntimeError, match="planted"):
        train(lo.MicroBatching(8), net=Net(fits=4))


@pytest.mark.parametrize("owner", ["callback", "module"])
@pytest.mark.parametrize(
    "hook",
    [
        "on_before_zero_grad",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
    ],
)
def test_batch_is_not_retried_if_memory_runs_out_in_a_hook(owner, hook):
    def run_out(*args: Any) -> None:
        raise torch.OutOfMemoryError("planted")

    net, callback = Net(), Callback()
    setattr(net if owner == "module" else callback, hook, run_out)
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        train(callback, lo.MicroBatching(), net=net)
    assert net.seen == list(range(16))


class ChangesBatch(Net):
    def training_step(self, batch, batch_idx):
        batch["x"].mul_(2)
        return super().training_step(batch, batch_idx)


class ChangesWeights(Net):
    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.layers[0].weight.mul_(0.9)
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:MicroBatching. each training_step changes")
@pytest.mark.parametrize(
    ("kind", "error"), [(ChangesBatch, "in place"), (ChangesWeights, "changed parameters")]
)
def test_in_place_changes_raise_instead_of_a_retry(kind, error):
    with pytest.raises(RuntimeError, match=error):
        train(lo.MicroBatching(), net=kind(fits=4))


def test_parameters_changed_between_micro_batches_warn():
    class Averaged(SmallNet):
        def on_before_zero_grad(self, optimizer):
            with torch.no_grad():
                self.layer[0].bias.mul_(0.9)

    with pytest.warns(UserWarning, match="Change them in on_train_batch_end"):
        quiet_trainer(callbacks=[lo.MicroBatching(2)]).fit(Averaged())


def test_entries_added_by_training_step_stay_in_the_batch():
    class AddsEntry(Net):
        def training_step(self, batch, batch_idx):
            batch["note"] = batch_idx
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            assert batch["note"] == batch_idx

    train(lo.MicroBatching(), net=AddsEntry())


def test_batch_may_have_tensors_of_inference_mode():
    class Encoded(Net):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            with torch.inference_mode():
                return batch | {"scores": batch["x"].sum(1)}

    run = train(lo.MicroBatching(), net=Encoded(fits=5))
    assert_same_weights(run[0].layers, train_whole()[0].layers, **CLOSE)


@pytest.mark.filterwarnings(UNCHECKED)
def test_unsplittable_batch_trains_while_it_fits():
    nets = [ListedNet(batch_of("graphs", ROWS)) for _ in range(2)]
    for net, callbacks in zip(nets, ([], [lo.MicroBatching()]), strict=True):
        quiet_trainer(callbacks=callbacks).fit(net)
    assert_same_weights(nets[1], nets[0])


# --- growing back -------------------------------------------------------------------------------


def test_size_grows_back_after_twice_as_many_batches_as_before():
    class GainsMemory(Net):
        def on_train_batch_start(self, batch, batch_idx):
            self.fits = 4 if self.global_step < 20 else 10**9

    micro = lo.MicroBatching(regrow_every=5)
    net, *_ = train(micro, net=GainsMemory(), samples=960, max_epochs=1)
    assert_same_weights(net.layers, train(samples=960, max_epochs=1)[0].layers, **CLOSE)
    events = [(event["step"], event["kind"], event["size"]) for event in micro.events]
    assert events == [
        (0, "split", 8),
        (0, "split", 4),
        (4, "grown", 8),  # does not fit in the next step
        (5, "split", 4),
        (14, "grown", 8),  # after ten batches, twice as many
        (15, "split", 4),
        (34, "grown", 8),  # after twenty
        (54, "grown", 16),  # all samples: no more splits
    ]


@pytest.mark.filterwarnings("ignore:MicroBatching. each training_step changes len.parts")
def test_long_samples_do_not_shrink_batches_of_short_ones():
    class Lengths(LinearNet):
        def training_step(self, batch, batch_idx):
            (x,) = batch
            if x.numel() > 64:
                raise torch.OutOfMemoryError("planted")
            self.parts.append(tuple(x.shape[:2]))
            return self.layer(x).square().mean()

        def train_dataloader(self):
            batches = [[torch.randn(8, length, 1)] for length in (8, 16, 8, 16, 32, 8)]
            return DataLoader(batches, batch_size=None)

    net, micro = Lengths(1), lo.MicroBatching()
    net.parts = []  # of the object, so that a failed attempt is rolled back
    quiet_trainer(callbacks=[micro]).fit(net)
    # Length 32 begins with the size of length 16.
    assert net.parts == [(8, 8)] + 2 * [(4, 16)] + [(8, 8)] + 2 * [(4, 16)] + 4 * [(2, 32)] + [
        (8, 8)
    ]
    assert len(micro.events) == 2


def test_learned_sizes_are_logged_reported_and_resumed(tmp_path):
    first, net, logger = lo.MicroBatching(), Net(fits=4), MemoryLogger()
    trainer = quiet_trainer(callbacks=[first], logger=logger)
    trainer.fit(net, DataLoader(Samples(64), batch_size=16))
    trainer.save_checkpoint(tmp_path / "stopped.ckpt")
    assert logger.series("micro_batching/size") == [4.0]
    assert logger.series("micro_batching/retries") == [2.0]
    assert "2 attempts rolled back" in str(first.report())
    second, resumed = lo.MicroBatching(), Net(fits=4)
    quiet_trainer(callbacks=[second], max_epochs=2).fit(
        resumed,
        DataLoader(Samples(64), batch_size=16),
        ckpt_path=tmp_path / "stopped.ckpt",
        weights_only=True,
    )
    assert second.events == first.events
    assert [event["size"] for event in second.events] == [8, 4]  # none after the resume
    fresh = lo.MicroBatching()
    for callback in (first, fresh):
        quiet_trainer(callbacks=[callback]).fit(Net(), DataLoader(Samples(64), batch_size=16))
    assert first.state_dict() == fresh.state_dict()  # what it learned was of another model


def test_outputs_of_each_kind_are_merged():
    def output(samples: int, width: int, accuracy: float | None) -> dict[str, Any]:
        rows = torch.ones(samples, 2, requires_grad=True)
        boxes = [torch.zeros(4, 4)] * samples
        values = {"array": rows.detach().numpy(), "boxes": boxes, "pair": (rows, rows.mean())}
        return {**values, "accuracy": accuracy, "logits": torch.ones(samples, width), "name": "a"}

    merged = merge_outputs([output(1, 5, None), output(2, 7, 0.5)], [1, 2], [1 / 3, 2 / 3])
    assert np.array_equal(merged["array"], np.ones((3, 2)))
    assert [box.shape for box in merged["boxes"]] == [(4, 4)] * 3
    assert (len(merged["pair"][0]), float(merged["pair"][1])) == (3, 1.0)
    assert not merged["pair"][0].requires_grad
    assert merged["accuracy"] == [None, 0.5]
    assert [logits.shape[1] for logits in merged["logits"]] == [5, 7]
    assert merged["name"] == "a"


def test_parts_without_tokens_count_equally():
    assert combine([1.0, 3.0], [0.0, 0.0]) == 2.0
    assert combine([1.0, 3.0], [0.0, 0.5]) == 3.0


class ConstantSizeNet(SmallNet):
    def training_step(self, batch, batch_idx):
        self.log("index", float(batch_idx), batch_size=4, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("size", [1, 3])
def test_constant_batch_size_weights_a_short_last_batch_as_without_parts(size):
    trainer = quiet_trainer(callbacks=[lo.MicroBatching(size)], max_epochs=1)
    rows = TensorDataset(torch.randn(14, 6), torch.randn(14, 1))
    trainer.fit(ConstantSizeNet(), DataLoader(rows, batch_size=4))
    assert float(trainer.callback_metrics["index"]) == (0 + 1 + 2 + 3) / 4
