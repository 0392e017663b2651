"""Findings of callbacks about a run, which the doctor collects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

State: TypeAlias = Literal["ok", "look", "unknown"]

TOPICS: dict[str, str] = {
    "profile": "Where does a step's time go?",
    "memory": "What is the peak of memory, and is there room?",
    "batch size": "Is the batch as large as memory allows?",
    "data": "Does training wait for data?",
    "throughput": "Does training stay as fast as it began?",
    "precision": "Does training use the fastest precision of the device?",
    "optimizer": "Is the optimizer the fused one?",
    "compilation": "Is the model compiled?",
    "gradients": "Are the gradients healthy?",
    "stability": "Are NaN, infinity and spikes caught?",
    "clipping": "Is clipping on, and does it rarely act?",
    "convergence": "Does the loss go down?",
    "leaks": "Does memory grow without end?",
    "determinism": "Would a second run give the same result?",
    "checkpoints": "Can training resume after a crash?",
    "monitoring": "Are metrics logged?",
    "baseline": "Has the setup been compared with plain Lightning?",
}
"""The questions of a diagnosis, in its order."""


@dataclass(frozen=True)
class Verdict:
    """The answer to one question.

    Attributes:
        topic: The question's key in :data:`TOPICS`.
        state: ``"ok"``, ``"look"`` if something needs attention, or ``"unknown"`` if it was not
            measured.
        finding: The measurement, in a sentence.
        advice: What to do; empty if there is nothing to do.
        callbacks: The end of the finding that names callbacks. ``lightning-opt doctor`` removes it
            if it added these callbacks itself.
        gain: The share of the run's time that the advice may save, 1 if the run's result is at
            stake, 0 if unknown.
    """

    topic: str
    state: State
    finding: str
    advice: str = ""
    callbacks: str = ""
    gain: float = 0.0

    def __post_init__(self) -> None:
        if self.topic not in TOPICS:
            raise ValueError(f"topic must be one of {', '.join(TOPICS)}, got {self.topic!r}.")
