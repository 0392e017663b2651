"""How the documentation is built: `make docs`, with warnings as errors."""

import json
import re
import shutil
import sys
from pathlib import Path

from sphinx.application import Sphinx

import lightning_opt

DOCS = Path(__file__).parent
ROOT = DOCS.parent
GENERATED = DOCS / "_generated"
sys.path.insert(0, str(DOCS))

import pages  # noqa: E402

project = "lightning_opt"
author = "The lightning_opt developers"
project_copyright = author
version = release = lightning_opt.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "_generated/*.md"]
html_theme = "furo"
html_title = f"{project} {release}"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
# Notebooks are executed by the tests, within their time limit; here they are only shown.
nb_execution_mode = "off"

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
# The examples in docstrings are run by pytest, those written into pages as {testcode} here.
doctest_test_doctest_blocks = ""

# Our own public names must resolve. Other projects' need a network to look up, and the modules in
# which ours are defined are not where a reader finds them.
nitpick_ignore_regex = [("py:.*", r"(?!lightning_opt\.[A-Z]\w*$).*")]


def collect() -> None:
    """Bring the notebooks to where Sphinx looks for pages, and write what is made from records."""
    shutil.rmtree(GENERATED, ignore_errors=True)
    (GENERATED / "examples").mkdir(parents=True)
    for notebook in sorted((ROOT / "examples").glob("*.ipynb")):
        shutil.copy(notebook, GENERATED / "examples")
    matrix = json.loads((DOCS / "matrix.json").read_text())
    made = {
        "features.md": pages.feature_lists(),
        "matrix.md": pages.matrix_tables(matrix["rows"]),
        "benchmarks.md": pages.benchmark_tables(),
    }
    for name, text in made.items():
        (GENERATED / name).write_text(text)


LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<path>\.\./[^)#\s]+)\)")
"""A relative link that may lead out of the documentation, to code, tests and notebooks."""


def stay_inside(app: Sphinx, name: str, source: list[str]) -> None:
    """Make text of what leads out of the documentation, which a reader of GitHub can follow."""
    folder = Path(app.env.doc2path(name)).parent

    def inside(link: re.Match[str]) -> str:
        target = (folder / link["path"]).resolve()
        if target.suffix == ".ipynb":
            return f"[{link['text']}](/_generated/examples/{target.name})"
        return link[0] if target.is_relative_to(DOCS) else link["text"]

    source[0] = LINK.sub(inside, source[0])


def setup(app: Sphinx) -> None:
    app.connect("source-read", stay_inside)


collect()
