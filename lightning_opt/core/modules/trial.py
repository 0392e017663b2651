"""Trial runs of the user's training step that leave no side effects."""

from __future__ import annotations

import copy
import functools
import inspect
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from lightning_opt.core.measure import flops
from lightning_opt.core.measure.timing import wait_for
from lightning_opt.core.modules.batches import leaves_of, tensors_of
from lightning_opt.core.modules.compiling import has_compiled_parts
from lightning_opt.core.modules.lazy import raise_if_lazy
from lightning_opt.core.modules.patching import do_nothing, replaced
from lightning_opt.core.modules.preserve import isolated_random, preserved
from lightning_opt.core.modules.sharding import is_dtensor
from lightning_opt.core.modules.state_kinds import hidden_modules

if TYPE_CHECKING:
    import lightning.pytorch as pl


@contextmanager
def without_side_effects(
    trainer: pl.Trainer, module: pl.LightningModule, written: WrittenParameters | None = None
) -> Iterator[None]:
    """Restore all state that training steps inside the context change.

    Random numbers, gradients, buffers, metrics, counters, collected outputs and parameters that
    ``training_step`` itself writes are restored. Nothing is logged, and no FLOPs are counted;
    optimizers and schedulers do not step. Pass the same ``written`` to several trials, so that only
    the first one detects written parameters.
    """
    with ExitStack() as stack:
        stack.enter_context(replaced(flops, in_trial=True))
        stack.enter_context((written or WrittenParameters(module)).restored())
        stack.enter_context(isolated_random(module.device))
        stack.enter_context(preserved(module))
        # Not `do_nothing`: it calls a callable argument.
        stack.enter_context(replaced(module, log=lambda *args, **kwargs: None))
        if getattr(trainer.strategy.model, "find_unused_parameters", False):
            backward = functools.partial(_backward_without_hooks, module)
            stack.enter_context(replaced(module, manual_backward=backward, backward=backward))
        else:
            stack.enter_context(replaced(module, manual_backward=Tensor.backward))
        wrapped = module.optimizers()
        wrapped = wrapped if isinstance(wrapped, list) else [wrapped]
        for optimizer in (*wrapped, *trainer.optimizers):
            stack.enter_context(replaced(optimizer, step=do_nothing))
        for config in trainer.lr_scheduler_configs:
            stack.enter_context(replaced(config.scheduler, step=do_nothing))
        silent = [SilentLogger(logger) for logger in trainer.loggers]
        stack.enter_context(replaced(trainer, _loggers=silent))
        yield


def _backward_without_hooks(
    module: nn.Module,
    loss: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Tensor | Iterable[Tensor] | None = None,
) -> None:
    """Accumulate the module's gradients like ``loss.backward``, without the hooks of DDP.

    With ``find_unused_parameters``, DDP's hooks count the parameters of a trial as used in the next
    step. DDP fails if that step does not use them.
    """
    inputs = [inputs] if isinstance(inputs, Tensor) else inputs or module.parameters()
    targets = [target for target in inputs if target.requires_grad]
    if not targets:
        return
    found = torch.autograd.grad(
        loss, targets, gradient, retain_graph, create_graph, allow_unused=True
    )
    for target, new in zip(targets, found, strict=True):
        if new is not None:
            target.grad = new if target.grad is None else target.grad + new


class SilentLogger:
    """Replaces a logger or its experiment. Any call or attribute works, but nothing is logged."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # for `isinstance(self.logger, TensorBoardLogger)`
        return type(self._logger)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._logger, name, ...)  # `...` for attributes of a call's result
        return value if isinstance(value, str | int | Path | None) else SilentLogger(value)

    def __call__(self, *args: Any, **settings: Any) -> SilentLogger:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    __enter__ = __getitem__ = __call__  # Comet, Neptune
    __setitem__ = __exit__


def loss_of(trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> Any:
    """Run ``training_step`` in the run's precision and return its loss.

    Under DDP the wrapper is bypassed, because its reducer would wait for gradients.

    Raises:
        ValueError: If a lazy layer has not run yet: the trial would create its weights.
    """
    raise_if_lazy("A trial of training_step", module)
    bypass_ddp = isinstance(trainer.strategy.model, DistributedDataParallel)
    step = module.training_step if bypass_ddp else trainer.strategy.training_step
    args = (batch, batch_idx)[: _argument_count(module.training_step)]
    with trainer.precision_plugin.train_step_context():
        loss = step(*args)
    return loss.get("loss") if isinstance(loss, dict) else loss


def run_step(trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
    """Run ``training_step`` and its backward pass, and wait for the device.

    Raises:
        RuntimeError: Under DDP with a static graph, which would count the trial as first iteration.
    """
    if getattr(trainer.strategy.model, "static_graph", False):
        raise RuntimeError(
            "No training step can be tried out under DDP's static_graph=True: DDP would take the "
            "trial for the first iteration, and ranks would drift apart. Remove static_graph=True "
            "or the callback that tries out steps."
        )
    with torch.enable_grad():
        loss = loss_of(trainer, module, batch, batch_idx)
        if module.automatic_optimization and loss is not None:
            module.backward(loss)
    wait_for(module.device)


def prepare_batch(trainer: pl.Trainer, module: pl.LightningModule, batch: Any) -> Any:
    """Convert a loader's batch and move it to the device, as Lightning does for a step."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def copy_batch(batch: Any) -> Any:
    """Return a copy for a trial step. Tensors have no graph, and objects such as locks are shared.

    Raises:
        ValueError: For a batch that holds an iterator, which a trial would use up.
    """
    memo: dict[int, Any] = {}
    for leaf in leaves_of(batch):
        try:
            copied = copy.deepcopy(leaf, memo)
        except Exception as error:
            if isinstance(leaf, Iterator):
                raise ValueError(
                    f"A step cannot be tried out with a batch that holds a {type(leaf).__name__}: "
                    "the trial would use it up. Make it a list in collate_fn."
                ) from error
            copied = leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
        memo[id(leaf)] = copied
    return copy.deepcopy(batch, memo)


def _argument_count(training_step: Callable[..., Any]) -> int:
    """Return 1 if ``training_step`` takes only a batch, 2 if it also takes the index."""
    kinds = [p.kind for p in inspect.signature(training_step).parameters.values()]
    positional_count = sum(kind in (0, 1) for kind in kinds)  # the two positional kinds
    return 2 if positional_count >= 2 or inspect.Parameter.VAR_POSITIONAL in kinds else 1


class TrialStep:
    """A training step (forward and backward pass) that can be repeated without side effects.

    No callback hooks run. Create it inside ``on_train_batch_start``. Each run copies the batch.
    """

    def __init__(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._trainer, self._module = trainer, pl_module
        self._batch, self._batch_idx = batch, batch_idx
        self.parameters = WrittenParameters(pl_module)

    def run(self, enter_contexts: Callable[[ExitStack], Any] | None = None) -> float:
        """Run the step once and return the seconds of the forward and backward pass.

        ``enter_contexts`` is called right before the forward pass with an ExitStack. Contexts
        entered on it last until the end of the backward pass.
        """
        module = self._module
        with without_side_effects(self._trainer, module, self.parameters):
            batch = copy_batch(self._batch)  # outside the measurement
            self._make_gradients()
            wait_for(module.device)
            with ExitStack() as measured:
                if enter_contexts is not None:
                    enter_contexts(measured)
                start = time.perf_counter()
                run_step(self._trainer, module, batch, self._batch_idx)
                return time.perf_counter() - start

    def _make_gradients(self) -> None:
        """Allocate gradients before the measurement, so that it covers activations only."""
        parameters = list(self._module.parameters())
        fsdp1 = type(self._trainer.strategy.model).__name__ == "FullyShardedDataParallel"
        if fsdp1 or any(map(is_dtensor, parameters)):
            return  # the strategy allocates sharded gradients
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)


class WrittenParameters:
    """The parameters that ``training_step`` itself writes, such as a moving-average teacher.

    The first run detects these parameters and copies each one right before its first write. Later
    runs, which may be timed, copy them in advance. Writes in compiled modules cannot be
    intercepted, so all their parameters are copied.

    Attributes:
        parameters: The detected parameters; None before the first run.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._watched = list(all_parameters(module).values())
        self.parameters = list(self._watched) if has_compiled_parts(module) else None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the parameters at the end of the context."""
        watch, step = _WriteWatch(self._watched), self._module.training_step
        watch.copies = {p: p.detach().clone() for p in self.parameters or ()}
        originals = [(p, p.data, _addresses(p)) for p in self._watched]

        @functools.wraps(step)
        def watched(*args: Any, **kwargs: Any) -> Any:
            with watch:
                return step(*args, **kwargs)

        watching = {"training_step": watched} if self.parameters is None else {}
        assigned: dict[nn.Parameter, None] = {}
        try:
            with replaced(self._module, **watching):
                yield
        finally:
            for parameter, data, addresses in originals:
                if _addresses(parameter) != addresses:  # `parameter.data = ...`
                    parameter.data = data
                    assigned[parameter] = None
            with torch.no_grad():
                for parameter, copy_ in watch.copies.items():
                    parameter.data.copy_(copy_)  # `.data` hides the write from autograd
        self.parameters = list({**watch.copies, **assigned})


def all_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return a module's parameters by name, including those of unregistered modules."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    for path, hidden in hidden_modules(module):
        for name, parameter in hidden.named_parameters():
            names.setdefault(parameter, f"{path}.{name}")
    return {name: parameter for parameter, name in names.items()}


def _addresses(parameter: Tensor) -> list[int]:
    return [storage.data_ptr() for storage in storages_of(parameter)]


class _WriteWatch(TorchDispatchMode):
    """Copies each parameter right before an operator first writes to it."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._by_memory = {address: p for p in parameters for address in _addresses(p)}
        self.copies: dict[nn.Parameter, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for tensor in written_by(func, args, kwargs or {}):
            for storage in storages_of(tensor):
                parameter = self._by_memory.get(storage.data_ptr())
                if parameter is not None and parameter not in self.copies:
                    self.copies[parameter] = parameter.detach().clone()
        return func(*args, **(kwargs or {}))


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors among the arguments that the operator ``func`` writes to."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from tensors_of(value)


def storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of a tensor on this rank; none for a sparse or lazy tensor.

    For wrappers such as DTensors, these are the storages of the inner tensors.
    """
    if is_traceable_wrapper_subclass(tensor):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        for part in filter(torch.is_tensor, parts):  # a DTensor also lists its mesh
            yield from storages_of(part)
    elif tensor.layout is torch.strided and not is_lazy(tensor):
        yield tensor.untyped_storage()


def returns_views(func: Any) -> bool:
    return any(result.alias_info is not None for result in func._schema.returns)
