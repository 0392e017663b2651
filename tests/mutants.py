"""Plants one bug at a time in a copy of the package, and checks that the named tests fail.

Run by hand: ``python -m tests.mutants``, or with words of the promises to run only those
(``python -m tests.mutants ranks resume``). A mutant survives if its tests pass.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("lightning_opt", "tests", "examples", "benchmarks", "pyproject.toml")
TIMEOUT = 900.0


class Mutant(NamedTuple):
    """A bug.

    Attributes:
        promise: The behaviour that it breaks.
        folder: Folder or file below ``lightning_opt`` with the line.
        pattern: Regular expression that matches once in the folder's sources.
        replacement: Its replacement, as for ``re.sub``.
        tests: Arguments of pytest: the tests that must fail.
    """

    promise: str
    folder: str
    pattern: str
    replacement: str
    tests: str


NORMS = "tests/core/numerics/test_norms.py"
CLIPPING = "tests/gradients/clipping"
GUARD = "tests/gradients/guard"
ACCUMULATION = "tests/batching/accumulation"
PARTS = "tests/batching/micro_batching"
COMPRESSION = "tests/strategies/compression"
DILOCO = "tests/strategies/diloco/test_diloco_strategy.py"
CHECKPOINTING = "tests/memory/checkpointing"
CONTRACTS = "tests/test_contracts.py -k"

MUTANTS = (
    Mutant(
        "the total norm is that of all gradients as one vector",
        "core/numerics",
        r"GradientNorms\(norms, math\.hypot\(\*norms\)\)",
        "GradientNorms(norms, max(norms))",
        NORMS,
    ),
    Mutant(
        "norms are divided by the loss scale",
        "core/numerics",
        r"\[norm / scale for norm in norms\]",
        "[norm for norm in norms]",
        f"{NORMS} {CLIPPING}/test_adaptive_clipping.py",
    ),
    Mutant(
        "squares of shards are summed over ranks",
        "core/modules/sharding.py",
        r"dist\.ReduceOp\.SUM if op is None else op",
        "dist.ReduceOp.MAX",
        f"{CLIPPING}/test_distributed.py tests/core/modules/test_sharding.py",
    ),
    Mutant(
        "a maximum over ranks is the largest of all ranks",
        "core/modules/sharding.py",
        r"dist\.all_reduce\((\w+), op=dist\.ReduceOp\.MAX, group=group\)",
        r"dist.all_reduce(\1, op=dist.ReduceOp.MIN, group=group)",
        "tests/batching/batch_size tests/memory/cleanup tests/data/pipeline",
    ),
    Mutant(
        "gradients above the threshold are scaled to it",
        "gradients/clipping/norm_rules.py",
        r"gradients\.scale_\(threshold / norm\)",
        "gradients.scale_(1.0)",
        f"{CLIPPING}/test_gradient_clipper.py {CLIPPING}/test_norm_rules.py",
    ),
    Mutant(
        "no NaN or infinite norm enters a statistic",
        "gradients/clipping/norm_rules.py",
        r"norm = norm if norm < math\.inf else 0\.0",
        "norm = norm",
        f"{CLIPPING}/test_norm_rules.py",
    ),
    Mutant(
        "a clipped history keeps clipped norms",
        "gradients/clipping/norm_rules.py",
        r'minimum\(norm, threshold\) if self\.history == "clipped" else norm',
        "norm",
        f"{CLIPPING}/test_norm_rules.py",
    ),
    Mutant(
        "clipping resumes with the statistics of its rule",
        "gradients/clipping",
        r'self\.state = to_plain\(state_dict\["rule"\]\)',
        "pass",
        f"{CONTRACTS} AdaptiveClipping",
    ),
    Mutant(
        "clipping resumes with its counts",
        "gradients/clipping",
        r'self\.clipped = state_dict\["clipped"\]',
        "pass",
        f"{CONTRACTS} AdaptiveClipping",
    ),
    Mutant(
        "the guard skips updates with NaN gradients",
        "gradients/guard/non_finite_guard.py",
        r"\.prepare\(detection\.skip,",
        ".prepare(False,",
        f"{GUARD}/test_non_finite_guard.py",
    ),
    Mutant(
        "all ranks of the guard use the largest norm of any rank",
        "gradients/guard",
        r"ranks\[:, 1\]\.amax\(\)",
        "ranks[:, 1].amin()",
        f"{GUARD}/test_distributed.py",
    ),
    Mutant(
        "all ranks of the guard use the mean loss over ranks",
        "gradients/guard",
        r"ranks\[:, 0\]\.mean\(\)",
        "ranks[0, 0]",
        f"{GUARD}/test_distributed.py",
    ),
    Mutant(
        "a rollback restores the optimizer's state",
        "gradients/guard/snapshot.py",
        r"optimizer\.state\[key\] = copy_back\(.*\)",
        "pass",
        GUARD,
    ),
    Mutant(
        "a rollback restores the learning rate schedulers",
        "gradients/guard/snapshot.py",
        r"config\.scheduler\.load_state_dict\(.*\)",
        "pass",
        GUARD,
    ),
    Mutant(
        "a rollback resets residuals of compression",
        "gradients/guard/snapshot.py",
        r"trainer\.strategy\.reset_residuals\(\)",
        "pass",
        f"{GUARD} tests/strategies",
    ),
    Mutant(
        "the loss of a short accumulation window is a mean",
        "gradients/guard",
        r"part = trainer\.accumulate_grad_batches / len\(losses\)",
        "part = 1.0",
        GUARD,
    ),
    Mutant(
        "accumulated gradients are averaged over the ranks' counts",
        "batching/accumulation",
        r"quotient\(world \* expected, total\)",
        "quotient(expected, total)",
        f"{ACCUMULATION}/test_distributed.py",
    ),
    Mutant(
        "batches of a window are weighted by their samples",
        "batching/accumulation",
        r"self\._now / self\._unit",
        "1.0",
        ACCUMULATION,
    ),
    Mutant(
        "a resumed accumulation window keeps its gradients",
        "batching/accumulation",
        r'self\._saved = dict\(state_dict\["gradients"\]\)',
        "self._saved = {}",
        f"{ACCUMULATION}/test_accumulation.py",
    ),
    Mutant(
        "micro-batches are weighted by their samples",
        "batching/micro_batching",
        r"loss = weighted\(loss, shares\[number\]\)",
        "loss = loss / len(pieces)",
        f"{PARTS}/test_micro_batching.py",
    ),
    Mutant(
        "a batch that ran out of memory is retried from the state before it",
        "batching/micro_batching",
        r"self\._state\.restore\(\)",
        "pass",
        PARTS,
    ),
    Mutant(
        "unsent parts of gradients are kept for later steps",
        "strategies/compression",
        r"state\.commit\(\)",
        "pass",
        f"{COMPRESSION}/test_compressed_ddp.py",
    ),
    Mutant(
        "a skipped step does not change the residual",
        "strategies/compression",
        r"state\.residual\.hold\(names, condition\)",
        "pass",
        f"{COMPRESSION}/test_steps_left_out.py",
    ),
    Mutant(
        "a checkpoint holds the residuals",
        "strategies/compression",
        r'"residuals": self\.buckets\.averaged\(\)',
        '"residuals": {}',
        f"{COMPRESSION}/test_compressed_ddp.py",
    ),
    Mutant(
        "a gradient is clipped before it enters the residual of Top-K",
        "strategies/compression",
        r"self\._clip\(gradient, self\._scale\)",
        "pass",
        f"{COMPRESSION}/test_compressed_ddp.py",
    ),
    Mutant(
        "DiLoCo resumes with its outer momentum",
        "strategies/diloco",
        r"part\.copy_\(momentum\[name\]\)",
        "pass",
        DILOCO,
    ),
    Mutant(
        "a checkpoint of DiLoCo holds the mean optimizer state of the replicas",
        "strategies/diloco",
        r"^( +)average_states\(optimizer\)",
        r"\1pass",
        DILOCO,
    ),
    Mutant(
        "replicas of DiLoCo average their buffers",
        "strategies/diloco",
        r"average_changed\(self\._tensors, self\._sums\)",
        "pass",
        DILOCO,
    ),
    Mutant(
        "a loss scale resumes in the middle of its growth interval",
        "precision/loss_scale",
        r'self\._init_growth_tracker = state_dict\["_growth_tracker"\]',
        "pass",
        "tests/precision/loss_scale",
    ),
    Mutant(
        "the loss scale stays above its floor",
        "precision/loss_scale",
        r"scale\.clamp_\(min=self\.min_scale\)",
        "pass",
        "tests/precision/loss_scale",
    ),
    Mutant(
        "a recomputed block draws the same random numbers",
        "memory/checkpointing",
        r"stack\.enter_context\(run\.state\.restored\(\)\)",
        "pass",
        f"{CHECKPOINTING}/test_exactness.py {CHECKPOINTING}/test_restored_state.py",
    ),
    Mutant(
        "recomputation leaves running statistics unchanged",
        "memory/checkpointing",
        r"stack\.enter_context\(run\.owner\.buffers\.replaced_by_copies\(.*\)\)",
        "pass",
        f"{CHECKPOINTING}/test_exactness.py {CHECKPOINTING}/test_restored_state.py",
    ),
    Mutant(
        "curvature is the mean over ranks",
        "gradients/curvature",
        r"mean = mean_of_parts\(sample, ranks_of_a_step\(trainer\)\)",
        "mean = sample",
        "tests/gradients/curvature/test_curvature_preconditioner.py",
    ),
    Mutant(
        "changes of the Trainer are undone after an exception",
        "trainer/run_callback.py",
        r"(exception: BaseException\n.*\n(?: +\"\"\".*\n)? +)self\.release\(trainer\)",
        r"\1pass",
        f"{CONTRACTS} unchanged",
    ),
    Mutant(
        "statistics restart with another model",
        "trainer/run_callback.py",
        r"self\.reset_for_model\(pl_module\)",
        "pass",
        f"{CONTRACTS} fitted_again",
    ),
)


def plant(mutant: Mutant, copy: Path) -> tuple[Path, str] | None:
    """Write a mutant, and return the file and its text before; None unless it matches once."""
    place = copy / "lightning_opt" / mutant.folder
    files = [place] if place.suffix else sorted(place.rglob("*.py"))
    pattern = re.compile(mutant.pattern, re.M)
    texts = {file: file.read_text() for file in files if file.exists()}
    found = [file for file, text in texts.items() for _ in pattern.finditer(text)]
    if len(found) != 1:
        return None
    before = texts[found[0]]
    found[0].write_text(pattern.sub(mutant.replacement, before))
    return found[0], before


def run_tests(tests: str, copy: Path) -> str:
    """Run tests in the copy: ``"pass"``, ``"fail"``, ``"time out"`` or ``"not found"``."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests.split()]
    try:
        done = subprocess.run(
            command, cwd=copy, capture_output=True, check=False, timeout=TIMEOUT,
            env={**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "time out"
    return {0: "pass", 1: "fail"}.get(done.returncode, "not found")


def examine(mutant: Mutant, copy: Path, plain: dict[str, str]) -> str:
    """Return the outcome of a mutant; ``plain`` holds outcomes of tests without mutants."""
    if mutant.tests not in plain:
        plain[mutant.tests] = run_tests(mutant.tests, copy)
    if plain[mutant.tests] != "pass":
        return f"TESTS {plain[mutant.tests].upper()} WITHOUT IT"
    planted = plant(mutant, copy)
    if planted is None:
        return "LINE NOT FOUND"
    file, before = planted
    try:
        outcome = run_tests(mutant.tests, copy)
    finally:
        file.write_text(before)
    return "SURVIVES" if outcome == "pass" else f"dies ({outcome})"


def main(words: list[str]) -> int:
    chosen = [
        mutant
        for mutant in MUTANTS
        if not words or any(word in f"{mutant.promise} {mutant.folder}" for word in words)
    ]
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy / name)
        plain: dict[str, str] = {}
        for mutant in chosen:
            start = time.monotonic()
            outcomes.append(examine(mutant, copy, plain))
            seconds = time.monotonic() - start
            print(f"{outcomes[-1]:24} {seconds:4.0f} s  {mutant.promise}", flush=True)
    dead = sum(outcome.startswith("dies") for outcome in outcomes)
    print(f"{dead} of {len(outcomes)} mutants die")
    return int(dead < len(outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
