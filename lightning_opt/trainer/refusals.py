"""What several features refuse for the same reason."""

from __future__ import annotations

from collections.abc import Iterable

from torch.optim import LBFGS, Optimizer


def refuse_lbfgs(name: str, optimizers: Iterable[Optimizer]) -> None:
    """Refuse an optimizer that evaluates the loss and its gradient several times a step.

    Args:
        name: Of who refuses it.
        optimizers: All of the run.

    Raises:
        ValueError: If one is ``torch.optim.LBFGS``.
    """
    if any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
        raise ValueError(
            f"{name} does not work with torch.optim.LBFGS, which evaluates the loss and its "
            "gradient several times within one step. Use a first-order optimizer such as AdamW "
            "or SGD."
        )
