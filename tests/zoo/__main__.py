"""Writes ``docs/zoo.json`` anew: ``python -m tests.zoo``, part of ``make matrix``.

With names of models only their rows are run again.
"""

import sys

import torch

from tests.zoo import cells


def main() -> int:
    torch.set_num_threads(1)
    wanted = sys.argv[1:] or cells.known_models()
    rows = cells.read() if cells.FILE.exists() else {}
    subjects = cells.subjects()
    failed = 0
    for name in wanted:
        rows[name] = cells.run_row(name, subjects)
        bad = [f"{label}: {cell}" for label, cell in rows[name].items() if cell.startswith("fails")]
        failed += len(bad)
        print(f"{name}: {len(bad)} fail of {len(rows[name])}", *bad, sep="\n    ", flush=True)
    cells.write({name: rows[name] for name in cells.known_models() if name in rows})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
