"""Tests of schedir.instrument with DeepSpeed's real engines over Gloo, on a CPU."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
import torch

import schedir
from schedir import PipelineShape, schedules
from tests.cpu.gloo_processes import run
from tests.cpu.trainer_traces import OTHER_MODELS, Runs, import_traces, list_computes, profile_step

pytest.importorskip("deepspeed", reason="deepspeed is not installed")

RANKS, MICROBATCHES, WIDTH = 4, 9, 4


def profile_engines(rank: int, folder: str) -> dict[str, list[str]]:
    """Return the ranges of a step, an evaluation and an uninstrumented step of each engine."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank)}
    import deepspeed
    from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
    from deepspeed.runtime.pipe.module import PipelineModule

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    ranges = {}
    for name, kind, stages in (("train", PipelineModule, 1), ("dualpipev", DualPipeVModule, 2)):
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(RANKS * stages)]
        model = kind(layers=layers, num_stages=RANKS, loss_fn=torch.nn.MSELoss())
        config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": MICROBATCHES}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        data = iter([(torch.ones(1, WIDTH), torch.ones(1, WIDTH))] * 10 * MICROBATCHES)
        train, evaluate = partial(engine.train_batch, data), partial(engine.eval_batch, data)
        train()  # the first step also sends the shapes of messages
        with schedir.instrument("deepspeed"):
            ranges[name] = profile_step(train, f"{folder}/{name}-{rank}.json")
            ranges[f"{name} eval"] = profile_step(evaluate, f"{folder}/{name} eval-{rank}.json")
        ranges[f"{name} plain"] = profile_step(train, f"{folder}/plain-{rank}.json")
    return ranges


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return the folder of the traces, and the ranges of each rank."""
    folder = tmp_path_factory.mktemp("traces")
    return folder, run(profile_engines, RANKS, str(folder))


def test_trace_of_deepspeed_1f1b_equals_one_f_one_b(runs: Runs) -> None:
    program = import_traces(runs[0], "train")
    shape = PipelineShape(RANKS, MICROBATCHES)
    assert list_computes(program) == list_computes(schedir.compile(schedules.one_f_one_b, shape))
    for model in OTHER_MODELS:
        schedir.check(program, progress_model=model)


@pytest.mark.parametrize("name", ["train eval", "dualpipev", "dualpipev eval"])
def test_traces_of_other_engines_are_deadlock_free(name: str, runs: Runs) -> None:
    program = import_traces(runs[0], name)
    assert program.shape.microbatches == MICROBATCHES
    assert program.shape.placement == ("vee" if "dualpipev" in name else "loop")
    for model in OTHER_MODELS:
        schedir.check(program, progress_model=model)


def test_each_deepspeed_instruction_has_range(runs: Runs) -> None:
    _, ranks = runs
    assert ranks[3]["train"][:4] == ["3RECV_F0", "3F0", "3B0", "3SEND_B0"]
    assert ranks[3]["train"][-2:] == ["3REDUCE_GRAD", "STEP"]
    assert ranks[2]["train"][2:8] == ["2SEND_F0", "2RECV_F1", "2F1", "2RECV_B0", "2SEND_F1", "2B0"]
    batch = "(2SEND_F5;5SEND_B1;5RECV_F4;2RECV_B0)BATCH_P2P"  # queued, and then issued as a group
    assert batch in ranks[2]["dualpipev"]
    assert all(rank["train plain"] == rank["dualpipev plain"] == [] for rank in ranks)
