"""Runs all cells of the zoo and writes ``docs/zoo.json`` and ``docs/zoo.md``.

``python -m tests.zoo``; with names of models only their rows are run.
"""

import logging
import sys

import lightning.pytorch
import torch

from tests.matrix.outcomes import failures
from tests.zoo import cells, page
from tests.zoo.models import MODELS


def main() -> int:
    torch.set_num_threads(1)
    logging.getLogger(lightning.pytorch.__name__).setLevel(logging.ERROR)
    wanted = sys.argv[1:] or list(MODELS)
    rows = cells.read() if cells.FILE.exists() else {}
    features = cells.subjects()
    on_ranks = cells.run_rows_on_ranks([name for name in wanted if name in cells.ON_RANKS])
    for name in wanted:
        rows[name] = {**cells.run_row(name, features), **on_ranks.get(name, {})}
        print(name, *failures({name: rows[name]}), sep="\n    ", flush=True)
        cells.write(rows)
    page.FILE.write_text(page.render(cells.content()))
    return 1 if failures({name: rows[name] for name in wanted}) else 0


if __name__ == "__main__":
    sys.exit(main())
