"""One replica: counts local steps, sends fragments in turn, and merges the means."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_opt.strategies.diloco.averaging import average_changed, checksums, reset_non_finite
from lightning_opt.strategies.diloco.exchange import Outcome, Replicas, exchange
from lightning_opt.strategies.diloco.fragments import cut_into_fragments, due_at, momentum_of


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
        module: The model; its weights are the same on all replicas now.
        optimizers: The inner optimizers.
        replicas: The process groups.
        plan: The settings, the same on all replicas.
        state: The state of :meth:`state_dict`, or empty.

    Attributes:
        worker: The thread of the exchanges.
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
        self._replicas, self._plan = replicas, plan
        self._step: int = state.get("step", 0)
        self._reported = self._step
        self._sent, self._waited = 0, 0.0  # bytes and seconds since the last report
        self._synchronized = True
        # Fragments in flight: the step of the merge, and the outcome.
        self._in_flight: dict[int, tuple[int, Future[Outcome]]] = {}
        self._norms: dict[int, tuple[Tensor, Tensor]] = {}
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="diloco")
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
        others = (*self._module.buffers(), *self._frozen)
        self._tensors = [one for one in others if one.is_floating_point() and one.numel()]
        self._others = len(self._tensors)  # the first ones; the trained parameters follow
        self._tensors += trained.values()
        self._sums = checksums(self._tensors)
        self._fragments = cut_into_fragments(trained, self._plan.fragments)
        for name, part in momentum_of(self._fragments).items():
            if name in momentum:
                part.copy_(momentum[name])

    def before_step(self) -> None:
        """Include unfrozen parameters, while they are still the same on all replicas."""
        if any(parameter.requires_grad for parameter in self._frozen):
            self.synchronize()
            self._make_fragments(momentum_of(self._fragments))

    def after_step(self) -> int:
        """Merge and send the fragments that are due after a local step, and return its number."""
        self._synchronized = False
        self._step += 1
        for number, (due, _) in list(self._in_flight.items()):
            if due == self._step:
                self._merge(number)
        for number in due_at(self._step, self._plan.sync_every, len(self._fragments)):
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
                outcome = exchange(pseudo_gradient, residual, replicas, compression)
                if stream is not None:
                    stream.synchronize()
                return outcome

        due = self._step + self._plan.delay
        self._in_flight[number] = (due, self.worker.submit(run))

    @torch.no_grad()
    def _merge(self, number: int, plain: bool = False) -> None:
        """Wait for a fragment's mean, take the outer step, and update the replica's weights.

        Args:
            number: The fragment's number.
            plain: Set all replicas to the mean of their weights, instead of an outer step.
        """
        fragment, plan = self._fragments[number], self._plan
        start = time.perf_counter()
        mean, finite, sent_bytes = self._in_flight.pop(number)[1].result()
        self._waited += time.perf_counter() - start
        self._sent += sent_bytes
        update: Tensor | float = 0.0
        if mean is not None:
            lr, momentum = (1.0, 0.0) if plain else (plan.outer_lr, plan.outer_momentum)
            update = fragment.step(mean, lr, momentum)
            if finite and fragment.pseudo_gradient is not None:
                drift = torch.linalg.vector_norm(fragment.pseudo_gradient - mean)
                self._norms[number] = (drift, torch.linalg.vector_norm(mean))
        if not finite:
            self.reset()  # a NaN in one fragment spreads to all within a step or two
        elif plain or plan.delay == 0 or fragment.pseudo_gradient is None:
            fragment.reset()
        else:
            fragment.shift(fragment.pseudo_gradient - update)
        fragment.pseudo_gradient = None

    @torch.no_grad()
    def synchronize(self) -> None:
        """Set all replicas to the mean of their weights and buffers. All processes must call it."""
        for number in list(self._in_flight):
            self._merge(number)
        if not self._synchronized:
            self._synchronized = True
            for number in range(len(self._fragments)):
                self._send(number, "float32")
            for number, fragment in enumerate(self._fragments):
                self._merge(number, plain=True)
                fragment.set_outer()  # half-precision weights are rounded
            self._sums[self._others :] = checksums(self._tensors[self._others :])
        # Includes weights that callbacks have replaced since, such as an average over steps.
        average_changed(self._tensors, self._sums)
        self._sums = checksums(self._tensors)

    @torch.no_grad()
    def reset(self) -> None:
        """Set this replica to the shared weights, and zero optimizer states that are not finite."""
        for fragment in self._fragments:
            fragment.reset()
        for optimizer in self._optimizers:
            reset_non_finite(optimizer)

    def read(self) -> dict[str, float]:
        """Return the logged values. Reads from the device."""
        steps = max(self._step - self._reported, 1)
        values = {"comm/bytes": self._sent / steps, "comm/wait_s": self._waited / steps}
        self._sent, self._waited, self._reported = 0, 0.0, self._step
        if self._norms:
            norms = torch.linalg.vector_norm(torch.tensor(list(self._norms.values())), dim=0)
            values["diloco/drift"], values["diloco/outer_norm"] = norms.tolist()
        return values

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; the replicas must be synchronized."""
        momentum = {name: part.cpu().clone() for name, part in momentum_of(self._fragments).items()}
        return {"step": self._step, "momentum": momentum}
