"""One replica: it counts its local steps, sends its fragments in turn, and merges what comes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_opt.strategies.diloco.agreement import average_changed, checksums, forget_non_finite
from lightning_opt.strategies.diloco.exchange import Outcome, Replicas, exchange
from lightning_opt.strategies.diloco.fragments import cut_into_fragments, due_at, momentum_of


@dataclass(frozen=True)
class Plan:
    """How often, how much and how: see the arguments of the strategy."""

    sync_every: int
    outer_lr: float
    outer_momentum: float
    fragments: int
    delay: int
    compression: str


class Replica:
    """Trains by itself, and now and then applies what all replicas have moved.

    Args:
        module: Whose weights are the same on all replicas now.
        optimizers: What trains it.
        replicas: Who takes part.
        plan: The same on all replicas.
        state: What :meth:`state_dict` returned, or nothing.

    Attributes:
        worker: The thread that exchanges.
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
        self._sent, self._waited = 0, 0.0
        self._agreed = True
        self._on_the_way: dict[int, tuple[int, Future[Outcome]]] = {}
        self._norms: dict[int, tuple[Tensor, Tensor]] = {}
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="diloco")
        self._cut(state.get("momentum", {}))
        device = self._fragments[0].outer.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @torch.no_grad()
    def _cut(self, momentum: Mapping[str, Tensor]) -> None:
        """Cut what is trained into fragments; the rest is looked at when the replicas agree."""
        trained = {
            name: parameter
            for name, parameter in self._module.named_parameters()
            # Manual optimisation may have switched some off for a moment.
            if parameter.requires_grad or name in momentum
        }
        own = set(trained.values())
        self._frozen = [one for one in self._module.parameters() if one not in own]
        others = (*self._module.buffers(), *self._frozen)
        self._tensors = [one for one in others if one.is_floating_point() and one.numel()]
        self._others = len(self._tensors)
        self._tensors += trained.values()
        self._sums = checksums(self._tensors)
        self._fragments = cut_into_fragments(trained, self._plan.fragments)
        for name, part in momentum_of(self._fragments).items():
            if name in momentum:
                part.copy_(momentum[name])

    def before_step(self) -> None:
        """Take in what has been unfrozen, while it is still alike on all replicas."""
        if any(parameter.requires_grad for parameter in self._frozen):
            self.agree()
            self._cut(momentum_of(self._fragments))

    def after_step(self) -> int:
        """Merge and send what is due after a local step, and return its number."""
        self._agreed = False
        self._step += 1
        for number, (due, _) in list(self._on_the_way.items()):
            if due == self._step:
                self._merge(number)
        for number in due_at(self._step, self._plan.sync_every, len(self._fragments)):
            self._send(number, self._plan.compression)
            if self._plan.delay == 0:
                self._merge(number)
        return self._step

    @torch.no_grad()
    def _send(self, number: int, compression: str) -> None:
        """Launch the exchange of a fragment."""
        fragment, replicas, stream = self._fragments[number], self._replicas, self._stream
        moved, owed = fragment.measure(), fragment.owed
        measured = None if stream is None else torch.cuda.current_stream().record_event()

        def run() -> Outcome:
            with torch.no_grad(), torch.cuda.stream(stream):  # no context at all for None
                if measured is not None:
                    measured.wait()
                outcome = exchange(moved, owed, replicas, compression)
                if stream is not None:
                    stream.synchronize()
                return outcome

        due = self._step + self._plan.delay
        self._on_the_way[number] = (due, self.worker.submit(run))

    @torch.no_grad()
    def _merge(self, number: int, plain: bool = False) -> None:
        """Wait for a fragment, take the outer step with it, and give the result to the replica.

        Args:
            number: Of the fragment.
            plain: Give all replicas the mean of their weights, instead of an outer step.
        """
        fragment, plan = self._fragments[number], self._plan
        start = time.perf_counter()
        mean, sound, sent_bytes = self._on_the_way.pop(number)[1].result()
        self._waited += time.perf_counter() - start
        self._sent += sent_bytes
        update: Tensor | float = 0.0
        if mean is not None:
            lr, momentum = (1.0, 0.0) if plain else (plan.outer_lr, plan.outer_momentum)
            update = fragment.step(mean, lr, momentum)
            if sound and fragment.moved is not None:
                apart = torch.linalg.vector_norm(fragment.moved - mean)
                self._norms[number] = (apart, torch.linalg.vector_norm(mean))
        if not sound:
            self.reset()  # what is NaN anywhere makes all of it NaN in a step or two
        elif plain or plan.delay == 0 or fragment.moved is None:
            fragment.reset()
        else:
            fragment.carry(fragment.moved - update)
        fragment.moved = None

    @torch.no_grad()
    def agree(self) -> None:
        """Give all replicas the mean of their weights and buffers. All processes must call it."""
        for number in list(self._on_the_way):
            self._merge(number)
        if not self._agreed:
            self._agreed = True
            for number in range(len(self._fragments)):
                self._send(number, "float32")
            for number, fragment in enumerate(self._fragments):
                self._merge(number, plain=True)
                fragment.adopt()  # half-precision weights are rounded
            self._sums[self._others :] = checksums(self._tensors[self._others :])
        # Of the weights, what callbacks have put in since: averages over earlier ones, say.
        average_changed(self._tensors, self._sums)
        self._sums = checksums(self._tensors)

    @torch.no_grad()
    def reset(self) -> None:
        """Give this replica the weights that all share, and begin anew what is not finite."""
        for fragment in self._fragments:
            fragment.reset()
        for optimizer in self._optimizers:
            forget_non_finite(optimizer)

    def read(self) -> dict[str, float]:
        """Return what is logged. Reads from the device."""
        steps = max(self._step - self._reported, 1)
        values = {"comm/bytes": self._sent / steps, "comm/wait_s": self._waited / steps}
        self._sent, self._waited, self._reported = 0, 0.0, self._step
        if self._norms:
            norms = torch.linalg.vector_norm(torch.tensor(list(self._norms.values())), dim=0)
            values["diloco/drift"], values["diloco/outer_norm"] = norms.tolist()
        return values

    def state_dict(self) -> dict[str, Any]:
        """Return what lasts, once the replicas agree."""
        momentum = {name: part.cpu().clone() for name, part in momentum_of(self._fragments).items()}
        return {"step": self._step, "momentum": momentum}
