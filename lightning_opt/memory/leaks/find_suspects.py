"""From counts of everything to suspects: what has grown each time, is large enough, and whose."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

from lightning_opt.memory.leaks.census import (
    Census,
    growing_containers,
    growing_graph,
    item_size,
    longest_graph,
    steady_garbage,
)
from lightning_opt.memory.leaks.suspects import (
    Suspect,
    source_line,
    suspect_container,
    suspect_cycle,
    suspect_graph,
)
from lightning_opt.memory.object_graph import (
    Root,
    Walk,
    backwards,
    describe,
    owners,
)

PER_STEP = 0.02
"""Items a step below which a container is no leak: one in fifty steps."""

MOST = 5


def find_suspects(
    counts: Sequence[Census],
    roots: Sequence[Root],
    min_rate: float,
    searcher: Any,
    native: bool,
) -> list[Suspect]:
    """Return what has grown from count to count, the fastest first, five at most.

    Args:
        counts: The oldest first.
        roots: Where to look for names.
        min_rate: Bytes a step that are too few to matter.
        searcher: Who asks; what it holds itself does not count.
        native: Whether memory is known to grow, so that something must be wrong even if no object
            of Python grows.
    """
    step = counts[-1].step
    walk = Walk(roots)
    suspects = _containers(counts, walk, min_rate, searcher)
    garbage = steady_garbage(counts)
    if garbage >= min_rate:
        last = counts[-1]
        suspects.append(suspect_cycle(last.garbage, garbage, last.step - counts[-2].step, step))
    rate = growing_graph(counts)
    tensor = longest_graph() if rate >= PER_STEP else None
    if tensor is not None:
        chain = walk.path(tensor) or backwards(tensor, [walk.found])
        line = source_line(owners(chain))
        suspects.append(suspect_graph(tensor, _name(walk, chain), line, rate, step))
    if not suspects and native:
        suspects = [Suspect("native", "memory in no container", None, "bytes", 0.0, 0.0, step)]
    largest = max((s.kb_per_step for s in suspects), default=0.0)
    worth = [s for s in suspects if s.kb_per_step >= 0.1 * largest]
    return sorted(worth, key=lambda suspect: -suspect.kb_per_step)[:MOST]


def _containers(
    counts: Sequence[Census], walk: Walk, min_rate: float, searcher: Any
) -> list[Suspect]:
    rates = growing_containers(counts, PER_STEP)
    things = {key: walk.found[key][0] for key in rates if key in walk.found}
    if len(things) < len(rates):
        things |= {id(thing): thing for thing in gc.get_objects() if id(thing) in rates}
    own = {id(held) for held in vars(searcher).values()} | {id(vars(searcher)), id(walk.found)}
    sizes = {key: item_size(thing) for key, thing in things.items() if key not in own}
    heavy = sorted(
        (key for key in sizes if rates[key] * sizes[key] >= min_rate / 2),
        key=lambda key: -rates[key] * sizes[key],
    )
    suspects = []
    for key in heavy[:MOST]:
        chain = walk.path(things[key]) or backwards(things[key], [things, walk.found])
        if any(item is searcher for item in chain):
            continue
        root = walk.name(chain[0]) if key in walk.found else None
        suspects.append(suspect_container(chain, root, rates[key], sizes[key], counts[-1].step))
    return suspects


def _name(walk: Walk, chain: Sequence[Any]) -> str:
    if not chain:
        return "?"
    return describe(chain, walk.name(chain[0]) if id(chain[0]) in walk.found else None)
