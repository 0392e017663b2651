"""Writes ``docs/zoo.json`` and ``docs/zoo.md`` anew: ``python -m tests.zoo``.

With names of models only their rows are run again.
"""

import logging
import sys

import lightning.pytorch
import torch

from tests.zoo import cells, page


def main() -> int:
    torch.set_num_threads(1)
    logging.getLogger(lightning.pytorch.__name__).setLevel(logging.ERROR)
    wanted = sys.argv[1:] or cells.known_models()
    rows = cells.read() if cells.FILE.exists() else {}
    features = cells.subjects()
    on_ranks = cells.run_rows_on_ranks([name for name in wanted if name in cells.ON_RANKS])
    failed = 0
    for name in wanted:
        rows[name] = {**cells.run_row(name, features), **on_ranks.get(name, {})}
        bad = [f"{label}: {cell}" for label, cell in rows[name].items() if cell.startswith("fails")]
        failed += len(bad)
        print(f"{name}: {len(bad)} of {len(rows[name])} fail", *bad, sep="\n    ", flush=True)
        cells.write({name: rows[name] for name in cells.known_models() if name in rows})
    page.FILE.write_text(page.render(cells.content()))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
