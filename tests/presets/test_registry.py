"""Registered presets of users."""

import itertools
from typing import Any

import pytest
import yaml
from lightning.pytorch import Callback

import lightning_opt as lo
from lightning_opt.presets.registry import preset_names
from lightning_opt.worker.recipes import class_named
from tests.helpers.models import SmallNet
from tests.helpers.trainers import quiet_trainer


class Mine(Callback):
    def __init__(self, words: int = 3, loud: bool = False) -> None:
        self.words, self.loud = words, loud


def names_of(preset: lo.Preset, **trainer: Any) -> list[str]:
    return [type(callback).__name__ for callback in preset.trainer_kwargs(**trainer)["callbacks"]]


def team() -> lo.Preset:
    return (
        lo.preset("basic")
        .plus(Mine, {"words": 5, "loud": True}, why="we like it", costs="nothing")
        .plus_argument("max_epochs", 2, why="our habit")
    )


def test_registered_preset_trains_and_takes_overrides():
    with pytest.raises(ValueError, match="'basic' is a preset of lightning_opt"):
        lo.register_preset("basic", team)
    lo.register_preset("team", lambda: None)
    lo.register_preset("team", team)  # replaces it
    assert "team" in preset_names()
    preset = lo.preset("team", Mine={"words": 7})
    trainer = quiet_trainer(**{"logger": False, **preset.trainer_kwargs()})
    trainer.fit(SmallNet())
    assert trainer.current_epoch == 2
    (mine,) = [callback for callback in trainer.callbacks if isinstance(callback, Mine)]
    assert (mine.words, mine.loud) == (7, True)
    assert repr(preset).startswith("preset('team', Mine={'words': 7}")
    assert "Mine" not in names_of(lo.preset("basic"))  # presets are immutable
    (row,) = [row for row in preset.describe().rows if row["part"] == "Mine"]
    assert row == {
        "part": "Mine", "on": "yes", "settings": "words=7, loud=True",
        "for": "we like it", "costs, or why not": "nothing",
    }  # fmt: skip


def test_obstacle_gives_the_reason():
    def build() -> lo.Preset:
        return lo.Preset("any").plus(
            Mine,
            lambda situation: {"words": situation.processes},
            obstacle=lambda situation: "too many" if situation.processes > 4 else None,
        )

    lo.register_preset("counted", build)
    preset = lo.preset("counted")
    (mine,) = preset.trainer_kwargs(accelerator="cpu", devices=3)["callbacks"]
    assert mine.words == 3
    assert names_of(preset, accelerator="cpu", devices=5) == []
    assert preset.describe(accelerator="cpu", devices=5).rows[0]["costs, or why not"] == "too many"


def test_yaml_equals_the_python_arguments():
    preset = lo.preset("ultra", NonFiniteGuard={"spike": 6.0}, precision="bf16-mixed")
    written = yaml.safe_load(preset.to_yaml(max_epochs=3, accelerator="cpu"))["trainer"]
    made = preset.trainer_kwargs(max_epochs=3, accelerator="cpu")
    callbacks = written.pop("callbacks")
    for entry, callback in itertools.zip_longest(callbacks, made.pop("callbacks")):
        kind = type(callback)
        part_of = "" if kind is lo.NonFiniteGuard else ".presets._optional"
        assert entry["class_path"] == f"lightning_opt{part_of}.{kind.__name__}"
        assert class_named(entry["class_path"]) is kind
    assert written == made
    (guard,) = [e for e in callbacks if e["class_path"].endswith("NonFiniteGuard")]
    assert guard["init_args"] == {"spike": 6.0}
    own = [{"class_path": "lightning_opt.AdaptiveClipping", "init_args": {"rule": "zclip"}}]
    with_own = lo.preset("basic").to_dict(callbacks=own)["callbacks"]
    assert [entry for entry in with_own if "Clipping" in entry["class_path"]] == own


def test_objects_as_settings_cannot_become_yaml():
    preset = lo.preset("basic", AdaptiveClipping={"rule": lo.ZClip(z=3.0)})
    assert names_of(preset)[2] == "AdaptiveClipping"
    with pytest.raises(TypeError, match="ZClip is not JSON serializable"):
        preset.to_yaml()
