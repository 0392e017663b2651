"""DiLoCo as a Lightning strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from lightning_opt.core.arguments import (
    check_at_least,
    check_fraction,
    check_one_of,
    check_positive,
)
from lightning_opt.core.modules.lazy import raise_if_lazy
from lightning_opt.core.modules.patching import do_nothing, replaced
from lightning_opt.core.modules.sharding import largest_over_ranks
from lightning_opt.core.output.loggers import log_scalars
from lightning_opt.strategies.diloco.exchange import (
    CODECS,
    Replicas,
    average_states,
    broadcast_all,
    make_groups,
)
from lightning_opt.strategies.diloco.replica import COLLECTIVE, Plan, Replica
from lightning_opt.strategies.own_exchange import OwnExchangeStrategy
from lightning_opt.trainer.lightning import package_of
from lightning_opt.trainer.run_callback import raise_if_lbfgs

if TYPE_CHECKING:
    import lightning.pytorch as pl


class DiLoCoStrategy(OwnExchangeStrategy):
    """Replicas train on their own, and average their changes every ``sync_every`` steps.

    For links of 1 Gbit/s and less, between machines or sites. A replica is a machine, within which
    DDP reduces gradients at each step; with ``num_nodes=1`` it is each process. After
    ``sync_every`` optimizer steps, the replicas average the change of their weights (the
    pseudo-gradient), and an outer step of SGD with Nesterov momentum applies the mean to the shared
    weights.

    With ``fragments``, parts of the model take turns, each once in ``sync_every`` steps. With
    ``delay``, a fragment is exchanged in the background during that many further steps; the outer
    step is then added to the replica's progress since.

    Before a validation, a checkpoint and the end of the fit, all replicas take the mean of their
    weights and buffers (uncompressed, without outer step), so all of them have the same model. A
    checkpoint also averages the optimizers' states; it resumes exactly, at any number of processes.

    Each replica has its own learning rate, clipping, guards, loss scale and accumulation;
    schedulers count local steps. All replicas must take the same number of steps. A replica whose
    weights became NaN or infinite takes the shared weights, and its pseudo-gradient is skipped.

    Logged every ``Trainer(log_every_n_steps)`` optimizer steps:

    ===================== =====================================================================
    ``comm/bytes``        bytes that this process sends per step, mean since the last report
    ``comm/wait_s``       seconds per step that training waits for other replicas, also a mean
    ``diloco/drift``      L2 distance between this replica and the mean, when it last sent
    ``diloco/outer_norm`` L2 norm of the latest mean pseudo-gradient
    ===================== =====================================================================

    Args:
        sync_every: Optimizer steps per window, H in the papers.
        outer_lr: Learning rate of the outer steps. None for 1.0 if ``sync_every`` is at most 16,
            else 0.7: the best in benchmarks.
        outer_momentum: Nesterov momentum of the outer steps. None for 0.0 if ``sync_every`` is at
            most 16, else 0.8.
        fragments: Number of parts of the model that take turns.
        delay: Optimizer steps that the exchange of a fragment may take; 0 to wait for it.
        compression: ``"int8"``, ``"int4"`` or ``"float32"``: the format of sent pseudo-gradients.
            The unsent rest of a message is added to the next one.
        **kwargs: Arguments of :class:`~lightning.pytorch.strategies.DDPStrategy` and
            :class:`~torch.nn.parallel.DistributedDataParallel` (within a machine).

    Raises:
        ValueError: For arguments out of range, more fragments than ``sync_every``, or a ``delay``
            that is not shorter than the window; in ``setup`` for LBFGS, for sharded parameters,
            lazy layers without weights, and a model without trainable parameters; before a step
            if processes have different numbers of batches, also after loaders were reloaded.
        RuntimeError: At the next exchange or collective of Lightning, on all processes, if an
            ``IterableDataset`` ended on one replica while others still train.

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
    forbidden = (*OwnExchangeStrategy.forbidden, "process_group")

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
        check_at_least("sync_every", sync_every, 1)
        # The best in benchmarks/strategies/diloco_accuracy.py.
        lr, momentum = (1.0, 0.0) if sync_every <= 16 else (0.7, 0.8)
        outer_lr = lr if outer_lr is None else outer_lr
        outer_momentum = momentum if outer_momentum is None else outer_momentum
        self.plan = Plan(
            sync_every,
            check_positive("outer_lr", outer_lr),
            check_fraction("outer_momentum", outer_momentum),
            check_at_least("fragments", fragments, 1),
            check_at_least("delay", delay, 0),
            check_one_of("compression", compression, tuple(CODECS)),
        )
        if max(fragments, delay + 1) > sync_every:
            raise ValueError(
                f"fragments={fragments} and delay={delay} do not fit into sync_every={sync_every}: "
                "each fragment is sent once per window, and must arrive before the next window."
            )
        self._replicas: Replicas | None = None
        self._replica: Replica | None = None

    def configure_ddp(self) -> None:
        """Broadcast the weights; wrap the model if a replica has several processes."""
        self.raise_if_sharded()
        if self.world_size == 1:
            return  # nothing to exchange
        module = self._module
        raise_if_lazy(self.title, module)
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ValueError("DiLoCo needs a parameter with requires_grad=True to train.")
        processes = self.num_processes if self.num_nodes > 1 else 1
        if self._replicas is None:
            self._replicas, self.step_group = make_groups(processes, self._timeout)
        broadcast_all([*module.parameters(), *module.buffers()])
        for part in module.modules():
            if isinstance(part, nn.SyncBatchNorm):  # else every step would wait for other machines
                self._undo.enter_context(replaced(part, process_group=self.step_group))
        if processes > 1:
            self._ddp_kwargs["process_group"] = self.step_group
            super().configure_ddp()

    def setup_optimizers(self, trainer: Any) -> None:
        """Create the optimizers, and check them."""
        super().setup_optimizers(trainer)
        raise_if_lbfgs("DiLoCo", self.optimizers)
        if self._replicas is not None:
            # Before any other callback reads the weights.
            first = package_of(trainer).callbacks.LambdaCallback(
                on_train_epoch_start=self._check_loaders,
                on_validation_start=self.synchronize,
                on_train_end=self.synchronize,
            )
            trainer.callbacks.insert(0, first)
            self._undo.callback(trainer.callbacks.remove, first)
            # At every batch Lightning broadcasts whether rank 0 has received a SIGTERM.
            loop = trainer.fit_loop.epoch_loop
            self._undo.enter_context(replaced(loop, _broadcast_sigterm_tensor=do_nothing))

    def on_train_start(self) -> None:
        """Set the shared weights to the weights at the start of training."""
        super().on_train_start()
        if self._replicas is not None:
            state = self._resumed or {}
            self._replica = Replica(self._module, self.optimizers, self._replicas, self.plan, state)
            self._undo.callback(setattr, self, "_replica", None)
            self._undo.callback(self._replica.thread.close)
            self._check_loaders(self._module.trainer)  # a fit resumed in an epoch does not start it
        self._resumed = None

    # Lightning compares and copies the function that `self.log` reduces with: no patches here.

    def broadcast(self, *args: Any, **kwargs: Any) -> Any:
        self._meet()
        return super().broadcast(*args, **kwargs)

    def reduce(self, *args: Any, **kwargs: Any) -> Any:
        self._meet()
        return super().reduce(*args, **kwargs)

    def barrier(self, *args: Any, **kwargs: Any) -> Any:
        self._meet()
        return super().barrier(*args, **kwargs)

    def _meet(self) -> None:
        """Check that all replicas call one of Lightning's collectives."""
        replica = self._replica
        if replica is not None and not self._module.trainer.interrupted:
            replica.meet(COLLECTIVE)

    def _check_loaders(self, trainer: pl.Trainer, *_: Any) -> None:
        """Compare the replicas' training loaders, once each time that Lightning has loaded them.

        Raises:
            ValueError: If the numbers of batches are known, and differ.
        """
        replica, loaders = self._replica, trainer.fit_loop._combined_loader.flattened  # type: ignore[union-attr]
        if replica is None or loaders is replica.loaders:
            return
        replica.loaders = loaders
        datasets = [getattr(loader, "dataset", None) for loader in loaders]
        streams = any(one is None or isinstance(one, IterableDataset) for one in datasets)
        batches = float(trainer.num_training_batches)
        # The minimum is the maximum of the negatives.
        ends = [batches, -batches, float(streams)]
        most, fewest, may_end = largest_over_ranks(ends, self.root_device)
        if most != -fewest:
            raise ValueError(
                f"DiLoCo needs as many batches on every process, got from {-fewest:g} to {most:g}. "
                "Use a DistributedSampler, or Trainer(limit_train_batches=...) with a number that "
                "every process reaches."
            )
        replica.may_end |= bool(may_end)

    def on_train_end(self) -> None:
        """Synchronize once more, because callbacks may have changed the weights."""
        super().on_train_end()
        self.synchronize()

    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Take a local step, then send and merge the fragments that are due."""
        replica = self._replica
        if replica is None:
            return super().optimizer_step(optimizer, *args, **kwargs)
        replica.before_step()
        output = super().optimizer_step(optimizer, *args, **kwargs)
        step, every = replica.after_step(), self._module.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and step % every == 0:
            log_scalars(self._module.trainer, replica.read())
        return output

    def synchronize(self, *_: Any) -> None:
        """Set all replicas to the mean of their weights and buffers. All processes must call it."""
        # An interrupted process may be the only one that calls this.
        if self._replica is not None and not self._module.trainer.interrupted:
            self._replica.synchronize()

    def reset_residuals(self) -> None:
        """Set this replica to the shared weights, after its weights were restored."""
        if self._replica is not None:
            self._replica.reset()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights, after synchronizing the replicas."""
        self.synchronize()
        return super().lightning_module_state_dict()

    @torch.no_grad()
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Return the state of an optimizer, averaged over all replicas."""
        if self._replica is not None and not self._module.trainer.interrupted:
            average_states(optimizer)
        return super().optimizer_state(optimizer)

    def state_to_save(self) -> dict[str, Any] | None:
        """Return the outer momentum and the step number."""
        return None if self._replica is None else self._replica.state_dict()
