"""What the schema of an operator says: which arguments it writes, and whether it makes memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from lightning_opt.core.modules.splitting import tensors_of


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors among the arguments that ``func`` writes to.

    Args:
        func: An operator, as ``__torch_dispatch__`` gets it.
        args: Its positional arguments.
        kwargs: Its other arguments.
    """
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from tensors_of(value)


def returns_views(func: Any) -> bool:
    """Return whether what ``func`` returns is memory of its arguments."""
    return any(result.alias_info is not None for result in func._schema.returns)
