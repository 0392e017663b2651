"""What a callback has found out about a run, in the form that a diagnosis collects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

State: TypeAlias = Literal["ok", "look", "unknown"]

TOPICS: dict[str, str] = {
    "profile": "Is it known where a step's time goes?",
    "memory": "Is the peak of memory known, and is there room?",
    "batch size": "Is the batch as large as the memory allows?",
    "data": "Does training wait for data?",
    "throughput": "Does it stay as fast as it began?",
    "precision": "Does it compute in the precision that the device is fast in?",
    "optimizer": "Is the optimizer the fused one?",
    "compilation": "Is the model compiled?",
    "gradients": "Are the gradients healthy?",
    "stability": "Are NaN, infinity and spikes caught?",
    "clipping": "Is clipping on, and the exception?",
    "convergence": "Does the loss go down?",
    "leaks": "Does memory grow without end?",
    "determinism": "Would a second run give the same?",
    "checkpoints": "Could it go on after a crash?",
    "monitoring": "Is anybody told what happens?",
    "baseline": "Has it been compared with the run without?",
}
"""What a diagnosis asks, in its order."""


@dataclass(frozen=True)
class Verdict:
    """An answer to one question.

    Attributes:
        topic: The question, one of :data:`TOPICS`.
        state: ``"ok"``; ``"look"`` if there is something to be done or looked into; ``"unknown"``
            if it was not measured.
        finding: What was measured, in a sentence.
        advice: The one thing to do; empty where there is nothing.
        callbacks: How the finding ends where it is about callbacks, which may be there only to find
            something out.
    """

    topic: str
    state: State
    finding: str
    advice: str = ""
    callbacks: str = ""

    def __post_init__(self) -> None:
        if self.topic not in TOPICS:
            raise ValueError(f"topic must be one of {', '.join(TOPICS)}, got {self.topic!r}.")
