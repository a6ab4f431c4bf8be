"""Tests of programs that other checks accept, or that only some transports finish.

The tests compare `check` with an execution of each program.
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
    DeadlockError,
    GroupError,
    SchedirError,
)
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program, Stream
from schedir.schedules import one_f_one_b
from schedir.verify.check import check
from tests.edits import written
from tests.oracle_threads import verdict

VEE = "stages_per_rank 2 placement vee"
LOOP = "stages_per_rank 2"


def list_accepting_models(program: Program) -> list[str]:
    """Return the models under which `check` accepts a program, and the execution finishes."""
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


def read_refusal(program: Program, progress_model: ProgressModel = "per_device") -> SchedirError:
    assert verdict(program, progress_model).kind != "ok"
    with pytest.raises(SchedirError) as caught:
        check(program, progress_model)
    return caught.value


# ---------------------------------------------------------------- each model allows less

PROGRAM_BY_STRICTEST_MODEL = {
    "per_edge": written(  # the receive of rank 0 precedes its send
        "recv_act 3.0; F 0.0; send_act 0.0; F 3.0",
        "recv_act 1.0; F 1.0; F 2.0; send_act 2.0",
        header=VEE,
    ),
    "per_pair": written(  # the first receive of rank 0 is from rank 2
        "recv_act 3.0; F 0.0; send_act 0.0; F 3.0; send_act 3.0",
        "recv_act 1.0; recv_act 4.0; F 1.0; send_act 1.0; F 4.0; send_act 4.0",
        "recv_act 2.0; recv_act 5.0; F 2.0; F 5.0; send_act 2.0",
        header=LOOP,
    ),
    "per_direction": written(  # the receive of a gradient precedes the send of an activation
        "F 0.0; recv_grad 0.0; send_act 0.0; B 0.0; reduce_grads 0; step",
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


ACCEPTING_MODELS = {
    "per_edge": ["per_edge"],
    "per_pair": ["per_edge", "per_pair", "torch_lazy"],
    "per_direction": ["per_edge", "per_direction"],
    "per_device": [model for model in MODELS if model != "blocking_serial"],
    "blocking_serial": [*MODELS],
}


@pytest.mark.parametrize("model", PROGRAM_BY_STRICTEST_MODEL)
def test_progress_models_that_accept_program(model: str) -> None:
    assert list_accepting_models(PROGRAM_BY_STRICTEST_MODEL[model]) == ACCEPTING_MODELS[model]


# ---------------------------------------------------------------- only with unbounded buffers


# ---------------------------------------------------------------- groups


def build_large_group(size: int) -> Program:
    """Return a program with all activations in one group, on both sides."""
    microbatches = range(size)
    return written(
        "; ".join(f"F 0.{k}" for k in microbatches)
        + "; "
        + " & ".join(f"send_act 0.{k}" for k in microbatches),
        " & ".join(f"recv_act 1.{k}" for k in microbatches)
        + "; "
        + "; ".join(f"F 1.{k}" for k in microbatches),
        microbatches=size,
    )


def test_groups_above_256_transfers_are_refused() -> None:
    assert list_accepting_models(build_large_group(256)) == [*MODELS]
    error = read_refusal(build_large_group(257))
    assert isinstance(error, GroupError)
    assert [(s.rank, s.index, str(s.instr)) for s in error.sites] == [(0, 257, "send_act 0.0")]


RECEIVE_ORDERS = {
    "as one": ("recv_act 1.0 & recv_act 1.1", True),
    "one by one": ("recv_act 1.0; recv_act 1.1", True),
    "as one, crossed": ("recv_act 1.1 & recv_act 1.0", False),
    "one by one, crossed": ("recv_act 1.1; recv_act 1.0", False),
}


@pytest.mark.parametrize("order_name", RECEIVE_ORDERS)
def test_group_transfers_match_by_order(order_name: str) -> None:
    """NCCL matches the sends and the receives of a group by their order only."""
    receives, is_accepted = RECEIVE_ORDERS[order_name]
    program = written(
        "F 0.0; F 0.1; send_act 0.0 & send_act 0.1", f"{receives}; F 1.0; F 1.1", microbatches=2
    )
    assert list_accepting_models(program) == ([*MODELS] if is_accepted else [])
    if not is_accepted:
        error = read_refusal(program)
        assert isinstance(error, GroupError)
        assert [(s.rank, str(s.instr)) for s in error.sites] == [
            (1, "recv_act 1.1"), (1, "recv_act 1.0"), (0, "send_act 0.0"), (0, "send_act 0.1"),
        ]  # fmt: skip


def test_group_of_activation_and_gradient_needs_two_channels() -> None:
    """They use two channels under `per_edge`, and one channel if they share a communicator."""
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
    assert list_accepting_models(program) == ["per_edge", "per_direction"]
    assert isinstance(read_refusal(program, "per_pair"), GroupError)
    # torch_lazy sends them one by one.
    assert isinstance(read_refusal(program, "torch_lazy"), DeadlockError)


def test_one_sided_group_is_accepted() -> None:
    """One side is a group, and the other side issues its parts one by one in either order.

    torch uses other communicators for a group in both directions than for single messages.
    """
    for rank_1_order in ("recv_act 1.1; send_act 2.0", "send_act 2.0; recv_act 1.1"):
        program = written(
            "F 0.0; send_act 0.0; F 0.1; send_act 0.1 & recv_act 3.0; F 3.0; recv_act 3.1; F 3.1",
            f"recv_act 1.0; F 1.0; F 2.0; {rank_1_order}; F 1.1; F 2.1; send_act 2.1",
            microbatches=2, header=VEE,
        )  # fmt: skip
        assert list_accepting_models(program) == [
            model for model in MODELS if model != "torch_lazy"
        ]
        assert isinstance(read_refusal(program, "torch_lazy"), ChannelMismatchError)


# ---------------------------------------------------------------- collectives


# ---------------------------------------------------------------- forwards only


def test_longest_path_ends_for_duplicate_instructions() -> None:
    """Some callers do not first check whether a program is complete."""
    program = compile(one_f_one_b, PipelineShape(2, 4))
    first, second = program.streams
    duplicated = replace(
        program, streams=(Stream(np.concatenate([first.words, first.words])), second)
    )
    for model in MODELS:
        assert compute_earliest_times(Graph(duplicated, model)).is_done.any()
