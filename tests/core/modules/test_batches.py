"""Batches of all kinds, split and joined again."""

import dataclasses
from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import tree_leaves

import lightning_opt as lo
from lightning_opt.core.modules.batches import read_batch

Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass(frozen=True)
class Record:
    rows: Tensor
    scale: float


class Encoding(UserDict):
    """Like Hugging Face's BatchEncoding: a mapping with attributes."""

    def __init__(self, data: Any, kind: str = "fast") -> None:
        super().__init__(data)
        self.kind = kind


X = torch.arange(14).reshape(7, 2)

BATCHES = {
    "tensor": X,
    "list": [X, X + 1],
    "tuple": (X, X.float()),
    "nested": {"a": [X, {"b": X}], "c": (X,)},
    "named tuple": Pair(X, [X]),
    "dataclass": Record(X, 0.5),
    "ordered": OrderedDict(z=X, a=X),
    "encoding": Encoding({"ids": X}),
    "names": {"ids": X, "names": list("abcdefg"), "codes": tuple(range(7))},
    "shared": {"ids": X, "scale": 2.0, "none": None, "scalar": torch.tensor(3), "at": X.device},
    "array": {"ids": np.arange(7), "x": X},
}


def join(parts: list[Any]) -> Any:
    """Join parts again; the reference of these tests."""
    first = parts[0]
    if isinstance(first, Tensor):
        return first if first.ndim == 0 else torch.cat(parts)
    if isinstance(first, np.ndarray):
        return np.concatenate(parts)
    if isinstance(first, (dict, UserDict)):
        return {key: join([part[key] for part in parts]) for key in first}
    if isinstance(first, Record):
        return {"rows": join([part.rows for part in parts]), "scale": first.scale}
    if isinstance(first, (list, tuple)):
        if any(isinstance(item, (Tensor, dict, list)) for item in first):
            return [join(list(items)) for items in zip(*parts, strict=True)]
        return [item for part in parts for item in part]
    return first


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("size", [1, 3, 6, 7, 100])
def test_joined_parts_equal_the_batch(kind, size):
    batch = BATCHES[kind]
    parts = lo.split_batch(batch, size)
    assert {type(part) for part in parts} == {type(batch)}
    lengths = [read_batch(part).samples for part in parts]
    assert sum(lengths) == 7
    assert len(parts) == -(-7 // size)
    assert max(lengths) <= size
    assert max(lengths) - min(lengths) <= 1
    joined, whole = tree_leaves(join(parts)), tree_leaves(join([batch]))
    assert len(joined) == len(whole)
    for leaf, expected in zip(joined, whole, strict=True):
        assert np.array_equal(leaf, expected) if hasattr(leaf, "shape") else leaf == expected


def test_mapping_attributes_are_kept_and_tensors_are_views():
    parts = lo.split_batch(Encoding({"ids": X}, kind="slow"), 4)
    assert [part.kind for part in parts] == ["slow", "slow"]
    assert parts[1]["ids"].untyped_storage().data_ptr() == X.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"a": X, "b": X[:3]}, r"batch\['a'\] has 7, batch\['b'\] has 3"),
        ({"a": X, "names": ["x"]}, "different numbers of samples"),
        ({"a": 1.0}, "no tensor"),
        ((X.to_sparse(),), "layout"),
        ((torch.nested.as_nested_tensor([X, X], layout=torch.jagged),), "nested tensor"),
        ({"a": pack_sequence([X.float(), X.float()])}, "PackedSequence"),
        ((pack_sequence([X.float(), X.float(), X.float()]), 3), "PackedSequence"),
        (object(), "object"),
    ],
)
def test_unsplittable_batch_raises_with_advice(batch, message):
    with pytest.raises(lo.UnsplittableBatchError, match=message) as caught:
        lo.split_batch(batch, 1)
    assert "split(batch, parts)" in str(caught.value)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_pairs_without_common_rows_are_samples(number):
    batch = [(torch.randn(8), torch.randn(1)) for _ in range(number)]
    assert read_batch(batch).samples == number
    parts = lo.split_batch(batch, 1)
    assert all(part[0] is pair for part, pair in zip(parts, batch, strict=True))
    assert read_batch([(X, X[:, :1])] * number).samples == 7
    assert read_batch([Rows(torch.arange(5))] * number).samples == number


class Graphs:
    """Like PyTorch Geometric's Batch."""

    def __init__(self, graphs: list[int]) -> None:
        self.graphs = graphs

    def __len__(self) -> int:
        return len(self.graphs)

    def to_data_list(self) -> list[int]:
        return self.graphs

    @classmethod
    def from_data_list(cls, graphs: list[int]) -> "Graphs":
        return cls(graphs)


class Rows:
    """Like a TensorDict."""

    def __init__(self, rows: Tensor) -> None:
        self.rows, self.batch_size = rows, rows.shape[:1]

    def __getitem__(self, index: slice) -> "Rows":
        return Rows(self.rows[index])


@pytest.mark.parametrize("kind", [Graphs, Rows])
def test_graphs_and_tensordicts_beside_other_fields_are_split(kind):
    whole = kind(list(range(4)) if kind is Graphs else torch.arange(4))
    for batch in ((whole, whole), (whole, "text", 4), [whole, 4], [whole, None]):
        first, second = lo.split_batch(batch, 3)
        assert read_batch(first).samples == read_batch(second).samples == 2
        (rows,) = {key: value for key, value in vars(second[0]).items() if key != "batch_size"}
        assert list(getattr(second[0], rows)) == [2, 3]
        assert second[1] is batch[1] or batch[1] is whole


def test_micro_batches_have_their_share_of_samples():
    batch = {"x": torch.arange(7), "scale": 0.5}
    found = lo.micro_batches(batch, 3)
    assert [part["x"].tolist() for part, _ in found] == [[0, 1], [2, 3], [4, 5, 6]]
    assert [share for _, share in found] == [2 / 7, 2 / 7, 3 / 7]
    assert lo.micro_batches({"x": torch.arange(0)}, 3)[0][1] == 1.0
    with pytest.raises(ValueError, match="at least 1"):
        lo.micro_batches(batch, 0)
