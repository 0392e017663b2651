"""Figures of matplotlib, which is an extra."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(owner: str, **settings: Any) -> Figure:
    """Return an empty figure that belongs to no window and no global state.

    Args:
        owner: Whose figure it is, for the error.
        **settings: What :class:`matplotlib.figure.Figure` takes.

    Raises:
        ImportError: Without matplotlib; the message names the extra.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"The figure of {owner} needs matplotlib: pip install 'lightning-opt[plots]'."
        ) from error
    return Figure(**settings)
