"""Runs all cells and writes ``docs/matrix.json``: ``python -m tests.matrix``, or ``make matrix``.

With names of strategies (``python -m tests.matrix ddp``) only their cells are run.
"""

import sys
from collections import Counter

from tests.matrix import record
from tests.matrix.cells import STRATEGIES, run_strategy
from tests.matrix.outcomes import failures
from tests.matrix.subjects import find_subjects


def main(strategies: list[str]) -> int:
    unknown = set(strategies) - set(STRATEGIES)
    if unknown:
        print(f"unknown: {', '.join(unknown)}; there are {', '.join(STRATEGIES)}", file=sys.stderr)
        return 2
    subjects = find_subjects(to_act=True)
    recorded = record.read() if strategies else {}
    found = {s.label: dict(recorded.get(s.label, {"cells": {}})["cells"]) for s in subjects}
    for strategy in strategies or STRATEGIES:
        for label, cells in run_strategy(strategy, subjects).items():
            found[label].update(cells)
    record.write(found)
    outcomes = Counter(
        cell.partition(":")[0] for cells in found.values() for cell in cells.values()
    )
    print(f"{record.FILE.name}: {dict(outcomes)}")
    lines = failures(found)
    print(*lines, sep="\n", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
