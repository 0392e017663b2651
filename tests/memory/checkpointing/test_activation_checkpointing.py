"""ActivationCheckpointing: arguments, patches, planned operations, reports."""

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from lightning_opt.core.modules.blocks import find_blocks
from lightning_opt.core.modules.compiling import is_checkpointed
from lightning_opt.memory.checkpointing.activation_checkpointing import ActivationCheckpointing
from lightning_opt.memory.checkpointing.batch_plan import to_plan
from lightning_opt.memory.checkpointing.forward import InputChangedError
from lightning_opt.memory.checkpointing.policies import (
    AppliedPlan,
    every_layer,
    segments,
    selective,
)
from lightning_opt.memory.checkpointing.step_profile import Option
from tests.helpers.footprint import model_footprint, process_footprint
from tests.helpers.trainers import MemoryLogger, quiet_trainer, warnings_of
from tests.memory.architectures import (
    ARCHITECTURES,
    Nested,
    PlainLayers,
    Residual,
    Transformer,
    train,
)


class Watch(Callback):
    def __init__(self) -> None:
        self.checkpointed: list[str] = []
        self.footprint: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        named = pl_module.named_modules()
        self.checkpointed = [name for name, module in named if is_checkpointed(module)]
        self.footprint = model_footprint(pl_module)


@pytest.mark.parametrize(
    ("policy", "settings", "expected"),
    [
        ("none", {}, []),
        ("every_layer", {}, ["layers.0", "layers.1", "layers.2", "layers.3"]),
        ("every_nth", {"interval": 3}, ["layers.0", "layers.3"]),
        ("custom", {"modules": ["layers.[23]"]}, ["layers.2", "layers.3"]),
        ("custom", {"modules": ["layers"]}, [f"layers.{i}" for i in range(4)]),
        ("custom", {"modules": ["layers.0", "layers.0.linear1"]}, ["layers.0"]),
        ("custom", {"modules": [nn.TransformerEncoderLayer]}, [f"layers.{i}" for i in range(4)]),
        ("custom", {"modules": ["TransformerEncoderLayer"]}, [f"layers.{i}" for i in range(4)]),
        ("sqrt", {"modules": ["layers.0", "layers.1"]}, ["layers.0", "layers.1"]),
    ],
)
def test_policy_checkpoints_the_expected_modules(
    policy: str, settings: dict[str, Any], expected: list[str]
) -> None:
    watch, callback = Watch(), ActivationCheckpointing(policy, **settings)
    quiet_trainer(callbacks=[callback, watch], max_steps=1).fit(Transformer())
    assert watch.checkpointed == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "half"}, "policy must be one of"),
        ({"policy": "sqrt", "interval": 3}, "interval=3 is for policy 'block' and 'every_nth'"),
        ({"policy": "block", "interval": 0}, "interval must be a whole number of at least 1"),
        ({"policy": "custom"}, "needs modules"),
        ({"policy": "block", "budget": 0.5}, "budget=0.5 is for policy 'auto'"),
        ({"budget": 0.5, "budget_mb": 3}, "are alternatives"),
        ({"budget_mb": -1}, "budget_mb must be a finite number above 0"),
        ({"policy": "every_layer", "min_flops": 3}, "min_flops=3 is for policy 'selective'"),
        ({"policy": "block", "worst_batch": 2}, "worst_batch=2 is for policy 'auto'"),
        ({"budget": 0.5, "offload": True}, "would change the measurements"),
    ],
)
def test_invalid_arguments_raise_in_init(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ActivationCheckpointing(**arguments)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_incompatible_models_and_strategies_raise() -> None:
    def fit(callback: Callback, model: Any = None, **settings: Any) -> None:
        quiet_trainer(callbacks=[callback], max_steps=1, **settings).fit(model or Transformer())

    with pytest.raises(ValueError, match="matches no module of Transformer"):
        fit(ActivationCheckpointing("custom", modules=["encoder.*"]))
    single = Transformer()
    single.layers = single.layers[:1]
    with pytest.raises(ValueError, match="finds no repeated blocks"):
        fit(ActivationCheckpointing("every_layer"), single)
    scripted = Residual()
    scripted.layers[1] = torch.jit.script(nn.Linear(8, 8))  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match=r"'layers\.1', which is a torch\.jit module"):
        fit(ActivationCheckpointing("every_layer", modules=["layers.*"]), scripted)
    lazy = Residual()
    lazy.layers.append(nn.LazyLinear(8))
    for callback in (
        ActivationCheckpointing("selective"),
        ActivationCheckpointing("auto", modules=["layers.0"]),
        ActivationCheckpointing("every_layer", modules=["layers.4"]),
    ):
        with pytest.raises(ValueError, match="Run the model once on an example batch before fit"):
            fit(callback, lazy)
    fit(ActivationCheckpointing("every_layer", modules=["layers.0"]), lazy)
    with pytest.raises(ValueError, match=r"layers\.0 is checkpointed already"):
        quiet_trainer(
            callbacks=[ActivationCheckpointing("every_layer"), ActivationCheckpointing("sqrt")]
        ).fit(Transformer())
    with_flag = Transformer()
    with_flag.layers[1].gradient_checkpointing = True  # as Transformers marks it
    with pytest.raises(ValueError, match=r"layers\.1 is checkpointed already"):
        fit(ActivationCheckpointing("every_layer"), with_flag)
    compiled = Transformer()
    compiled.layers[0].compile(backend="eager")
    with pytest.raises(ValueError, match=r"layers\.0 is compiled"):
        fit(ActivationCheckpointing("selective"), compiled)
    strategy = FSDPStrategy(activation_checkpointing_policy={nn.TransformerEncoderLayer})
    trainer = quiet_trainer()
    trainer.strategy.__class__ = FSDPStrategy
    trainer.strategy.__dict__.update(vars(strategy))
    with pytest.raises(ValueError, match="would recompute twice"):
        ActivationCheckpointing("sqrt").setup(trainer, Transformer(), "fit")


def without_forward(footprint: dict[str, Any]) -> dict[str, Any]:
    """Remove ``forward``, the only attribute that checkpointing sets."""
    modules = copy.deepcopy(footprint["modules"])
    for module in modules.values():
        module["attributes"].pop("forward", None)
    return {**footprint, "modules": modules}


@pytest.mark.parametrize("policy", ["every_layer", "block", "selective", "auto"])
def test_fit_changes_only_forward_and_restores_it(policy: str) -> None:
    plain, watched = Watch(), Watch()
    quiet_trainer(callbacks=[plain], max_steps=1).fit(Nested())
    model = Nested()
    before = process_footprint()
    settings = {"budget": 0.8} if policy == "auto" else {}
    callback = ActivationCheckpointing(policy, **settings)
    quiet_trainer(callbacks=[callback, watched], max_steps=1).fit(model)
    assert without_forward(watched.footprint) == plain.footprint
    assert without_forward(model_footprint(model)) == model_footprint(model)
    assert not any(is_checkpointed(module) for module in model.modules())
    after = process_footprint()
    assert {**after, "environment": 0} == {**before, "environment": 0}


def test_forward_hooks_of_a_block_fire_once() -> None:
    for policy in ("every_layer", "block"):
        model = Transformer()
        calls = []
        model.layers[1].register_forward_hook(lambda *_, calls=calls: calls.append(1))
        quiet_trainer(
            callbacks=[ActivationCheckpointing(policy)], max_steps=2, limit_val_batches=0
        ).fit(model)
        assert len(calls) == 2


def test_forward_without_gradients_saves_nothing() -> None:
    model = Transformer()
    applied = AppliedPlan(every_layer(find_blocks(model)))
    saves = []
    for forward in applied.forwards:
        forward.state.save = lambda: saves.append(1)  # type: ignore[method-assign]
    with torch.no_grad():
        model(torch.randn(1, 2, 8))
    assert not saves


@pytest.mark.parametrize("plan", [every_layer, lambda blocks: segments(blocks, 2)])
def test_checkpointed_model_can_be_copied_and_pickled(plan: Any) -> None:
    model = ARCHITECTURES["UNet"]()
    AppliedPlan(plan(find_blocks(model)))
    batch = torch.randn(2, 4, 8)

    def gradients(net: Any) -> list[Tensor]:
        net.zero_grad()
        net.training_step(batch, 0).backward()
        return [p.grad for p in net.parameters()]

    expected = gradients(model)
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert copied.layers[0].forward.module is copied.layers[0]
    assert pickled.layers[0].forward.__self__ is pickled.layers[0]
    for other in (copied, pickled):
        torch.testing.assert_close(gradients(other), expected, rtol=0, atol=0)


def test_checkpoint_resumes_with_and_without_the_callback(tmp_path: Path) -> None:
    expected = train("Residual", None)
    for number, (first, second) in enumerate([("every_layer", "none"), ("none", "block")]):
        trainer = quiet_trainer(callbacks=[ActivationCheckpointing(first)], max_steps=3)
        trainer.fit(ARCHITECTURES["Residual"]())
        path = tmp_path / f"{number}.ckpt"
        trainer.save_checkpoint(path)
        assert list(torch.load(path, weights_only=True)["state_dict"]) == list(
            expected.state_dict()
        )
        states = []
        for callbacks in ([ActivationCheckpointing(second)], []):
            model = ARCHITECTURES["Residual"]()
            quiet_trainer(callbacks=callbacks, max_epochs=2).fit(
                model, ckpt_path=path, weights_only=True
            )
            assert model.gradients
            states.append(model.state_dict())
        torch.testing.assert_close(*states, rtol=0, atol=0)


def test_error_names_a_block_that_writes_to_its_input() -> None:
    class InPlace(PlainLayers):
        def build(self) -> None:
            self.layers = nn.Sequential(
                *(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8)) for _ in range(3))
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x.clone())

    with pytest.raises(InputChangedError, match="Sequential changes its input in place"):
        quiet_trainer(callbacks=[ActivationCheckpointing("every_layer")]).fit(InPlace())
    callback = ActivationCheckpointing("auto", budget=0.9, strict=False)
    trainer = quiet_trainer(callbacks=[callback], max_steps=1)
    _, warned = warnings_of(lambda: trainer.fit(InPlace()), "cannot meet budget=0.9")
    assert warned
    assert callback.plan == []


def backward_flops(model: Any, batch: Tensor) -> int:
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(query, key, value))

    counter = FlopCounterMode(display=False, custom_mapping={attention: attention_flops})
    loss = model.training_step(batch, 0)
    with counter:
        loss.backward()
    return int(counter.get_total_flops())


def recomputed_flops(selection: Any, kept: frozenset[Any]) -> int:
    """Return the FLOPs of recomputing the operators that are not in ``kept``."""
    return sum(op.flops for op in selection.repeated_operators() if op.key not in kept)


@pytest.mark.parametrize("name", ["Residual", "EncoderDecoder"])
def test_backward_pass_runs_exactly_the_planned_operations(name: str) -> None:
    callback = ActivationCheckpointing("auto", budget=10.0)
    model = ARCHITECTURES[name]()
    quiet_trainer(callbacks=[callback], max_steps=1).fit(model)
    assert callback.step_plan is not None
    profile = callback.step_plan.profile
    batch = torch.randn(2, 4, 8)
    bare = backward_flops(model, batch)
    with AppliedPlan(selective([unit.block for unit in profile.units], None)) as applied:
        backward_flops(model, batch)
        runs = [forward.selection for forward in applied.forwards]

    def check(*options: Option) -> int:
        planned = sum(
            unit.calls * recomputed_flops(run, option.kept)
            for unit, run, option in zip(profile.units, runs, options, strict=True)
            if option.kept is not None
        )
        names = [unit.block.name for unit in profile.units]
        with AppliedPlan(to_plan(profile.blocks, dict(zip(names, options, strict=True)))):
            assert backward_flops(model, batch) - bare == planned
        return planned

    recompute, keep, partial = zip(*(unit.options for unit in profile.units), strict=True)
    assert check(*keep) == check(*partial) == 0
    assert check(*recompute) > check(*partial[:1], *recompute[1:]) > 0
    mixed = zip(keep, recompute, partial, strict=True)
    check(*(options[i % 3] for i, options in enumerate(mixed)))


def test_selective_policy_recomputes_exactly_the_operators_it_does_not_keep() -> None:
    callback = ActivationCheckpointing("selective")
    model = Transformer()
    model.layers = nn.ModuleList(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)
    )
    batch = torch.randn(2, 4, 8)
    bare = backward_flops(model, batch)
    extra = []
    for min_flops in (None, 0.2, 0.3, 10**9):
        callback = ActivationCheckpointing("selective", min_flops=min_flops)
        callback.on_fit_start(None, model)  # type: ignore[arg-type]
        backward_flops(model, batch)  # the first step records the operators
        extra.append(backward_flops(model, batch) - bare)
        selection = callback.blocks[0].modules[0].forward.selection
        assert extra[-1] == 2 * recomputed_flops(selection, selection.kept)
        callback.release(None)
    assert extra[0] == 0
    assert extra == sorted(set(extra))


@pytest.mark.parametrize(
    ("policy", "settings"), [("block", {"interval": 2}), ("auto", {"budget": 0.7})]
)
def test_description_matches_the_logged_values(policy: str, settings: dict[str, Any]) -> None:
    callback = ActivationCheckpointing(policy, strict=False, **settings)
    for logger in (MemoryLogger(), MemoryLogger()):  # a second fit is logged too
        trainer = quiet_trainer(callbacks=[callback], max_steps=2, logger=logger)
        warnings_of(partial(trainer.fit, Transformer()))
    rows = callback.describe().rows
    assert [row["block"] for row in rows] == [f"layers.{i}" for i in range(4)]
    assert rows[0]["class"] == "TransformerEncoderLayer"
    assert logger.series("checkpointing/blocks") == [4.0]
    recomputed = sum(row["policy"] != "kept" for row in rows)
    assert logger.series("checkpointing/recomputed") == [float(recomputed)]
    if policy == "auto":
        assert [row["order"] for row in rows] == [0, 1, 2, 3]
        assert all(row["keeping MB"] > 0 and row["recomputing ms"] > 0 for row in rows)
    else:
        assert rows[3]["policy"] == "recomputed with layers.2 to layers.3"
