"""Known traps: programs that other checks accept, or that only some transports finish.

The checker and an execution judge each program.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from schedir.analysis.critical_path.longest_path import compute_earliest_times
from schedir.analysis.dependency_graph import Graph
from schedir.analysis.progress_models import MODELS, ProgressModel
from schedir.compiler.compile import compile
from schedir.errors import (
    ChannelMismatchError,
    CompletenessError,
    CostsError,
    DeadlockError,
    GroupError,
    OrderError,
    SchedirError,
)
from schedir.ir.cost.costs import Costs
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program, Stream
from schedir.predict.simulate import simulate
from schedir.schedules import one_f_one_b
from schedir.verify.check import check
from tests.edits import written
from tests.oracle_threads import verdict

VEE = "stages_per_rank 2 placement vee"
LOOP = "stages_per_rank 2"


def accepted(program: Program) -> list[str]:
    """Return the models that accept a program. The checker and the execution must agree."""
    models: list[str] = []
    for model in MODELS:
        try:
            check(program, model)
        except SchedirError:
            assert verdict(program, model).kind != "ok"
        else:
            assert verdict(program, model).kind == "ok"
            models.append(model)
    return models


def refused(program: Program, progress_model: ProgressModel = "per_device") -> SchedirError:
    assert verdict(program, progress_model).kind != "ok"
    with pytest.raises(SchedirError) as caught:
        check(program, progress_model)
    return caught.value


# ---------------------------------------------------------------- each model allows less

STRICTER = {
    "per_edge": written(  # no other model accepts it
        "recv_act 3.0; F 0.0; send_act 0.0; F 3.0",  # the receive precedes the send
        "recv_act 1.0; F 1.0; F 2.0; send_act 2.0",
        header=VEE,
    ),
    "per_pair": written(
        "recv_act 3.0; F 0.0; send_act 0.0; F 3.0; send_act 3.0",  # from another rank
        "recv_act 1.0; recv_act 4.0; F 1.0; send_act 1.0; F 4.0; send_act 4.0",
        "recv_act 2.0; recv_act 5.0; F 2.0; F 5.0; send_act 2.0",
        header=LOOP,
    ),
    "per_direction": written(
        "F 0.0; recv_grad 0.0; send_act 0.0; B 0.0; reduce_grads 0; step",  # the other kind
        "recv_act 1.0; F 1.0; B 1.0; send_grad 1.0; reduce_grads 1; step",
    ),
    "per_device": written(
        "F 0.0; send_act 0.0; recv_grad 0.0; B 0.0; reduce_grads 0; reduce_tied 0; step",
        "recv_act 1.0; F 1.0; B 1.0; reduce_grads 1; reduce_tied 1; send_grad 1.0; step",
        header="tied_weights yes",
    ),
    "blocking_serial": written(
        "F 0.0; send_act 0.0; recv_grad 0.0; B 0.0; reduce_grads 0; reduce_tied 0; step",
        "recv_act 1.0; F 1.0; B 1.0; reduce_grads 1; send_grad 1.0; reduce_tied 1; step",
        header="tied_weights yes",
    ),
}


LEGAL = {
    "per_edge": ["per_edge"],
    "per_pair": ["per_edge", "per_pair", "torch_lazy"],
    "per_direction": ["per_edge", "per_direction"],
    "per_device": [model for model in MODELS if model != "blocking_serial"],
    "blocking_serial": [*MODELS],
}


@pytest.mark.parametrize("model", STRICTER)
def test_legal_up_to(model: str) -> None:
    assert accepted(STRICTER[model]) == LEGAL[model]


# ---------------------------------------------------------------- only with unbounded buffers


def test_both_send_before_they_receive() -> None:
    """A transport that buffers sends finishes. On one communicator of NCCL, both ranks wait."""
    program = written(
        "F 0.0; send_act 0.0; F 0.1; send_act 0.1; recv_act 3.0; recv_act 3.1; F 3.0; F 3.1",
        "recv_act 1.0; F 1.0; F 2.0; send_act 2.0; recv_act 1.1; F 1.1; F 2.1; send_act 2.1",
        microbatches=2, header=VEE,
    )  # fmt: skip
    assert accepted(program) == ["per_edge"]
    error = refused(program, "per_pair")
    assert isinstance(error, DeadlockError)
    assert [(w.rank, str(w.instr), str(w.needed_instr)) for w in error.cycle] == [
        (0, "send_act 0.1", "recv_act 1.1"), (1, "send_act 2.0", "recv_act 3.0"),
    ]  # fmt: skip


def test_received_in_another_order_than_sent() -> None:
    """A transport that finds messages by name would finish. Elsewhere the messages cross."""
    program = written(
        "F 0.0; F 0.1; send_act 0.0; send_act 0.1", "recv_act 1.1; recv_act 1.0; F 1.0; F 1.1",
        microbatches=2,
    )  # fmt: skip
    assert accepted(program) == []
    assert isinstance(refused(program), DeadlockError)


# ---------------------------------------------------------------- groups


def in_bulk(size: int) -> Program:
    """Return a program with all activations in one group, on both sides."""
    every = range(size)
    return written(
        "; ".join(f"F 0.{k}" for k in every) + "; " + " & ".join(f"send_act 0.{k}" for k in every),
        " & ".join(f"recv_act 1.{k}" for k in every) + "; " + "; ".join(f"F 1.{k}" for k in every),
        microbatches=size,
    )


def test_groups_that_nccl_hangs_on() -> None:
    assert accepted(in_bulk(256)) == [*MODELS]
    error = refused(in_bulk(257))
    assert isinstance(error, GroupError)
    assert [(s.rank, s.index, str(s.instr)) for s in error.sites] == [(0, 257, "send_act 0.0")]


RECEIVED = {
    "as one": ("recv_act 1.0 & recv_act 1.1", True),
    "one by one": ("recv_act 1.0; recv_act 1.1", True),
    "as one, crossed": ("recv_act 1.1 & recv_act 1.0", False),
    "one by one, crossed": ("recv_act 1.1; recv_act 1.0", False),
}


@pytest.mark.parametrize("how", RECEIVED)
def test_messages_sent_as_one_arrive_in_their_order(how: str) -> None:
    """NCCL matches the sends and the receives of a group by their order only."""
    receives, right = RECEIVED[how]
    program = written(
        "F 0.0; F 0.1; send_act 0.0 & send_act 0.1", f"{receives}; F 1.0; F 1.1", microbatches=2
    )
    assert accepted(program) == ([*MODELS] if right else [])
    if not right:
        error = refused(program)
        assert isinstance(error, GroupError)
        assert [(s.rank, str(s.instr)) for s in error.sites] == [
            (1, "recv_act 1.1"), (1, "recv_act 1.0"), (0, "send_act 0.0"), (0, "send_act 0.1"),
        ]  # fmt: skip


def test_an_activation_and_a_gradient_of_one_group_cross() -> None:
    """They use two channels under `per_edge`, and one where both use one communicator."""
    program = written(
        "F 0.0; send_act 0.0; recv_act 2.0; F 2.0; send_act 2.0; recv_grad 2.0; B 2.0;"
        "F 0.1; send_act 0.1 & send_grad 2.0; recv_grad 0.0; B 0.0;"
        "recv_act 2.1; F 2.1; send_act 2.1; recv_grad 2.1; B 2.1; send_grad 2.1; recv_grad 0.1;"
        "B 0.1; reduce_grads 0; reduce_grads 2; step",
        "recv_act 1.0; F 1.0; send_act 1.0; recv_act 3.0; F 3.0; B 3.0; send_grad 3.0;"
        "recv_grad 1.0 & recv_act 1.1; B 1.0; send_grad 1.0;"
        "F 1.1; send_act 1.1; recv_act 3.1; F 3.1; B 3.1; send_grad 3.1; recv_grad 1.1; B 1.1;"
        "send_grad 1.1; reduce_grads 1; reduce_grads 3; step",
        microbatches=2, header=LOOP,
    )  # fmt: skip
    assert accepted(program) == ["per_edge", "per_direction"]
    assert isinstance(refused(program, "per_pair"), GroupError)
    assert isinstance(refused(program, "torch_lazy"), DeadlockError)  # it sends them one by one


def test_an_asymmetric_group_is_legal() -> None:
    """One side is a group, and the other side issues its parts one by one in either order.

    But torch uses different communicators for a group in both directions and for single messages.
    """
    for there in ("recv_act 1.1; send_act 2.0", "send_act 2.0; recv_act 1.1"):
        program = written(
            "F 0.0; send_act 0.0; F 0.1; send_act 0.1 & recv_act 3.0; F 3.0; recv_act 3.1; F 3.1",
            f"recv_act 1.0; F 1.0; F 2.0; {there}; F 1.1; F 2.1; send_act 2.1",
            microbatches=2, header=VEE,
        )  # fmt: skip
        assert accepted(program) == [model for model in MODELS if model != "torch_lazy"]
        assert isinstance(refused(program, "torch_lazy"), ChannelMismatchError)


def test_an_asymmetric_group_that_waits_for_itself() -> None:
    """A member of a group must not wait, through other ranks, for an effect of another member."""
    program = written(
        "F 0.0; send_act 0.0 & recv_act 3.1; F 3.1; F 0.1; send_act 0.1; recv_act 3.0; F 3.0",
        "recv_act 1.0; F 1.0; F 2.0; recv_act 1.1; F 1.1; F 2.1; send_act 2.1; send_act 2.0",
        microbatches=2, header=VEE,
    )  # fmt: skip
    assert accepted(program) == []
    assert isinstance(refused(program), DeadlockError)


# ---------------------------------------------------------------- collectives


def test_collectives_in_different_order_on_two_ranks() -> None:
    """The sum of tied copies and the norm use two groups of ranks. Mixing their order hangs."""
    first = "F 0.0; send_act 0.0; recv_grad 0.0; B 0.0; reduce_grads 0;"
    second = "recv_act 1.0; F 1.0; B 1.0; send_grad 1.0; reduce_grads 1;"
    right, wrong = "; reduce_norm; step", "reduce_norm; "
    header = "tied_weights yes clip_grad_norm yes"
    one, other = f"{first} reduce_tied 0{right}", f"{second} reduce_tied 1{right}"
    assert accepted(written(one, other, header=header)) == [*MODELS]
    mixed = written(one, f"{second} {wrong} reduce_tied 1; step", header=header)
    assert accepted(mixed) == []
    error = refused(mixed)
    assert isinstance(error, OrderError)
    assert [(s.rank, str(s.instr)) for s in error.sites] == [
        (1, "reduce_norm"), (1, "reduce_tied 1"),
    ]  # fmt: skip


def test_a_collective_before_a_message_that_it_waits_for() -> None:
    """Reductions have their own queue, except in models with a single queue."""
    error = refused(STRICTER["per_device"], "blocking_serial")
    assert isinstance(error, DeadlockError)
    assert {str(w.instr) for w in error.cycle} == {"recv_grad 0.0", "reduce_tied 1"}


# ---------------------------------------------------------------- forwards only


def test_a_gradient_that_nobody_made() -> None:
    """The messages are complete, in order and without a cycle, but one was never computed."""
    program = written(
        "F 0.0; send_act 0.0; recv_grad 0.0", "recv_act 1.0; F 1.0; send_grad 1.0"
    )  # fmt: skip
    assert accepted(program) == []
    assert isinstance(refused(program), CompletenessError)


def test_costs_that_add_up_to_infinity_are_no_deadlock() -> None:
    program = compile(one_f_one_b, PipelineShape(2, 4), costs=Costs(F=1e308))
    with pytest.raises(CostsError, match="add up"):
        simulate(program, Costs(F=1e308))


def test_a_walk_ends_where_an_instruction_is_there_twice() -> None:
    """This is for callers that do not first check whether a program is complete."""
    program = compile(one_f_one_b, PipelineShape(2, 4))
    one, two = program.streams
    twice = replace(program, streams=(Stream(np.concatenate([one.words, one.words])), two))
    for model in MODELS:
        assert compute_earliest_times(Graph(twice, model)).is_done.any()
