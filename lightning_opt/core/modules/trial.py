"""One training step of the user's model on the user's batch, which leaves no trace."""

from __future__ import annotations

import copy
import functools
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_opt.core.measure.timing import wait_for
from lightning_opt.core.modules.batches import tensors_of
from lightning_opt.core.modules.compiling import has_compiled_parts
from lightning_opt.core.modules.patching import do_nothing, replaced
from lightning_opt.core.modules.preserve import isolated_random, preserved
from lightning_opt.core.modules.sharding import is_dtensor

if TYPE_CHECKING:
    import lightning.pytorch as pl


@contextmanager
def without_a_trace(
    trainer: pl.Trainer, module: pl.LightningModule, written: WrittenParameters | None = None
) -> Iterator[None]:
    """Let training steps run that change, log and step nothing.

    Random numbers, gradients, buffers, metrics, counters, collected outputs and parameters that
    ``training_step`` itself writes are afterwards as before. Nothing is logged, optimizers and
    schedulers do not step. What ``training_step`` does to the world outside (a file, an
    environment) it does.

    Args:
        trainer: The Trainer.
        module: Its module.
        written: What is known of those parameters already, where steps are timed.
    """
    with ExitStack() as stack:
        stack.enter_context((written or WrittenParameters(module)).put_back())
        stack.enter_context(isolated_random(module.device))
        stack.enter_context(preserved(module))
        stack.enter_context(
            replaced(
                module,
                log=lambda *args, **kwargs: None,
                log_dict=lambda *args, **kwargs: None,  # `do_nothing` would call a metric
                manual_backward=lambda loss, *args, **kwargs: loss.backward(*args, **kwargs),
            )
        )
        optimizers = module.optimizers()
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            stack.enter_context(replaced(optimizer, step=do_nothing))
        for config in trainer.lr_scheduler_configs:
            stack.enter_context(replaced(config.scheduler, step=do_nothing))
        yield


def loss_of(trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> Any:
    """Run ``training_step`` in the run's precision, and return its loss.

    Under DDP it goes past the wrapper, whose reducer then expects no gradients and stays out of it.
    """
    past_ddp = isinstance(trainer.strategy.model, DistributedDataParallel)
    step = module.training_step if past_ddp else trainer.strategy.training_step
    args = (batch, batch_idx)[: _arguments(module.training_step)]
    with trainer.precision_plugin.train_step_context():
        loss = step(*args)
    return loss.get("loss") if isinstance(loss, dict) else loss


def run_step(trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
    """Run ``training_step`` and its backward pass, and wait until the device is done."""
    with torch.enable_grad():
        loss = loss_of(trainer, module, batch, batch_idx)
        if module.automatic_optimization and loss is not None:
            module.backward(loss)
    wait_for(module.device)


def as_delivered(trainer: pl.Trainer, module: pl.LightningModule, batch: Any) -> Any:
    """Return a batch of a loader as ``training_step`` gets it: converted, on the device."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def _arguments(training_step: Callable[..., Any]) -> int:
    """Return whether ``training_step`` takes a batch alone (1), or its index too (2)."""
    kinds = [p.kind for p in inspect.signature(training_step).parameters.values()]
    placed = sum(kind in (0, 1) for kind in kinds)  # positional ones
    return 2 if placed >= 2 or inspect.Parameter.VAR_POSITIONAL in kinds else 1


class TrialStep:
    """Forward and backward pass of a training step, as often as wanted, without consequences.

    See :func:`without_a_trace`. No callback is told of it.

    Args:
        trainer: The Trainer, within ``on_train_batch_start``.
        pl_module: Its module.
        batch: The batch; the step gets a copy.
        batch_idx: Its index.
    """

    def __init__(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._trainer, self._module = trainer, pl_module
        self._batch, self._batch_idx = batch, batch_idx
        self._written = WrittenParameters(pl_module)

    def run(self, inside: Callable[[ExitStack], Any] | None = None) -> float:
        """Run it once.

        Args:
            inside: Called with a stack right before the forward pass, to enter contexts that last
                until the end of the backward pass.

        Returns:
            Seconds from the start of the forward to the end of the backward pass.
        """
        module = self._module
        with without_a_trace(self._trainer, module, self._written):
            batch = copy.deepcopy(self._batch)  # before anything measures
            self._make_gradients()
            wait_for(module.device)
            with ExitStack() as measured:
                if inside is not None:
                    inside(measured)
                start = time.perf_counter()
                run_step(self._trainer, module, batch, self._batch_idx)
                return time.perf_counter() - start

    def _make_gradients(self) -> None:
        """Have the gradients there before the measurement, which is of activations."""
        parameters = list(self._module.parameters())
        fsdp1 = type(self._trainer.strategy.model).__name__ == "FullyShardedDataParallel"
        if fsdp1 or any(map(is_dtensor, parameters)):
            return  # sharded gradients are made by the strategy
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)


class WrittenParameters:
    """The parameters that ``training_step`` itself writes, such as a teacher that is an average.

    The first time they are found, each copied right before it is written; afterwards, when steps
    may be timed, these are copied at once and nothing is watched. Where parts are compiled, whose
    writes cannot be seen coming, all are copied.

    Args:
        module: Whose step it is.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._known = list(module.parameters()) if has_compiled_parts(module) else None

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Let steps run, and leave the parameters as they were."""
        watch, step = _WriteWatch(self._module), self._module.training_step
        watch.copies = {p: p.detach().clone() for p in self._known or ()}
        versions = {p: p._version for p in watch.copies}

        @functools.wraps(step)
        def watched(*args: Any, **kwargs: Any) -> Any:
            with watch:
                return step(*args, **kwargs)

        watching = {"training_step": watched} if self._known is None else {}
        try:
            with replaced(self._module, **watching):
                yield
            self._known = list(watch.copies)
        finally:
            with torch.no_grad():
                for parameter, copy_ in watch.copies.items():
                    if parameter._version != versions.get(parameter):
                        parameter.data.copy_(copy_)  # `.data`: autograd need not know


class _WriteWatch(TorchDispatchMode):
    """Copies each parameter of a module right before an operator first writes to it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        plain = [p for p in module.parameters() if type(p) is nn.Parameter]
        self._by_memory = {p.untyped_storage().data_ptr(): p for p in plain}
        self.copies: dict[nn.Parameter, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for tensor in written_by(func, args, kwargs or {}):
            if type(tensor) in (Tensor, nn.Parameter):
                parameter = self._by_memory.get(tensor.untyped_storage().data_ptr())
                if parameter is not None and parameter not in self.copies:
                    self.copies[parameter] = parameter.detach().clone()
        return func(*args, **(kwargs or {}))


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
