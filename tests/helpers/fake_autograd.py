"""A backward pass on fake CUDA tensors: autograd's nodes, called from Python.

Autograd's engine needs a CUDA driver for the streams of each device; its nodes do not.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

Edge = tuple[Any, int]


@contextmanager
def without_engine() -> Iterator[None]:
    """Replace ``torch.autograd.backward`` and ``grad`` by functions that do not use the engine."""
    with mock.patch.multiple(torch.autograd, backward=_backward, grad=_grad):
        yield


def _listed(tensors: Any) -> list[Any]:
    return [tensors] if tensors is None or isinstance(tensors, Tensor) else list(tensors)


def _edge_of(tensor: Tensor) -> Edge:
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _backward(
    tensors: Any, grad_tensors: Any = None, *_: Any, create_graph: bool = False, **__: Any
) -> None:
    with torch.set_grad_enabled(create_graph):
        _run(_listed(tensors), _listed(grad_tensors), set())


def _grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: Any = None,
    create_graph: bool = False,
    allow_unused: bool | None = None,
    **_: Any,
) -> tuple[Tensor | None, ...]:
    edges = [_edge_of(one) for one in _listed(inputs)]
    with torch.set_grad_enabled(create_graph):
        found = _run(_listed(outputs), _listed(grad_outputs), set(edges))
    gradients = tuple(found.get(edge) for edge in edges)
    if not allow_unused and None in gradients:
        raise RuntimeError("One of the tensors appears to not have been used in the graph.")
    return gradients


def _run(roots: Sequence[Tensor], given: list[Any], wanted: set[Edge]) -> dict[Edge, Tensor]:
    """Return the gradients of the wanted edges; if there are none, accumulate in the leaves."""
    arrived: dict[Any, dict[int, Tensor]] = {}
    found: dict[Edge, Tensor] = {}

    def arrive(node: Any, place: int, gradient: Tensor | None) -> None:
        if node is None or gradient is None:
            return
        expected = node._input_metadata[place]
        assert gradient.device == expected.device, (node, gradient.device, expected.device)
        if gradient.shape != expected.shape:
            gradient = gradient.sum_to_size(expected.shape)
        gradient = gradient.to(expected.dtype)
        slots = arrived.setdefault(node, {})
        slots[place] = slots[place] + gradient if place in slots else gradient

    for root, own in zip(roots, given + [None] * len(roots), strict=False):
        arrive(*_edge_of(root), torch.ones_like(root) if own is None else own)
    for node in _in_order(arrived.copy()):
        slots = arrived.pop(node, {})
        found |= {(node, place): own for place, own in slots.items() if (node, place) in wanted}
        is_leaf = hasattr(node, "variable")
        if not slots or (is_leaf and wanted):
            continue
        results = getattr(node, "apply", node)(
            *(slots.get(place) for place in range(len(node._input_metadata)))
        )
        if not is_leaf:
            results = results if isinstance(results, tuple) else (results,)
            for (following, place), gradient in zip(node.next_functions, results, strict=True):
                arrive(following, place, gradient)
    return found


def _in_order(roots: Iterable[Any]) -> list[Any]:
    order: list[Any] = []
    seen: set[Any] = set()
    stack = [(node, False) for node in roots]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
        elif node is not None and node not in seen:
            seen.add(node)
            stack += [(node, True), *((following, False) for following, _ in node.next_functions)]
    return order[::-1]
