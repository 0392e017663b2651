"""The tuner compared with an exhaustive search: the answers and the time.

Supports the claim of the documentation: on a ConvNet, a vision transformer, a byte-level GPT, a
tiny MLP and two trainings that wait for data (one for the work of a loader, one for a slow disk)
the tuner's answer is within 5% of the best of all combinations of some switches, with a budget of a
quarter of the time of trying them all. Both searches use the same trials (the same processes,
turns, early ends and checks of numerics), each with an empty cache of compiled code. Torch uses its
default threads. The answers and the best are then measured again, in turns with the baseline, since
the best of many measurements is partly luck; an answer is compared with the fastest of that.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lightning_opt as lo
from benchmarks.harness import continued, parse_arguments, publish
from benchmarks.kernels import kernels_models
from benchmarks.kernels.kernels_models import Batches, Learner, Parts
from lightning_opt.tuner.autotune import Tuning
from lightning_opt.tuner.search import Objective, Search, Switches
from lightning_opt.tuner.trials import GRACE_SECONDS
from lightning_opt.worker.training_process import TrainingProcess

OWN_SIZES = {
    # Steps of some tens of milliseconds on one thread of a CPU: width, depth, heads, ...
    "tuner": {
        "vision transformer": (96, 3, 4, 8),
        "ConvNet": (16, 2, 8),
        "byte GPT": (96, 3, 4, 128, 4),
    },
    "tuner_cuda": {
        "vision transformer": (512, 6, 8, 64),
        "ConvNet": (64, 3, 128),
        "byte GPT": (512, 6, 8, 512, 8),
    },
}

MODELS = ("vision transformer", "ConvNet", "byte GPT", "tiny MLP", "slow items", "slow disk")

OWN = {
    name.lower(): {"callbacks": [{"class_path": f"lightning_opt.{name}"}]}
    for name in ("AdaptiveClipping", "GarbageCollection")
}
"""Candidates of a user's own; the first can only cost time."""

BLOCKS = ["fused", "bf16", "compile_regions", "checkpointing"]
SMALL = ["fused", "bf16", "compile", "adaptiveclipping"]
SWITCHES = {
    device: {
        "vision transformer": [*BLOCKS, runtime, "channels_last"],
        "ConvNet": [*BLOCKS, runtime, "channels_last"],
        "byte GPT": [*BLOCKS, runtime, "adaptiveclipping"],
        "tiny MLP": [*SMALL, runtime, "garbagecollection"],
        "slow items": [*SMALL, runtime, *loader],
        "slow disk": [*SMALL, runtime, *loader],
    }
    for device, runtime, loader in (
        ("cpu", "one_thread", ["data_pipeline", "data_pipeline_one_thread"]),
        ("cuda", "tf32", ["data_pipeline"]),
    )
}
"""Switches of both searches, except for unsuitable ones, as bfloat16 on many CPUs."""


class TinyMLP(L.LightningModule):
    """Computes so little that Lightning's own overhead is most of a step."""

    samples, length = 32, 0

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(3072, 8), nn.ReLU(), nn.Linear(8, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.layers(batch[0]).float(), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Items(Dataset[Any]):
    """Images that are slow to load: by CPU work, or by a wait as for a disk."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.name == "slow disk":
            time.sleep(0.001)
        else:
            end = time.thread_time() + 0.0005
            while time.thread_time() < end:
                pass
        return torch.full((3, 32, 32), index % 10 / 10), index % 10


class Recipe:
    """Creates a model or its data by name, in the process of a trial."""

    def __init__(self, name: str, device: str, data: bool) -> None:
        self.name, self.device, self.data = name, device, data

    def __call__(self) -> Any:
        kernels_models.SIZES.update(OWN_SIZES)  # of another module, so anew in each process
        size = "tuner_cuda" if self.device == "cuda" else "tuner"
        if self.data and self.name in ("slow items", "slow disk"):
            return DataLoader(Items(self.name), batch_size=32)
        tiny = self.name in MODELS[3:]
        model = TinyMLP() if tiny else Learner(self.name, size, Parts())
        return DataLoader(Batches(model), batch_size=None) if self.data else model


class Exhaustive(Search):
    """Tries all combinations."""

    def run(self) -> Switches:
        self._try(
            itertools.chain.from_iterable(
                itertools.combinations(self.switches, size)
                for size in range(1, len(self.switches) + 1)
            )
        )
        self.complete = True
        return self.winner()

    def winner(self) -> Switches:
        """Return the configuration with the best score, by whatever margin."""
        best = min(self.outcomes, key=lambda names: self.outcomes[names].score, default=())
        return best if best and self.outcomes[best].score < 1 else ()

    def next_to_remeasure(self, repeated: Any) -> None:
        """Measure nothing again."""


class Grid(Tuning):
    """The tuner's trials without its search and without a time limit."""

    def _search(self) -> Search:
        self._trials.deadline = float("inf")
        return Exhaustive(self._measure, tuple(self._space.switches), self._space.allows)

    def side_by_side(self, best: Switches, others: Iterable[Switches]) -> dict[Switches, float]:
        """Return times of a step of others as shares of the best one's, measured anew."""
        wanted = {names: named(names) for names in (best, *others)}
        settings = {name: self._space.settings(names) for names, name in wanted.items()}
        found = lo.compare(self.model, self.data, settings, rounds=40, seconds=60.0).ratios
        return {
            names: 1.0 if names == best else found[name].value for names, name in wanted.items()
        }


def arguments_for(name: str, device: str) -> dict[str, Any]:
    """Return the arguments of both searches."""
    return {
        "model": Recipe(name, device, data=False),
        "data": Recipe(name, device, data=True),
        "base": {"accelerator": "gpu" if device == "cuda" else "cpu", "devices": 1},
        "candidates": [{key: OWN[key]} if key in OWN else key for key in SWITCHES[device][name]],
        "objective": Objective("throughput"),
        "timeout": 120.0,
        "progress": False,
    }


COMPILED = os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
"""One folder for all searches: under a variable of another value processes start more slowly."""


def empty_cache() -> None:
    """Delete all compiled code."""
    shutil.rmtree(COMPILED, ignore_errors=True)


def measure(name: str, device: str, runs: int) -> dict[str, Any]:
    """Return the row of a model: one exhaustive search, and several of the tuner's."""
    given = arguments_for(name, device)
    with TrainingProcess(
        given["model"], given["data"], given["base"]
    ) as fit:  # later starts are quicker than the first
        fit.advance(1)
    empty_cache()
    begun = time.monotonic()
    grid = Grid(**given, budget=60.0)
    every = grid.run()
    grid_seconds = time.monotonic() - begun
    # Under a quarter of the grid's time, less that of the baseline, which no budget counts.
    baseline = grid_seconds - sum(trial.cost for trial in every.trials)
    budget = 0.24 * grid_seconds - baseline - GRACE_SECONDS
    best, tuned, seconds = every.switches, [], []
    for _ in range(runs):
        empty_cache()
        begun = time.monotonic()
        tuned.append(Tuning(**given, budget=budget).run())
        seconds.append(time.monotonic() - begun)
        print(f"{name}: {named(tuned[-1].switches)} in {seconds[-1]:.0f} s", flush=True)
    answers = [one.switches for one in tuned]
    again = grid.side_by_side(best, answers) if set(answers) != {best} else {best: 1.0}
    fastest = min(again.values())  # what the grid called the best may be that by luck
    shares = [again[names] / fastest for names in answers]
    took = statistics.median(seconds)
    return {
        "model": name,
        "tuner's answers": "; ".join(
            f"{count} of {named(names)}" if count > 1 else named(names)
            for names, count in Counter(answers).items()
        ),
        "time": ", ".join(f"{one.best.ratio or 1.0:.2f}" for one in tuned),
        "best combination": named(best),
        "best's time": round(every.best.ratio or 1.0, 3),
        "answer / best, measured again": ", ".join(f"{share:.2f}" for share in shares),
        "within 5%": f"{sum(share <= 1.05 for share in shares)} of {runs}",
        "trials": round(statistics.median(len(one.trials) - 1 for one in tuned)),
        "combinations": len(every.trials) - 1,
        "tuner s": round(took, 1),
        "exhaustive s": round(grid_seconds, 1),
        "tuner s / exhaustive s": round(took / grid_seconds, 3),
    }


def named(switches: Switches) -> str:
    return " + ".join(switches) or "leave it as it is"


NOTES = [
    "`time`: time of a step with each answer, as a ratio to the baseline, as the tuner measured "
    "it. `best combination`: the fastest in the exhaustive search. `trials`: trials of the tuner. "
    "`combinations`: trials of the exhaustive search: all combinations of switches that do not "
    "exclude each other. `tuner s`, `exhaustive s`: seconds of a search. `trials` and `tuner s` "
    "are medians over the tuner's searches. Goal for the last column: at most 0.25.",
    "`answer / best, measured again`: after the searches, the answers and the best combination "
    "were timed again, in turns. Each number is the time of an answer as a ratio to the fastest of "
    "them. `within 5%`: answers with a ratio of at most 1.05.",
]


def main() -> None:
    """Compare on every model, and publish the table anew after each."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--runs", type=int, default=5, help="searches of the tuner for each model")
    own, rest = parser.parse_known_args()
    threads = torch.get_num_threads()
    arguments = parse_arguments(__doc__ or "", rest)
    torch.set_num_threads(threads)  # the user's default, since that is what the answer is against
    if arguments.quick:
        own.runs = 1
        for name in MODELS:
            del SWITCHES[arguments.device][name][2:]
    known = continued("tuner", arguments).get("models", {})
    for name in own.models:
        known[name] = measure(name, arguments.device, own.runs)
        rows = [known[name] for name in MODELS if name in known]
        report = lo.Report("The tuner, compared with an exhaustive search", rows, NOTES)
        publish("tuner", report, arguments, models=known)


if __name__ == "__main__":
    main()
