"""Every recorded measurement names its machine and commit, and holds for the present code."""

import json
import re

import pytest

from benchmarks.harness import RESULTS, code_hash
from benchmarks.waive import WAIVERS, changed_code

RECORDS = {
    file.stem: record
    for file in sorted(RESULTS.glob("*.json"))
    if "machine" in (record := json.loads(file.read_text()))
}
NEEDED = {"cpu", "threads", "python", "torch", "lightning", "lightning_opt", "date", "commit"}


@pytest.mark.parametrize("name", RECORDS)
def test_record_names_its_origin_and_its_code_is_unchanged_or_waived(name):
    machine = RECORDS[name]["machine"]
    assert NEEDED - set(machine) == set(), f"{name}.json: measure again"
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", machine["date"])
    assert re.fullmatch(r"[0-9a-f]{7,40}\+?|unknown", machine["commit"])
    if changed := changed_code(RECORDS[name]):
        waiver = json.loads(WAIVERS.read_text()).get(name, {})
        assert waiver.get("code") == changed, (
            f"{name}.json is older than {', '.join(changed)}. Measure again, or sign why it still "
            f"holds: python -m benchmarks.waive 'the reason' {name}"
        )
        assert len(waiver["reason"]) > 20
        assert waiver["signed"]


def test_waivers_are_only_for_changed_records():
    waivers = json.loads(WAIVERS.read_text())
    assert {name for name in waivers if not changed_code(RECORDS.get(name, {"code": {}}))} == set()


def test_hash_of_code_changes_with_code_and_not_with_comments(tmp_path):
    file = tmp_path / "module.py"
    file.write_text("def double(x):\n    return 2 * x\n")
    before = code_hash(tmp_path)
    file.write_text('def double(x):\n    """Docstring."""\n    return 2 * x  # comment\n')
    assert code_hash(tmp_path) == before
    file.write_text("def double(x):\n    return 3 * x\n")
    assert code_hash(tmp_path) != before
