"""One replica: counts local steps, sends fragments of the model in turn, and merges the means.

References:
    Douillard et al. (2023), *DiLoCo: Distributed Low-Communication Training of Language Models*.
    Douillard et al. (2025), *Streaming DiLoCo with overlapping communication*.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm as norm
from torch.optim import Optimizer

from lightning_opt.core.numerics.norms import as_real
from lightning_opt.strategies.diloco.exchange import (
    Key,
    Outcome,
    Replicas,
    average_changed,
    checksums,
    exchange,
    raise_if_apart,
    reset_non_finite,
)
from lightning_opt.strategies.own_exchange import ExchangeThread
from lightning_opt.strategies.packing import chunks_of

SYNCHRONIZATION, COLLECTIVE = -1, -2
"""Places where replicas meet. An exchange's place is the number of its step instead."""


class Fragment:
    """Parameters that are exchanged together.

    Args:
        parameters: Dense parameters on one device, by name.

    Attributes:
        outer: The weights that all replicas share, flat, float32 or wider.
        momentum: The momentum of the outer optimizer; like ``outer``.
        residual: The unsent rest of this replica's messages; like ``outer``.
        pseudo_gradient: ``outer`` minus the weights that this replica last sent; None after the
            merge.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = parameters
        flat = torch.cat([tensor.flatten() for tensor in self.tensors()])
        self.outer = flat.to(torch.promote_types(flat.dtype, torch.float32))
        self.momentum = torch.zeros_like(self.outer)
        self.residual = torch.zeros_like(self.outer)
        self.pseudo_gradient: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """Return the parameters as real numbers without a graph; views."""
        return [as_real(parameter.detach()) for parameter in self.parameters.values()]

    def parts(self, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of each of :meth:`tensors` and its part of ``flat`` in the same shape."""
        tensors = self.tensors()
        pieces = flat.split([tensor.numel() for tensor in tensors])
        return [(one, piece.view(one.shape)) for one, piece in zip(tensors, pieces, strict=True)]

    def set_outer(self) -> None:
        """Copy this replica's weights to the shared weights."""
        for parameter, part in self.parts(self.outer):
            part.copy_(parameter)

    def compute_pseudo_gradient(self) -> Tensor:
        """Return the shared weights minus this replica's."""
        self.pseudo_gradient = torch.empty_like(self.outer)
        own, shared = self.parts(self.pseudo_gradient), self.parts(self.outer)
        for (parameter, part), (_, outer) in zip(own, shared, strict=True):
            # Round the shared weights like the replica's, so that unchanged weights give 0.
            torch.sub(outer.to(parameter.dtype).to(outer.dtype), parameter, out=part)
        return self.pseudo_gradient

    def step(self, mean: Tensor, lr: float, momentum: float) -> Tensor:
        """Apply the mean pseudo-gradient to ``outer`` by SGD with Nesterov momentum.

        Args:
            mean: Like ``outer``.
            lr: The outer learning rate.
            momentum: 0 for none; the momentum buffer then stays unchanged.

        Returns:
            The norm of ``mean``, and the norm of this replica's pseudo-gradient minus ``mean``.
        """
        own = mean if self.pseudo_gradient is None else self.pseudo_gradient
        norms = []
        for chunk in chunks_of(mean):
            update = mean[chunk]
            difference = own[chunk] - update
            norms.append(torch.stack([norm(update), norm(difference)]))
            if momentum:
                # Not `add_(..., alpha=)`: some CPUs round the product before the sum, others not.
                buffer = self.momentum[chunk].mul_(momentum).add_(update)
                update = torch.mul(buffer, momentum, out=difference).add_(update)
            update = torch.mul(update, lr, out=difference)
            self.outer[chunk].sub_(update)
            if self.pseudo_gradient is not None:
                self.pseudo_gradient[chunk].sub_(update)
        total: Tensor = norm(torch.stack(norms), dim=0)
        return total

    def shift(self) -> None:
        """Set the replica's weights to ``outer`` plus its updates since the last send."""
        assert self.pseudo_gradient is not None
        for parameter, part in self.parts(self.pseudo_gradient):
            parameter.add_(part.to(parameter.dtype))

    def reset(self) -> None:
        """Overwrite this replica's weights with the shared weights."""
        self.pseudo_gradient = None
        for parameter, part in self.parts(self.outer):
            parameter.copy_(part)


def cut_into_fragments(parameters: Mapping[str, Tensor], count: int) -> list[Fragment]:
    """Return fragments of about equal size, each of whole parameters in their order."""
    total = sum(parameter.numel() for parameter in parameters.values())
    groups: dict[int, dict[str, Tensor]] = {}
    start = 0
    for name, parameter in parameters.items():
        middle = start + parameter.numel() / 2
        groups.setdefault(int(middle * count / total), {})[name] = parameter
        start += parameter.numel()
    return [Fragment(group) for group in groups.values()]


def momentum_of(fragments: Sequence[Fragment]) -> dict[str, Tensor]:
    return {
        name: part
        for one in fragments
        for name, (_, part) in zip(one.parameters, one.parts(one.momentum), strict=True)
    }


@dataclass(frozen=True)
class Plan:
    sync_every: int
    outer_lr: float
    outer_momentum: float
    fragments: int
    delay: int
    compression: str


class Replica:
    """Trains on its own, and at intervals applies the mean pseudo-gradient of all replicas.

    Args:
        module: The model, with equal weights on all replicas.
        optimizers: The inner optimizers.
        replicas: The process groups.
        plan: The settings, the same on all replicas.
        state: A result of :meth:`state_dict`, or empty.

    Attributes:
        loaders: The training loaders whose lengths were compared.
        may_end: Whether a replica may run out of data before others.
        thread: Runs the exchanges.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        replicas: Replicas,
        plan: Plan,
        state: Mapping[str, Any],
    ) -> None:
        self._module, self._optimizers = module, optimizers
        self.loaders: list[Any] | None = None
        self.may_end = False
        self._replicas, self._plan = replicas, plan
        self._step: int = state.get("step", 0)
        self._reported_step = self._step
        self._sent, self._waited = 0, 0.0  # bytes and seconds since the last report
        self._synchronized = True
        # By fragment in flight: the step at which to merge it, and its outcome.
        self._in_flight: dict[int, tuple[int, Future[Outcome]]] = {}
        self._norms: dict[int, Tensor] = {}
        self.thread = ExchangeThread()
        self._make_fragments(state.get("momentum", {}))
        device = self._fragments[0].outer.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @torch.no_grad()
    def _make_fragments(self, momentum: Mapping[str, Tensor]) -> None:
        """Divide the trained parameters into fragments; other tensors are only synchronized."""
        trained = {
            name: parameter
            for name, parameter in self._module.named_parameters()
            # Manual optimization may freeze parameters temporarily.
            if parameter.requires_grad or name in momentum
        }
        in_fragments = set(trained.values())
        self._frozen = [one for one in self._module.parameters() if one not in in_fragments]
        self._checksums = checksums(self._tensors())
        self._fragments = cut_into_fragments(trained, self._plan.fragments)
        for name, part in momentum_of(self._fragments).items():
            if name in momentum:
                part.copy_(momentum[name])

    def _tensors(self) -> dict[Key, Tensor]:
        """Return all floating or complex tensors by name and shape, as views of real numbers.

        Called each time, because a model may assign new buffers.
        """
        named = (*self._module.named_parameters(), *self._module.named_buffers())
        real = ((name, as_real(one.detach())) for name, one in named)
        floating = ((name, one) for name, one in real if one.is_floating_point() and one.numel())
        return {(name, tuple(one.shape)): one for name, one in floating}

    def before_step(self) -> None:
        """Add newly unfrozen parameters to the fragments while all replicas have equal ones."""
        if any(parameter.requires_grad for parameter in self._frozen):
            self.synchronize()
            self._make_fragments(momentum_of(self._fragments))

    def after_step(self) -> int:
        """Merge and send the fragments that are due after a local step. Return the step."""
        self._synchronized = False
        self._step += 1
        for number, (due, _) in list(self._in_flight.items()):
            if due == self._step:
                self._merge(number)
        every, count = self._plan.sync_every, len(self._fragments)
        for number in range(count):
            if (self._step - (number + 1) * every // count) % every == 0:
                self._send(number, self._plan.compression)
                if self._plan.delay == 0:
                    self._merge(number)
        return self._step

    @torch.no_grad()
    def _send(self, number: int, compression: str) -> None:
        fragment, replicas, stream = self._fragments[number], self._replicas, self._stream
        pseudo_gradient, residual = fragment.compute_pseudo_gradient(), fragment.residual
        computed = None if stream is None else torch.cuda.current_stream().record_event()

        def run() -> Outcome:
            with torch.no_grad(), torch.cuda.stream(stream):  # has no effect for None
                if computed is not None:
                    computed.wait()
                if may_end:
                    raise_if_apart(place, replicas, residual)
                outcome = exchange(pseudo_gradient, residual, replicas, compression)
                if stream is not None:
                    stream.synchronize()
                return outcome

        may_end = self.may_end  # the same on all replicas, unlike when `run` is called
        place = SYNCHRONIZATION if self._synchronized else self._step
        due = self._step + self._plan.delay
        self._in_flight[number] = (due, self.thread.submit(run, Future()))

    @torch.no_grad()
    def _merge(self, number: int, average: bool = False) -> None:
        """Wait for a fragment's mean, take the outer step, and update the replica's weights.

        Args:
            number: The fragment's number.
            average: Set all replicas to the mean of their weights, instead of an outer step.
        """
        fragment, plan = self._fragments[number], self._plan
        start = time.perf_counter()
        mean, finite, sent_bytes = self._in_flight.pop(number)[1].result()
        self._waited += time.perf_counter() - start
        self._sent += sent_bytes
        is_valid = finite and fragment.pseudo_gradient is not None
        if mean is not None:
            lr, momentum = (1.0, 0.0) if average else (plan.outer_lr, plan.outer_momentum)
            norms = fragment.step(mean, lr, momentum)
            if is_valid:
                self._norms[number] = norms
        if not finite:
            self.reset()  # all fragments, because a NaN spreads within a step or two
        elif is_valid and plan.delay and not average:
            fragment.shift()
        else:
            fragment.reset()
        fragment.pseudo_gradient = None

    def meet(self, place: int) -> None:
        """Raise on all processes, instead of hanging, if a replica has run out of data earlier."""
        if self.may_end:
            run = partial(raise_if_apart, place, self._replicas, self._fragments[0].outer)
            self.thread.submit(run, Future[None]()).result()

    @torch.no_grad()
    def synchronize(self) -> None:
        """Set all replicas to the mean of their weights and buffers. All processes must call it."""
        self.meet(SYNCHRONIZATION)
        for number in list(self._in_flight):
            self._merge(number)
        tensors = self._tensors()
        if not self._synchronized:
            self._synchronized = True
            for number in range(len(self._fragments)):
                self._send(number, "float32")
            for number, fragment in enumerate(self._fragments):
                self._merge(number, average=True)
                fragment.set_outer()  # weights of half precision are rounded
            trained = {name for one in self._fragments for name in one.parameters}
            self._checksums |= checksums({k: tensors[k] for k in tensors if k[0] in trained})
        # Also averages tensors that callbacks have replaced, for example by an EMA.
        average_changed(tensors, self._checksums)
        self._checksums = checksums(tensors)

    @torch.no_grad()
    def reset(self) -> None:
        """Set this replica to the shared weights, and zero optimizer states that are not finite."""
        for fragment in self._fragments:
            fragment.reset()
        for optimizer in self._optimizers:
            reset_non_finite(optimizer)

    def read(self) -> dict[str, float]:
        """Return the values to log. Waits for the device."""
        steps = max(self._step - self._reported_step, 1)
        values = {"comm/bytes": self._sent / steps, "comm/wait_s": self._waited / steps}
        self._sent, self._waited, self._reported_step = 0, 0.0, self._step
        if self._norms:
            norms = norm(torch.stack(list(self._norms.values())), dim=0)
            values["diloco/outer_norm"], values["diloco/drift"] = norms.tolist()
        return values

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; the replicas must be synchronized."""
        momentum = {name: part.cpu().clone() for name, part in momentum_of(self._fragments).items()}
        return {"step": self._step, "momentum": momentum}
