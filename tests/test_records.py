"""Every committed measurement says where it comes from, and none is too old for its code."""

import json
import re
import subprocess
from pathlib import Path

import pytest

import lightning_opt as lo

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
RECORDS = {
    file.stem: json.loads(file.read_text())
    for file in sorted(RESULTS.glob("*.json"))
    if "machine" in json.loads(file.read_text())
}
NEEDED = {"cpu", "threads", "python", "torch", "lightning", "lightning_opt", "date", "commit"}


def releases() -> list[str]:
    """Return the released versions, newest first."""
    return re.findall(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)


def releases_since(version: str, released: list[str]) -> int:
    """Return how many releases came after a version; one that was never released is too old."""
    known = [*dict.fromkeys((lo.__version__, *released))]
    return known.index(version) if version in known else len(known)


def features_of(name: str) -> list[str]:
    """Return the folders of the package whose pages show a record."""
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "api"]
    shown = [
        str(page.relative_to(ROOT / "docs").with_suffix(""))
        for page in pages
        if f"benchmarks/results/{name} " in page.read_text()
    ]
    return [f"lightning_opt/{path}" for path in shown if (ROOT / "lightning_opt" / path).is_dir()]


def has_changed(commit: str, folders: list[str]) -> bool:
    """Return whether these folders differ from a commit; where that cannot be known, they do."""
    command = [
        "git",
        "-C",
        str(ROOT),
        "diff",
        "--quiet",
        commit.rstrip("+"),
        "HEAD",
        "--",
        *folders,
    ]
    return subprocess.run(command, capture_output=True, check=False).returncode != 0


def is_stale(record: dict[str, str], folders: list[str], released: list[str]) -> bool:
    """Return whether more than a release lies between a record and code that has changed since."""
    if releases_since(record["lightning_opt"], released) <= 1:
        return False
    return has_changed(record["commit"], folders)


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_says_where_it_comes_from(name: str) -> None:
    machine = RECORDS[name]["machine"]
    assert NEEDED - set(machine) == set(), f"{name}.json: measure again"
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", machine["date"])
    assert re.fullmatch(r"[0-9a-f]{7,40}\+?|unknown", machine["commit"])


@pytest.mark.parametrize("name", RECORDS)
def test_no_record_is_older_than_its_code_by_more_than_a_release(name: str) -> None:
    folders = features_of(name)
    stale = is_stale(RECORDS[name]["machine"], folders, releases())
    assert not stale, f"{name}.json is older than {', '.join(folders)}: measure again"


def test_a_stale_record_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lo, "__version__", "0.3.0", raising=False)
    old = {"lightning_opt": "0.1.0", "commit": "0" * 12}
    folders = ["lightning_opt/gradients/guard"]
    assert is_stale(old, folders, ["0.3.0", "0.2.0", "0.1.0"])
    assert is_stale({**old, "lightning_opt": "0.0.9"}, folders, ["0.3.0", "0.2.0", "0.1.0"])
    assert not is_stale({**old, "lightning_opt": "0.2.0"}, folders, ["0.3.0", "0.2.0", "0.1.0"])
    # Code that did not change needs no new record, however old it is.
    assert not is_stale({**old, "commit": "HEAD"}, folders, ["0.3.0", "0.2.0", "0.1.0"])


def test_features_are_found_by_the_pages_that_show_a_record() -> None:
    assert features_of("guard_cost") == ["lightning_opt/gradients/guard"]
