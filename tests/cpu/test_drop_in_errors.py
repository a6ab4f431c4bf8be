"""Tests of programs and stages that `schedir.torch_pipelining.Schedule` refuses.

All ranks raise the same error before the first step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import schedules as theirs
from torch.nn.functional import mse_loss

from schedir import schedules
from schedir.compiler.compile import compile
from schedir.errors import DeadlockError, SchedirError
from schedir.io.torch_csv import to_csv
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program, Stream
from schedir.schedules.schedule_expansion import expand_schedule
from schedir.torch_pipelining import Schedule
from schedir.torch_pipelining.program_selection import get_progress_model
from schedir.torch_pipelining.step_checks import find_microbatch_error
from schedir.verify.check import check
from tests.cpu.drop_in_steps import N_MICROBATCHES, make_schedule
from tests.cpu.gloo_processes import run
from tests.cpu.tiny_stages import copy_gradients
from tests.cpu.torch_pipelines import make_batch, make_model, make_stage

GOLDEN = Path(__file__).parents[1] / "golden" / "torch_face.txt"
ONE = compile(schedules.one_f_one_b, PipelineShape(2, N_MICROBATCHES))
LOOP = PipelineShape(2, N_MICROBATCHES, 2)
ROWS = torch.ones(N_MICROBATCHES, 8)
ROWS_AND_ONE = torch.ones(N_MICROBATCHES + 1, 8)


def swap_receives() -> Program:
    """Return a program in which a rank has swapped the receives of a gradient and an activation."""
    program = compile(schedules.interleaved, LOOP)
    words = program.streams[1].words.copy()
    k = [*map(str, program.streams[1])].index("recv_grad 1.0")
    assert str(program.streams[1][k + 1]) == "recv_act 1.3"
    words[[k, k + 1]] = words[[k + 1, k]]
    return replace(program, name="crossed", streams=(program.streams[0], Stream(words)))


def make_local_stages(rank: int, stages: int, placement: str = "loop") -> dict[int, nn.Module]:
    layers = make_model(stages)
    local_stages = PipelineShape(2, N_MICROBATCHES, stages // 2, placement).stages_on_rank[rank]
    return {s: layers[s] for s in local_stages}


def make_two_stages(rank: int, **options: Any) -> Schedule:
    return make_schedule(make_local_stages(rank, 2), 2, **({"schedule": "one_f_one_b"} | options))


def run_program(rank: int, **options: Any) -> Schedule:
    """Make a schedule of two stages from a program that is compiled with options."""
    program = compile(schedules.one_f_one_b, PipelineShape(2, N_MICROBATCHES), **options)
    return make_two_stages(rank, schedule=None, program=program)


def make_four_stages(rank: int, **options: Any) -> Schedule:
    return make_schedule(make_local_stages(rank, 4), 4, **options)


def run_refused_step(rank: int, *inputs: Any, **options: Any) -> Any:
    """Run a step that is refused before it sends a message."""
    return make_two_stages(rank).step(*inputs, **options)


WRONG: dict[str, Callable[[int], Any]] = {
    "neither": lambda r: make_two_stages(r, schedule=None),
    "both": lambda r: make_two_stages(r, program=ONE),
    "no such schedule": lambda r: make_two_stages(r, schedule="one_f_one_bee"),
    "a schedule that is none": lambda r: make_two_stages(r, schedule=3),
    "a program that is none": lambda r: make_two_stages(r, schedule=None, program="one_f_one_b"),
    "a runtime of another name": lambda r: make_two_stages(r, runtime="nccl"),
    "modules": lambda r: Schedule(make_model(2), N_MICROBATCHES, mse_loss, schedule="gpipe"),  # type: ignore[arg-type]
    "no stages": lambda r: Schedule([], N_MICROBATCHES, mse_loss, schedule="gpipe"),
    "no microbatches": lambda r: make_two_stages(r, n_microbatches=0),
    "other microbatches": lambda r: make_two_stages(r, n_microbatches=4 + r),
    "a loss that is none": lambda r: make_two_stages(r, loss_fn="mse"),
    "a loss on one rank": lambda r: make_two_stages(r, loss_fn=mse_loss if r else None),
    "a program of other microbatches": lambda r: make_two_stages(
        r, schedule=None, program=compile(schedules.one_f_one_b, PipelineShape(2, 8))
    ),
    "a program of another placement": lambda r: make_four_stages(
        r, program=compile(schedules.zb_v, PipelineShape(2, N_MICROBATCHES, placement="vee"))
    ),
    "a program that trains without a loss": lambda r: make_two_stages(
        r, schedule=None, program=ONE, loss_fn=None
    ),
    "a schedule of another placement": lambda r: make_four_stages(r, schedule="zb_v"),
    "programs that differ": lambda r: make_two_stages(r, schedule=["gpipe", "one_f_one_b"][r]),
    "two holders": lambda r: make_four_stages(
        r, program=expand_schedule(schedules.dualpipe, replace(LOOP, placement="mirror"))
    ),
    "transfers as one": lambda r: run_program(r, overlap=True),
    "a program with ZeRO": lambda r: run_program(r, dp=2, zero=1),
    "a program with experts": lambda r: make_schedule(
        {s: make_model(6)[s] for s in range(3 * r, 3 * r + 3)},
        6,
        schedule=None,
        program=compile(
            "one_f_one_b", PipelineShape(2, N_MICROBATCHES), dp=2, ep=2, stage_segments="dc"
        ),
    ),
    "messages that would be taken for each other": lambda r: make_four_stages(
        r, program=swap_receives()
    ),
    "a stage twice": lambda r: make_schedule({0: make_model(2)[0]}, 2, schedule="gpipe"),
    "a stage that nobody has": lambda r: make_schedule(
        {2 * r: make_model(4)[r]}, 4, schedule="gpipe"
    ),
    "unsharded_stages": lambda r: make_two_stages(r, unsharded_stages=0),
    "a list later": lambda r: make_two_stages(r)._load_csv("x.csv"),
    "a step of forwards alone": lambda r: make_two_stages(r, schedule="forward_only").step(),
    "a whole batch and microbatches": lambda r: run_refused_step(
        r, target=make_batch()[1], target_mbs=[*make_batch()[1].chunk(N_MICROBATCHES)]
    ),
    "a batch that n_microbatches does not divide": lambda r: run_refused_step(
        r, ROWS_AND_ONE, target=ROWS_AND_ONE
    ),
    "a batch with fewer samples than n_microbatches": lambda r: run_refused_step(
        r, target=ROWS[1:]
    ),
    "the same for schedir's executor": lambda r: make_two_stages(r, runtime="schedir").step(
        *[ROWS_AND_ONE] * (r == 0), target=ROWS if r else None
    ),
    "a whole batch and microbatches on one rank of schedir's executor": lambda r: make_two_stages(
        r, runtime="schedir"
    ).step(
        *[ROWS] * (r == 0),
        arg_mbs=None if r else [(row,) for row in ROWS[:, None]],
        target=ROWS if r else None,
    ),
    "microbatches that are no tuples": lambda r: run_refused_step(
        r, arg_mbs=[*ROWS[:, None]], target_mbs=[*ROWS[:, None]]
    ),
    "a class of torch": lambda r: make_two_stages(r, schedule=theirs.Schedule1F1B),
}


def read_errors(rank: int) -> dict[str, str]:
    errors = {}
    for name, call in WRONG.items():
        try:
            call(rank)
            errors[name] = "is taken"
        except SchedirError as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return errors


def test_wrong_arguments_raise_same_error_on_all_ranks() -> None:
    first_errors, second_errors = run(read_errors, 2)
    assert first_errors == second_errors
    errors = "".join(f"{name}\n  {error}\n" for name, error in first_errors.items())
    assert errors == GOLDEN.read_text()


def probe_gloo_queues(rank: int) -> tuple[list[str], float, list[float]]:
    """Probe the queues of Gloo's group.

    Return the progress model of the group, the values of two messages that are received in the
    wrong order, and of large ones that both ranks send before either receives.
    """
    peer = 1 - rank
    ops = [dist.P2POp(dist.isend, torch.full((1,), float(k)), peer) for k in range(2)]
    received = [torch.zeros(1) for _ in range(2)]  # of the second message, and of the first
    works = theirs._batch_p2p(ops if rank == 0 else [])
    if rank == 1:
        for buffer in received:
            works += theirs._batch_p2p([dist.P2POp(dist.irecv, buffer, peer)])
    theirs._wait_batch_p2p(works)
    large, large_received = torch.full((1 << 22,), float(rank)), torch.zeros(1 << 22)
    works = theirs._batch_p2p([dist.P2POp(dist.isend, large, peer)])
    theirs._wait_batch_p2p(theirs._batch_p2p([dist.P2POp(dist.irecv, large_received, peer)]))
    theirs._wait_batch_p2p(works)
    model, blocks = get_progress_model(dist.group.WORLD, torch.device("cpu"))
    return [model] * blocks, large_received[0].item(), [buffer.item() for buffer in received]


def test_gloo_matches_by_position_and_allows_both_directions() -> None:
    """A program that is proven for `per_pair` runs correctly on Gloo.

    Gloo does not separate messages by kind, unlike `per_edge`. It allows both directions at once,
    unlike `per_pair`.
    """
    (model, second_large, _), (_, first_large, received) = run(probe_gloo_queues, 2)
    assert model == ["per_pair"] and (first_large, second_large) == (0.0, 1.0)
    assert received == [0.0, 1.0]  # the first message is received instead of the second


def compute_gradient_error(rank: int, path: str) -> float:
    """Run an unproven program under torch's runtime, and return its largest gradient error."""
    parts, layers = make_local_stages(rank, 4), make_model(4)
    x, y = make_batch()
    for pair in zip(x.chunk(N_MICROBATCHES), y.chunk(N_MICROBATCHES), strict=True):
        (mse_loss(layers(pair[0]), pair[1]) / N_MICROBATCHES).backward()
    stages: list[Any] = [make_stage(part, s, 4) for s, part in parts.items()]
    runtime = theirs._PipelineScheduleRuntime(stages, N_MICROBATCHES, loss_fn=mse_loss)
    runtime._load_csv(path, format="compute_comms")
    runtime.step(*((x,) if 0 in parts else ()), target=y if 3 in parts else None)
    gradients = copy_gradients([*parts.values()])
    expected_gradients = copy_gradients([layers[s] for s in parts])
    return max(
        float((actual[name] - expected[name]).norm() / expected[name].norm())
        for actual, expected in zip(gradients, expected_gradients, strict=True)
        for name in expected
    )


def test_refused_program_computes_wrong_gradients_in_torch(tmp_path: Any) -> None:
    program = swap_receives()
    check(program, "per_edge", blocking_hosts=True)
    with pytest.raises(DeadlockError):
        check(program, "per_pair", blocking_hosts=True)
    (tmp_path / "x.csv").write_text(to_csv(program, "torch-2.13"))
    assert max(run(compute_gradient_error, 2, str(tmp_path / "x.csv"))) > 0.1


def test_missing_target_names_similar_keyword() -> None:
    def find_error(keywords: dict[str, Any]) -> str:
        return find_microbatch_error(1, None, [keywords], None, None, needs_target=True)

    error = "target is missing: loss_fn needs it, as in step(x, target=y)"
    assert find_error({"mask": 1}) == find_error({}) == error
    assert find_error({"targets": 1}) == f"{error}; the stages get the keyword 'targets'"
