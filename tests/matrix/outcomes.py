"""What a cell of the matrix or the zoo says: how far weights are apart, where an error is from."""

import traceback
from pathlib import Path

from torch import Tensor

Weights = dict[str, Tensor]


def largest_difference(a: Weights, b: Weights) -> float:
    """Return the largest difference of any two elements that are not the same."""
    if a.keys() != b.keys():
        raise RuntimeError(f"The weights have other names: {sorted(a.keys() ^ b.keys())}.")
    largest = 0.0
    for name, value in a.items():
        other = b[name]
        differs = (value != other) & ~(value.isnan() & other.isnan())  # infinities may be the same
        if differs.any():
            largest = max(largest, float((value - other)[differs].abs().max()))
    return largest


def describe_error(error: Exception, begun: bool) -> str:
    """Return what a cell says that raised, before the first step or after it had begun."""
    message = " ".join(str(error).split())
    last = traceback.extract_tb(error.__traceback__)[-1]
    if begun:
        where = f"{Path(last.filename).name}:{last.lineno}"
        return f"fails: {type(error).__name__} in training, from {where}: {message}"
    # An error that torch runs into by itself is no refusal, however early it comes.
    if "/lightning_opt/" in last.filename or "/lightning/" in last.filename:
        return f"refused: {message}"
    return f"fails: {type(error).__name__} from {Path(last.filename).name}: {message}"
