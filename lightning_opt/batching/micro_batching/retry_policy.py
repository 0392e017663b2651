"""What ``MicroBatching("auto")`` does with batches: tries them, takes them back, learns sizes."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict

from torch import Tensor
from torch.optim import Optimizer

from lightning_opt.batching.micro_batching.closure import MicroBatchClosure, Workshop, split_with
from lightning_opt.batching.micro_batching.forecast import Forecast
from lightning_opt.batching.micro_batching.learned_sizes import (
    MOST_SHAPES,
    LearnedSizes,
    Proven,
    kind_of,
)
from lightning_opt.batching.micro_batching.room import Room
from lightning_opt.core.splitting import UnsplittableBatchError, shape_of, tensors_of

log = logging.getLogger(__name__)


class Failure(TypedDict):
    """An attempt that ran out of memory on one rank.

    Attributes:
        shape: Of the samples, as text.
        elements: Of one sample.
        samples: Of the batch.
        failed: Samples of the largest micro-batch.
        problem: The allocator's words.
        hopeless: Why there is no smaller micro-batch to try; empty if there is.
    """

    shape: str
    elements: int
    samples: int
    failed: int
    problem: str
    hopeless: str


class Look(NamedTuple):
    """A batch by its shapes.

    Attributes:
        shape: Of the samples, as text.
        elements: Of one sample.
        kind: The shape without lengths.
        samples: How many there are.
    """

    shape: str
    elements: int
    kind: str
    samples: int


_LEAVES = frozenset((Tensor, str, int, float, bool, type(None)))


def _signature(batch: Any) -> tuple[Any, ...]:
    """Return the types and shapes of all tensors; those of the usual batches without a search."""
    values = batch.values() if type(batch) is dict else batch
    if type(batch) in (dict, list, tuple) and _LEAVES.issuperset(map(type, values)):
        return tuple([(value.dtype, value.shape) for value in values if type(value) is Tensor])
    return tuple((tensor.dtype, tensor.shape) for tensor in tensors_of(batch))


def _unmeasured(clean: bool) -> None:
    """End a batch that was not measured."""


class Learner:
    """Sizes of micro-batches by shape, the same on all ranks: what one learns, it tells the others.

    Args:
        min_size: Samples below which it does not go.
        safety: Share of each memory limit to be left free when sizes grow.
        regrow_every: Batches from one size to the attempt at its double.
        split_first: Called when a batch is about to be split, with the batch and the parts.

    Attributes:
        sizes: What was learnt.
        retries: Attempts that were taken back.
        events: Changes of size, the newest last.
        changed: The size that was changed last and not logged yet.
    """

    def __init__(
        self,
        min_size: int,
        safety: float,
        regrow_every: int,
        split_first: Callable[[Any, int], None],
    ) -> None:
        self.safety, self._split_first = safety, split_first
        self.sizes = LearnedSizes(min_size, regrow_every)
        self.retries = 0
        self.events: list[dict[str, Any]] = []
        self.changed: int | None = None
        self._proven = Proven()
        self._careful_until = 0
        self._shop: Workshop | None = None
        self._forecast: Forecast | None = None
        self._planned: dict[str, int] = {}
        self._looks: dict[Any, Look] = {}

    def start(self, shop: Workshop, forecast: Forecast | None = None) -> None:
        """Begin a run; what was proven in another one need not hold in this one.

        Args:
            shop: Of the run.
            forecast: If given, batches that it says do not fit are split before they run out.
        """
        self._shop, self._room = shop, Room(shop.device, self.safety)
        self._forecast = forecast
        self._passed = Proven()
        self._start = shop.trainer.global_step
        self._looked = self.sizes.batches
        self._proven.clear()
        self._careful_until = 0
        self._planned.clear()
        self._looks.clear()

    def stop(self) -> None:
        """Let go of the run."""
        self._shop = self._room = None  # type: ignore[assignment]
        self._forecast = None
        self.changed = None

    @property
    def shop(self) -> Workshop:
        """The run's."""
        assert self._shop is not None
        return self._shop

    def make_closure(
        self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int
    ) -> MicroBatchClosure:
        """Return what runs a batch in place of Lightning's closure."""
        batch, sizes, ranks = kwargs["batch"], self.sizes, self.shop.ranks
        parts, binding = 1, None
        if sizes.shapes:
            parts, binding = self._parts_of(batch)
        growing = binding is not None and parts > 1 and sizes.is_due(binding)
        look = self._look(batch) if self._forecast is not None or ranks.several else None
        parts = max(parts, self._parts_planned(look))
        room = self._room if growing else None
        if room is not None:
            room.forget()
        if sizes.shapes or self._forecast is not None:  # on all ranks or on none
            parts = self._agree_on(batch, parts)
        proof = self._proof_of(look, parts) if ranks.several else None
        ranks.begin(risky=self._is_risky(proof), news=growing)
        if parts > 1:
            self._split_first(batch, parts)
        retries = self.retries
        measured = self._watch(look, parts)

        def succeeded() -> None:
            sizes.batches += 1
            clean = self.retries == retries
            if clean and proof is not None:
                self._proven.add(*proof)
            measured(clean)
            grown = None
            if room is not None and binding is not None and clean:
                grown = (binding, room.holds(sizes.shapes[binding]["size"]))
            if not ranks.several or ranks.has_news:
                self._grow([news for news in ranks.gather(grown) if news is not None])

        measure = room.measure if room is not None else None
        return MicroBatchClosure(
            self.shop, kwargs, optimizer, batch_idx, parts, self._again, succeeded, measure
        )

    def _parts_of(self, batch: Any) -> tuple[int, str | None]:
        """Return how many parts this rank needs, and the shape that says so."""
        binding = self.sizes.binding(*shape_of(batch))
        if binding is None:
            return 1, None
        return -(-self._samples(batch) // self.sizes.shapes[binding]["size"]), binding

    def _look(self, batch: Any) -> Look | None:
        """Return what is known of a batch by its shapes; None if it cannot be split."""
        key = _signature(batch)
        if self.shop.split is None and key in self._looks:  # the frequent case takes a tenth
            return self._looks[key]
        shape, elements = shape_of(batch)
        try:
            look = Look(shape, elements, kind_of(shape), self._samples(batch))
        except UnsplittableBatchError:
            return None
        if any(shape for _, shape in key):
            if len(self._looks) >= MOST_SHAPES:
                self._looks.clear()
            self._looks[key] = look
        return look

    def _parts_planned(self, look: Look | None) -> int:
        """Return how many parts leave the memory free that is to be left free."""
        if self._forecast is None or look is None:
            return 1
        size = self._forecast.largest(look.shape, look.elements)
        if size is None:
            return 1
        size = max(size, self.sizes.min_size)
        if size >= look.samples:
            return 1
        if self._planned.get(look.shape) != size:
            self._planned[look.shape] = size
            self.note("planned", look.samples, size)
        return -(-look.samples // size)

    def _watch(self, look: Look | None, parts: int) -> Callable[[bool], None]:
        """Begin to measure a batch if none as large was, or only long ago; return what ends it."""
        forecast = self._forecast
        if forecast is None or look is None:
            return _unmeasured
        seen = (look.kind, look.elements, look.samples)
        if self.sizes.batches - self._looked >= self.sizes.regrow_every:
            self._passed.clear()
        if self._passed.covers(*seen):
            return _unmeasured
        forecast.begin()

        def end(clean: bool) -> None:
            if not clean:
                return
            forecast.end(look.shape, look.elements, -(-look.samples // parts))
            self._looked = self.sizes.batches
            if self.shop.trainer.global_step > self._start:  # the optimizer's state is there
                self._passed.add(*seen)

        return end

    def _agree_on(self, batch: Any, parts: int) -> int:
        """Return the most parts that any rank needs, as far as there are samples for them."""
        if not self.shop.ranks.several:
            return parts
        most = self.shop.ranks.most(parts)
        return parts if most == parts else min(most, max(parts, self._samples(batch)))

    def _samples(self, batch: Any) -> int:
        [(_, samples)] = split_with(self.shop.split, batch, 1)
        return samples

    # --- out of memory --------------------------------------------------------------------------

    def _again(self, batch: Any, failed: int, parts: int, problem: str) -> int:
        """Return the number of parts of the next attempt after one that ran out of memory.

        Args:
            batch: The batch.
            failed: Samples of the largest micro-batch; 0 for all.
            parts: Of the failed attempt.
            problem: The allocator's words; empty if it was another rank that ran out.

        Raises:
            MemoryError: If no smaller micro-batch is left to be tried, on any rank.
        """
        self.retries += 1
        self._proven.clear()
        self._careful_until = self.sizes.batches + self.sizes.regrow_every
        own, error = None, None
        if problem:
            try:
                samples = self._samples(batch)
            except UnsplittableBatchError as unsplittable:
                samples, error = 1, unsplittable
            own = self._describe(batch, samples, failed or samples, parts, problem)
            if error is not None:
                own["hopeless"] = str(error)
        failures: list[Failure] = [
            failure for failure in self.shop.ranks.gather(own) if failure is not None
        ]
        if error is not None:
            raise error
        for failure in failures:
            self._shrink(failure)
        wanted = parts
        if own is not None:
            size = self.sizes.shapes[own["shape"]]["size"]
            wanted = max(parts + 1, -(-own["samples"] // size))
        parts = self._agree_on(batch, wanted)
        if parts > 1:
            self._split_first(batch, parts)
        return parts

    def _describe(self, batch: Any, samples: int, failed: int, parts: int, problem: str) -> Failure:
        shape, elements = shape_of(batch)
        hopeless = ""
        if parts >= samples or failed <= self.sizes.min_size:
            one = "one sample does" if failed == 1 else f"min_size={failed} samples do"
            hopeless = (
                f"Even {one} not fit into memory: a micro-batch of {failed} of a batch of "
                f"{samples} ({shape or 'no tensors'}) ran out of it. What may help: "
                "lo.ActivationCheckpointing, precision='bf16-mixed', shorter or smaller samples. "
                f"The allocator said: {problem}"
            )
        return Failure(
            shape=shape,
            elements=elements,
            samples=samples,
            failed=failed,
            problem=problem,
            hopeless=hopeless,
        )

    def _shrink(self, failure: Failure) -> None:
        size = None
        if not failure["hopeless"]:
            size = self.sizes.shrink(failure["shape"], failure["elements"], failure["failed"])
        if size is None:
            raise MemoryError(failure["hopeless"])
        self.note("split", failure["samples"], size)
        log.info(
            "Out of memory with %d samples of %d: the batch is tried again in parts of at most %d.",
            failure["failed"],
            failure["samples"],
            size,
        )

    # --- what fits ------------------------------------------------------------------------------

    def _grow(self, news: list[tuple[str, bool]]) -> None:
        """Grow each shape of which all that measured it say that it fits."""
        for shape in dict.fromkeys(shape for shape, _ in news):
            fits = all(fit for other, fit in news if other == shape)
            size = self.sizes.shapes[shape]["size"]
            self.sizes.grow(shape, fits)
            if fits:
                self.note("grown", 0, 2 * size)

    @staticmethod
    def _proof_of(look: Look | None, parts: int) -> tuple[str, int, int] | None:
        """Return kind, elements of a sample, and samples of a micro-batch; None if unknown."""
        return None if look is None else (look.kind, look.elements, -(-look.samples // parts))

    def _is_risky(self, proof: tuple[str, int, int] | None) -> bool:
        if proof is None or self.sizes.batches < self._careful_until:
            return True
        return not self._proven.covers(*proof)

    def note(self, kind: str, samples: int, size: int) -> None:
        """Note that micro-batches of batches of so many samples have another size from now on."""
        step = self.shop.trainer.global_step
        self.changed = size
        self.events.append({"step": step, "kind": kind, "samples": samples, "size": size})
        del self.events[:-1000]

    # --- checkpoints ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what was learnt, as plain types."""
        return {
            "batches": self.sizes.batches,
            "shapes": {shape: dict(known) for shape, known in self.sizes.shapes.items()},
            "retries": self.retries,
            "events": [dict(event) for event in self.events],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.sizes.batches = state_dict["batches"]
        self.sizes.shapes = {shape: dict(known) for shape, known in state_dict["shapes"].items()}  # type: ignore[misc]
        self.retries = state_dict["retries"]
        self.events = [dict(event) for event in state_dict["events"]]
