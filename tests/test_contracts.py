"""What every callback of the package promises, whatever it does.

The callbacks are those of ``lightning_opt.__all__``, so a new one is held to all this by itself.
Each is tried with its defaults and with the further settings of ``SETTINGS``, written as in a
LightningCLI configuration, because everything must be possible there.
"""

import functools
import gc
import importlib
import inspect
import io
import json
import pickle
import threading
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.cli import LightningCLI

import lightning_opt as lo
from tests.helpers.footprint import model_footprint, process_footprint, trainer_footprint
from tests.helpers.models import SmallNet, assert_same_state, assert_same_weights
from tests.helpers.syncs import each_path
from tests.helpers.trainers import quiet_trainer

Settings = dict[str, Any]

SETTINGS: dict[str, list[Settings]] = {
    "Accumulation": [
        {"schedule": 2, "normalize": "batches"},
        {"schedule": {"0": 1, "2": 2}},
        {"effective_batch": 8},
    ],
    "AdaptiveClipping": [
        {"rule": {"class_path": "lightning_opt.Robust", "init_args": {"warmup": 5, "patience": 4}}},
        {"rule": {"class_path": "lightning_opt.ZClip", "init_args": {"warmup": 5, "z": 1.0}}},
        {"rule": {"class_path": "lightning_opt.MeanStd", "init_args": {"k": 0.5, "window": 10}}},
        {"rule": {"class_path": "lightning_opt.PerParameter", "init_args": {"warmup": 6}}},
        {"rule": {"class_path": "lightning_opt.FixedNorm", "init_args": {"max_norm": 0.3}}},
        {"rule": {"class_path": "lightning_opt.FixedValue", "init_args": {"max_value": 0.1}}},
        {"rule": {"class_path": "lightning_opt.UnitWise", "init_args": {"exclude": None}}},
        {"rule": "percentile"},
        {"rule": "unit_wise"},
    ],
    "AttentionBackend": [{"order": ["math"], "watch_batches": 3}],
    "CurvatureMonitor": [{"every_n_steps": 4, "fraction": 1.0}],
    "CurvaturePreconditioner": [{"every_n_steps": 4, "fraction": 1.0, "clip": None}],
    "ChannelsLast": [{"policy": "always"}],
    "DynamicBatchSize": [
        {"budget_mb": 1e6, "grow": 1.5, "scale_lr": "sqrt"},
    ],
    "DataMonitor": [{"every_n_steps": 2, "threshold": 0.0, "patience": 1}],
    "DataPipelineTuner": [{"max_workers": 1, "random_items": "refuse", "verbose": False}],
    "GarbageCollection": [{"every_n_steps": 5}],
    "GradientHealth": [{"every_n_steps": 5, "activations": True, "figure": None}],
    "LeakDetector": [{"every_n_steps": 1, "warmup_steps": 28, "min_kb_per_step": 0.01}],
    "MemoryCleanup": [
        {"threshold": 0.001, "release": 0.0, "cooldown_steps": 0, "every_n_steps": 3},
        {"threshold": 0.01, "release": 0.0, "actions": ["malloc_trim"], "every_n_steps": 1},
    ],
    "MemoryProfiler": [
        {"every_n_steps": 5, "modules": True, "figure": None, "file": None},
    ],
    "MicroBatching": [{"size": 3}],
    "PerformanceMonitor": [
        # Its history of times cannot be the same twice, so it keeps none here.
        {"every_n_steps": 3, "sample_seconds": 0.01, "tokens": 7, "slowdown": None},
    ],
    "Runtime": [{"matmul_precision": "highest", "deterministic": True, "threads": 1}],
}
"""Settings to try beside the defaults, so that within a few steps each does something."""

INSTEAD_OF_DEFAULTS: dict[str, Settings] = {
    # Inductor takes seconds for each run, changes results by rounding and leaves threads behind.
    "CompileModel": {"backend": "eager"},
}
"""Used everywhere, where the true defaults cost more than they show; tests of its own try those."""

EXPORTS = {name: getattr(lo, name) for name in lo.__all__}
CALLBACKS = {
    name: export
    for name, export in EXPORTS.items()
    if inspect.isclass(export) and issubclass(export, Callback)
}


def case_id(name: str, settings: Settings) -> str:
    """Name a case as in ``AdaptiveClipping-rule=ZClip``."""
    return "-".join(
        [name]
        + [
            f"{key}={value['class_path'].rpartition('.')[2] if 'class_path' in value else 'table'}"
            if isinstance(value, dict)
            else f"{key}={value}"
            for key, value in settings.items()
        ]
    )


CASES = [
    pytest.param(name, settings, id=case_id(name, settings))
    for name in CALLBACKS
    for settings in ({}, *SETTINGS.get(name, []))
]

each_case = pytest.mark.parametrize(("name", "settings"), CASES)
each_callback = pytest.mark.parametrize("name", CALLBACKS)


def build(name: str, settings: Settings, **more: Any) -> Callback:
    """Make a callback from settings written as in a configuration file."""
    settings = {**INSTEAD_OF_DEFAULTS.get(name, {}), **settings, **more}
    return CALLBACKS[name](**{key: _resolve(value) for key, value in settings.items()})


def _resolve(value: Any) -> Any:
    if isinstance(value, dict) and "class_path" in value:
        module, _, name = value["class_path"].rpartition(".")
        return getattr(importlib.import_module(module), name)(**value.get("init_args", {}))
    return value


def takes(name: str, parameter: str) -> bool:
    return parameter in inspect.signature(CALLBACKS[name]).parameters


def fit(*callbacks: Callback, model: SmallNet | None = None, **settings: Any) -> SmallNet:
    model = SmallNet() if model is None else model
    quiet_trainer(callbacks=list(callbacks), **settings).fit(model)
    return model


@pytest.fixture(autouse=True)
def _process_is_left_as_found(request: pytest.FixtureRequest) -> Iterator[None]:
    """What one test leaves changed would look natural to the next, so each is watched."""
    freezes = "GarbageCollection" in request.node.name
    if freezes:
        request.getfixturevalue("nothing_frozen")
    before = process_footprint()
    yield
    for thread in threading.enumerate():  # that of a loader's queue ends a moment after its workers
        if thread.name not in before["threads_alive"]:
            thread.join(timeout=5.0)
    assert process_footprint() == before
    assert not freezes or gc.get_freeze_count() == 0


def test_every_callback_of_the_table_exists():
    assert SETTINGS.keys() | INSTEAD_OF_DEFAULTS.keys() <= CALLBACKS.keys()


# --- construction -------------------------------------------------------------------------------


@each_callback
def test_a_configuration_file_can_construct_it(name):
    """Plain annotated parameters with defaults: what LightningCLI can read, print and check."""
    for parameter in inspect.signature(CALLBACKS[name]).parameters.values():
        assert parameter.kind is parameter.POSITIONAL_OR_KEYWORD, parameter
        assert parameter.annotation is not parameter.empty, parameter
        assert parameter.default is not parameter.empty, parameter


def run_cli(*arguments: str) -> LightningCLI:
    """Read a configuration and make what it says, as ``fit`` does before it trains."""
    quiet = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False}
    silent = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return LightningCLI(
        SmallNet,
        args=list(arguments),
        run=False,
        save_config_callback=None,
        trainer_defaults={**quiet, **dict.fromkeys(silent, False), "num_sanity_val_steps": 0},
        seed_everything_default=False,
    )


@each_case
def test_lightning_cli_round_trip(name, settings, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["fit"])  # LightningCLI warns of the arguments of pytest
    # Lightning 2.6 calls jsonargparse 4.53 in a way that is about to go.
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    written = tmp_path / "written.yaml"  # JSON is YAML
    arguments = {**INSTEAD_OF_DEFAULTS.get(name, {}), **settings}
    callback = {"class_path": f"lightning_opt.{name}", "init_args": arguments}
    written.write_text(json.dumps({"trainer": {"callbacks": [callback]}}))

    with pytest.raises(SystemExit) as exit_status:
        run_cli("--config", str(written), "--print_config")
    assert exit_status.value.code == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    assert f"lightning_opt.{name}" in printed.read_text()

    cli = run_cli("--config", str(printed))
    assert [type(c) for c in cli.trainer.callbacks if type(c).__name__ in CALLBACKS] == [
        CALLBACKS[name]
    ]
    cli.trainer.fit(cli.model)
    assert_same_weights(cli.model, fit(build(name, settings)))


@each_case
def test_pickles_before_and_after_a_run(name, settings):
    callback = build(name, settings)
    for _ in range(2):
        twin = pickle.loads(pickle.dumps(callback))
        assert twin.state_key == callback.state_key
        assert_same_state(twin.state_dict(), callback.state_dict())
        fit(callback)
    # A copy must not resume: its model is another one.
    assert_same_weights(fit(twin), fit(build(name, settings)))


# --- runs ---------------------------------------------------------------------------------------


@each_case
def test_second_run_of_one_instance(name, settings):
    """On another model it starts anew; on the same one it goes on."""
    callback = build(name, settings)
    once = fit(callback)
    again = fit(callback)
    assert_same_weights(again, once)
    fit(callback, model=again)


class Save(Callback):
    """Saves a checkpoint when a step has ended, as ModelCheckpoint does, but has no state."""

    def __init__(self, files: Mapping[int, Path]) -> None:
        self.files = files

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step in self.files:
            trainer.save_checkpoint(self.files[trainer.global_step])


@each_case
def test_resumes_bit_exactly_in_mid_epoch(name, settings, tmp_path, monkeypatch):
    """From a run in one piece, then from the one that was resumed."""
    # 12 batches an epoch: neither is the end of one.
    save = Save({step: tmp_path / f"step{step}.ckpt" for step in (3, 17)})
    for _ in each_path(monkeypatch):
        whole = build(name, settings)
        expected = fit(whole, save, model=SmallNet("Adam"), max_epochs=3)
        for file in save.files.values():
            resumed, model = build(name, settings), SmallNet("Adam")
            trainer = quiet_trainer(callbacks=[resumed, save], max_epochs=3)
            trainer.fit(model, ckpt_path=file, weights_only=True)
            assert_same_weights(model, expected)
            assert_same_state(resumed.state_dict(), whole.state_dict())


@each_case
def test_state_loads_with_weights_only(name, settings, monkeypatch):
    for _ in each_path(monkeypatch):
        callback = build(name, settings)
        fit(callback)
        state = callback.state_dict()
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        assert_same_state(torch.load(file, weights_only=True), state)


@each_callback
def test_validate_test_and_predict_are_unaffected(name):
    model = SmallNet()
    plain = quiet_trainer()
    callback = build(name, {})
    for trainer in (quiet_trainer(callbacks=[callback]), quiet_trainer(callbacks=[callback])):
        for stage in ("validate", "test"):
            with_it = getattr(trainer, stage)(model, verbose=False)
            assert with_it == getattr(plain, stage)(model, verbose=False)
        for a, b in zip(trainer.predict(model), plain.predict(model), strict=True):
            assert torch.equal(a, b)
        trainer.fit(model)


@each_callback
def test_two_instances_work_or_are_refused(name):
    try:
        fit(build(name, {}), build(name, {}))
    except (ValueError, RuntimeError) as error:
        assert name in str(error)  # noqa: PT017


# --- what is left behind ------------------------------------------------------------------------


@functools.cache
def left_without_us(fail_at: int | None) -> dict[str, Any]:
    return leave_behind(SmallNet(fail_at=fail_at))


def leave_behind(model: SmallNet, *callbacks: Callback) -> dict[str, Any]:
    """Fit, also where that raises, and return what is found afterwards."""
    trainer = quiet_trainer(callbacks=list(callbacks))
    parameters, forward = [id(p) for p in model.parameters()], model.forward
    if model.fail_at is None:
        trainer.fit(model)
    else:
        with pytest.raises(ArithmeticError, match="planted"):
            trainer.fit(model)
    assert [id(p) for p in model.parameters()] == parameters
    assert model.forward == forward
    return {"model": model_footprint(model), **trainer_footprint(trainer)}


@each_case
@pytest.mark.parametrize("fail_at", [None, 0, 3])
def test_leaves_everything_as_found(name, settings, fail_at):
    left = leave_behind(SmallNet(fail_at=fail_at), build(name, settings))
    assert left == left_without_us(fail_at)


@each_case
def test_runs_again_after_an_exception(name, settings):
    callback = build(name, settings)
    with pytest.raises(ArithmeticError, match="planted"):
        fit(callback, model=SmallNet(fail_at=3))
    assert_same_weights(fit(callback), fit(build(name, settings)))


@each_case
@pytest.mark.parametrize("fail_at", [None, 0, 3])
def test_lets_go_of_the_model(name, settings, fail_at):
    """A callback that is kept for its report keeps no model, optimizer or gradient in memory."""
    callback, model = build(name, settings), SmallNet(fail_at=fail_at)
    leave_behind(model, callback)
    parts = [weakref.ref(part) for part in (*model.modules(), *model.parameters())]
    del model, callback.log, callback.log_dict  # Lightning lends the model's to every callback
    gc.collect()
    assert not [part for part in parts if part() is not None]


# --- cost ---------------------------------------------------------------------------------------


@pytest.mark.gpu
@each_case
def test_adds_no_host_sync_on_a_gpu(name, settings):
    more = {"every_n_steps": 1000} if takes(name, "every_n_steps") else {}

    class Strict(Callback):
        """Makes CUDA refuse a sync within the hooks of the callback before the optimizer step."""

        def __init__(self, mode: str) -> None:
            self.mode = mode

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            # The first step may bring settings and state to the device.
            torch.cuda.set_sync_debug_mode(self.mode if trainer.global_step else "default")

    callbacks = [Strict("error"), build(name, settings, **more), Strict("default")]
    try:
        fit(*callbacks, model=SmallNet(fused=True), accelerator="gpu")
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- documentation ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXPORTS)
def test_docstring(name):
    doc = inspect.getdoc(EXPORTS[name]) or ""
    assert doc, f"{name} has no docstring"
    if name in CALLBACKS:
        for section in ("Args:", "Example:"):
            assert section in doc, f"the docstring of {name} has no section {section}"
        for parameter in inspect.signature(EXPORTS[name]).parameters:
            assert f"\n    {parameter}:" in doc, f"{name} does not describe {parameter}"


DOCS = Path(__file__).parent.parent / "docs"


def test_api_page_takes_every_export():
    page = (DOCS / "api.md").read_text()
    assert [name for name in lo.__all__ if f"[`{name}`](api/" not in page] == []


@each_callback
def test_has_a_page_in_the_documentation(name):
    folders = [
        folder
        for folder in DOCS.iterdir()
        if (DOCS.parent / "lightning_opt" / folder.name).is_dir()
    ]
    pages = [page.read_text() for folder in folders for page in folder.rglob("*.md")]
    assert any(f"`{name}" in page for page in pages)
