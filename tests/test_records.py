"""Every recorded measurement names its machine and commit, and holds for the present code."""

import importlib
import os
import re
import shutil

import pytest

from benchmarks import records as module
from benchmarks.records import PACKAGE, SHARED, changed_parts, code_of, records, waivers
from tests.helpers.processes import launch

RECORDS = records()
NEEDED = {"cpu", "threads", "python", "torch", "lightning", "lightning_opt", "date", "commit"}


def import_all(names):
    os.chdir(module.ROOT)
    for name in names:
        importlib.import_module(name)


def test_every_benchmark_can_be_imported():
    """With all names that it takes from the package, the examples and the tests."""
    names = [
        ".".join(file.relative_to(module.ROOT).with_suffix("").parts)
        for file in (module.ROOT / "benchmarks").rglob("*.py")
    ]
    launch(import_all, names, processes=1)  # the examples have modules with common names


@pytest.mark.parametrize("name", RECORDS)
def test_record_names_its_origin_and_its_code_is_unchanged_or_waived(name):
    machine = RECORDS[name]["machine"]
    assert NEEDED - set(machine) == set(), f"{name}.json: measure again"
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", machine["date"])
    assert re.fullmatch(r"[0-9a-f]{7,40}\+?|unknown", machine["commit"])
    assert changed_parts(name) == set(), (
        f"{name}.json is older than this code. Measure again, or sign why it still holds: "
        f"python -m benchmarks.waive 'the reason' {name}"
    )


def test_waivers_are_signed_with_a_reason_and_only_for_changed_records():
    for name, waiver in waivers().items():
        assert RECORDS[name].get("code") != waiver["code"]
        assert len(waiver["reason"]) > 20
        assert waiver["signed"]


SCRIPT = """
import lightning_opt as lo
from benchmarks.helping import Step


def main():
    return lo.AdaptiveClipping(), Step(strategy="ddp_topk")
"""


@pytest.fixture
def no_cache():
    caches = [one for one in vars(module).values() if hasattr(one, "cache_clear")]

    def clear():
        for one in caches:
            one.cache_clear()

    clear()
    yield clear
    clear()


@pytest.fixture
def script(no_cache, tmp_path, monkeypatch):
    """A benchmark in a copy of the sources."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "lightning_opt", ignore=ignored)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "PACKAGE", tmp_path / "lightning_opt")
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "helping.py").write_text("class Step: pass\n")
    file = tmp_path / "benchmarks" / "measuring.py"
    file.write_text(SCRIPT)
    return file


def test_code_of_a_record_is_its_script_its_features_and_shared_code(script):
    assert set(code_of(script)) == {
        "benchmarks/helping.py",
        "benchmarks/measuring.py",
        "lightning_opt/gradients/clipping",
        "lightning_opt/strategies/compression",
        *SHARED,
    }


@pytest.mark.slow
def test_hash_changes_with_code_and_not_with_comments(script, no_cache):
    parts = {
        "benchmarks/helping.py": "benchmarks/helping.py",
        "lightning_opt/gradients/clipping/norm_rules.py": "lightning_opt/gradients/clipping",
        "lightning_opt/gradients/gradient_callback.py": "lightning_opt/gradients/clipping",
        "lightning_opt/strategies/compressors.py": "lightning_opt/strategies/compression",
        "lightning_opt/core/output/report.py": "lightning_opt/core",
        "lightning_opt/memory/meters.py": None,
    }

    def add(text, *files):
        """Append to sources, and return the parts whose hash changes."""
        before = code_of(script)
        for file in files:
            path = module.ROOT / file
            path.write_text(path.read_text() + text)
        no_cache()
        after = code_of(script)
        return {name for name in before if after[name] != before[name]}

    assert add('\n# A comment.\n"""A docstring."""\n', *parts) == set()
    for file, part in parts.items():
        changed = add("added = 1\n", file)
        assert changed == ({part} if part else set()), file
