"""Where a step goes, in five lines, and what would have to change for more."""

from dataclasses import replace

import pytest

from lightning_opt.tuner import account as parts
from lightning_opt.tuner.report.explaining import bottleneck, describe_step, explain
from lightning_opt.tuner.report.result import TuneResult
from lightning_opt.tuner.search.space import Facts, Space
from lightning_opt.tuner.trial import Trial

GROUPS = (*parts.GROUPS, parts.REST)
FACTS = Facts(threads=2, cpus=2, busy=0.5, room=2**30, account=dict.fromkeys(GROUPS, 0.008))
BASELINE = Trial((), "baseline", seconds=0.1, peak=2**25)


def facts(group: str, **other: object) -> Facts:
    return replace(FACTS, account={**FACTS.account, group: 0.952}, **other)  # type: ignore[arg-type]


def test_five_lines_say_where_a_step_goes() -> None:
    space = Space("throughput", facts(parts.WAITING))
    lines = describe_step(space, BASELINE)
    assert lines == [
        "A step takes 100 ms: waiting for data 95%, forward 1%, backward 1%, optimizer 1%, "
        "communication 1%, callbacks 1%, Lightning and the rest 1%.",
        "The bottleneck is waiting for data (95%).",
        "It uses 50% of 2 CPUs.",
        "It takes 32 MiB at its peak; 1,024 MiB are free.",
        "Tried will be: data_pipeline.",
    ]
    on_gpu = describe_step(Space("throughput", facts(parts.WAITING, device="cuda")), BASELINE)
    assert on_gpu[2] == "It uses the device (cuda) 3% of the time."


@pytest.mark.parametrize(
    ("group", "more", "part", "remedy"),
    [
        (parts.WAITING, {}, "waiting for data", "a faster disk"),
        (parts.BACKWARD, {}, "computing", "a GPU with bf16"),
        (parts.BACKWARD, {"device": "cuda", "no_bf16": "old"}, "computing", "a GPU with bf16"),
        (parts.FORWARD, {"device": "cuda"}, "computing", "a faster device, or more of them"),
        (parts.COMMUNICATION, {}, "communication", "a faster network"),
        (parts.CALLBACKS, {}, "Lightning and callbacks", "a larger batch"),
    ],
)
def test_what_would_have_to_change(
    group: str, more: dict[str, str], part: str, remedy: str
) -> None:
    known = facts(group, **more)
    assert bottleneck(known)[0] == part
    said = explain(TuneResult("throughput", Space("throughput", known), [BASELINE], ()))
    assert f"More would take {remedy}" in said.splitlines()[-1]
    assert f"{part} takes 9" in said.splitlines()[-1]


def test_largest_batches_and_models_are_said() -> None:
    best = Trial(("fused",), "accepted", ratio=1.1, peak_ratio=0.5)
    space = Space("batch", FACTS)
    said = explain(
        TuneResult("batch", space, [BASELINE, best], ("fused",), batches={(): 32, ("fused",): 96})
    )
    assert "Largest batch, tried: 32 as it is, 96 with fused." in said
    said = explain(TuneResult("memory", space, [BASELINE, best], ("fused",)))
    assert "by the peak about 2 times as large" in said
