"""The search in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_opt.tuner.search.space import Space
from lightning_opt.tuner.trials.trial import Trial

GOALS = {
    "throughput": "time of a step",
    "memory": "peak memory",
    "time_to_loss": "time to the baseline's loss",
}


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
    lines += _alone(tried)
    lines += _together(tried)
    for trial in tried:
        if trial.verdict == "rejected":
            lines.append(f"Rejected, since it changes the result: {trial.name}; {trial.why}.")
    failed = [trial for trial in tried if trial.failed]
    lines += [f"Failed ({trial.verdict}): {trial.name}. {trial.why}" for trial in failed]
    if space.left_out:
        left = "; ".join(f"{name} ({why})" for name, why in space.left_out.items())
        lines.append(f"Not tried: {left}.")
    if not complete:
        lines.append("The budget ended before the search did; a longer one may find more.")
    return "\n".join(lines)


def _answer(objective: str, best: Trial, tried: bool) -> str:
    goal = GOALS[objective]
    if not tried:
        return "Leave it as it is: nothing was tried."
    if not best.switches:
        return f"Leave it as it is: nothing that was tried gains enough in {goal} to be sure of."
    words = []
    if best.ratio is not None and best.low is not None and best.high is not None:
        words.append(
            f"a step takes {best.ratio:.2f} of the time (from {best.low:.2f} to {best.high:.2f})"
        )
    if best.peak_ratio is not None:
        words.append(f"peak memory is {best.peak_ratio:.2f} of what it was")
    if best.steps_ratio is not None:
        words.append(f"the loss is reached in {best.steps_ratio:.2f} of the steps")
    return f"Take {best.name}: " + ", ".join(words) + "."


def _alone(tried: Sequence[Trial]) -> list[str]:
    singles = [trial for trial in tried if len(trial.switches) == 1 and trial.ratio is not None]
    if not singles:
        return []
    words = ", ".join(
        f"{trial.name} {trial.ratio:.2f}" for trial in sorted(singles, key=lambda t: t.ratio or 0)
    )
    return [f"Time of a step with one switch alone, as a share of the baseline's: {words}."]


def _together(tried: Sequence[Trial]) -> list[str]:
    alone = {
        trial.switches[0]: trial.ratio
        for trial in tried
        if len(trial.switches) == 1 and trial.ratio is not None
    }
    lines = []
    for trial in tried:
        if len(trial.switches) < 2 or trial.ratio is None:
            continue
        product = 1.0
        for name in trial.switches:
            product *= alone.get(name) or 1.0
        verdict = "as the product of its parts" if abs(trial.ratio / product - 1) < 0.04 else (
            f"where its parts would give {product:.2f}"
        )  # fmt: skip
        lines.append(f"Together: {trial.name} {trial.ratio:.2f}, {verdict}.")
    return lines
