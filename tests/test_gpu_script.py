"""The list of benchmarks of `make gpu` agrees with the scripts."""

import importlib
import logging
import sys

import pytest

from benchmarks import gpu

SCRIPTS = {
    ".".join(path.relative_to(gpu.ROOT).with_suffix("").parts[1:])
    for path in (gpu.ROOT / "benchmarks").rglob("*.py")
    if gpu.gpus_needed(path)
}
OPTIONS = [
    *((name, options) for name, _, options in gpu.planned(sorted(SCRIPTS))),
    *gpu.ON_CPU.items(),
]


class Accepted(Exception):  # noqa: N818 - it ends a script
    pass


def test_planned_benchmarks_fit_into_the_time():
    plan = gpu.planned(sorted(SCRIPTS))
    assert gpu.TESTS + sum(seconds for _, seconds, _ in plan) <= gpu.WHOLE + 0.1
    assert all(seconds >= 10 for _, seconds, _ in plan)


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_script_accepts_its_options(name, options, monkeypatch, caplog, tmp_path):
    caplog.set_level(logging.INFO, "lightning.pytorch")  # scripts change this level
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # and this variable
    script = importlib.import_module(f"benchmarks.{name}")
    parse = script.parse_arguments

    def parse_and_end(*arguments):
        parse(*arguments)
        raise Accepted

    monkeypatch.setattr(script, "parse_arguments", parse_and_end)
    monkeypatch.setattr(sys, "argv", [name, "--device", "cuda", "--out", str(tmp_path), *options])
    with pytest.raises(Accepted):
        script.main()
