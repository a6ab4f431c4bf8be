"""Tests of models in pipelines, with tensor-parallel ranks and replicas, against one process.

Tensor-parallel ranks and replicas sum in another order, so they are only close to it.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from schedir.compiler.compile import compile
from schedir.errors import UsageError
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.models import llama
from schedir.models.llama_config import LlamaConfig
from schedir.runtime.executor import Executor
from schedir.runtime.in_process import InProcessExecutor
from schedir.schedules import interleaved, one_f_one_b, zb_h1, zb_v
from schedir.schedules.schedule_algebra import get_placement_mark
from schedir.tensor_parallel.mappings import get_shard_dim
from schedir.transports.gloo import GlooTransport
from tests.cases import cases
from tests.cpu.gloo_processes import run
from tests.cpu.test_built_in_schedules import program_of
from tests.cpu.tiny_models import KINDS, Kind

torch.set_num_threads(1)
M = 4
SGD = partial(torch.optim.SGD, lr=0.5)


def compile_for(schedule: Any, kind: Kind, microbatches: int = M, **options: Any) -> Program:
    schedule_shape = program_of(schedule).shape
    shape = PipelineShape(
        2, microbatches, schedule_shape.stages_per_rank, get_placement_mark(schedule)[0] or "loop"
    )
    return compile(schedule, shape, tied_weights=kind.tied(shape.stages), **options)


class Case(NamedTuple):
    """How four processes divide a model."""

    schedule: Any
    tp: int = 1
    dp: int = 1
    zero: int = 0
    options: Any = ()


TP = Case(one_f_one_b, tp=2)
SPLIT = Case(zb_h1, tp=2)
RECOMPUTED = Case(one_f_one_b, tp=2, options=(("recompute", "all"),))
ZERO_2 = Case(zb_h1, dp=2, zero=2)
ZERO_3 = Case(interleaved, dp=2, zero=3)
MORE_CASES = [
    *(Case(one_f_one_b, dp=2, zero=zero) for zero in range(4)),
    Case(zb_v, tp=2),
    Case(interleaved, tp=2),
    Case(zb_h1, dp=2, zero=3, options=(("recompute", "all"),)),
]
PARALLEL_CASES = [
    *(
        ("tied llama", case)
        for case in cases([SPLIT, ZERO_3], [TP, RECOMPUTED, ZERO_2, *MORE_CASES])
    ),
    *(("bert", case) for case in cases([TP], [ZERO_2, SPLIT, RECOMPUTED, ZERO_3, *MORE_CASES])),
    ("uneven", RECOMPUTED),
    *(("encoder_decoder", case) for case in cases([], [TP, SPLIT, ZERO_2, ZERO_3, *MORE_CASES])),
]
Weights = dict[tuple[int, str], tuple[Tensor, int | None]]


def train_all_cases(rank: int) -> list[tuple[list[float], Weights]]:
    """Return losses of two steps and this rank's weights after them, for each kind and case."""
    return [train_rank(KINDS[name], case) for name, case in PARALLEL_CASES]


def train_rank(kind: Kind, case: Case) -> tuple[list[float], Weights]:
    program = compile_for(
        case.schedule, kind, tp=case.tp, dp=case.dp, zero=case.zero, **dict(case.options)
    )
    transport, count = GlooTransport(program), program.shape.stages
    tp = transport.tp_group
    stages = {s: kind.stage(s, count, tp=tp) for s in program.shape.stages_on_rank[transport.rank]}
    executor = Executor(
        program, transport.rank, stages, transport, loss=partial(kind.loss, tp=tp),
        boundary=kind.boundary(count),
        optimizer=SGD([p for stage in stages.values() for p in stage.parameters()]),
    )  # fmt: skip
    losses = run_two_steps(executor, kind, case, transport.dp_rank)
    with executor.full_parameters():
        weights = {
            (s, n): (p.detach().clone(), get_shard_dim(p))
            for s, stage in stages.items()
            for n, p in stage.named_parameters()
        }
    return losses, weights


def run_two_steps(
    executor: Executor | InProcessExecutor, kind: Kind, case: Case, replica: int = 0
) -> list[float]:
    """Run the microbatches of a program's replica, and return the losses where they are known."""
    m, losses = executor.program.shape.microbatches, []
    own = slice(replica * m, (replica + 1) * m)
    for step in range(2):
        data = kind.batch(M * case.dp, step)
        keywords = data.keywords[own]
        loss = executor.step(data.inputs[own], data.targets[own], data.scale, keywords=keywords)
        losses += [] if loss is None else [float(loss)]
    return losses


def train_one_process(kind: Kind, case: Case) -> tuple[list[float], Weights]:
    """Return losses and weights of one process, without replicas and tensor parallelism."""
    program = compile_for(case.schedule, kind, M * case.dp)
    count = program.shape.stages
    stages = kind.stages(count)
    ranks = InProcessExecutor(
        program, stages, loss=kind.loss, boundary=kind.boundary(count), optimizer=SGD
    )
    return run_two_steps(ranks, kind, case), {
        (s, n): (p.detach(), None)
        for s, stage in enumerate(stages)
        for n, p in stage.named_parameters()
    }


def test_tensor_parallel_ranks_and_replicas_train_like_one_process() -> None:
    ranks = run(train_all_cases, 4, limit=240)
    for k, (name, case) in enumerate(PARALLEL_CASES):
        losses, expected_weights = train_one_process(KINDS[name], case)
        rank_losses = [rank_results[k][0] for rank_results in ranks if rank_results[k][0]]
        if case.dp > 1:
            rank_losses = [[sum(values) for values in zip(*rank_losses, strict=True)]]
        assert rank_losses and all(
            rank_results == pytest.approx(losses, rel=1e-6) for rank_results in rank_losses
        )
        for (s, n), (expected, _) in expected_weights.items():
            shards = [
                rank_results[k][1][s, n] for rank_results in ranks if (s, n) in rank_results[k][1]
            ]
            assert len(shards) == 2
            dim = shards[0][1]
            if dim is None:
                actual = shards[0][0]
                assert torch.equal(actual, shards[1][0]), (name, case, n)
            else:
                assert case.tp == 2
                actual = torch.cat([values for values, _ in shards], dim)[: len(expected)]
            assert (actual - expected).norm() <= 1e-6 * expected.norm(), (name, case, n)


def read_error_fields(rank: int) -> list[tuple[str, ...]]:
    """Return the fields of errors for models that two ranks cannot divide."""
    fields = []
    for config in (LlamaConfig(kv_heads=1), LlamaConfig(feed_forward=5)):
        with pytest.raises(UsageError) as error:
            llama.build_stage(config, 0, 1, tp=torch.distributed.group.WORLD)
        fields.append((*error.value.fields,))
    return fields


def test_indivisible_models_are_refused() -> None:
    assert run(read_error_fields, 2) == [[("tp", "kv_heads"), ()]] * 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"layers": 0}, {"kv_heads": 0}, {"kv_heads": 3}, {"hidden": 12}, {"theta": 0.0},
        {"eps": -1.0}, {"feed_forward": 0},
    ],
    ids=lambda wrong: min(wrong),
)  # fmt: skip
def test_invalid_llama_config_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError) as error:
        LlamaConfig(**wrong)
    assert {*wrong} <= {*error.value.fields}


def test_code_of_models_page_runs() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/models.md").read_text()
    (code,) = (block for block in page.split("```")[1::2] if block.startswith("python\n"))
    exec(code.removeprefix("python\n"), {})


def test_sequence_longer_than_context_is_refused() -> None:
    with pytest.raises(UsageError):
        llama.build_stage(LlamaConfig(context=8), 0, 1)(torch.zeros(1, 9, dtype=torch.int64))
