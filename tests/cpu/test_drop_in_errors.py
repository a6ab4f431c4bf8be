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
from torch import Tensor, nn
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
from schedir.verify.check import check
from tests.cpu.drop_in_steps import MB, made
from tests.cpu.gloo_processes import run
from tests.cpu.torch_pipelines import batch, model, stage_of

GOLDEN = Path(__file__).parents[1] / "golden" / "torch_face.txt"
ONE = compile(schedules.one_f_one_b, PipelineShape(2, MB))
LOOP = PipelineShape(2, MB, 2)


def crossed() -> Program:
    """Swap the receives of a gradient and an activation from one peer on a rank."""
    program = compile(schedules.interleaved, LOOP)
    words = program.streams[1].words.copy()
    (k,) = [
        k
        for k, pair in enumerate(zip(program.streams[1], program.streams[1][1:], strict=False))
        if [*map(str, pair)] == ["recv_grad 1.0", "recv_act 1.3"]
    ]
    words[[k, k + 1]] = words[[k + 1, k]]
    return replace(program, name="crossed", streams=(program.streams[0], Stream(words)))


def parts_of(rank: int, stages: int, placement: str = "loop") -> dict[int, nn.Module]:
    whole = model(stages)
    own = PipelineShape(2, MB, stages // 2, placement).stages_on_rank[rank]
    return {s: whole[s] for s in own}


def two(rank: int, **options: Any) -> Schedule:
    return made(parts_of(rank, 2), 2, **({"schedule": "one_f_one_b"} | options))


def four(rank: int, **options: Any) -> Schedule:
    return made(parts_of(rank, 4), 4, **options)


def stepped(rank: int, *inputs: Any, **how: Any) -> Any:
    """Run a step that is refused before it sends a message."""
    return two(rank).step(*inputs, **how)


WRONG: dict[str, Callable[[int], Any]] = {
    "neither": lambda r: two(r, schedule=None),
    "both": lambda r: two(r, program=ONE),
    "no such schedule": lambda r: two(r, schedule="one_f_one_bee"),
    "a schedule that is none": lambda r: two(r, schedule=3),
    "a program that is none": lambda r: two(r, schedule=None, program="one_f_one_b"),
    "a runtime of another name": lambda r: two(r, runtime="nccl"),
    "modules": lambda r: Schedule(model(2), MB, mse_loss, schedule="gpipe"),  # type: ignore[arg-type]
    "no stages": lambda r: Schedule([], MB, mse_loss, schedule="gpipe"),
    "no microbatches": lambda r: two(r, n_microbatches=0),
    "other microbatches": lambda r: two(r, n_microbatches=4 + r),
    "a loss that is none": lambda r: two(r, loss_fn="mse"),
    "a loss on one rank": lambda r: two(r, loss_fn=mse_loss if r else None),
    "a program of other microbatches": lambda r: two(
        r, schedule=None, program=compile(schedules.one_f_one_b, PipelineShape(2, 8))
    ),
    "a program of another placement": lambda r: four(
        r, program=compile(schedules.zb_v, PipelineShape(2, MB, placement="vee"))
    ),
    "a program that trains without a loss": lambda r: two(
        r, schedule=None, program=ONE, loss_fn=None
    ),
    "a schedule of another placement": lambda r: four(r, schedule="zb_v"),
    "programs that differ": lambda r: two(r, schedule=["gpipe", "one_f_one_b"][r]),
    "two holders": lambda r: four(
        r, program=expand_schedule(schedules.dualpipe, PipelineShape(2, MB, 2, "mirror"))
    ),
    "transfers as one": lambda r: two(
        r, schedule=None, program=compile(schedules.one_f_one_b, PipelineShape(2, MB), overlap=True)
    ),
    "a program with ZeRO": lambda r: two(
        r, schedule=None, program=compile(schedules.one_f_one_b, PipelineShape(2, MB), dp=2, zero=1)
    ),
    "a program with experts": lambda r: made(
        {s: model(6)[s] for s in range(3 * r, 3 * r + 3)},
        6,
        schedule=None,
        program=compile("one_f_one_b", PipelineShape(2, MB), dp=2, ep=2, stage_segments="dc"),
    ),
    "messages that would be taken for each other": lambda r: four(r, program=crossed()),
    "a stage twice": lambda r: made({0: model(2)[0]}, 2, schedule="gpipe"),
    "a stage that nobody has": lambda r: made({2 * r: model(4)[r]}, 4, schedule="gpipe"),
    "unsharded_stages": lambda r: two(r, unsharded_stages=0),
    "a list later": lambda r: two(r)._load_csv("x.csv"),
    "a step of forwards alone": lambda r: two(r, schedule="forward_only").step(),
    "a whole batch and microbatches": lambda r: stepped(
        r, target=batch()[1], target_mbs=[*batch()[1].chunk(MB)]
    ),
    "a batch that n_microbatches does not divide": lambda r: stepped(
        r, torch.ones(MB + 1, 8), target=torch.ones(MB + 1, 8)
    ),
    "a batch with fewer samples than n_microbatches": lambda r: stepped(
        r, target=torch.ones(MB - 1, 8)
    ),
    "the same for schedir's executor": lambda r: two(r, runtime="schedir").step(
        *[torch.ones(MB + 1, 8)] * (r == 0), target=torch.ones(MB, 8) if r else None
    ),
    "microbatches that are no tuples": lambda r: stepped(
        r, arg_mbs=[*torch.ones(MB, 1, 8)], target_mbs=[*torch.ones(MB, 1, 8)]
    ),
    "a class of torch": lambda r: two(r, schedule=theirs.Schedule1F1B),
}


def refusals(rank: int) -> dict[str, str]:
    told = {}
    for name, wrong in WRONG.items():
        try:
            wrong(rank)
            told[name] = "is taken"
        except SchedirError as error:
            told[name] = f"{type(error).__name__}: {error}"
    return told


def test_what_cannot_be_is_refused_on_all_ranks_alike() -> None:
    one, other = run(refusals, 2)
    assert one == other
    said = "".join(f"{name}\n  {text}\n" for name, text in one.items())
    assert said == GOLDEN.read_text()


# ---------------------------------------------------------------- guarantees of Gloo


def promises(rank: int) -> tuple[list[str], float, list[float]]:
    """Probe the queues of Gloo's group.

    Return the progress model of the group, the values of two messages that are received in the
    wrong order, and of large ones that both ranks send before either receives.
    """
    other = 1 - rank
    ops = [dist.P2POp(dist.isend, torch.full((1,), float(k)), other) for k in range(2)]
    taken = [torch.zeros(1), torch.zeros(1)]  # where the second is wanted, and the first
    sent = theirs._batch_p2p(ops if rank == 0 else [])
    if rank == 1:
        for into in taken:
            sent += theirs._batch_p2p([dist.P2POp(dist.irecv, into, other)])
    theirs._wait_batch_p2p(sent)
    large, comes = torch.full((1 << 22,), float(rank)), torch.zeros(1 << 22)
    sent = theirs._batch_p2p([dist.P2POp(dist.isend, large, other)])
    theirs._wait_batch_p2p(theirs._batch_p2p([dist.P2POp(dist.irecv, comes, other)]))
    theirs._wait_batch_p2p(sent)
    model, blocks = get_progress_model(dist.group.WORLD, torch.device("cpu"))
    return [model] * blocks, comes[0].item(), [into.item() for into in taken]


def test_gloo_matches_by_position_and_both_ways_are_free() -> None:
    """A program that is proven for one queue per pair is right on Gloo.

    Gloo does not separate messages by kind, as `per_edge` does. It allows both directions at once,
    which `per_pair` does not.
    """
    (model, other, _), (_, one, taken) = run(promises, 2)
    assert model == ["per_pair"] and (one, other) == (0.0, 1.0)
    assert taken == [0.0, 1.0]  # the first message is received in place of the second


def theirs_alone(rank: int, path: str) -> float:
    """Return the error of gradients of torch's runtime with an unproven program."""
    parts, whole = parts_of(rank, 4), model(4)
    (x, y), plain = batch(), whole
    for some in zip(x.chunk(MB), y.chunk(MB), strict=True):
        (mse_loss(plain(some[0]), some[1]) / MB).backward()
    held = [stage_of(part, s, 4) for s, part in parts.items()]
    runtime = theirs._PipelineScheduleRuntime(held, n_microbatches=MB, loss_fn=mse_loss)
    runtime._load_csv(path, format="compute_comms")
    runtime.step(*((x,) if 0 in parts else ()), target=y if 3 in parts else None)
    off = 0.0
    for s, part in parts.items():
        for p, due in zip(part.parameters(), whole[s].parameters(), strict=True):
            assert isinstance(p.grad, Tensor) and isinstance(due.grad, Tensor)
            off = max(off, (p.grad - due.grad).norm().item() / due.grad.norm().item())
    return off


def test_what_is_refused_would_be_silently_wrong(tmp_path: Any) -> None:
    program = crossed()
    check(program, "per_edge", blocking_hosts=True)
    with pytest.raises(DeadlockError):
        check(program, "per_pair", blocking_hosts=True)
    (tmp_path / "x.csv").write_text(to_csv(program, "torch-2.13"))
    assert max(run(theirs_alone, 2, str(tmp_path / "x.csv"))) > 0.1
