"""Record the demo of README and `make demo`, with its machine.

Claim: each act of `examples/demo.py` ends as its picture shows. `--act 3` records only one act.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import lightning_opt as lo
from benchmarks.harness import parse_arguments, publish

ROOT = Path(__file__).parents[1]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--act", type=int, action="append")
    own, rest = parser.parse_known_args(argv)
    arguments = parse_arguments(__doc__ or "", rest)
    sys.path.insert(0, str(ROOT / "examples"))
    demo = importlib.import_module("demo")
    found = demo.run(own.act or list(demo.TITLES), arguments.quick)
    if own.act:
        recorded = json.loads(demo.RECORD.read_text())["acts"]
        found = {int(act): seen for act, seen in recorded.items()} | found
    rows = [
        {"act": demo.TITLES[act], "run": side, "outcome": outcome}
        for act, seen in found.items()
        for side, outcome in demo.outcomes(act, seen).items()
    ]
    publish("demo", lo.Report("Four acts of the demo", rows), arguments, acts=found)
    if not arguments.quick:
        demo.draw(found).savefig(ROOT / "docs" / "_static" / "demo.png")


if __name__ == "__main__":
    main()
