"""Every recorded measurement names its machine and commit, and is not outdated."""

import json
import re
import subprocess
from pathlib import Path

import pytest

import lightning_opt as lo

ROOT = Path(__file__).parents[1]
RECORDS = {
    file.stem: record["machine"]
    for file in sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    if "machine" in (record := json.loads(file.read_text()))
}
NEEDED = {"cpu", "threads", "python", "torch", "lightning", "lightning_opt", "date", "commit"}


def releases_since(version: str) -> int:
    """Return the number of releases after a version; an unknown version is too old."""
    released = re.findall(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    known = [*dict.fromkeys((lo.__version__, *released))]
    return known.index(version) if version in known else len(known)


def features_of(name: str) -> list[str]:
    """Return the folders of the package whose pages show a record."""
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "api"]
    shown = [
        page.relative_to(ROOT / "docs").with_suffix("")
        for page in pages
        if f"benchmarks/results/{name} " in page.read_text()
    ]
    return [f"lightning_opt/{path}" for path in shown if (ROOT / "lightning_opt" / path).is_dir()]


def has_changed(commit: str, folders: list[str]) -> bool:
    """Return whether folders differ from a commit; True if git does not know the commit."""
    command = ["git", "-C", str(ROOT), "diff", "--quiet", commit.rstrip("+"), "HEAD", "--"]
    return subprocess.run([*command, *folders], capture_output=True, check=False).returncode != 0


@pytest.mark.parametrize("name", RECORDS)
def test_record_names_its_origin_and_is_at_most_one_release_older_than_changed_code(
    name: str,
) -> None:
    machine = RECORDS[name]
    assert NEEDED - set(machine) == set(), f"{name}.json: measure again"
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", machine["date"])
    assert re.fullmatch(r"[0-9a-f]{7,40}\+?|unknown", machine["commit"])
    if releases_since(machine["lightning_opt"]) > 1:
        folders = features_of(name)
        is_outdated = has_changed(machine["commit"], folders)
        assert not is_outdated, f"{name}.json is older than {', '.join(folders)}: measure again"
