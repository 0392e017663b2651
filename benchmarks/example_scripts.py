"""Record the tables of the example scripts for `docs/examples.md`, or only those given.

Claim: each optimised run of an example agrees with its plain run.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import parse_arguments, publish

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = {
    "example_vision_attention": {"steps": 66, "seed": 0, "deterministic": False,
                                 "backend": "inductor"},
    "example_language_model": {"steps": 40, "warmup": 10, "half": "bf16", "seed": 0},
    "example_pairwise_distance": {"samples": 41, "batch_size": 10, "epochs": 30, "seed": 0},
    "example_curvature": {"steps": 300},
}  # fmt: skip
NOT_INTERLEAVED = ("step ms", "of original", "of plain")
"""Times of consecutive runs, which are not comparable on a busy machine."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--scripts", nargs="+", choices=list(SCRIPTS), default=list(SCRIPTS))
    own, rest = parser.parse_known_args(argv)
    arguments = parse_arguments(__doc__ or "", rest)
    sys.path.insert(0, str(EXAMPLES))
    importlib.import_module("measuring").silence_advice()
    for record in own.scripts:
        settings = dict(SCRIPTS[record])
        if arguments.quick and "steps" in settings:
            settings["steps"] = 6
        found = importlib.import_module(record.removeprefix("example_")).compare(**settings)
        report = found[0] if isinstance(found, tuple) else found
        for row in report.rows:
            for column in NOT_INTERLEAVED:
                row.pop(column, None)
        report.notes[:] = [
            note
            for note in report.notes
            if not note.startswith(NOT_INTERLEAVED) and ": compiled in " not in note
        ]
        publish(record, report, arguments)


if __name__ == "__main__":
    main()
