"""Run the notebooks, or those given, and save their outputs: ``make notebooks``.

Execution counts and editor metadata are removed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import nbclient
import nbformat
from jupyter_client.manager import AsyncKernelManager

HERE = Path(__file__).resolve().parent


def execute(
    path: Path, replacements: Mapping[str, str], kernel: AsyncKernelManager | None = None
) -> nbformat.NotebookNode:
    """Run a notebook with pieces of its source replaced, and return it with its outputs.

    Args:
        path: The notebook.
        replacements: New text by old text.
        kernel: Started if it is not running, and left running; None for a kernel of its own.
    """
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        for old, new in replacements.items():
            cell.source = cell.source.replace(old, new)
    resources = {"metadata": {"path": str(HERE)}}
    client = nbclient.NotebookClient(notebook, km=kernel, timeout=500, resources=resources)
    try:
        client.execute()
    finally:
        if kernel is not None:
            client.kc.stop_channels()
    for number, cell in enumerate(notebook.cells):
        cell.metadata, cell.id = {}, str(number)
        if cell.cell_type == "code":
            cell.execution_count = None
            for output in cell.outputs:
                output.pop("execution_count", None)
                if output.output_type == "execute_result":
                    output.execution_count = None
                for rich in {"image/png", "text/markdown"} & set(output.get("data", {})):
                    output.data = {rich: output.data[rich]}  # its text is a memory address
    notebook.metadata.pop("widgets", None)
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def main() -> None:
    os.environ.setdefault("PYTHONWARNINGS", "ignore:IProgress not found")
    chosen = [Path(name) for name in sys.argv[1:]] or sorted(HERE.glob("*.ipynb"))
    for path in chosen:
        nbformat.write(execute(path, {}), path)
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB", flush=True)


if __name__ == "__main__":
    main()
