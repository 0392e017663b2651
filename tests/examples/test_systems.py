"""The example systems: original and optimised runs agree, and the optimisations are active."""

import json
import math
import multiprocessing
import os
import socket
from pathlib import Path

import pytest
from torch.distributed.launcher import LaunchConfig, elastic_launch

from tests.examples.conftest import Load, run_script
from tests.helpers.processes import launch

# The GPT defines validation, which only the demo uses.
pytestmark = pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`")


# --- vision ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_vision_runs_agree_and_optimisations_are_active(load: Load) -> None:
    vision = load("vision_attention")

    report = vision.compare(steps=3, seed=0, deterministic=False, backend="eager")

    assert len(report.rows) == 8
    assert [row["run"] for row in report.rows][::7] == ["original", "all together"]
    assert all(row["difference"] < 1e-3 for row in report.rows)
    notes = "\n".join(report.notes)
    assert "FusedOptimizer: the optimizer is fused." in notes
    assert "SDPA: the backend is 'flash'." in notes
    assert "CompileModel: compiled in" in notes


# --- language -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_language_runs_agree_and_need_less_memory(load: Load) -> None:
    language = load("language_model")

    report, output = language.compare(steps=5, warmup=2, half="bf16", seed=0)

    plain, health, checkpointed, accumulated, mixed, together = report.rows
    assert plain["last loss"] < math.log(256)
    assert health["difference"] == checkpointed["difference"] == 0.0
    assert accumulated["difference"] < 1e-4
    assert 0.0 < mixed["difference"] < 0.02
    assert 0.0 < together["difference"] < 0.02
    assert checkpointed["peak MB"] < 0.5 * plain["peak MB"]
    assert accumulated["peak MB"] < 0.7 * plain["peak MB"]
    assert mixed["peak MB"] < 0.8 * plain["peak MB"]
    assert together["peak MB"] < 0.3 * plain["peak MB"]
    assert output == "healthy: no issue in 5 steps"


# --- pairwise distances ---------------------------------------------------------------------------


def test_each_distance_is_computed_once_and_weights_are_equal(load: Load) -> None:
    pairwise = load("pairwise_distance")

    report = pairwise.compare(samples=9, batch_size=4, epochs=6, seed=0)

    original, cached, first, second = report.rows
    requested = 6 * 2 * 4  # epochs, batches, pairs
    assert [row["distances"] for row in report.rows] == [requested] * 4
    assert original["computed"] == requested
    assert cached["computed"] == first["computed"] <= 9 * 8 // 2
    assert second["computed"] == 0  # the first run saved them on disk
    assert all(row["same weights"] for row in report.rows)


# --- curvature ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_loop_and_trainer_agree_and_curvature_saves_steps(load: Load) -> None:
    curvature = load("curvature")

    report = curvature.compare(steps=40)

    original, parts, trainer, curved = report.rows
    assert parts["difference"] < 1e-5
    assert trainer["difference"] < 1e-5
    assert curved["steps to the loop's end"] < 0.7 * original["steps to the loop's end"]


# --- many machines --------------------------------------------------------------------------------


def run_as_machine(port: int, *words: str) -> None:
    """Run a script as torchrun does on one of two machines, in a fork instead of an interpreter."""
    multiprocessing.current_process().daemon = False  # which may not have children
    config = LaunchConfig(
        2, 2, 1, rdzv_backend="static", rdzv_endpoint=f"127.0.0.1:{port}", start_method="fork",
        rdzv_configs={"rank": int(os.environ["RANK"])}, run_id="none",
    )  # fmt: skip
    elastic_launch(config, run_script)(*words)


@pytest.mark.slow
@pytest.mark.distributed
def test_one_process_and_two_machines_reach_the_same_loss(tmp_path: Path, load: Load) -> None:
    out = tmp_path / "new" / "table.json"
    words = ["--steps", "20", "--out", str(out), "--strategy", "ddp", "ddp_topk"]
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    launch(run_as_machine, port, "many_machines", *words)
    alone = load("many_machines").train("ddp", 20, 1, 1)

    table = json.loads(out.read_text())
    assert "machines: 2, processes on each: 1" in table["title"]
    assert len(set(table["processes"])) == 2
    dense, topk = table["rows"]
    assert (dense["strategy"], topk["strategy"]) == ("ddp", "ddp_topk")
    assert dense["replicas equal"]
    assert topk["replicas equal"]
    assert dense["loss"] == pytest.approx(alone["loss"], rel=1e-3)
    assert topk["loss"] == pytest.approx(alone["loss"], rel=0.3)
    assert alone["loss"] < 0.8 * math.log(256)
    assert topk["KB sent, at the end"] < 0.1 * topk["KB sent, dense"]


@pytest.mark.parametrize(
    ("variables", "layout"),
    [
        ({}, (1, 3)),
        ({"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, (2, 4)),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "6", "SLURM_NNODES": "2"}, (2, 3)),
        ({"SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}, (1, 3)),  # salloc, without srun
    ],
)
def test_layout_is_read_from_the_environment(
    variables: dict[str, str], layout: tuple[int, int], monkeypatch: pytest.MonkeyPatch, load: Load
) -> None:
    machines = load("many_machines")
    for name in list(os.environ):
        if name.startswith(("SLURM", "TORCHELASTIC", "WORLD_SIZE", "LOCAL_WORLD_SIZE")):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert machines.find_layout(3) == layout
