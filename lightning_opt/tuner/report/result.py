"""What a search has found, and its forms: a table, sentences, Python, YAML and JSON."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_opt.core.output.report import Report
from lightning_opt.tuner.report.explaining import explain
from lightning_opt.tuner.report.writing import to_python, to_yaml
from lightning_opt.tuner.search.settings import plain
from lightning_opt.tuner.search.space import Space
from lightning_opt.tuner.trial import Switches, Trial
from lightning_opt.worker.recipes import instantiate

MIB = 2**20


@dataclass(repr=False, eq=False)
class TuneResult:
    """The answer of :func:`~lightning_opt.autotune`, with all that led to it.

    Attributes:
        objective: What was tuned for.
        space: What could be switched on.
        trials: All trials, the baseline first.
        switches: What is switched on in the answer; nothing where it is better to leave things as
            they are.
        complete: Whether the search ended by itself, and not with its budget.
        facts: Of machine and versions.
        seconds: Time that the search took.
        batches: Samples of the largest batches that were found, by what was on.
    """

    objective: str
    space: Space
    trials: Sequence[Trial]
    switches: Switches
    complete: bool = True
    facts: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    batches: Mapping[Switches, int] = field(default_factory=dict)

    @property
    def best(self) -> Trial:
        """The trial of the answer; the baseline's where nothing is better."""
        return next(trial for trial in self.trials if trial.switches == self.switches)

    @property
    def improved(self) -> bool:
        """Whether the answer is anything but to leave things as they are."""
        return bool(self.switches)

    @property
    def table(self) -> Report:
        """Every trial, the best first, then those that were not accepted.

        ============= ==========================================================================
        ``time``      of a step, as a share of the baseline's, with its interval at 90%
        ``memory``    peak, as a share of the baseline's
        ``gradient``  cosine to the baseline's, in the module in which they differ most
        ``start s``   seconds that the first step took longer than a later one
        ============= ==========================================================================
        """
        order = {"accepted": 0, "baseline": 0, "no gain": 0, "too slow": 1, "rejected": 2}
        ordered = sorted(
            self.trials,
            key=lambda trial: (
                trial is not self.best,
                order.get(trial.verdict, 3),
                trial.ratio if trial.ratio is not None else 1e9,
            ),
        )
        answer = " + ".join(self.switches) or "change nothing"
        title = f"Trials for {self.objective}: {answer}"
        return Report(title, [self._row(trial) for trial in ordered], self._table_notes())

    def _row(self, trial: Trial) -> dict[str, Any]:
        timed = trial.ratio is not None and trial.low is not None and trial.high is not None
        return {
            "configuration": trial.name,
            "time": _rounded(trial.ratio, 3),
            "interval": f"{trial.low:.3f} to {trial.high:.3f}" if timed else None,
            "step ms": _rounded(None if trial.seconds is None else 1e3 * trial.seconds, 2),
            "memory": _rounded(trial.peak_ratio, 3),
            "peak MiB": _rounded(None if trial.peak is None else trial.peak / MIB, 1),
            "gradient": _rounded(trial.agreement, 4),
            "start s": _rounded(trial.startup, 1),
            "verdict": "the answer" if trial is self.best else trial.verdict,
            "why": trial.why,
        }

    def _table_notes(self) -> list[str]:
        machine = ", ".join(f"{name} {value}" for name, value in self.facts.items())
        held = "On a CPU freed tensors may stay resident: recomputing can save more than is seen."
        return [
            "time, memory: shares of the baseline's; the interval is at 90%. gradient: cosine to "
            "the baseline's from equal weights and batches, where they differ most.",
            f"Trials: {len(self.trials) - 1}, in {self.seconds:.0f} s; {machine}.",
            *[held] * (self.objective != "throughput" and self.facts.get("device") == "cpu"),
        ]

    def explain(self) -> str:
        """Return in sentences what was tried, what came of it, and why the answer is what it is."""
        return explain(self)

    def trainer_kwargs(self, **more: Any) -> dict[str, Any]:
        """Return the arguments for ``Trainer(**...)``, base included, with new callbacks each time.

        Args:
            more: Further arguments. ``callbacks`` and ``plugins`` are added, others replace.
        """
        settings = plain(self.space.settings(self.switches, more))
        return {name: instantiate(value) for name, value in settings.items()}

    @property
    def settings(self) -> dict[str, Any]:
        """The Trainer's arguments, base included, as plain values.

        Raises:
            ValueError: If something in them is an object or a function.
        """
        if not self.space.is_written(self.switches):
            raise ValueError(
                "The settings have objects or functions in them, which cannot be written down. In "
                "base and candidates describe them instead: {'class_path': "
                "'package.module.Class', 'init_args': {...}}. trainer_kwargs() works as it is."
            )
        return dict(plain(self.space.settings(self.switches)))

    def to_yaml(self) -> str:
        """Return a configuration for LightningCLI, ``--config trainer.yaml``.

        Raises:
            ValueError: If the settings cannot be written down.
        """
        return to_yaml(self.settings, self._headline())

    def to_python(self) -> str:
        """Return Python that makes the Trainer.

        Raises:
            ValueError: If the settings cannot be written down.
        """
        return to_python(self.settings, self._headline())

    def diff(self) -> str:
        """Return the change of the Trainer's call, as Python and as YAML; empty where none is.

        Raises:
            ValueError: If the settings cannot be written down.
        """
        before = dict(plain(self.space.settings(())))
        found = ""
        for form, name in ((to_python, "trainer.py"), (to_yaml, "trainer.yaml")):
            old, new = (form(kwargs).splitlines(True) for kwargs in (before, self.settings))
            found += "".join(difflib.unified_diff(old, new, f"yours/{name}", f"tuned/{name}", n=99))
        return found

    def to_json(self) -> str:
        """Return everything: answer, settings, trials, facts."""
        content = {
            "objective": self.objective,
            "improved": self.improved,
            "switches": list(self.switches),
            "settings": self.settings if self.space.is_written(self.switches) else None,
            "complete": self.complete,
            "seconds": round(self.seconds, 1),
            "facts": self.facts,
            "left_out": self.space.left_out,
            "trials": [asdict(trial) | {"losses": None} for trial in self.trials],
        }
        return json.dumps(content, indent=2)

    def save(self, folder: str | Path) -> list[Path]:
        """Write all forms into a folder, and return the files.

        ``result.json``, ``report.md`` and, where they can be made, ``trainer.yaml``,
        ``trainer.py`` and ``trainer.diff``.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        forms: dict[str, Callable[[], str]] = {
            "result.json": self.to_json,
            "report.md": lambda: f"{self.table.to_markdown()}\n\n{self.explain()}\n",
        }
        if self.space.is_written(self.switches):
            forms |= {
                "trainer.yaml": self.to_yaml,
                "trainer.py": self.to_python,
                "trainer.diff": self.diff,
            }
        for name, form in forms.items():
            (folder / name).write_text(form(), encoding="utf-8")
        return [folder / name for name in forms]

    def _headline(self) -> str:
        return f"# {self.explain().splitlines()[0]}\n"

    def __repr__(self) -> str:
        return f"TuneResult({' + '.join(self.switches) or 'change nothing'})"

    def _repr_markdown_(self) -> str:
        return self.table.to_markdown()


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
