"""DiLoCo as a Lightning strategy."""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_opt.core.arguments import at_least, fraction, one_of, positive
from lightning_opt.core.modules.patching import do_nothing, replaced
from lightning_opt.core.output.loggers import log_scalars
from lightning_opt.strategies.diloco.agreement import (
    average_states,
    broadcast_all,
    require_equal_batches,
)
from lightning_opt.strategies.diloco.exchange import CODECS, Replicas, make_groups
from lightning_opt.strategies.diloco.fragments import default_outer
from lightning_opt.strategies.diloco.replica import Plan, Replica
from lightning_opt.strategies.own_exchange import OwnExchangeStrategy
from lightning_opt.trainer.run_callback import raise_if_lbfgs


class DiLoCoStrategy(OwnExchangeStrategy):
    """Replicas train by themselves, and every ``sync_every`` steps apply what all have moved.

    For links of 1 Gbit/s and less, between machines or sites. A replica is a machine, within which
    DDP reduces gradients at each step; with ``num_nodes=1`` it is each process. After
    ``sync_every`` optimizer steps, the replicas average by how much their weights have moved, and
    an outer step of SGD with Nesterov momentum applies the mean to the weights that all share.

    With ``fragments`` parts of the model take turns, each once in ``sync_every`` steps, and with
    ``delay`` their exchange goes on in the background during so many further steps: what the others
    bring is then added to what the replica has learnt meanwhile.

    Before a validation, a checkpoint and the end of the fit, all replicas take the mean of their
    weights and buffers (uncompressed, without outer step), so these see one model. A checkpoint
    also averages the optimizers' states; it resumes exactly, at any number of processes.

    Learning rates, clipping, guards, the loss scale and accumulation are each replica's own;
    schedulers count local steps. All replicas must take the same number of steps. A replica whose
    weights became NaN or infinite takes those that all share, and what it has moved is left out.

    Logged every ``Trainer(log_every_n_steps)`` optimizer steps:

    ===================== =====================================================================
    ``comm/bytes``        bytes that this process sends in a step, mean since the last time
    ``comm/wait_s``       seconds of a step that training waited for other replicas, likewise
    ``diloco/drift``      L2 distance of this replica from the mean, when it last sent
    ``diloco/outer_norm`` L2 norm of the mean by which the replicas have last moved
    ===================== =====================================================================

    Args:
        sync_every: Optimizer steps of a window, H in the papers.
        outer_lr: Learning rate of the outer steps; None for what did best at ``sync_every``.
        outer_momentum: Their Nesterov momentum; None likewise.
        fragments: How many parts of the model take turns.
        delay: Optimizer steps that the exchange of a fragment may take; 0 to wait for it.
        compression: ``"int8"``, ``"int4"`` or ``"float32"``: how the moves are sent. What a message
            fails to carry is added to the next one.
        **kwargs: What :class:`~lightning.pytorch.strategies.DDPStrategy` and
            :class:`~torch.nn.parallel.DistributedDataParallel` (within a machine) take.

    Raises:
        ValueError: For arguments out of range, more fragments than ``sync_every``, a ``delay`` that
            is not shorter than the window; in ``setup`` for LBFGS and for sharded parameters.

    References:
        Douillard et al. (2023), *DiLoCo: Distributed Low-Communication Training of Language
        Models*. Douillard et al. (2025), *Streaming DiLoCo with overlapping communication*.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> strategy = lo.DiLoCoStrategy(sync_every=30, fragments=4, delay=5)
        >>> trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)
    """

    title = "DiLoCo"
    checkpoint_key = "lightning_opt.diloco"
    brought = (*OwnExchangeStrategy.brought, "process_group")

    def __init__(
        self,
        sync_every: int = 16,
        outer_lr: float | None = None,
        outer_momentum: float | None = None,
        fragments: int = 1,
        delay: int = 0,
        compression: Literal["int8", "int4", "float32"] = "int8",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        lr, momentum = default_outer(at_least("sync_every", sync_every, 1))
        self.plan = Plan(
            sync_every,
            lr if outer_lr is None else positive("outer_lr", outer_lr),
            momentum if outer_momentum is None else fraction("outer_momentum", outer_momentum),
            at_least("fragments", fragments, 1),
            at_least("delay", delay, 0),
            one_of("compression", compression, tuple(CODECS)),
        )
        if max(fragments, delay + 1) > sync_every:
            raise ValueError(
                f"fragments={fragments} and delay={delay} do not fit into sync_every={sync_every}: "
                "each fragment is sent once in so many steps, and must arrive before the next time."
            )
        self._replicas: Replicas | None = None
        self._replica: Replica | None = None

    def configure_ddp(self) -> None:
        """Make the replicas start alike; within one of several processes, wrap the model."""
        self.refuse_shards()
        if self.world_size == 1:
            return  # there is nobody to learn from
        module = self._module
        processes = self.num_processes if self.num_nodes > 1 else 1
        if self._replicas is None:
            self._replicas, self.step_group = make_groups(processes, self._timeout)
        broadcast_all([*module.parameters(), *module.buffers()])
        for part in module.modules():
            if isinstance(part, nn.SyncBatchNorm):  # across machines every step would wait
                part.process_group = self.step_group
        if processes > 1:
            self._ddp_kwargs["process_group"] = self.step_group
            super().configure_ddp()

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the optimizers, and refuse those that DiLoCo does not suit."""
        super().setup_optimizers(trainer)
        raise_if_lbfgs("DiLoCo", self.optimizers)
        if self._replicas is not None:
            # Before any other callback looks at the weights.
            first = LambdaCallback(on_validation_start=self.agree, on_train_end=self.agree)
            trainer.callbacks.insert(0, first)
            self._undo.callback(trainer.callbacks.remove, first)
            # Lightning asks rank 0 at every batch whether it has got a SIGTERM.
            loop = trainer.fit_loop.epoch_loop
            self._undo.enter_context(replaced(loop, _broadcast_sigterm_tensor=do_nothing))

    def on_train_start(self) -> None:
        """Take the weights that training starts from for those that all share."""
        super().on_train_start()
        if self._replicas is not None:
            require_equal_batches(self._module.trainer.num_training_batches, self.root_device)
            self._replica = Replica(
                self._module, self.optimizers, self._replicas, self.plan, self._resumed or {}
            )
            self._undo.callback(self._replica.worker.shutdown, wait=False)
        self._resumed = None

    def on_train_end(self) -> None:
        """Agree once more, on what callbacks have made of the weights."""
        super().on_train_end()
        self.agree()

    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Take a local step; send and merge what is due after it."""
        replica = self._replica
        if replica is None:
            return super().optimizer_step(optimizer, *args, **kwargs)
        replica.before_step()
        output = super().optimizer_step(optimizer, *args, **kwargs)
        step, every = replica.after_step(), self._module.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and step % every == 0:
            log_scalars(self._module.trainer, replica.read())
        return output

    def agree(self, *_: Any) -> None:
        """Give all replicas the mean of their weights and buffers. All processes must call it."""
        # A process that something has interrupted may be alone.
        if self._replica is not None and not self._module.trainer.interrupted:
            self._replica.agree()

    def reset_residuals(self) -> None:
        """Take the weights that all share, since this replica has put its own back."""
        if self._replica is not None:
            self._replica.reset()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights, on which all replicas agree first."""
        self.agree()
        return super().lightning_module_state_dict()

    @torch.no_grad()
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Return the state of an optimizer, which all replicas average first."""
        if self._replica is not None and not self._module.trainer.interrupted:
            average_states(optimizer)
        return super().optimizer_state(optimizer)

    def state_to_save(self) -> dict[str, Any] | None:
        """Return the outer momentum and the place in the window."""
        return None if self._replica is None else self._replica.state_dict()

    def teardown(self) -> None:
        """Let go of the model and the thread."""
        self._replica = None
        super().teardown()
