"""A production checklist, answered from what was measured of a run."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lightning_opt.core.output.report import Report
from lightning_opt.core.output.verdicts import TOPICS, State, Verdict
from lightning_opt.profiling.doctor.checks import LOOKS

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)

MEASURES: dict[str, str] = {
    "profile": "Trainer(profiler=StepProfiler()) tells.",
    "memory": "MemoryProfiler() measures the peak of each phase.",
    "batch size": "find_batch_size() measures how large it can be, and which is the fastest.",
    "data": "DataMonitor() measures the share of waiting.",
    "throughput": "PerformanceMonitor() watches it.",
    "precision": "Look at the Trainer's precision.",
    "optimizer": "Ask again after fit, when there is one.",
    "compilation": "compare() measures whether CompileModel() pays for this model.",
    "gradients": "GradientHealth() looks at every layer.",
    "stability": "NonFiniteGuard() leaves such steps out, and counts them.",
    "clipping": "AdaptiveClipping() clips what is unusual, and counts it.",
    "convergence": "PerformanceMonitor() looks at the trend of the loss.",
    "leaks": "LeakDetector() watches memory, and names who holds it.",
    "determinism": "Call lightning.seed_everything(seed, workers=True) first.",
    "checkpoints": "Add ModelCheckpoint().",
    "monitoring": "Give the Trainer a logger.",
    "baseline": "compare(model, data, {'plain': {...}, 'mine': {...}}) measures both side by side.",
}
"""Who would answer what was not measured."""

PUT_BACK = ("optimizer", "compilation")
"""What callbacks undo at the end of a run, so that they know better than the Trainer."""

GRAVITY: dict[State, int] = {"look": 0, "ok": 1, "unknown": 2}
MARKS: dict[State, str] = {"look": "LOOK", "ok": "ok", "unknown": "?"}


class Diagnosis(Report):
    """The answers to the checklist; those that need attention come first.

    Prints as text, renders in a notebook, and gives markdown or JSON.

    Attributes:
        verdicts: One for each question.
        rows: The same as a table: question, verdict (``ok``, ``look``, ``unknown``), finding and
            advice.
    """

    def __init__(self, verdicts: Sequence[Verdict], notes: Sequence[str] = ()) -> None:
        self.verdicts = sorted(verdicts, key=lambda verdict: GRAVITY[verdict.state])
        number = {state: sum(v.state == state for v in verdicts) for state in GRAVITY}
        title = (
            f"Diagnosis: {number['look']} to look at, {number['ok']} ok, {number['unknown']} not "
            "measured"
        )
        rows = [
            {
                "topic": verdict.topic,
                "question": TOPICS[verdict.topic],
                "verdict": verdict.state,
                "finding": verdict.finding,
                "advice": verdict.advice,
            }
            for verdict in self.verdicts
        ]
        super().__init__(title, rows, notes)

    def __getitem__(self, topic: str) -> Verdict:
        """Return the verdict on a topic, such as ``"data"``."""
        return next(verdict for verdict in self.verdicts if verdict.topic == topic)

    def topics(self, state: State) -> list[str]:
        """Return the topics with this verdict."""
        return [verdict.topic for verdict in self.verdicts if verdict.state == state]

    def to_text(self) -> str:
        """Return the answers as plain text, one a paragraph."""
        lines = [self.title]
        for verdict in self.verdicts:
            lines.append(f"{MARKS[verdict.state]:>4}  {TOPICS[verdict.topic]} {verdict.finding}")
            if verdict.advice:
                lines.append(f"      -> {verdict.advice}")
        return "\n".join([*lines, *self.notes])


def doctor(trainer: pl.Trainer) -> Diagnosis:
    """Go through a checklist after a run, answered from what the Trainer's callbacks measured.

    It runs and measures nothing: call it after ``fit``. Each question is answered by any callback,
    profiler, strategy or plugin that offers ``diagnose() -> list[Verdict]``, or else from the
    Trainer itself. If several answer, the one that needs attention counts. A question that nobody
    answers is ``unknown``, with a hint as to what would measure it.

    Args:
        trainer: After its run; before it, most answers are unknown.

    Returns:
        One verdict per question, with advice if there is something to do.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> diagnosis = lo.doctor(L.Trainer(logger=False, enable_checkpointing=False))
        >>> diagnosis["monitoring"].state
        'look'
        >>> diagnosis["leaks"].advice
        'LeakDetector() watches memory, and names who holds it.'
    """
    found: list[Verdict] = []
    notes: list[str] = []
    for part in _parts(trainer):
        diagnose = getattr(part, "diagnose", None)
        if callable(diagnose):
            found += _ask(diagnose, type(part).__name__, notes)
    told = {verdict.topic for verdict in found if verdict.state != "unknown"}
    for question in LOOKS:
        seen = _ask(question, question.__name__, notes, trainer)
        found += [v for v in seen if v.topic not in told or v.topic not in PUT_BACK]
    verdicts = []
    for topic in TOPICS:
        answers = [verdict for verdict in found if verdict.topic == topic]
        silence = Verdict(topic, "unknown", "Not measured.", MEASURES[topic])
        verdicts.append(min(answers, key=lambda v: GRAVITY[v.state], default=silence))
    return Diagnosis(verdicts, notes)


def _parts(trainer: pl.Trainer) -> Iterable[Any]:
    callbacks = getattr(trainer, "callbacks", None) or []
    others = ("profiler", "strategy", "precision_plugin")
    return [*callbacks, *(getattr(trainer, name, None) for name in others)]


def _ask(question: Any, name: str, notes: list[str], *arguments: Any) -> list[Verdict]:
    """Return the answers; a part that fails, or means something else by that name, has none."""
    try:
        answers = question(*arguments)
    except Exception as error:  # one that is ill must not hide the others' answers
        log.debug("doctor: %s has no answer", name, exc_info=True)
        notes.append(f"{name} could not be asked: {type(error).__name__}: {error}")
        return []
    answers = answers if isinstance(answers, (list, tuple)) else [answers]
    return [answer for answer in answers if isinstance(answer, Verdict)]
