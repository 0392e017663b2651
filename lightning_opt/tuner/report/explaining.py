"""The search in sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_opt.tuner.search.objective import OBJECTIVES
from lightning_opt.tuner.search.space import Space
from lightning_opt.tuner.trial import Trial


def explain(
    objective: str, space: Space, trials: Sequence[Trial], best: Trial, complete: bool
) -> str:
    """Return paragraphs, one a line; the first is the answer."""
    tried = [trial for trial in trials if trial.switches]
    lines = [_answer(objective, best, bool(tried))]
    if best.switches:
        about = [
            f"{name}: {space.switches[name].about}"
            for name in best.switches
            if space.switches[name].about
        ]
        lines += about
        if best.startup and best.startup > 1:
            lines.append(f"The first step takes {best.startup:.0f} s longer than a later one.")
    for trial in tried:
        if trial.verdict == "rejected":
            lines.append(f"Rejected, since it changes the result: {trial.name}; {trial.why}.")
    failed = [trial for trial in tried if trial.failed]
    lines += [f"Failed ({trial.verdict}): {trial.name}. {trial.why}" for trial in failed]
    for trial in tried:
        if trial is not best and trial.verdict == "accepted" and (trial.high or 0) >= 1:
            lines.append(
                f"Undecided: {trial.name} takes {trial.ratio:.2f} of the time (from "
                f"{trial.low:.2f} to {trial.high:.2f})."
            )
    if space.left_out:
        left = "; ".join(f"{name} ({why})" for name, why in space.left_out.items())
        lines.append(f"Not tried: {left}.")
    if not complete:
        lines.append("The budget ended before the search did; a longer one may find more.")
    return "\n".join(lines)


def _answer(objective: str, best: Trial, tried: bool) -> str:
    if not tried:
        return "Leave it as it is: nothing was tried."
    if not best.switches:
        goal = OBJECTIVES[objective]
        return f"Leave it as it is: nothing that was tried gains enough in {goal} to be sure of."
    return (
        f"Take {best.name}: a step takes {best.ratio or math.nan:.2f} of the time (from "
        f"{best.low or 0:.2f} to {best.high or math.inf:.2f}), peak memory is "
        f"{best.peak_ratio or math.nan:.2f} of what it was."
    )
