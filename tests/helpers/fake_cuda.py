"""CUDA tensors without a GPU: reading a value and mixing devices raise; launches are counted.

A fake tensor has shape, dtype and device, and no values. On torch's CPU build some functions need a
CUDA device before they reach the dispatcher and are replaced, and no graph is recorded; torch's
CUDA build records one (``make cuda-dry``).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple
from unittest import mock
from weakref import finalize

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

from lightning_opt import NonFiniteGuard
from tests.helpers.fake_autograd import without_engine
from tests.helpers.syncs import SyncCounter
from tests.helpers.trainers import quiet_trainer

aten = torch.ops.aten

FIRST = torch.device("cuda", 0)

NONE = {aten.promote_types, aten.lift_fresh, aten.detach}
"""Operators that launch no kernel."""

needs_cuda_build = pytest.mark.skipif(
    not torch.backends.cuda.is_built(),
    reason="torch's CPU build records no graph of CUDA tensors: `make cuda-dry` runs this",
)


@contextmanager
def fake_cuda() -> Iterator[FakeTensorMode]:
    """Make ``device="cuda"`` create fake tensors; reading one or mixing devices is an error."""
    shims: dict[str, Any] = {
        "record_stream": lambda own, stream: stream.tensors.append(own),
        "__deepcopy__": _deepcopy,
        "numpy": lambda own, force=False: np.array(own.tolist()),
    }
    if not torch.backends.cuda.is_built():
        shims |= {
            "__getitem__": _getitem,
            "__invert__": lambda own: torch.bitwise_not(own),
            "copy_": lambda own, new, non_blocking=False: aten.copy_(own, new, non_blocking),
            "to": _to,
            **{
                name: lambda own, kind=kind: kind(aten._local_scalar_dense(own))
                for name, kind in {
                    "item": lambda value: value,
                    "__bool__": bool,
                    "__int__": int,
                    "__float__": float,
                }.items()
            },
        }
    cuda = {
        "synchronize": lambda device=None: aten._local_scalar_dense(torch.empty((), device=FIRST)),
        "get_rng_state": lambda device=None: torch.empty(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_device_name": lambda device=None: "fake",
        "Event": FakeEvent,
        "Stream": FakeStream,
        "current_stream": FakeStream.current,
        "stream": FakeStream.use,
    }
    with (
        FakeTensorMode() as mode,
        without_engine() if torch.backends.cuda.is_built() else nullcontext(),
        mock.patch.multiple(torch.cuda, **cuda),
        mock.patch.multiple(Tensor, **shims),
        mock.patch.dict(FakeStream._own, clear=True),
        mock.patch.object(torch, "Generator", FakeGenerator),
        # Fake memory has no address.
        mock.patch.object(torch.UntypedStorage, "data_ptr", lambda own: own._cdata),
        mock.patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False),
        # Lightning sums the number of batches over ranks on the device, and reads the sum.
        mock.patch("lightning.pytorch.loops.fit_loop.has_len_all_ranks", return_value=True),
    ):
        yield mode


class FakeStream:
    """A stream that records its dependencies.

    Attributes:
        device: Its device.
        waits: Streams and events that it waits for.
        tensors: Tensors of other streams that it uses (``record_stream``).
    """

    _used: ClassVar[list["FakeStream"]] = []
    _own: ClassVar[dict[torch.device, "FakeStream"]] = {}

    def __init__(self, device: Any = None) -> None:
        self.device = FIRST if device in (None, "cuda", torch.device("cuda")) else device
        self.waits: list[Any] = []
        self.tensors: list[Tensor] = []

    @classmethod
    def current(cls, device: Any = None) -> "FakeStream":
        """Return the current stream, or the device's default stream."""
        stream = cls(device)
        return cls._used[-1] if cls._used else cls._own.setdefault(stream.device, stream)

    @classmethod
    @contextmanager
    def use(cls, stream: "FakeStream | None") -> Iterator[None]:
        cls._used += [stream] if stream is not None else []
        try:
            yield
        finally:
            del cls._used[len(cls._used) - (stream is not None) :]

    def wait_stream(self, other: "FakeStream") -> None:
        self.waits.append(other)

    wait_event = wait_stream

    def record_event(self) -> "FakeEvent":
        event = FakeEvent()
        event.record(self)
        return event


class FakeEvent:
    """An event with the streams that recorded it."""

    def __init__(self, **_: Any) -> None:
        self.recorded: list[FakeStream | None] = []

    def record(self, stream: FakeStream | None = None) -> None:
        self.recorded.append(stream)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "FakeEvent") -> float:
        return 1.0


class FakeGenerator(torch.Generator):
    """A generator for any device; fake tensors draw no numbers."""

    def __new__(cls, device: Any = None) -> "FakeGenerator":
        return super().__new__(cls)


def _getitem(tensor: Tensor, key: Any) -> Tensor:
    """Index without the guard of a CUDA device, which the CPU build does not have."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if ... in (parts := [part if part is Ellipsis else None for part in keys]):
        place = parts.index(...)
        given = sum(part is not None and part is not Ellipsis for part in keys)
        keys[place : place + 1] = [slice(None)] * (tensor.ndim - given)
    dim, indices = 0, dict[int, Tensor]()
    for part in keys:
        if isinstance(part, Tensor) and part.ndim == 0:
            part = part.item()  # such an index waits for the device
        if part is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(part, int):
            tensor = tensor.select(dim, part)
            continue
        elif isinstance(part, slice):
            tensor = aten.slice(tensor, dim, part.start, part.stop, part.step or 1)
        else:
            indices[dim] = part
        dim += 1
    if not indices:
        return tensor
    result: Tensor = aten.index(tensor, [indices.get(place) for place in range(dim)])
    return result


_plain_to = Tensor.to


def _deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Copy a fake tensor without its mode."""
    return memo.setdefault(id(tensor), tensor.detach().clone())


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Move or convert; "cuda" means "cuda:0", since there is no current device."""
    args = tuple(FIRST if own in ("cuda", torch.device("cuda")) else own for own in args)
    if kwargs.get("device") in ("cuda", torch.device("cuda")):
        kwargs["device"] = FIRST
    return _plain_to(tensor, *args, **kwargs)


class Copy(NamedTuple):
    """A copy between host and device: whether the host waited for it, and its stream."""

    waited: bool
    stream: FakeStream


class Copies(TorchDispatchMode):
    """Records the copies between host and device within its ``with`` block."""

    def __init__(self) -> None:
        super().__init__()
        self.to_host: list[Copy] = []
        self.to_device: list[Copy] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (aten._to_copy, aten.copy_):
            written = func.overloadpacket is aten.copy_
            source = args[1] if written else args[0]
            late = (kwargs or {}).get("non_blocking", written and True in args[2:])
            if source.device.type != result.device.type:
                to_host = result.device.type == "cpu"
                stream = FakeStream.current(source.device if to_host else result.device)
                (self.to_host if to_host else self.to_device).append(Copy(not late, stream))
        return result


class Answers(TorchDispatchMode):
    """Makes reads return ``number`` for numbers and ``truth`` for booleans."""

    def __init__(self, number: float = 1.0, truth: bool = True) -> None:
        super().__init__()
        self.number, self.truth = number, truth

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket not in (aten._local_scalar_dense, aten.equal):
            return func(*args, **(kwargs or {}))
        dtype = args[0].dtype
        if func.overloadpacket is aten.equal or dtype is torch.bool:
            return self.truth
        return self.number if dtype.is_floating_point else int(self.number)


class FakeAllocator(TorchDispatchMode):
    """Counts the bytes of fake tensors on one device, and replaces torch's memory statistics.

    Args:
        total: Bytes of the device.
    """

    def __init__(self, total: int) -> None:
        super().__init__()
        self.total, self.held, self.peak = total, 0, 0
        self._known: set[int] = set()
        self._patch = mock.patch.multiple(
            torch.cuda,
            memory_allocated=lambda device=None: self.held,
            max_memory_allocated=lambda device=None: self.peak,
            memory_reserved=lambda device=None: self.held,
            max_memory_reserved=lambda device=None: self.peak,
            mem_get_info=lambda device=None: (self.total - self.held, self.total),
            reset_peak_memory_stats=lambda device=None: self._reset(),
            memory_stats=lambda device=None: {"inactive_split_bytes.all.peak": 0},
            memory_stats_as_nested_dict=lambda device=None: {
                "allocated_bytes": {"all": {"current": self.held}}
            },
            get_per_process_memory_fraction=lambda device=None: 1.0,
            empty_cache=lambda: None,
            current_device=lambda: 0,
        )

    def __enter__(self) -> Any:
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._patch.stop()

    def _reset(self) -> None:
        self.peak = self.held

    def _release(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.held -= nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if not isinstance(tensor, Tensor) or tensor.device.type != "cuda":
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._known.add(storage._cdata)
                finalize(storage, self._release, storage._cdata, storage.nbytes())
                self.held += storage.nbytes()
                self.peak = max(self.peak, self.held)
        return result


class Launches(TorchDispatchMode):
    """Counts the operators within its ``with`` block, except views, which launch nothing.

    Attributes:
        names: Counts by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self.names.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten" and not func.is_view and func.overloadpacket not in NONE:
            self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def count_launches(call: Callable[[], object]) -> int:
    """Return the number of operators that a call launches."""
    with Launches() as launches:
        call()
    return launches.total


class Transformer(nn.Module):
    """The 98 parameters of a transformer with eight blocks and a head; it is never called."""

    def __init__(self, width: int = 64, blocks: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True) for _ in range(blocks)
        )
        self.head = nn.Linear(width, 10)


def on_fake_cuda(module: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Move parameters and buffers to the fake device, within ``fake_cuda``."""
    for child in module.modules():
        for name, own in [*child.named_parameters(recurse=False)]:
            fake = torch.empty(own.shape, dtype=own.dtype, device="cuda")
            child.register_parameter(name, nn.Parameter(fake, own.requires_grad))
        for name, own in [*child.named_buffers(recurse=False)]:
            fake = torch.empty(own.shape, dtype=own.dtype, device="cuda")
            child.register_buffer(name, fake, name not in child._non_persistent_buffers_set)
    return module


def fake_gradients(module: nn.Module, but: Sequence[str] = ()) -> None:
    """Set a gradient on every parameter except those named in ``but``."""
    for name, parameter in module.named_parameters():
        parameter.grad = None if name in but else torch.empty_like(parameter)


class Model(L.LightningModule):
    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = Transformer() if net is None else net


class Stage:
    """Calls the hooks of callbacks in the Trainer's order, within ``fake_cuda``.

    Args:
        callbacks: Callbacks, in order.
        net: The model.
        scaler: The precision plugin's loss scaler.
        optimizer: The class of the optimizer.
        settings: Its arguments.
    """

    def __init__(
        self,
        callbacks: Sequence[Any],
        net: nn.Module | None = None,
        scaler: Any = None,
        optimizer: type[Optimizer] = torch.optim.AdamW,
        **settings: Any,
    ) -> None:
        self.module = on_fake_cuda(Model(net))
        self.optimizer = optimizer(self.module.parameters(), **settings)
        self.callbacks = list(callbacks)
        self.trainer: Any = SimpleNamespace(
            optimizers=[self.optimizer],
            callbacks=self.callbacks,
            model=self.module,
            strategy=SimpleNamespace(root_device=torch.device("cuda")),
            precision_plugin=SimpleNamespace(scaler=scaler),
            world_size=1,
            accumulate_grad_batches=1,
            global_step=0,
            current_epoch=0,
            loggers=[],
            is_global_zero=True,
        )
        for callback in self.callbacks:
            callback.on_fit_start(self.trainer, self.module)
        for callback in self.callbacks:
            if isinstance(callback, NonFiniteGuard):
                # `on_train_start` without its check of the weights, which reads.
                from lightning_opt.gradients.guard.snapshot import BufferBackup

                callback._reset_run(BufferBackup(self.module))
            else:
                callback.on_train_start(self.trainer, self.module)

    def call(self, hook: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(self.trainer, self.module, *arguments)

    def step(self, losses: Sequence[Tensor] | None = None, update: bool = True) -> Launches:
        """Make one step, and return the launches of the callbacks before the update."""
        if losses is None:
            losses = [torch.empty((), device="cuda")]
        fake_gradients(self.module)
        step = self.trainer.global_step
        with Launches() as launches:
            self.call("on_train_batch_start", None, step)
            for loss in losses:
                self.call("on_before_backward", loss)
                self.call("on_after_backward")
            self.call("on_before_optimizer_step", self.optimizer)
        if update:
            self.optimizer.step()
        for callback in self.callbacks:
            if isinstance(callback, NonFiniteGuard):
                callback._delayed.clear()  # the host would read them two steps later
        self.call("on_train_batch_end", None, None, step)
        self.trainer.global_step += 1
        return launches


class FakeDevice(SingleDeviceStrategy):
    """A strategy for the fake device, on which the model already is."""

    def __init__(self) -> None:
        super().__init__(FIRST, accelerator=FakeAccelerator())

    def model_to_device(self) -> None:
        pass

    def teardown(self) -> None:
        pass


class FakeAccelerator(CUDAAccelerator):
    """A CUDA accelerator that needs no device."""

    def setup(self, trainer: L.Trainer) -> None:
        pass

    def setup_device(self, device: torch.device) -> None:
        pass

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return [0]

    @staticmethod
    def is_available() -> bool:
        return True


class FakeNet(L.LightningModule):
    """A network to train on fake CUDA; without a graph, ``backward`` sets the gradients."""

    def __init__(self, fused: bool = True) -> None:
        super().__init__()
        self.fused = fused
        self.net = nn.Sequential(
            nn.Linear(6, 5), nn.LayerNorm(5), nn.GELU(), nn.Dropout(0.1), nn.Linear(5, 1)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        with torch.set_grad_enabled(torch.backends.cuda.is_built()):
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if loss.requires_grad:
            loss.backward()
            return
        for parameter in self.parameters():
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            else:
                parameter.grad += torch.empty_like(parameter)

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.AdamW(self.parameters(), fused=self.fused)


def fit_on_fake_cuda(
    *callbacks: L.Callback,
    net: FakeNet | None = None,
    steps: int = 5,
    answers: Answers | None = None,
    syncs: SyncCounter | None = None,
    **settings: Any,
) -> L.Trainer:
    """Train with Lightning's loops on the fake device, and return the Trainer.

    Reads return the values of ``answers``, and ``syncs`` records them.
    """
    trainer = quiet_trainer(
        callbacks=list(callbacks), accelerator="auto", strategy=FakeDevice(), **settings
    )
    rows = TensorDataset(torch.empty(4 * steps, 6), torch.empty(4 * steps, 1))
    # The innermost mode is called first.
    with answers or Answers(), FakeAllocator(2**40), syncs or nullcontext():
        trainer.fit(on_fake_cuda(net or FakeNet()), DataLoader(rows, batch_size=4))
    return trainer
