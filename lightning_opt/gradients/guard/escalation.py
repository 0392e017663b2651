"""Choose the response to a fault; skip an update or reduce its learning rate."""

from __future__ import annotations

from functools import wraps
from types import MethodType
from typing import Any, Literal, TypeAlias

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks

from lightning_opt.core.arguments import check_at_least, check_one_of, check_share
from lightning_opt.core.modules.patching import Patches, replaced
from lightning_opt.core.numerics.norms import parameters_of
from lightning_opt.core.numerics.scalars import Condition, to_plain
from lightning_opt.gradients.guard.detector import SPIKES, Kind
from lightning_opt.trainer.run_callback import has_step_hooks

Policy: TypeAlias = Literal["skip", "rollback", "raise"]
Action: TypeAlias = Literal["skip", "backoff", "rollback", "raise"]

MAX_BACKOFFS = 4
"""Maximum number of reductions that add up. More would stall the run."""

RECOVERY_STEPS = 100
"""Good steps that undo one reduction of the learning rate, by a constant factor per step."""


class Escalation:
    """Counts faults in a row per optimizer, and chooses the response and the learning rate scale.

    Args:
        policy: ``"skip"`` never rolls back, ``"rollback"`` uses all responses, ``"raise"`` stops at
            the first fault.
        backoff_after: Faults in a row at which the learning rate is scaled by ``lr_backoff``.
        rollback_after: Faults in a row at which the snapshot is restored.
        max_consecutive: Faults in a row at which the run stops. A spike stops a run only under
            ``policy="raise"``.
        lr_backoff: Factor of a reduction, in (0, 1]; 1 keeps the learning rate.

    Attributes:
        rollbacks: Snapshots restored so far.
    """

    def __init__(
        self,
        policy: Policy = "skip",
        backoff_after: int = 3,
        rollback_after: int = 6,
        max_consecutive: int = 10,
        lr_backoff: float = 0.5,
    ) -> None:
        self.lr_backoff = check_share("lr_backoff", lr_backoff)
        self.policy = check_one_of("policy", policy, ("skip", "rollback", "raise"))
        self.backoff_after = check_at_least("backoff_after", backoff_after, 1)
        self.rollback_after = check_at_least("rollback_after", rollback_after, 1)
        self.max_consecutive = check_at_least("max_consecutive", max_consecutive, 1)
        if policy == "rollback" and rollback_after >= max_consecutive:
            raise ValueError(
                f"rollback_after ({rollback_after}) must be below max_consecutive "
                f"({max_consecutive}): the run would stop before it is rolled back."
            )
        self.reset()

    def reset(self) -> None:
        """Reset the counts of all optimizers."""
        self._states: dict[int, dict[str, Any]] = {}
        self.rollbacks = 0

    def state(self, index: int) -> dict[str, Any]:
        """Return the state of one optimizer. Only the detector uses its ``history``."""
        initial = {"consecutive": 0, "skipped": 0, "overflows": 0, "lr_scale": 1.0, "history": {}}
        return self._states.setdefault(index, initial)

    def record(self, index: int, kind: Kind | None, *, overflow: bool = False) -> Action | None:
        """Count a step, and return the response to its fault; None for a step without a fault.

        Args:
            index: The optimizer's index.
            kind: The fault, if there is one.
            overflow: Whether the loss scaler skips the step.
        """
        state = self.state(index)
        if kind is None:
            if overflow:
                state["overflows"] += 1
            else:
                state["consecutive"] = 0
                recovered = state["lr_scale"] * self.lr_backoff ** (-1.0 / RECOVERY_STEPS)
                state["lr_scale"] = min(1.0, recovered)
            return None
        state["consecutive"] += 1
        state["skipped"] += 1
        faults, is_spike = state["consecutive"], kind in SPIKES
        if self.policy == "raise" or (faults >= self.max_consecutive and not is_spike):
            return "raise"
        if self.policy == "rollback" and faults == self.rollback_after:
            return "rollback"
        if faults == self.backoff_after and self.lr_backoff < 1.0:
            self._back_off(state)
            return "backoff"
        return "skip"

    def record_rollback(self) -> None:
        """Count a rollback, and reduce every learning rate once more."""
        self.rollbacks += 1
        for state in self._states.values():
            self._back_off(state)

    def _back_off(self, state: dict[str, Any]) -> None:
        lowest = self.lr_backoff**MAX_BACKOFFS
        state["lr_scale"] = max(lowest, state["lr_scale"] * self.lr_backoff)

    def scalars(self) -> dict[str, float]:
        """Return the values to log. Does not read a device."""
        states = list(self._states.values())
        return {
            "guard/skipped": float(sum(state["skipped"] for state in states)),
            "guard/consecutive": float(max((state["consecutive"] for state in states), default=0)),
            "guard/overflows": float(sum(state["overflows"] for state in states)),
            "guard/lr_scale": float(min((state["lr_scale"] for state in states), default=1.0)),
            "guard/rollbacks": float(self.rollbacks),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return all counts and histories as plain types. Waits for the device."""
        return {"optimizers": to_plain(self._states), "rollbacks": self.rollbacks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        optimizers = state_dict["optimizers"]
        self._states = {int(index): to_plain(state) for index, state in optimizers.items()}
        self.rollbacks = state_dict["rollbacks"]


class _SkippedUpdate(Exception):  # noqa: N818 - not an error
    """Raised in the closure to end ``Optimizer.step`` before it updates the weights."""


class UpdateControl:
    """Skips one update of an optimizer, or scales its learning rate for one update.

    Changes are applied right before the update, after all hooks of callbacks and modules. They are
    undone right after it. Modules, loggers, schedulers and checkpoints see unchanged gradients and
    learning rates.

    If ``skip`` is a tensor, the optimizer's fused kernel skips the update. If it is True, the
    optimizer's ``step`` ends after its closure has evaluated the loss.

    Args:
        optimizer: The optimizer itself, without Lightning's wrapper.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer: Any = optimizer
        self._skip: Condition = False
        self._lr_scale = 1.0
        self._changes, self._patch = Patches(), Patches()
        original: Any = optimizer.step

        # A method with the same signature: schedulers and loss scalers inspect it.
        @wraps(getattr(original, "__func__", original))
        def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self._step(original, *args, **kwargs)

        self._patch.enter_context(replaced(optimizer, step=MethodType(step, optimizer)))

    def release(self) -> None:
        """Undo all changes to the optimizer, and restore its ``step``."""
        self.reset()
        self._patch.close()

    def skips_on_device(self) -> bool:
        """Return whether the optimizer skips a step by itself if ``optimizer.found_inf`` is 1.

        True for torch's fused kernels. False for subclasses, which may override ``step``, and for
        SGD if its gradients have no momentum yet: torch (2.13) allocates it uninitialised, and a
        skipped step would never set it. Torch raises if only some gradients of a group have one.
        """
        groups, state = self.optimizer.param_groups, self.optimizer.state
        kind = type(self.optimizer)
        if kind not in (Adam, AdamW, SGD, Adagrad) or not all(g.get("fused") for g in groups):
            return False
        return kind is not SGD or all(
            group["momentum"] == 0
            or next((state.get(p) for p in group["params"] if p.grad is not None), True)
            for group in groups
        )

    def prepare(self, skip: Condition, lr_scale: float) -> None:
        """Set the changes of the next update. Call it in ``on_before_optimizer_step``.

        Args:
            skip: Whether to skip the update. A tensor requires :meth:`skips_on_device`.
            lr_scale: Factor on the learning rate.
        """
        self._skip, self._lr_scale = skip, lr_scale

    def reset(self) -> None:
        """Undo the applied changes, and cancel the prepared ones."""
        self._changes.close()
        self._skip, self._lr_scale = False, 1.0

    def _step(self, original: Any, closure: Any = None, **kwargs: Any) -> Any:
        versions, changed_weights, result = self._versions(), False, None

        # Without a loss scaler Lightning runs forward pass, backward pass and all hooks inside the
        # closure.
        def evaluate() -> Any:
            nonlocal changed_weights, result
            changed_weights = self._versions() != versions
            result = closure()
            if self._skip is True:
                raise _SkippedUpdate
            self._apply()
            return result

        try:
            if closure is not None:
                return original(closure=evaluate, **kwargs)
            if self._skip is True:
                return None
            self._apply()
            return original(**kwargs)
        except _SkippedUpdate:
            if changed_weights:
                rank_zero_warn(
                    f"NonFiniteGuard skips a step of {type(self.optimizer).__name__}, which had "
                    "changed the weights before it evaluated the loss, or between two "
                    "evaluations. This change is not undone."
                )
            self._run_post_hooks({**kwargs, "closure": closure})
            return result
        finally:
            self.reset()

    def _versions(self) -> int:
        """Return a number that grows with each in-place change of a weight.

        It is 0 for torch's own optimizers, which are not checked.
        """
        if type(self.optimizer).__module__.startswith("torch.optim"):
            return 0
        return sum(parameter._version for parameter in parameters_of(self.optimizer))

    def _run_post_hooks(self, kwargs: dict[str, Any]) -> None:
        """Run the optimizer's post hooks, since its pre hooks have run. They see no gradients."""
        for parameter in parameters_of(self.optimizer):
            self._changes.callback(setattr, parameter, "grad", parameter.grad)
            parameter.grad = None
        optimizer = self.optimizer
        own = optimizer._optimizer_step_post_hooks if has_step_hooks(optimizer) else {}
        for hook in [*own.values(), *_global_optimizer_post_hooks.values()]:
            hook(optimizer, (), kwargs)

    def _apply(self) -> None:
        optimizer = self.optimizer
        self._changes.close()  # changes of an earlier evaluation of the loss
        if isinstance(self._skip, Tensor):
            flag = self._skip.to(torch.float32)
            found = getattr(optimizer, "found_inf", None)
            if found is not None:  # set by a loss scaler, which removes it afterwards
                flag = torch.maximum(flag, found.to(flag.device))
            self._changes.enter_context(replaced(optimizer, found_inf=flag))
        if self._lr_scale != 1.0:
            for group in optimizer.param_groups:
                rate = group.get("lr")
                if rate is not None:
                    group["lr"] = scaled = rate * self._lr_scale
                    self._changes.callback(_restore_rate, group, rate, scaled)


def _restore_rate(group: dict[str, Any], rate: Any, scaled: Any) -> None:
    if group["lr"] is scaled:  # otherwise the optimizer has set another rate
        group["lr"] = rate
