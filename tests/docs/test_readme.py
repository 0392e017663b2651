"""The snippets, commands and table of the README, and the configurations of docs/recipes.md."""

import contextlib
import functools
import inspect
import io
import re
import shlex

import lightning as L
import pytest
import torch
import yaml

import lightning_opt as lo
from lightning_opt.cli import main
from tests.docs.pages import ROOT, blocks_of
from tests.helpers.models import SmallNet, loader_of

TEXT = (ROOT / "README.md").read_text()
PYTHON = blocks_of(TEXT, "python")
COMMANDS = [
    line.partition("#")[0].removeprefix("$ ").strip()
    for block in blocks_of(TEXT, "console", "bash")
    for line in block.splitlines()
    if line.startswith("$ ")
]


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
@pytest.mark.filterwarnings("ignore:The number of training batches")
@pytest.mark.filterwarnings("ignore:.*will duplicate the data")
def test_python_snippets_run(code, tmp_path, monkeypatch):
    """With a model, data and a short quiet Trainer."""
    monkeypatch.chdir(tmp_path)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = L.Trainer

    def quick(**settings):
        settings.pop("strategy", None)  # starting processes requires a script
        return trainer(
            **{**settings, **quiet, "max_epochs": 1, "limit_train_batches": 4},
            accelerator="cpu",
            enable_model_summary=False,
        )

    monkeypatch.setattr(L, "Trainer", quick)
    names = {"model": SmallNet("AdamW"), "data": loader_of(8), "L": L, "lo": lo, "torch": torch}
    exec(compile(code, "README.md", "exec"), names)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make")])
def test_make_targets_exist(command):
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(shlex.split(command)[1:]) <= set(targets)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("pip install")])
def test_installed_extras_exist(command):
    extras = set(re.findall(r"\[([\w,]+)\]", command))
    project = (ROOT / "pyproject.toml").read_text()
    section = project[project.index("[project.optional-dependencies]") :]
    known = set(re.findall(r"^(\w+) = \[", section[: section.index("\n[dep")], re.M))
    assert {name for names in extras for name in names.split(",")} <= known


@functools.cache
def help_of(command: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([command, "--help"])
    return printed.getvalue()


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("lightning-opt")])
def test_options_of_commands_exist(command, monkeypatch):
    """So do the files that they name. Nothing is run."""
    # Lightning 2.6 calls jsonargparse 4.53 in a deprecated way.
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    words = shlex.split(command)[1:]
    text = help_of(words[0])
    assert text.startswith("usage: lightning-opt")
    for word in words[1:]:
        if word.startswith("--"):
            assert re.search(rf"{re.escape(word.partition('=')[0])}\b", text), word
        if ".py:" in word:
            file, _, attribute = word.partition(":")
            assert re.search(rf"^class {attribute}\b", (ROOT / file).read_text(), re.M), word


def test_every_row_of_the_table_links_to_its_record():
    table = TEXT[TEXT.index("| symptom |") : TEXT.index("<!-- end -->")]
    rows = [line for line in table.splitlines()[2:] if line.startswith("|")]
    assert len(rows) == 8
    for row in rows:
        records = re.findall(r"benchmarks/results/(\w+)\.md", row)
        assert records
        assert all((ROOT / f"benchmarks/results/{name}.json").exists() for name in records)


RECIPES = [
    yaml.safe_load(text) for text in blocks_of((ROOT / "docs/recipes.md").read_text(), "yaml")
]


@pytest.mark.parametrize("recipe", RECIPES, ids=range(len(RECIPES)))
def test_recipes_name_existing_callbacks_with_the_guard_before_clipping(recipe):
    callbacks = [
        getattr(lo, part["class_path"].rpartition(".")[2])(**part.get("init_args", {}))
        for part in recipe["trainer"].pop("callbacks")
    ]
    kinds = [type(callback) for callback in callbacks]
    if lo.AdaptiveClipping in kinds:
        assert kinds.index(lo.NonFiniteGuard) < kinds.index(lo.AdaptiveClipping)
    assert set(recipe["trainer"]) <= set(inspect.signature(L.Trainer).parameters)
