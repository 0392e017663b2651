"""Contracts of every callback in ``lightning_opt.__all__``; a new callback is tested automatically.

Each is tested with its defaults and with ``SETTINGS``, written as in a LightningCLI configuration.
"""

import copy
import functools
import gc
import inspect
import io
import json
import math
import os
import pickle
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.cli import LightningCLI

import lightning_opt as lo
from lightning_opt.data.pipeline import pipeline_tuner
from lightning_opt.profiling.run_report import page, run_report
from lightning_opt.worker.recipes import instantiate
from tests.helpers.footprint import counts_in, model_footprint, process_footprint, trainer_footprint
from tests.helpers.models import (
    AdversarialNet,
    SmallNet,
    assert_same_state,
    assert_same_weights,
    load_changed_state,
)
from tests.helpers.syncs import each_path
from tests.helpers.trainers import MemoryLogger, SaveAt, quiet_trainer

Settings = dict[str, Any]

SETTINGS: dict[str, list[Settings]] = {
    "Accumulation": [
        {"schedule": 2, "normalize": "batches"},
        {"schedule": {"0": 1, "2": 2}},
        {"effective_batch": 8},
    ],
    "AdaptiveClipping": [
        {"rule": {"class_path": "lightning_opt.Robust", "init_args": {"warmup": 5, "patience": 4}}},
        {"rule": {"class_path": "lightning_opt.MeanStd", "init_args": {"k": 0.5, "window": 10}}},
        {"rule": {"class_path": "lightning_opt.PerParameter", "init_args": {"warmup": 6}}},
        {"rule": {"class_path": "lightning_opt.UnitWise", "init_args": {"exclude": None}}},
    ],
    "CurvatureMonitor": [{"every_n_steps": 4, "fraction": 1.0}],
    "CurvaturePreconditioner": [{"every_n_steps": 4, "fraction": 1.0, "clip": None}],
    "ChannelsLast": [{"policy": "always"}],
    "DynamicBatchSize": [{"budget_mb": 1e6, "max_size": 6, "scale_lr": "sqrt"}],
    "DataMonitor": [{"every_n_steps": 2, "threshold": 0.0, "patience": 1}],
    "DataPipelineTuner": [{"max_workers": 1, "verbose": False}],
    "GarbageCollection": [{"every_n_steps": 5}],
    "GradientHealth": [{"every_n_steps": 5, "activations": True}],
    "LeakDetector": [{"every_n_steps": 1, "warmup_steps": 16, "min_kb_per_step": 0.01}],
    "MemoryCleanup": [
        {"threshold": 0.001, "release": 0.0, "every_n_steps": 3},
        {"threshold": 0.01, "release": 0.0, "actions": ["malloc_trim"], "every_n_steps": 1},
    ],
    "MemoryProfiler": [
        {"every_n_steps": 5, "modules": True},
    ],
    "MicroBatching": [{"size": 3}],
    "PerformanceMonitor": [
        # A history of measured times would differ between two runs.
        {"every_n_steps": 3, "sample_seconds": 0.01, "tokens": 7, "slowdown": 0.9},
    ],
    "Runtime": [{"matmul_precision": "medium", "threads": 2}],
}
"""Settings tested besides the defaults, chosen to take effect within a few steps."""

WRONG: dict[str, list[Any]] = {
    "ChannelsLast": [({"policy": "on"}, "policy must be one of")],
    "CompileModel": [
        ({"mode": "fast"}, "mode must be one of"), ({"scope": "blocks"}, "scope must be"),
        ({"mode": "max-autotune", "backend": "eager"}, "inductor"),
    ],
    "CurvatureMonitor": [
        {"n_samples": 1}, {"fraction": 1.5}, {"tolerance": 0}, {"max_iterations": 0},
    ],
    "CurvaturePreconditioner": [
        {"every_n_steps": 0}, {"beta": 1.0}, {"power": 2.0}, {"damping": 0.0}, {"clip": -1.0},
        {"fraction": 0.0},
    ],
    "DataMonitor": [{"every_n_steps": 0}, {"threshold": 1.5}, {"patience": 0}],
    "DataPipelineTuner": [{"max_workers": -1}, {"budget_seconds": 0}],
    "DynamicBatchSize": [
        {"target": 1.5}, {"scale_lr": "cubic"}, {"find": "best"},
        ({"scale_lr": "sqrt", "keep_effective": 8}, "Pass only one of them"),
    ],
    "GarbageCollection": [{"every_n_steps": 0}],
    "GradientHealth": [{"every_n_steps": 2.5}, {"exploding": math.nan}, {"vanishing": -1e-7}],
    "LeakDetector": [{"every_n_steps": 0}, {"warmup_steps": -1}, {"min_kb_per_step": 0}],
    "MemoryCleanup": [
        {"threshold": 1.0}, {"threshold": 0.5}, {"release": -0.1}, {"threshold": math.nan},
        {"actions": []}, {"actions": ["reboot"]}, {"actions": "gc"},
    ],
    "MemoryProfiler": [{"every_n_steps": 0}],
    "MicroBatching": [
        {"size": 0}, {"size": "half"}, {"regrow_every": 0},
        ({"loss": "mean"}, "loss must be one of"), ({"loss": "mean_over_tokens"}, "needs count"),
        ({"count": len}, "mean_over_tokens"),
    ],
    "NonFiniteGuard": [
        {"policy": "ignore"}, {"max_consecutive": 2.5}, {"spike": math.nan}, {"lr_backoff": 1.5},
        {"snapshot_every_n_steps": 0}, {"backoff_after": 0}, {"every_n_steps": 0},
        {"policy": "rollback", "rollback_after": 10},
    ],
    "PerformanceMonitor": [
        {"every_n_steps": 0}, {"sample_seconds": 0.0}, {"tokens": 0}, {"slowdown": 1.5},
    ],
    "Runtime": [
        {"matmul_precision": "low"}, {"cudnn_benchmark": "auto"}, {"allocator": "jemalloc"},
        {"threads": 0},
    ],
    "StepProfiler": [
        ({"log_every_n_steps": -1}, "log_every_n_steps must be a whole number of at least 0"),
        ({"tokens": 0}, "tokens must be a whole number of at least 1"),
        ({"peak_flops": 0.0}, "peak_flops must be a finite number above 0"),
    ],
    "DynamicLossScale": [{"growth_interval": 0}, {"patience": 0}],
}  # fmt: skip
"""Wrong arguments, with words of the error; by default the name of the last argument."""

INSTEAD_OF_DEFAULTS: dict[str, Settings] = {
    # Inductor takes seconds per run, changes results by rounding and leaves threads running.
    "CompileModel": {"backend": "eager"},
}
"""Replace defaults that are too slow here; the callback's own tests cover them."""

CALLBACKS = {
    name: export
    for name, export in ((name, getattr(lo, name)) for name in lo.__all__)
    if inspect.isclass(export) and issubclass(export, Callback)
}
assert SETTINGS.keys() | INSTEAD_OF_DEFAULTS.keys() <= CALLBACKS.keys()
CASES = {name: [{}, *SETTINGS.get(name, [])] for name in CALLBACKS}


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


each_case = pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param(
            name,
            settings,
            id=case_id(name, settings),
            marks=[pytest.mark.settings] if settings else [],
        )
        for name, cases in CASES.items()
        for settings in cases
    ],
)
each_callback = pytest.mark.parametrize("name", CALLBACKS)


def build(name: str, settings: Settings, every_n_steps: int | None = None) -> Callback:
    """Create a callback from settings written as in a configuration file.

    ``every_n_steps`` replaces the callback's own, if it has this parameter.
    """
    settings = {**INSTEAD_OF_DEFAULTS.get(name, {}), **settings}
    if every_n_steps and "every_n_steps" in inspect.signature(CALLBACKS[name]).parameters:
        settings["every_n_steps"] = every_n_steps
    return CALLBACKS[name](**instantiate(settings))


def fit(*callbacks: Callback, model: SmallNet | None = None, **settings: Any) -> SmallNet:
    model = SmallNet() if model is None else model
    quiet_trainer(callbacks=list(callbacks), **settings).fit(model)
    return model


class FailAt(Callback):
    """Makes a SmallNet raise an error in a step of the training, not of trials before it."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_train_start(self, trainer, pl_module):
        pl_module.fail_at = self.step


class Copy(Callback):
    def __init__(self, copied: Callback) -> None:
        self.copied = copied

    def on_train_batch_end(self, *args):
        for twin in (copy.deepcopy(self.copied), pickle.loads(pickle.dumps(self.copied))):
            assert getattr(twin, "log", None) is None  # it would hold the model


@pytest.fixture(autouse=True)
def _process_is_unchanged(tmp_path: Path) -> Iterator[None]:
    before, folder = process_footprint(), Path.cwd()
    os.chdir(tmp_path)  # some callbacks write files
    with pytest.MonkeyPatch.context() as patch:
        # Drawing takes another process half a second; RunReport's own tests cover it.
        patch.setattr(page, "find_spec", lambda _: None)
        patch.setattr(pipeline_tuner, "MEASUREMENT_SECONDS", 0.02)
        yield
    os.chdir(folder)
    for thread in threading.enumerate():  # a loader's queue thread ends shortly after its workers
        if thread.name not in before["threads_alive"]:
            thread.join(timeout=60.0)
    assert process_footprint() == before


# --- construction -------------------------------------------------------------------------------


@each_callback
def test_constructor_has_plain_annotated_documented_parameters_with_defaults(name):
    """As LightningCLI needs to read, print and check them."""
    doc = inspect.getdoc(CALLBACKS[name]) or ""
    assert "Example:" in doc
    assert "Args:" in doc or not inspect.signature(CALLBACKS[name]).parameters
    for parameter in inspect.signature(CALLBACKS[name]).parameters.values():
        assert parameter.kind is parameter.POSITIONAL_OR_KEYWORD, parameter
        assert parameter.annotation is not parameter.empty, parameter
        assert parameter.default is not parameter.empty, parameter
        assert f"\n    {parameter.name}:" in doc, parameter


def run_cli(*arguments: str) -> LightningCLI:
    """Create the Trainer and the model of a configuration without training."""
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


def pickled(callback: Callback) -> bytes:
    """Return bytes that are equal for equal objects, whatever parts they share."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer)
    pickler.fast = True
    pickler.dump(callback)
    return buffer.getvalue()


@pytest.mark.parametrize("number", range(max(map(len, CASES.values()))))
def test_lightning_cli_round_trip_keeps_settings(number, tmp_path, monkeypatch, capsys):
    """One configuration holds the case of this number of every callback that has so many."""
    monkeypatch.setattr("sys.argv", ["fit"])  # LightningCLI warns about pytest's arguments
    # Lightning 2.6 calls jsonargparse 4.53 in a deprecated way.
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    settings = {name: cases[number] for name, cases in CASES.items() if number < len(cases)}
    callbacks = [
        {
            "class_path": f"lightning_opt.{name}",
            "init_args": {**INSTEAD_OF_DEFAULTS.get(name, {}), **own},
        }
        for name, own in settings.items()
    ]
    written = tmp_path / "written.yaml"  # JSON is YAML
    written.write_text(json.dumps({"trainer": {"callbacks": callbacks}}))
    with pytest.raises(SystemExit) as exit_status:
        run_cli("--config", str(written), "--print_config")
    assert exit_status.value.code == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)

    monkeypatch.setattr(run_report, "perf_counter", lambda: 0.0)  # a RunReport holds its start
    cli = run_cli("--config", str(printed))
    created = {type(c).__name__: c for c in cli.trainer.callbacks if type(c).__name__ in settings}
    assert created.keys() == settings.keys()
    for name, callback in created.items():
        expected = build(name, settings[name])
        assert callback.state_key == expected.state_key  # it may become an attribute
        assert pickled(callback) == pickled(expected), name


@pytest.mark.parametrize("name", WRONG)
def test_wrong_argument_raises_an_error_that_names_it(name):
    for case in WRONG[name]:
        settings, words = case if isinstance(case, tuple) else (case, list(case)[-1])
        with pytest.raises(ValueError, match=words):
            getattr(lo, name)(**settings)


# --- runs ---------------------------------------------------------------------------------------


MEASURED = {"PerformanceMonitor": "throughput"}
"""State that holds seconds, which differ between equal runs."""


def repeatable_state(callback: Callback) -> dict[str, Any]:
    """Return a copy of the state that equal runs leave equal."""
    state = copy.deepcopy(callback.state_dict())
    state.pop(MEASURED.get(type(callback).__name__), None)
    return state


@each_case
def test_instance_can_be_copied_and_fitted_again(name, settings):
    """A run on another model restarts, also after an error."""
    callback = build(name, settings)
    twin = pickle.loads(pickle.dumps(callback))
    assert twin.state_key == callback.state_key
    assert_same_state(twin.state_dict(), callback.state_dict())
    once = fit(callback, Copy(callback))
    state, counts = repeatable_state(callback), counts_in(callback)
    twin = pickle.loads(pickle.dumps(callback))
    assert_same_state(twin.state_dict(), callback.state_dict())
    assert_same_weights(fit(twin), once)
    again = fit(callback)
    assert_same_weights(again, once)
    if name != "DataPipelineTuner":  # measures anew, and may choose other settings
        assert_same_state(repeatable_state(callback), state)
        if name not in ("LeakDetector", "MemoryCleanup", "PerformanceMonitor"):  # they measure
            assert counts_in(callback) == counts
    with pytest.raises(ArithmeticError, match="planted"):
        fit(callback, FailAt(3))
    assert_same_weights(fit(callback), once)


OF_EACH_RUN = [
    "Accumulation",
    "CurvatureMonitor",
    "DataPipelineTuner",
    "PerformanceMonitor",
    "RunReport",
]
"""They depend on the Trainer's epochs or steps, or on what one run has measured."""


@each_case
def test_second_run_of_a_model_continues_the_first(name, settings):
    """Two runs of one epoch equal a run of two. A state that was saved or loaded stays the same."""
    whole, parts = (build(name, settings, every_n_steps=5) for _ in range(2))
    model = fit(parts)
    saved = parts.state_dict()
    kept = copy.deepcopy(saved)
    fit(parts, model=model)
    assert_same_state(saved, kept)
    if name not in OF_EACH_RUN:
        assert_same_weights(model, fit(whole, max_epochs=2))
        assert_same_state(*map(repeatable_state, (parts, whole)))
    if saved and name != "Accumulation":  # saves no numbers of a window without gradients
        loaded = load_changed_state(parts)
        kept = copy.deepcopy(loaded)
        fit(parts, model=model)
        assert_same_state(loaded, kept)


@each_case
def test_resumes_bit_exactly_in_mid_epoch(name, settings, tmp_path, monkeypatch):
    """From the uninterrupted run, from the resumed one, and with instances that have run."""
    # 12 batches per epoch, or 6 windows of two: neither step ends an epoch.
    saves = [SaveAt(tmp_path / f"step{step}.ckpt", step) for step in (3, 14)]
    epochs = 3 if name == "Accumulation" else 2
    for _ in each_path(monkeypatch):
        whole = build(name, settings)
        expected = fit(whole, *saves, model=SmallNet("Adam"), max_epochs=epochs)
        early, late = ((build(name, settings), SmallNet("Adam")) for _ in range(2))
        for save, (resumed, model) in zip((*saves, saves[0]), (early, late, late), strict=True):
            trainer = quiet_trainer(callbacks=[resumed, *saves], max_epochs=epochs)
            trainer.fit(model, ckpt_path=save.file, weights_only=True)
            assert_same_weights(model, expected)
            assert_same_state(*map(repeatable_state, (resumed, whole)))


def evaluate(*callbacks: Callback) -> list[Any]:
    """Evaluate; return metrics, logs, predictions and the model's footprint. Then train."""
    logger, model = MemoryLogger(), SmallNet()
    trainer = quiet_trainer(callbacks=list(callbacks), logger=logger)
    results = [
        trainer.validate(model, verbose=False),
        trainer.test(model, verbose=False),
        [prediction.tolist() for prediction in trainer.predict(model)],
        list(logger.records),
        model_footprint(model),
    ]
    trainer.fit(model)
    return results


@functools.cache
def evaluated_without_callback() -> list[Any]:
    return evaluate()


@each_callback
def test_validate_test_and_predict_are_unaffected(name):
    callback = build(name, CASES[name][-1])
    for _ in range(2):
        assert evaluate(callback) == evaluated_without_callback()


@each_callback
def test_two_instances_work_or_raise_an_error_that_names_the_class(name):
    try:
        fit(build(name, {}), build(name, {}))
    except (ValueError, RuntimeError) as error:
        assert name in str(error)  # noqa: PT017
    else:
        assert not getattr(build(name, {}), "only_one", False)


# --- what is left behind ------------------------------------------------------------------------


def footprint_after_fit(
    fail_at: int | None, model: SmallNet, *callbacks: Callback
) -> dict[str, Any]:
    """Fit until the end or the model's error, and describe the model and the Trainer."""
    trainer = quiet_trainer(callbacks=[*callbacks, FailAt(fail_at)])
    parameters, forward = [id(p) for p in model.parameters()], model.forward
    if fail_at is None:
        trainer.fit(model)
    else:
        with pytest.raises(ArithmeticError, match="planted"):
            trainer.fit(model)
    assert [id(p) for p in model.parameters()] == parameters
    assert model.forward == forward
    return {"model": model_footprint(model), **trainer_footprint(trainer)}


@functools.cache
def footprint_without_callback(fail_at: int | None) -> dict[str, Any]:
    return footprint_after_fit(fail_at, SmallNet())


@pytest.mark.parametrize(
    ("name", "settings", "fail_at"),
    [
        pytest.param(name, settings, fail_at, id=f"{case_id(name, settings)}-{fail_at}")
        for name, cases in CASES.items()
        for settings in cases
        for fail_at in ((5,) if settings else (None, 0, 3))
    ],
)
def test_model_and_trainer_are_unchanged_and_released(name, settings, fail_at):
    """A callback kept for its report holds no reference to model, optimizer or gradients."""
    callback, model = build(name, settings), SmallNet()
    assert footprint_after_fit(fail_at, model, callback) == footprint_without_callback(fail_at)
    parts = [weakref.ref(part) for part in (*model.modules(), *model.parameters())]
    del model, callback.log, callback.log_dict  # Lightning sets the model's methods on callbacks
    gc.collect()
    assert not [part for part in parts if part() is not None]


def optimizers_after_fit(*callbacks: Callback) -> Any:
    trainer = quiet_trainer(callbacks=list(callbacks))
    trainer.fit(AdversarialNet())
    return trainer_footprint(trainer)["optimizers"], [o.defaults for o in trainer.optimizers]


@functools.cache
def optimizers_without_callback() -> Any:
    return optimizers_after_fit()


@each_callback
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # read by the compiler
def test_every_optimizer_is_unchanged(name):
    """Under manual optimization, with two optimizers, unless the callback refuses it."""
    try:
        found = optimizers_after_fit(build(name, {}, every_n_steps=1))
    except ValueError as error:
        assert "manual" in str(error)  # noqa: PT017
    else:
        assert found == optimizers_without_callback()


@each_callback
@pytest.mark.filterwarnings("ignore")
def test_model_with_lazy_and_scripted_layers_trains_or_is_refused(name):
    model = SmallNet()
    model.layer = torch.nn.Sequential(
        torch.jit.script(torch.nn.BatchNorm1d(6)), torch.nn.LazyBatchNorm1d(), model.layer
    )
    try:
        fit(build(name, {}), model=model)
    except ValueError as error:
        if "lazy layer" not in str(error):
            raise


# --- cost ---------------------------------------------------------------------------------------


class SyncDebugMode(Callback):
    """Sets CUDA's sync debug mode from this position of the callbacks on."""

    def __init__(self, mode: str) -> None:
        self.mode = mode

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        # The first step may copy settings and state to the device.
        torch.cuda.set_sync_debug_mode(self.mode if trainer.global_step else "default")


@pytest.mark.gpu
@each_case
def test_adds_no_host_sync_on_gpu(name, settings):
    callback = build(name, settings, every_n_steps=1000)
    try:
        fit(
            SyncDebugMode("error"),
            callback,
            SyncDebugMode("default"),
            model=SmallNet(fused=True),
            accelerator="gpu",
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
