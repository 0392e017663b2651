"""The search in sentences."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lightning_opt.tuner import account as parts
from lightning_opt.tuner.search.objective import OBJECTIVES
from lightning_opt.tuner.search.space import Facts, Space
from lightning_opt.tuner.trial import Trial

if TYPE_CHECKING:
    from lightning_opt.tuner.report.result import TuneResult

OVERHEAD = "Lightning and callbacks"
PARTS = {
    parts.WAITING: (parts.WAITING,),
    "computing": (parts.FORWARD, parts.BACKWARD, parts.OPTIMIZER),
    parts.COMMUNICATION: (parts.COMMUNICATION,),
    OVERHEAD: (parts.CALLBACKS, parts.REST),
}
"""What may be the bottleneck, and of which groups it consists."""

REMEDIES = {
    parts.WAITING: "a faster disk, more CPUs for workers, or items that take less to load",
    parts.COMMUNICATION: "a faster network, or fewer exchanges",
    OVERHEAD: "a larger batch, since these take as long whatever is in it",
}


def bottleneck(facts: Facts) -> tuple[str, float]:
    """Return what takes most of a step, and its share."""
    shares = {part: facts.share(*groups) or 0.0 for part, groups in PARTS.items()}
    return max(shares.items(), key=lambda item: item[1])


def describe_step(space: Space, baseline: Trial) -> list[str]:
    """Return in five lines where the baseline's step goes, and what will be tried."""
    facts, what = space.facts, f"Tried will be: {', '.join(space.switches) or 'nothing'}."
    if not facts.account:
        return [what]
    shares = ", ".join(f"{group} {facts.share(group) or 0:.0%}" for group in facts.account)
    used = f"{facts.busy:.0%} of {facts.cpus} CPU{'s' * (facts.cpus > 1)}"
    if facts.device != "cpu":
        idle = facts.share(parts.WAITING, parts.CALLBACKS, parts.REST) or 0.0
        used = f"the device ({facts.device}) {1 - idle:.0%} of the time"
    return [
        f"A step takes {1e3 * (baseline.seconds or 0):.3g} ms: {shares}.",
        "The bottleneck is {} ({:.0%}).".format(*bottleneck(facts)),
        f"It uses {used}.",
        f"It takes {(baseline.peak or 0) / 2**20:,.0f} MiB at its peak; {facts.room / 2**20:,.0f} "
        "MiB are free.",
        what,
    ]


def _further(facts: Facts) -> str:
    """Return what would have to change for more."""
    part, share = bottleneck(facts)
    better = "a faster device, or more of them"
    if facts.device != "cuda" or facts.no_bf16:
        better = "a GPU with bf16"
    return f"More would take {REMEDIES.get(part, better)}: {part} takes {share:.0%} of a step."


def explain(result: TuneResult) -> str:
    """Return paragraphs, one a line; the first is the answer."""
    space, best, objective = result.space, result.best, result.objective
    tried = [trial for trial in result.trials if trial.switches]
    lines = [_answer(objective, best, bool(tried))]
    if best.switches:
        lines += [f"{name}: {space.switches[name].about}" for name in best.switches]
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
    if result.batches:
        named = {" + ".join(names): size for names, size in result.batches.items()}
        sizes = ", ".join(
            f"{n} {name and 'with '}{name or 'as it is'}" for name, n in named.items()
        )
        lines.append(f"Largest batch, tried: {sizes}.")
    if objective == "memory" and best.switches and best.peak_ratio:
        lines.append(
            f"Largest model: by the peak about {1 / best.peak_ratio:.2g} times as large as without."
        )
    if objective == "throughput" and space.facts.account:
        lines.append(_further(space.facts))
    if not result.complete:
        lines.append("The budget ended before the search did; a longer one may find more.")
    return "\n".join(lines)


def _answer(objective: str, best: Trial, tried: bool) -> str:
    if not tried:
        return "Change nothing: nothing was tried."
    if not best.switches:
        return f"Change nothing: no candidate gains enough in {OBJECTIVES[objective]} to be sure."
    ratio, low, high = best.interval
    return (
        f"Take {best.name}: a step takes {ratio:.2f} of the time (from {low:.2f} to {high:.2f}), "
        f"peak memory is {best.peak_ratio or math.nan:.2f} of what it was."
    )
