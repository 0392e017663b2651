"""Writes ``docs/matrix.json`` anew: ``python -m tests.matrix``, or ``make matrix``.

With names of strategies (``python -m tests.matrix ddp``) only their cells are run again.
"""

import sys

from tests.matrix import record
from tests.matrix.cells import STRATEGIES


def main(strategies: list[str]) -> int:
    """Run, write, and say which cells neither work nor are refused."""
    unknown = set(strategies) - set(STRATEGIES)
    if unknown:
        print(f"unknown: {', '.join(unknown)}; there are {', '.join(STRATEGIES)}", file=sys.stderr)
        return 2
    found = record.measure(tuple(strategies) or STRATEGIES)
    if strategies:
        found = record.merge(found, record.read())
    failures = record.failures(found)
    for line in failures:
        print(line, file=sys.stderr)
    record.write(found)
    print(f"{record.FILE.name}: {record.count(found)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
