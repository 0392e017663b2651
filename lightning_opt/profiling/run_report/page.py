"""Builds the page of a run from the verdicts, tables, series and events of its callbacks."""

from __future__ import annotations

import json
import logging
import platform
import subprocess
import sys
from datetime import datetime
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning_opt
from lightning_opt.core.arguments import changed_arguments
from lightning_opt.core.measure.machine import commit_of_folder, describe_machine
from lightning_opt.core.output.loggers import HISTORIES, History
from lightning_opt.core.output.report import TOPICS, Report
from lightning_opt.profiling.doctor.doctor import code_of, collect, doctor, parts_of
from lightning_opt.trainer.lightning import package_of

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)

FINDING = '<li><p class="faint">{}</p><h3>{}</h3><p>{}</p><pre>{}</pre></li>'
TABLE = "<details><summary>{}</summary><div>{}</div></details>"

RESOLVED = {
    "precision": "32-true", "log_every_n_steps": 50, "num_sanity_val_steps": 2, "min_epochs": 0,
    "limit_train_batches": 1.0, "limit_val_batches": 1.0, "limit_test_batches": 1.0,
    "limit_predict_batches": 1.0, "val_check_interval": 1.0,
}  # fmt: skip
"""Values that Lightning uses for Trainer arguments that are None."""


def build_page(trainer: pl.Trainer, sentence: str, folder: Path, images: bool = False) -> str:
    """Return the page as HTML.

    Args:
        trainer: The Trainer.
        sentence: The heading.
        folder: An empty folder for the pictures.
        images: Whether to also write each picture to the folder as a PNG.
    """
    model, own = type(trainer.lightning_module).__name__, Path(__file__).parent
    page, style = ((own / name).read_text(encoding="utf-8") for name in ("page.html", "page.css"))
    verdicts = doctor(trainer).verdicts
    findings = [
        FINDING.format(*map(escape, (TOPICS[v.topic], v.finding, v.advice, code_of(v.advice))))
        for v in verdicts
        if v.state == "look"
    ]
    hints = [f"{TOPICS[v.topic]} {v.advice}" for v in verdicts if v.state == "unknown"]
    tables = [table for part in parts_of(trainer) for table in _tables(part)]
    return page.format(
        title=escape(f"Run report · {model} · {datetime.now():%Y-%m-%d %H:%M}"),
        style=style,
        sentence=escape(sentence),
        findings="".join(findings[:3]) or "<li>The checks found nothing to improve.</li>",
        pictures=_pictures(trainer, folder, images),
        hints="".join(f"<li>{escape(hint)}</li>" for hint in hints),
        tables="".join(TABLE.format(escape(each.title), each.to_html()) for each in tables)
        or "<p>No callback of this run has a report.</p>",
        setup=_setup(trainer).to_html(),
    )


def _tables(part: Any) -> list[Report]:
    notes: list[str] = []
    tables = collect(getattr(part, "report", list), type(part).__name__, notes, kind=Report)
    return [*tables, *(Report(note, []) for note in notes)]


def _pictures(trainer: pl.Trainer, folder: Path, images: bool) -> str:
    """Draw in another process, so that an error or a lack of memory cannot end the training."""
    if find_spec("matplotlib") is None:
        return "<p>Pictures need matplotlib: pip install 'lightning-opt[plots]'</p>"
    script = Path(__file__).with_name("pictures.py")
    command = [sys.executable, str(script), str(folder), "images" if images else ""]
    try:
        data = json.dumps(_series_and_events(trainer))
        subprocess.run(command, input=data, capture_output=True, text=True, timeout=120, check=True)
    except Exception as error:  # the page is useful without pictures
        log.debug("RunReport: %s", getattr(error, "stderr", ""), exc_info=True)
        return f"<p>Drawing the pictures failed: {escape(repr(error))}</p>"
    return (folder / "pictures.html").read_text(encoding="utf-8")


def _series_and_events(trainer: pl.Trainer) -> tuple[dict[str, Any], list[tuple[float, str]]]:
    series: dict[str, Any] = dict(HISTORIES.get(trainer, History()).points)
    events: list[tuple[float, str]] = []
    for part in parts_of(trainer):
        series |= part.series() if hasattr(part, "series") else {}
        found = (event for event in getattr(part, "events", ()) if "step" in event)
        events += [(event["step"], event.get("action", event.get("kind", ""))) for event in found]
    return series, events


def _setup(trainer: pl.Trainer) -> Report:
    lightning = package_of(trainer)
    versions = [f"{p.__name__} {p.__version__}" for p in (lightning_opt, lightning)]
    rows = {
        "machine": describe_machine(trainer.strategy.root_device.type),
        "versions": ", ".join([*versions, f"Python {platform.python_version()}"]),
        "commit": commit_of_folder() or "none",
        "processes": f"{trainer.world_size}, {type(trainer.strategy).__name__}",
        "Trainer": changed_arguments(trainer, RESOLVED),
        **{type(part).__name__: changed_arguments(part) for part in parts_of(trainer)},
    }
    return Report("", [{"part": k, "settings": v or "defaults"} for k, v in rows.items()])


class Page(str):
    """A page as HTML. Notebooks display it."""

    __slots__ = ()

    def _repr_html_(self) -> str:  # a frame separates its styles from the notebook's
        style = "width:100%;height:80vh;border:0"
        return f'<iframe srcdoc="{escape(self)}" style="{style}"></iframe>'
