"""Blocks are found by structure, not by name."""

import pytest
import torch
from torch import nn

from lightning_opt.core.modules.blocks import find_blocks


def names(model: nn.Module) -> list[str]:
    return [block.name for block in find_blocks(model)]


class Layer(nn.Module):
    def __init__(self, width: int = 4, heads: int = 0, experts: int = 0) -> None:
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(width, 1)) for _ in range(heads))
        self.others = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2), nn.Linear(2, width)) for _ in range(experts)
        )


class Attributes(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def stack(count: int, *args: int) -> nn.ModuleList:
    return nn.ModuleList(Layer(*args) for _ in range(count))


def test_blocks_of_different_width() -> None:
    model = Attributes(p=Layer(4), q=nn.MaxPool1d(2), r=Layer(8), s=Layer(16))
    assert names(model) == ["p", "r", "s"]


def test_stages_are_split_into_their_blocks() -> None:
    stages = nn.Sequential(
        *(nn.Sequential(*(Layer(width) for _ in range(n))) for width, n in ((4, 2), (8, 3)))
    )
    assert names(stages) == ["0.0", "0.1", "1.0", "1.1", "1.2"]


def test_encoder_and_decoder_are_split_into_layers() -> None:
    model = Attributes(one=Attributes(layers=stack(3)), two=Attributes(layers=stack(3)))
    assert names(model) == [f"{side}.layers.{i}" for side in ("one", "two") for i in range(3)]


@pytest.mark.parametrize("kind", ["heads", "experts"])
def test_heads_and_experts_stay_inside_their_layers(kind: str) -> None:
    model = nn.ModuleList(Layer(4, **{kind: 3}) for _ in range(5))
    assert names(model) == ["0", "1", "2", "3", "4"]


def test_first_layer_with_an_extra_part_is_a_block() -> None:
    model = Attributes(layers=nn.ModuleList([Layer(4, 2), *stack(3)]))
    assert names(model) == [f"layers.{i}" for i in range(4)]


def test_shared_module_is_one_block() -> None:
    assert names(nn.ModuleList([Layer()] * 4)) == ["0"]


def test_repeated_plain_layers_of_a_sequential_are_blocks() -> None:
    def layers(count: int) -> list[nn.Module]:
        return [
            layer for _ in range(count) for layer in (nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU())
        ]

    model = Attributes(net=nn.Sequential(nn.Linear(2, 4), *layers(4), nn.Linear(4, 1)))
    assert names(model) == ["net.1-3", "net.4-6", "net.7-9", "net.10-12"]
    assert names(nn.Sequential(*layers(2))) == []


def test_modules_with_several_matrices_are_blocks_and_plain_layers_are_not() -> None:
    assert names(nn.ModuleList(nn.LSTM(4, 4) for _ in range(2))) == ["0", "1"]
    assert names(nn.ModuleList(nn.Linear(4, 4) for _ in range(9))) == []


def test_compiled_blocks_are_found_inside() -> None:
    compiled = nn.ModuleList(torch.compile(layer, backend="eager") for layer in stack(2))
    blocks = find_blocks(compiled)
    assert [block.name for block in blocks] == ["0", "1"]
    assert all(type(block.modules[0]) is Layer for block in blocks)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_scripted_modules_are_not_blocks() -> None:
    model = Attributes(scripted=torch.jit.script(nn.Linear(4, 4)), a=Layer(), b=Layer())
    assert names(model) == ["a", "b"]
    scripted = [torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU())) for _ in range(3)]
    assert names(nn.Sequential(*scripted)) == []
    layers = [part for _ in range(4) for part in (torch.jit.script(nn.Linear(4, 4)), nn.ReLU())]
    assert names(nn.Sequential(*layers)) == []
    inside = [nn.Sequential(part, nn.ReLU()) for part in scripted]
    assert names(nn.Sequential(*inside)) == ["0", "1", "2"]
