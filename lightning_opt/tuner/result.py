"""The result of a search: a table, an explanation, and settings as YAML and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_opt.core.measure.memory import MB
from lightning_opt.core.output.report import Report
from lightning_opt.tuner.search import OBJECTIVES, Switches, Trial
from lightning_opt.tuner.space import Space
from lightning_opt.worker.recipes import as_mapping, instantiate


@dataclass(repr=False, eq=False)
class TuneResult:
    """The result of :func:`~lightning_opt.autotune`: the best configuration, and all trials.

    Attributes:
        objective: ``"throughput"`` or ``"memory"``.
        space: The search space, with the switches that were tried.
        trials: All trials, the baseline first.
        switches: The switches to turn on; empty if nothing should change.
        complete: Whether the search ended before its budget ran out.
        machine: The machine and torch's version.
        seconds: Duration of the search.
    """

    objective: str
    space: Space
    trials: Sequence[Trial]
    switches: Switches
    complete: bool = True
    machine: str = ""
    seconds: float = 0.0

    @property
    def best(self) -> Trial:
        """The trial of the best configuration; the baseline's if nothing is better."""
        return next(trial for trial in self.trials if trial.switches == self.switches)

    @property
    def table(self) -> Report:
        """All trials, the best configuration first, then by time, rejected ones last.

        ============= ==========================================================================
        ``time``      time of a step, as a share of the baseline's, with its 90% interval
        ``memory``    peak memory, as a share of the baseline's
        ``start s``   seconds of the first step minus the seconds of a later step
        ============= ==========================================================================
        """
        best = self.best
        ordered = sorted(
            self.trials, key=lambda t: (t is not best, t.verdict == "rejected", t.ratio or math.inf)
        )
        answer = " + ".join(self.switches) or "change nothing"
        title = f"Trials for {self.objective}: {answer}"
        notes = [
            "time, memory: shares of the baseline's, with the 90% interval of the time.",
            f"Trials: {len(self.trials) - 1}, in {self.seconds:.0f} s; {self.machine}.",
        ]
        return Report(title, [self._row(trial) for trial in ordered], notes)

    def _row(self, trial: Trial) -> dict[str, Any]:
        return {
            "configuration": trial.name,
            "time": _rounded(trial.ratio, 3),
            "interval": f"{trial.low:.3f} to {trial.high:.3f}" if trial.high else None,
            "step ms": _rounded(None if trial.seconds is None else 1e3 * trial.seconds, 2),
            "memory": _rounded(trial.peak_ratio, 3),
            "peak MiB": _rounded(None if trial.peak is None else trial.peak / MB, 1),
            "start s": _rounded(trial.startup, 1),
            "verdict": "best" if trial is self.best else trial.verdict,
            "why": trial.why,
        }

    def explain(self) -> str:
        """Explain the result in lines of text: the best configuration first, then the trials."""
        space, best = self.space, self.best
        tried = [trial for trial in self.trials if trial.switches]
        lines = [_headline(self.objective, best, bool(tried))]
        lines += [f"{name}: {space.switches[name].about}" for name in best.switches]
        lines += [f"{trial.name}: {trial.verdict}; {trial.why}" for trial in tried if trial.why]
        if space.left_out:
            reasons = "; ".join(f"{name} ({why})" for name, why in space.left_out.items())
            lines.append(f"Not tried: {reasons}.")
        if not self.complete:
            lines.append("The budget ended before the search. A larger budget may find more.")
        return "\n".join(lines)

    def trainer_kwargs(self, **more: Any) -> dict[str, Any]:
        """Return the arguments for ``Trainer(**...)``, including the base's, with new callbacks.

        Args:
            more: Further arguments. ``callbacks`` and ``plugins`` are added, others replaced.
        """
        return dict(instantiate(as_mapping(self.space.settings(self.switches, more))))

    @property
    def settings(self) -> dict[str, Any] | None:
        """The Trainer's arguments, including the base's, as plain values.

        None if they contain objects or functions, which cannot be written as text.
        """
        try:
            text = json.dumps(as_mapping(self.space.settings(self.switches)))
        except TypeError:
            return None
        return dict(json.loads(text))

    def to_yaml(self) -> str:
        """Return a configuration for LightningCLI, ``--config trainer.yaml``.

        Raises:
            ValueError: If the settings cannot be written as text.
        """
        import yaml  # type: ignore[import-untyped]  # one of Lightning's own dependencies

        if self.settings is None:
            raise ValueError(
                "The settings contain objects or functions, which cannot be written as text. In "
                "base and candidates, write {'class_path': 'package.module.Class', 'init_args': "
                "{...}} instead, or use trainer_kwargs()."
            )
        content = {"trainer": self.settings}
        text = yaml.safe_dump(content, sort_keys=False, default_flow_style=False)
        return f"# {self.explain().splitlines()[0]}\n{text}"

    def to_json(self) -> str:
        """Return the result as JSON: switches, settings, trials and facts."""
        content = {
            "objective": self.objective,
            "switches": list(self.switches),
            "settings": self.settings,
            "complete": self.complete,
            "seconds": round(self.seconds, 1),
            "machine": self.machine,
            "left_out": self.space.left_out,
            "trials": [asdict(trial) | {"losses": None} for trial in self.trials],
        }
        return json.dumps(content, indent=2)

    def save(self, folder: str | Path) -> list[Path]:
        """Write all forms into a folder, and return the files.

        ``result.json``, ``report.md`` and, if the settings can be written as text,
        ``trainer.yaml``.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        texts = {
            "result.json": self.to_json(),
            "report.md": f"{self.table.to_markdown()}\n\n{self.explain()}\n",
        }
        if self.settings is not None:
            texts["trainer.yaml"] = self.to_yaml()
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        return [folder / name for name in texts]

    def __repr__(self) -> str:
        return f"TuneResult({' + '.join(self.switches) or 'change nothing'})"

    def _repr_markdown_(self) -> str:
        return self.table.to_markdown()


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _headline(objective: str, best: Trial, tried: bool) -> str:
    if not tried:
        return "Change nothing: no switch was tried."
    if not best.switches:
        return f"Change nothing: no switch certainly reduces {OBJECTIVES[objective]} enough."
    ratio, low, high = best.interval
    return (
        f"Use {best.name}: a step takes {ratio:.2f} times as long (between {low:.2f} and "
        f"{high:.2f}), with {best.peak_ratio or math.nan:.2f} times the peak memory."
    )
