"""Generates the README's table of gains and costs from the committed records."""

import json
import statistics
from typing import Any

from benchmarks.records import RESULTS


def find(name: str, **where: object) -> dict[str, Any]:
    """Return the only row of a record that has these values."""
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    found = [row for row in rows if all(row.get(key) == value for key, value in where.items())]
    if len(found) != 1:
        raise ValueError(
            f"{name}.json has {len(found)} rows with {where}; docs/evidence.py expects 1"
        )
    return dict(found[0])


def sums(name: str, *columns: str) -> list[int]:
    """Return the sums of columns of a record."""
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return [sum(row[column] for row in rows) for column in columns]


def record(name: str, text: str) -> str:
    return f"[{text}](benchmarks/results/{name}.md)"


def more(ratio: float) -> str:
    """Format a ratio as added cost in per cent; 0% below half a per cent."""
    return f"{100 * (ratio - 1):.0f}%" if ratio >= 1.005 else "0%"


def evidence_rows() -> list[tuple[str, str, str, str, str]]:
    """Return symptom, feature, gain, cost and proof of eight features."""
    small, large = "40-tensor MLP", "9.5 M transformer"
    guard = [
        find("guard_cost", model=m, callbacks="NonFiniteGuard")["1 + hooks"] for m in (small, large)
    ]
    guarded = [
        find("guard_cost", model=m, callbacks="bare step")["ms a step"] for m in (small, large)
    ]
    clip = [
        find("clipping_cost", model=m, what="AdaptiveClipping")["of step"] for m in (small, large)
    ]
    clipped = [
        find("clipping_cost", model=m, what="bare step")["us"] / 1000 for m in (small, large)
    ]
    bad = {
        kind: find("compression_outlier", optimizer="SGD", protection=kind, strategy="dense")
        for kind in ("none", "guard")
    }
    lost = "NaN" if bad["none"]["with"] is None else f"{bad['none']['with']:.2f}"
    survived = sums(
        "micro_batching_survival",
        "completed, right weights and samples", "trainings", "bare run completed",
    )  # fmt: skip
    adam = find("compression_outlier", optimizer="AdamW", protection="none", strategy="dense")
    micro = find("micro_batching_cost", model="transformer, 9.5M", accumulate=4)
    micro_small = find("micro_batching_cost", model="MLP of 40 tensors", accumulate=1)
    half = {
        model: find("checkpointing", model=model, policy="auto, 0.5")
        for model in ("transformer", "convnet")
    }
    gpt2 = find("checkpointing_others", model="GPT-2", policy="auto, 0.5")
    acts = json.loads((RESULTS / "demo.json").read_text())["acts"]
    link = {name: acts["4"]["dense"] / seconds for name, seconds in acts["4"].items()}
    data = {
        (d, s): find("data", dataset=d, settings=s)["samples/s"]
        for d in ("waits", "computes")
        for s in ("default", "tuner")
    }
    faster = {d: data[d, "tuner"] / data[d, "default"] for d in ("waits", "computes")}
    search = find("data", dataset="waits", settings="tuner")["found in s"]
    image, disk = (find("tuner", model=name) for name in ("vision transformer", "slow disk"))
    tuned = [1 / statistics.median(map(float, row["time"].split(", "))) for row in (image, disk)]
    size = find("batch_size_largest", model="wide, 3 layers")
    passes = find("clipping_rules", rule="Robust()")
    return [
        (
            "one bad batch ruins the weights",
            "[`NonFiniteGuard(spike=8)`](docs/gradients/guard.md)",
            f"final loss {bad['guard']['with']:.2f}, as without the bad batch; plain: {lost} "
            f"with SGD, {adam['with']:.2f} instead of {adam['without']:.2f} with AdamW",
            f"{more(guard[0])} of a {guarded[0]:.0f} ms step, "
            f"{more(guard[1])} of a {guarded[1]:.0f} ms step",
            f"{record('compression_outlier', 'GPT, three seeds')}; {record('guard_cost', 'cost')}",
        ),
        (
            "out of memory once in a while",
            '[`MicroBatching("auto")`](docs/batching/micro_batching.md)',
            f"{survived[0]} of {survived[1]} runs finish with the right weights; "
            f"plain: {survived[2]}",
            f"{more(micro_small['of the bare step'])} of a "
            f"{micro_small['ms a bare step']:.0f} ms step, {more(micro['of the bare step'])} of a "
            f"{micro['ms a bare step']:.0f} ms step while everything fits",
            f"{record('micro_batching_survival', 'random limits')}; "
            f"{record('micro_batching_cost', 'cost')}",
        ),
        (
            "out of memory from the start",
            '[`ActivationCheckpointing("auto", budget=0.5)`](docs/memory/checkpointing.md)',
            f"peak activation memory cut to {half['transformer']['peak']:.2f}",
            f"transformer {more(half['transformer']['time'])} slower, "
            f"ConvNet {more(half['convnet']['time'])}, GPT-2 {more(gpt2['time'])}; "
            "an error where half cannot be met",
            f"{record('checkpointing', 'transformer, ConvNet')}; "
            f"{record('checkpointing_others', 'GPT-2')}",
        ),
        (
            "gradients explode once in a while",
            "[`AdaptiveClipping()`](docs/gradients/clipping.md)",
            f"a gradient of 100 times the usual norm is scaled down to "
            f"{passes['spike'].removesuffix('x')} times; {passes['steady']} of normal gradients "
            "are clipped too",
            f"{more(clip[0])} of a {clipped[0]:.0f} ms step, "
            f"{more(clip[1])} of a {clipped[1]:.0f} ms step",
            f"{record('clipping_rules', 'known norms')}; {record('clipping_cost', 'cost')}",
        ),
        (
            "a slow link between machines",
            '[`strategy="ddp_int8"`, `"ddp_topk"`](docs/strategies/compression.md)',
            f"steps {link['ddp_int8']:.1f} and {link['ddp_topk 1%']:.0f} times faster "
            "at 100 Mbit/s",
            "Top-K loses accuracy under AdamW; int8 does not",
            f"{record('demo', 'two processes')}; "
            f"{record('compression_accuracy', 'accuracy')}",
        ),
        (
            "training waits for data",
            "[`DataPipelineTuner()`](docs/data/pipeline.md)",
            f"{faster['computes']:.1f} times the samples per second of a loader without workers "
            f"where items compute, {faster['waits']:.1f} times where they sleep",
            f"{search:.0f} s before the first step",
            record("data", "two datasets"),
        ),
        (
            "which batch size fits?",
            "[`find_batch_size()`](docs/batching/batch_size.md)",
            f"finds {size['found / exhaustive']:.2f} of the largest that fits",
            f"{size['seconds']:.0f} s",
            record("batch_size_largest", "three models, limited memory"),
        ),
        (
            "which speed-ups are worth it?",
            "[`lightning-opt tune`](docs/tuner.md)",
            f"a vision transformer {tuned[0]:.1f} times faster, a training that waits for a disk "
            f"{tuned[1]:.1f} times",
            f"a search of {image['tuner s']:.0f} and {disk['tuner s']:.0f} s",
            record("tuner", "beside all combinations"),
        ),
    ]  # fmt: skip


def evidence_table() -> str:
    """Return the README's table."""
    head = "| symptom | feature | gain | cost | proven on |\n|---|---|---|---|---|\n"
    return head + "\n".join(f"| {' | '.join(row)} |" for row in evidence_rows())
