"""Trains every installed project with each feature and writes ``docs/clients.json`` and ``.md``.

``python -m tests.clients``; with names of projects only their rows are run.
"""

import json
import logging
import sys
from importlib.metadata import version

import torch

from tests.clients import cells
from tests.clients.projects import PROJECTS, installed
from tests.matrix.outcomes import failures
from tests.zoo import page


def main() -> int:
    torch.set_num_threads(1)
    for package in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(package).setLevel(logging.ERROR)
    wanted = sys.argv[1:] or installed()
    content = json.loads(cells.FILE.read_text()) if cells.FILE.exists() else {}
    versions, rows = content.get("versions", {}), content.get("rows", {})
    for name in wanted:
        rows[name] = {**cells.row(name), **cells.row_on_ranks(name)}
        versions[name] = "" if name == "GAN" else version(name)
        print(name, *failures({name: rows[name]}), sep="\n    ", flush=True)
        ordered = {
            "versions": {one: versions[one] for one in PROJECTS if versions.get(one)},
            "rows": {one: rows[one] for one in PROJECTS if one in rows},
        }
        cells.FILE.write_text(json.dumps(ordered, indent=1) + "\n")
        cells.PAGE.write_text(page.render(ordered, cells.HEAD))
    return 1 if failures({name: rows[name] for name in wanted}) else 0


if __name__ == "__main__":
    sys.exit(main())
