"""Plants one bug at a time in a copy of the package, and checks that the named tests fail.

Run by hand. ``python -m tests.mutants`` runs all and writes ``docs/planted_bugs.md``; with words
(``python -m tests.mutants ranks resume``) it runs those whose promises contain one. A mutant
survives if its tests pass.
"""

import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import lightning.pytorch  # noqa: F401 - before the forks
import pytest
import tomllib
import torch

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("lightning_opt", "tests", "examples", "benchmarks", "pyproject.toml")
TIMEOUT = 900.0
PAGE = ROOT / "docs/planted_bugs.md"
HEAD = """# Planted bugs

Each row is a bug that `python -m tests.mutants` planted in a copy of the package, named by the
promise that it breaks. It is found if the tests of that promise fail. Many were planted by readers
of the code who had not seen the tests; those that no test found then got one.

{dead} of {all} are found.

| promise | planted in | |
|---|---|---|
"""


class Mutant(NamedTuple):
    """A row of ``mutants.toml``; ``promise`` is the behaviour that it breaks."""

    promise: str
    folder: str
    pattern: str
    replacement: str
    tests: str


MUTANTS = [
    Mutant(**row) for row in tomllib.loads((ROOT / "tests/mutants.toml").read_text())["mutant"]
]


def matches(mutant: Mutant, root: Path) -> list[Path]:
    """Return the file of each match of the pattern."""
    place = root / "lightning_opt" / mutant.folder
    files = [place] if place.suffix else sorted(place.rglob("*.py"))
    return [file for file in files for _ in re.findall(mutant.pattern, file.read_text(), re.M)]


def plant(mutant: Mutant, copy: Path) -> tuple[Path, str]:
    """Write a mutant, and return the file and its text before."""
    (file,) = matches(mutant, copy)
    before = file.read_text()
    file.write_text(re.sub(mutant.pattern, mutant.replacement, before, flags=re.M))
    return file, before


def run_tests(tests: str, copy: Path) -> str:
    """Run tests in the copy: ``"pass"``, ``"fail"``, ``"time out"`` or ``"not found"``.

    A fork of this process runs them, since importing torch and Lightning takes longer than most.
    """
    child = os.fork()
    if child == 0:
        os.setsid()
        _become_pytest(tests, copy)
    deadline = time.monotonic() + TIMEOUT
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "time out"
        time.sleep(0.05)
    return {0: "pass", 1: "fail"}.get(os.waitstatus_to_exitcode(ended[1]), "not found")


def _become_pytest(tests: str, copy: Path) -> NoReturn:
    code = 3
    try:
        os.chdir(copy)
        os.environ["PYTHONPATH"] = str(copy)
        sys.path.insert(0, str(copy))
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]
        log = os.open(copy / "log", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        ignored = "ignore::pytest.PytestAssertRewriteWarning"  # pytest's plugins are imported
        arguments = ["-x", "-q", "-p", "no:cacheprovider", "-W", ignored, *tests.split()]
        code = int(pytest.main(arguments))
    finally:
        os._exit(code)


def examine(mutant: Mutant, copy: Path, plain: dict[str, str]) -> str:
    """Return the outcome of a mutant; ``plain`` holds outcomes of tests without mutants."""
    if mutant.tests not in plain:
        plain[mutant.tests] = run_tests(mutant.tests, copy)
    if plain[mutant.tests] != "pass":
        return f"TESTS {plain[mutant.tests].upper()} WITHOUT IT"
    file, before = plant(mutant, copy)
    try:
        outcome = run_tests(mutant.tests, copy)
    finally:
        file.write_text(before)
    return "SURVIVES" if outcome == "pass" else f"dies ({outcome})"


def write_page(mutants: Sequence[Mutant], outcomes: Sequence[str]) -> None:
    rows = [
        f"| {mutant.promise} | `{mutant.folder}` | {'found' if is_dead(outcome) else outcome} |\n"
        for mutant, outcome in zip(mutants, outcomes, strict=True)
    ]
    head = HEAD.format(dead=sum(map(is_dead, outcomes)), all=len(outcomes))
    PAGE.write_text(head + "".join(rows))


def is_dead(outcome: str) -> bool:
    return outcome.startswith("dies")


def main(words: list[str]) -> int:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    chosen = [
        mutant
        for mutant in MUTANTS
        if not words or any(word in f"{mutant.promise} {mutant.folder}" for word in words)
    ]
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy / name)
        plain: dict[str, str] = {}
        for mutant in chosen:
            start = time.monotonic()
            outcomes.append(examine(mutant, copy, plain))
            seconds = time.monotonic() - start
            print(f"{outcomes[-1]:24} {seconds:4.0f} s  {mutant.promise}", flush=True)
    if not words:
        write_page(chosen, outcomes)
    dead = sum(map(is_dead, outcomes))
    print(f"{dead} of {len(outcomes)} mutants die")
    return int(dead < len(outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
