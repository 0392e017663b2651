"""Generates two tables from the committed records: gains and costs, strategies on networks."""

import json
import statistics
from typing import Any

from benchmarks.records import RESULTS


def rows_of(name: str) -> list[dict[str, Any]]:
    """Return the rows of a record."""
    return list(json.loads((RESULTS / f"{name}.json").read_text())["rows"])


def find(name: str, **where: object) -> dict[str, Any]:
    """Return the only row of a record that has these values."""
    rows = rows_of(name)
    found = [row for row in rows if all(row.get(key) == value for key, value in where.items())]
    if len(found) != 1:
        raise ValueError(
            f"{name}.json has {len(found)} rows with {where}; docs/evidence.py expects 1"
        )
    return dict(found[0])


def record(name: str, text: str) -> str:
    return f"[{text}](benchmarks/results/{name}.md)"


def more(ratio: float) -> str:
    """Format a ratio as added cost in per cent; 0% below half a per cent."""
    return f"{100 * (ratio - 1):.0f}%" if ratio >= 1.005 else "0%"


def longer(*steps: tuple[float, float]) -> str:
    """Format the costs of two steps, each given as milliseconds and ratio."""
    (first, ratio), (second, other) = steps
    return (
        f"a step of {first:.0f} ms takes {more(ratio)} longer, one of {second:.0f} ms {more(other)}"
    )


def guard_row() -> tuple[str, str, str, str, str]:
    runs = {
        (optimizer, protection): find(
            "compression_outlier", optimizer=optimizer, protection=protection, strategy="dense"
        )["with"]
        for optimizer in ("SGD", "AdamW")
        for protection in ("none", "guard")
    }
    lost = runs["SGD", "none"]
    costs = []
    for model in ("40-tensor MLP", "9.5 M transformer"):
        bare = find("guard_cost", model=model, callbacks="bare step")["ms a step"]
        (guarded,) = (
            row["time / bare, hooks only"]
            for row in rows_of("guard_cost")
            if row["model"] == model and row["callbacks"].startswith("NonFiniteGuard(spike")
        )
        costs.append((bare, guarded))
    return (
        "one bad batch ruins the weights",
        "[`NonFiniteGuard(spike=8)`](docs/gradients/guard.md)",
        "the loss ends as without the bad batch: at "
        f"{runs['SGD', 'guard']:.2f} instead of {'NaN' if lost is None else f'{lost:.2f}'} with "
        f"SGD, at {runs['AdamW', 'guard']:.2f} instead of {runs['AdamW', 'none']:.2f} with AdamW",
        longer(*costs),
        f"{record('compression_outlier', 'GPT, three seeds')}; {record('guard_cost', 'cost')}",
    )


def micro_batching_row() -> tuple[str, str, str, str, str]:
    right, runs, plain = (
        sum(row[column] for row in rows_of("micro_batching_survival"))
        for column in (
            "completed, right weights and samples", "trainings", "bare run completed",
        )
    )  # fmt: skip
    costs = (
        find("micro_batching_cost", model="MLP of 40 tensors", accumulate=1),
        find("micro_batching_cost", model="transformer, 9.5M", accumulate=4),
    )
    return (
        "out of memory once in a while",
        '[`MicroBatching("auto")`](docs/batching/micro_batching.md)',
        f"of {runs} runs with a random memory limit, {right} finish with the right weights; "
        f"without it {plain}",
        "while everything fits, "
        + longer(*((row["ms a bare step"], row["time / bare"]) for row in costs)),
        f"{record('micro_batching_survival', 'random limits')}; "
        f"{record('micro_batching_cost', 'cost')}",
    )


def checkpointing_row() -> tuple[str, str, str, str, str]:
    half = {
        "transformer": find("checkpointing", model="transformer", policy="auto, 0.5"),
        "ConvNet": find("checkpointing", model="convnet", policy="auto, 0.5"),
        "GPT-2": find("checkpointing_others", model="GPT-2", policy="auto, 0.5"),
    }
    times = ", ".join(f"{more(row['time'])} ({model})" for model, row in half.items())
    peak = max(row["peak"] for row in half.values())
    return (
        "out of memory from the start",
        '[`ActivationCheckpointing("auto", budget=0.5)`](docs/memory/checkpointing.md)',
        f"activations take at most {100 * peak:.0f}% of their memory; an error if half is "
        "impossible",
        f"a step takes longer: {times}",
        f"{record('checkpointing', 'transformer, ConvNet')}; "
        f"{record('checkpointing_others', 'GPT-2')}",
    )


def clipping_row() -> tuple[str, str, str, str, str]:
    rule = find("clipping_rules", rule="Robust()")
    costs = (
        (
            find("clipping_cost", model=model, what="bare step")["us"] / 1000,
            find("clipping_cost", model=model, what="AdaptiveClipping")["step / bare"],
        )
        for model in ("40-tensor MLP", "9.5 M transformer")
    )
    return (
        "gradients explode once in a while",
        "[`AdaptiveClipping()`](docs/gradients/clipping.md)",
        "a gradient 100 times as large as usual is scaled down to "
        f"{rule['spike'].removesuffix('x')} times the usual size; {rule['steady']} of the "
        "normal gradients are scaled down too",
        longer(*costs),
        f"{record('clipping_rules', 'known norms')}; {record('clipping_cost', 'cost')}",
    )


def compression_row() -> tuple[str, str, str, str, str]:
    acts = json.loads((RESULTS / "demo.json").read_text())["acts"]
    link = {name: acts["4"]["dense"] / seconds for name, seconds in acts["4"].items()}
    worse = {
        (name, optimizer): find(
            "compression_accuracy", task="byte-level GPT, loss", optimizer=optimizer, ranks=2,
            strategy=name,
        )["% worse"]
        for name in ("topk 1%", "int8")
        for optimizer in ("SGD", "AdamW")
    }  # fmt: skip
    return (
        "a slow link between machines",
        '[`strategy="ddp_int8"`, `"ddp_topk"`](docs/strategies/compression.md)',
        f"at 100 Mbit/s a step is {link['ddp_int8']:.1f} times faster with int8 and "
        f"{link['ddp_topk 1%']:.0f} times with Top-K",
        f"Top-K ends with a loss {worse['topk 1%', 'SGD']:.1f}% higher with SGD and "
        f"{worse['topk 1%', 'AdamW']:.1f}% with AdamW; int8: "
        f"{max(abs(worse['int8', 'SGD']), abs(worse['int8', 'AdamW'])):.1f}%",
        f"{record('demo', 'two processes')}; {record('compression_accuracy', 'small GPT')}",
    )


def data_row() -> tuple[str, str, str, str, str]:
    faster = {
        dataset: find("data", dataset=dataset, settings="tuner")["samples/s"]
        / find("data", dataset=dataset, settings="default")["samples/s"]
        for dataset in ("waits", "computes")
    }
    search = find("data", dataset="waits", settings="tuner")["found in s"]
    return (
        "training waits for data",
        "[`DataPipelineTuner()`](docs/data/pipeline.md)",
        f"compared with a loader without workers: {faster['computes']:.1f} times the samples per "
        f"second if items take computation, {faster['waits']:.0f} times if they take waiting "
        "(here: `time.sleep`)",
        f"{search:.0f} s before the first step",
        record("data", "two datasets"),
    )


def evidence_rows() -> list[tuple[str, str, str, str, str]]:
    """Return symptom, feature, gain, cost and record of eight features."""
    sizes = rows_of("batch_size_largest")
    share = min(row["found / exhaustive"] for row in sizes)
    seconds = [row["seconds"] for row in sizes]
    image, disk = (find("tuner", model=name) for name in ("vision transformer", "slow disk"))
    tuned = [1 / statistics.median(map(float, row["time"].split(", "))) for row in (image, disk)]
    return [
        guard_row(),
        micro_batching_row(),
        checkpointing_row(),
        clipping_row(),
        compression_row(),
        data_row(),
        (
            "which batch size fits?",
            "[`find_batch_size()`](docs/batching/batch_size.md)",
            f"finds a size of at least {100 * share:.0f}% of the largest that fits",
            f"{min(seconds):.0f} to {max(seconds):.0f} s",
            record("batch_size_largest", "three models, limited memory"),
        ),
        (
            "which speed-ups are worth it?",
            "[`lightning-opt tune`](docs/tuner.md)",
            f"a vision transformer trains {tuned[0]:.1f} times faster, a training that waits for a "
            f"slow disk {tuned[1]:.1f} times",
            f"the search takes {image['tuner s']:.0f} and {disk['tuner s']:.0f} s",
            record("tuner", "beside all combinations"),
        ),
    ]


def evidence_table() -> str:
    """Return the README's table."""
    head = "| symptom | feature | gain | cost | measured |\n|---|---|---|---|---|\n"
    return head + "\n".join(f"| {' | '.join(row)} |" for row in evidence_rows())


STRATEGIES = {
    '`"ddp"`': ("compression", "dense"),
    '`"ddp_int8"`': ("compression", "ddp_int8"),
    '`"ddp_int4"`': ("compression", "ddp_int4"),
    '`"ddp_topk"`': ("compression", "ddp_topk 1%"),
    '`"diloco"`': ("diloco", "diloco, H=16"),
    "`DiLoCoStrategy(30)`": ("diloco", "diloco, H=30"),
    '`"diloco_streaming"`': ("diloco", "diloco_streaming, H=30"),
}
"""The record and the row of each strategy."""

ALONE = {"compression": "no exchange", "diloco": "no network"}
"""The row of each record in which processes send nothing."""


def strategy_table() -> str:
    """Return each strategy's step, as a multiple of one without an exchange, on two networks."""
    head = "| strategy | 1 Gbit/s | 100 Mbit/s | compression ratio |\n|---|---|---|---|\n"
    lines = []
    for strategy, (name, row) in STRATEGIES.items():
        cells = []
        for network in ("1 Gbit/s", "100 Mbit/s"):
            own, alone = (
                find(name, ranks=2, network=network, strategy=found) for found in (row, ALONE[name])
            )
            cells.append(f"{own['step'] / alone['step']:.1f}")
        cells.append(f"{float(format(own['compression ratio'], '.2g')):g}")
        lines.append(f"| {strategy} | {' | '.join(cells)} |")
    return head + "\n".join(lines)
