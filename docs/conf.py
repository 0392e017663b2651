"""Configuration of Sphinx: `make docs`, with warnings as errors."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

import lightning_opt

DOCS = Path(__file__).parent
ROOT = DOCS.parent
GENERATED = DOCS / "_generated"
sys.path.insert(0, str(DOCS))

import pages  # noqa: E402
import references  # noqa: E402

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
# Notebooks are committed with their outputs; the tests run them and compare.
nb_execution_mode = "off"

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
# pytest runs the examples in docstrings, Sphinx those in pages.
doctest_test_doctest_blocks = ""

# Only public names of the package must resolve.
nitpick_ignore_regex = [("py:.*", r"(?!lightning_opt\.[A-Z]\w*$).*")]


def collect() -> None:
    """Copy the notebooks to the folder of Sphinx's pages."""
    shutil.rmtree(GENERATED, ignore_errors=True)
    (GENERATED / "examples").mkdir(parents=True)
    for notebook in sorted((ROOT / "examples").glob("*.ipynb")):
        contents = json.loads(notebook.read_text())
        # The first cell has shell commands, which only IPython's lexer supports.
        contents["metadata"]["language_info"]["pygments_lexer"] = "ipython3"
        (GENERATED / "examples" / notebook.name).write_text(json.dumps(contents))


LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<path>[^)#\s:]+)(?P<anchor>#[^)\s]+)?\)")
SIGNATURE = re.compile(r"<!-- signature: (\w+) -->\n.*?<!-- end -->", re.S)
FENCE = re.compile(r"^```(?:python|text) (testcode|testoutput)(?: (\+\w+))?$", re.M)
ELSEWHERE = {"contributing": ROOT / "CONTRIBUTING.md", "changelog": ROOT / "CHANGELOG.md"}
"""Pages whose text is elsewhere; on GitHub they only link to it."""


def prepare(app: Sphinx, name: str, source: list[str]) -> None:
    """Convert plain Markdown to Sphinx's.

    Tested code becomes directives of ``sphinx.ext.doctest``, signatures are replaced by the whole
    docstring, and the index gets its navigation. Links to code and tests, outside of the
    documentation, become text.
    """
    page = ELSEWHERE.get(name, Path(app.env.doc2path(name)))
    text = page.read_text() if name in ELSEWHERE else source[0]

    def inside(link: re.Match[str]) -> str:
        target = (page.parent / link["path"]).resolve()
        if target.suffix == ".ipynb":
            return f"[{link['text']}](/_generated/examples/{target.name})"
        if not target.exists() or (target.is_relative_to(DOCS) and name not in ELSEWHERE):
            return link[0]
        if target.suffix == ".md" and target.is_relative_to(DOCS):
            return f"[{link['text']}](/{target.relative_to(DOCS)}{link['anchor'] or ''})"
        return link["text"]

    def directive(fence: re.Match[str]) -> str:
        return f"```{{{fence[1]}}}" + (f"\n:options: {fence[2]}\n" if fence[2] else "")

    def reference(signature: re.Match[str]) -> str:
        thing = getattr(lightning_opt, signature[1])
        kind = "autoclass" if isinstance(thing, type) else "autofunction"
        members = "\n   :members:" if kind == "autoclass" else ""
        return f"```{{eval-rst}}\n.. {kind}:: lightning_opt.{signature[1]}{members}\n```"

    text = SIGNATURE.sub(reference, FENCE.sub(directive, LINK.sub(inside, text)))
    if name == "index":
        for caption, names in pages.navigation().items():
            text += _tree(caption, [_document(found) for found in names])
    if name == "contributing":
        text += _tree("", [_document(found) for found in pages.CONTRIBUTORS])
    if name == "api":
        text += _tree("", [f"api/{found[:-3]}" for found in pages.api_pages()])
    source[0] = text


def _document(name: str) -> str:
    return f"_generated/examples/{Path(name).stem}" if name.endswith(".ipynb") else name


def _tree(caption: str, names: list[str]) -> str:
    head = [
        "",
        "```{toctree}",
        ":maxdepth: 1",
        ":hidden:",
        *([f":caption: {caption}"] if caption else []),
    ]
    return "\n".join([*head, "", *names, "```", ""])


def name_others(
    _: Sphinx, _what: str, _name: str, _thing: Any, _options: Any, lines: list[str]
) -> None:
    """Link names of torch and Lightning in docstrings."""
    references.cross_reference(lines)


def resolve(_: Sphinx, _env: Any, wanted: nodes.Element, shown: nodes.Element) -> nodes.Node | None:
    """Resolve names of torch and Lightning in docstrings and annotations, without a network."""
    name = references.defined_name(wanted["reftarget"])
    if name is None:
        return None
    return nodes.reference("", "", shown, refuri=references.address_of(name), internal=False)


def setup(app: Sphinx) -> None:
    app.connect("source-read", prepare)
    app.connect("autodoc-process-docstring", name_others)
    app.connect("missing-reference", resolve)


collect()
