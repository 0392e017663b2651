"""The checklist: planted problems are found, and a healthy run has none."""

import gc
import json
import math
import re
import time
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

import lightning_opt as lo
from lightning_opt.core.output.report import TOPICS, Verdict
from lightning_opt.profiling.doctor import doctor as checks
from lightning_opt.profiling.doctor.doctor import HINTS
from tests.helpers.models import SmallNet, assert_same_weights
from tests.helpers.processes import launch
from tests.helpers.trainers import MemoryLogger, fit, quiet_trainer
from tests.memory.leaks.leaky import LossList

MEASURED = ("data", "throughput", "gradients", "stability", "clipping", "convergence", "leaks")


def watchers(**more):
    """Return every measuring callback, with intervals for short runs."""
    return [
        lo.GradientHealth(every_n_steps=10),
        lo.NonFiniteGuard(),
        lo.AdaptiveClipping(),
        lo.DataMonitor(every_n_steps=20, **more),
        # A shared machine may be slower for a while: slowdowns have their own tests.
        lo.PerformanceMonitor(every_n_steps=10, sample_seconds=0.05, slowdown=0.9),
    ]


class Healthy(SmallNet):
    """A regression with slow steps, fast data and a fused optimizer."""

    def __init__(self):
        super().__init__("Adam", lr=0.02, fused=True, widths=(16,))

    def training_step(self, batch, batch_idx):
        time.sleep(0.002)
        inputs = batch[0]
        return self.loss(self(inputs), inputs.sum(1, keepdim=True).tanh())

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(0)
        rows = torch.utils.data.TensorDataset(torch.randn(1600, 6, generator=generator))
        return DataLoader(rows, batch_size=16)


def _diagnose_healthy_and_leaking(folder):
    """Diagnose a healthy and a leaking run, in a process without other leaks."""
    L.seed_everything(0, verbose=False)
    gc.freeze()  # the detector visits every object that is not frozen
    callbacks = [
        *watchers(threshold=0.5),
        lo.LeakDetector(every_n_steps=10, warmup_steps=40),
        lo.MemoryProfiler(every_n_steps=70),
        ModelCheckpoint(folder),
    ]
    settings = {"logger": MemoryLogger(), "profiler": lo.StepProfiler(print_table=False)}
    trainer = fit(Healthy(), *callbacks, max_epochs=2, enable_checkpointing=True, **settings)
    healthy = lo.doctor(trainer)
    leaks = lo.LeakDetector(every_n_steps=10, warmup_steps=50)
    leaking = lo.doctor(fit(LossList(), leaks, max_epochs=6))
    return healthy.verdicts, healthy.notes, leaking["leaks"]


def test_healthy_run_has_no_findings_and_a_leak_is_found(tmp_path):
    ((verdicts, notes, leak),) = launch(_diagnose_healthy_and_leaking, tmp_path, processes=1)
    states = {verdict.topic: verdict.state for verdict in verdicts}
    # On hardware with bfloat16, full precision is rightly a finding.
    looks = [v for v in verdicts if v.state == "look" and v.topic != "precision"]
    assert looks == []
    assert notes == []
    for topic in (*MEASURED, "memory", "profile", "optimizer", "determinism", "checkpoints"):
        assert states[topic] == "ok", (topic, verdicts)
    assert [t for t, s in states.items() if s == "unknown"] == [
        "batch size", "compilation", "baseline"
    ]  # fmt: skip
    assert leak.state == "look"
    assert "LossList.losses" in leak.finding
    assert leak.advice.startswith("Detach() it")


class NotANumber(SmallNet):
    def training_step(self, batch, batch_idx):
        loss = self.step(batch)
        return loss * math.nan if self.global_step in (5, 9) else loss


def test_faults_of_the_guard_are_reported():
    verdict = lo.doctor(fit(NotANumber(), *watchers()))["stability"]
    assert verdict.state == "look"
    assert re.search(r"\b2\b.* 12 steps", verdict.finding)


def test_nonfinite_weights_are_found_without_a_guard():
    trainer = fit(NotANumber())
    verdict = lo.doctor(trainer)["stability"]
    assert verdict.state == "look"
    assert "layer.0.weight and 3 more of the model's tensors are NaN" in verdict.finding
    # Neither the verdict of a guard without steps replaces it, nor that of one that found nothing.
    trainer.callbacks.append(lo.NonFiniteGuard())
    assert lo.doctor(trainer)["stability"].state == "look"
    trainer = fit(model := SmallNet(), lo.NonFiniteGuard())
    assert lo.doctor(trainer)["stability"].state == "ok"
    model.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))
    assert lo.doctor(trainer)["stability"].state == "ok"
    model.register_buffer("average", torch.tensor(math.nan))
    assert "average" in lo.doctor(trainer)["stability"].finding
    torch.nn.init.constant_(model.layer[0].weight, math.nan)
    assert lo.doctor(trainer)["stability"].state == "look"


def test_frequent_clipping_is_found():
    clipping = lo.AdaptiveClipping(rule=lo.FixedNorm(1e-6))
    verdict = lo.doctor(fit(SmallNet(), clipping, max_epochs=3))["clipping"]
    assert verdict.state == "look"
    assert "clips 100.0% of the time" in verdict.finding


@pytest.mark.parametrize(
    "name",
    ["DataMonitor", "LeakDetector", "MemoryProfiler", "GradientHealth", "NonFiniteGuard",
     "AdaptiveClipping", "PerformanceMonitor", "StepProfiler"],
)  # fmt: skip
def test_verdicts_before_a_run_are_unknown(name):
    verdicts = getattr(lo, name)().diagnose()
    assert verdicts
    assert all(verdict.state == "unknown" and verdict.advice for verdict in verdicts)


def test_verdict_on_the_optimizer_describes_the_training():
    """FusedOptimizer restores the Trainer's optimizers after training."""
    fused = fit(SmallNet("Adam"), lo.FusedOptimizer())
    assert not fused.optimizers[0].param_groups[0]["fused"]
    assert lo.doctor(fused)["optimizer"].state == "ok"
    assert "Adam ran fused" in lo.doctor(fused)["optimizer"].finding
    assert lo.doctor(fit(SmallNet("Adam")))["optimizer"].state == "look"
    assert lo.doctor(fit(SmallNet("Adam", fused=True)))["optimizer"].state == "ok"
    assert lo.doctor(fit(SmallNet("RMSprop")))["optimizer"].state == "ok"


def test_verdict_on_compilation_describes_the_training():
    compiled = fit(SmallNet(), lo.CompileModel(backend="eager"))
    assert lo.doctor(compiled)["compilation"].state == "ok"
    plain = lo.doctor(fit(SmallNet()))["compilation"]
    assert (plain.state, "compare()" in plain.advice) == ("unknown", True)


def test_verdict_on_checkpoints_needs_a_saved_one(tmp_path):
    never = ModelCheckpoint(tmp_path / "never", every_n_train_steps=1000)
    for callback, state in ((ModelCheckpoint(tmp_path / "each"), "ok"), (never, "look")):
        trainer = fit(SmallNet(), callback, enable_checkpointing=True)
        assert lo.doctor(trainer)["checkpoints"].state == state
    assert lo.doctor(quiet_trainer())["checkpoints"].state == "look"


@pytest.mark.parametrize(
    ("precision", "capability", "state"),
    [("32-true", (9, 0), "look"), ("32-true", (7, 5), "ok"), ("bf16-mixed", (9, 0), "ok")],
)
def test_precision_on_a_gpu_depends_on_its_capability(monkeypatch, precision, capability, state):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    device = torch.device("cuda", 0)
    trainer = SimpleNamespace(precision=precision, strategy=SimpleNamespace(root_device=device))
    assert checks.precision(trainer).state == state


@pytest.mark.parametrize(("used", "memory", "batch"), [(97, "look", "ok"), (20, "ok", "look")])
def test_memory_and_batch_size_depend_on_the_peak(monkeypatch, used, memory, batch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: used)
    properties = SimpleNamespace(total_memory=100)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
    strategy = SimpleNamespace(root_device=torch.device("cuda", 0))
    trainer = SimpleNamespace(strategy=strategy)
    assert [verdict.state for verdict in checks.memory(trainer)] == [memory, batch]


def test_missing_seed_is_found(monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    with torch.random.fork_rng(devices=[]):
        torch.seed()  # a random seed, as in a fresh process
        assert lo.doctor(quiet_trainer())["determinism"].state == "look"
        torch.manual_seed(7)
        assert lo.doctor(quiet_trainer())["determinism"].state == "ok"


# --- how verdicts are collected ----------------------------------------------------------------


def test_trainer_without_a_run_has_unknown_verdicts(capsys):
    diagnosis = lo.doctor(quiet_trainer())
    assert {verdict.topic for verdict in diagnosis.verdicts} == set(TOPICS) == set(HINTS)
    assert diagnosis.notes == []
    for topic in MEASURED:
        assert diagnosis[topic] == Verdict(topic, "unknown", "Not measured.", HINTS[topic])
    with pytest.raises(KeyError, match="astrology"):
        diagnosis["astrology"]
    diagnosis.print()
    text = capsys.readouterr().out
    assert text.splitlines()[0] == diagnosis.title
    assert "   LOOK  Are metrics logged? The Trainer has no logger." in text.splitlines()
    assert diagnosis.topics("look") == [v.topic for v in diagnosis.verdicts if v.state == "look"]
    assert len(json.loads(diagnosis.to_json())["rows"]) == len(TOPICS)
    words = {word for hint in HINTS.values() for word in re.findall(r"(\w+)\(", hint)}
    others = {"Trainer", "seed_everything", "ModelCheckpoint", "doctor"}
    assert words - others <= set(lo.__all__)


def test_user_callbacks_give_verdicts_and_failures_become_notes():
    class Own(Callback):
        def diagnose(self):
            return [Verdict("baseline", "ok", "1.4 times as fast as before.")]

    class OtherMeaning(Callback):
        def diagnose(self):
            return "the patient is fine"

    class WantsMore(Callback):
        def diagnose(self, patient):
            return []

    class Failing(Callback):
        def diagnose(self):
            raise OSError("planted")

    trainer = quiet_trainer(callbacks=[Failing(), OtherMeaning(), WantsMore(), Own()])
    diagnosis = lo.doctor(trainer)
    assert diagnosis["baseline"].finding == "1.4 times as fast as before."
    assert len(diagnosis.notes) == 2
    assert diagnosis.notes[0] == "Failing failed: OSError: planted"


def test_verdict_that_needs_attention_or_gains_most_is_used():
    class One(Callback):
        def __init__(self, state, gain=0.0, topic="data"):
            self.state, self.gain, self.topic = state, gain, topic

        def diagnose(self):
            return [Verdict(self.topic, self.state, self.state, gain=self.gain)]

    gains = [One("look", gain) for gain in (0.1, 0.3, 0.2)]
    diagnosis = lo.doctor(quiet_trainer(callbacks=[*gains, One("look", 0.9, "baseline")]))
    assert diagnosis["data"].gain == 0.3
    gains = [verdict.gain for verdict in diagnosis.verdicts if verdict.state == "look"]
    assert gains[0] == 0.9
    assert gains == sorted(gains, reverse=True)
    for states in (["ok", "look", "unknown"], ["unknown", "ok"], ["unknown"]):
        diagnosis = lo.doctor(quiet_trainer(callbacks=[One(state) for state in states]))
        assert diagnosis["data"].state == min(states, key=("look", "ok", "unknown").index)


def test_doctor_during_training_changes_nothing():
    class CallsDoctor(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            lo.doctor(trainer)

    alone, watched = SmallNet("Adam"), SmallNet("Adam")
    fit(alone, *watchers())
    fit(watched, *watchers(), CallsDoctor())
    assert_same_weights(watched, alone)
