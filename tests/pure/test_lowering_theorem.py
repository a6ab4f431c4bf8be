"""Tests that lowered drafts finish, and that the graph equals a machine that has no graph."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from schedir.analysis.critical_path.longest_path import compute_earliest_times
from schedir.analysis.dependency_graph import Graph
from schedir.analysis.progress_models import MODELS, ProgressModel
from schedir.compiler.compile import compile, lower
from schedir.errors import DeadlockError, SchedirError
from schedir.ir.cost.costs import Costs
from schedir.ir.isa.instructions import Opcode as O
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program, Stream, pack
from schedir.passes.communication.transfer_overlap import (
    group_opposite_transfers,
    post_receives_early,
    start_gathers_early,
)
from schedir.predict.simulate import simulate
from schedir.schedules import interleaved, interleaved_zb, one_f_one_b
from schedir.schedules.schedule_algebra import Schedule
from schedir.testing import compute_programs, tied_weights
from schedir.verify.check import check
from tests.mutants import CORPUS, mutate
from tests.oracle import Machine
from tests.strategies import costs, with_slots

models = st.sampled_from(MODELS)
MUTATIONS = ("run_order", "swap_neighbors", "swap_any", "move_anywhere", "swap_receives",
           "early_receive", "late_send", "join_both_sides", "join_next_transfer")  # fmt: skip


def draw_program_and_costs(draw: st.DataObject, draft: Program) -> tuple[Program, Costs]:
    """Draw a lowered program with random options, and costs."""
    tp, clip = draw.draw(st.integers(1, 2)), draw.draw(st.booleans())
    tied = draw.draw(tied_weights(draft.shape))
    draft = replace(draft, tp=tp, tied_weights=tied, clip_grad_norm=clip)
    drawn_costs = draw.draw(costs(draft.shape))
    return lower(draft, draw.draw(st.sampled_from([None, drawn_costs]))), drawn_costs


@settings(max_examples=200)
@given(compute_programs(), st.data())
def test_lowered_drafts_pass_check_under_all_models(draft: Program, data: st.DataObject) -> None:
    program, _ = draw_program_and_costs(data, draft)
    for model in MODELS:
        check(program, model)


@given(compute_programs(), st.data(), models, st.integers(1, 3))
def test_overlap_keeps_programs_legal(
    draft: Program, data: st.DataObject, progress_model: ProgressModel, ahead: int
) -> None:
    program, _ = draw_program_and_costs(data, draft)
    grouped = group_opposite_transfers(program)
    for other in MODELS:
        check(grouped, other)
    for start in (program, grouped):
        with_early_gathers = start_gathers_early(start, ahead)
        for other in MODELS:
            check(with_early_gathers, other, blocking_hosts=True)
        check(
            post_receives_early(with_early_gathers, progress_model, ahead),
            progress_model,
            blocking_hosts=True,
        )
        check(
            post_receives_early(start, progress_model, ahead), progress_model, blocking_hosts=True
        )


@settings(max_examples=200)
@given(st.integers(0, 2**32), models, st.booleans())
def test_wrong_message_order_does_not_change_verdict(
    seed: int, progress_model: ProgressModel, made_up: bool
) -> None:
    """A wrong `message_order`, outdated or random, does not change the verdict of `check`."""
    rng = random.Random(seed)
    program, mutant = mutate(rng.choice(MUTATIONS), seed, corpus=CORPUS)
    order = program.message_order
    if made_up:
        order = {
            op: np.array(rng.choices(range(9), k=len(ranks_of_messages)), np.int32)
            for op, ranks_of_messages in order.items()
        }
    verdicts = []
    for given_order in ({}, order):
        try:
            check(replace(mutant, message_order=given_order), progress_model)
            verdicts.append("")
        except SchedirError as error:
            verdicts.append(str(error))
    event("refused" if verdicts[0] else "legal")
    assert verdicts[0] == verdicts[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_early_receive_deadlocks_if_other_ranks_have_groups(rank: int) -> None:
    """`check` compares the order of all messages of a rank, from the first one on."""
    program = compile(one_f_one_b, PipelineShape(ranks=4, microbatches=4))
    streams = [*program.streams[:2], *group_opposite_transfers(program).streams[2:]]
    words = streams[rank].words
    receive = int(np.flatnonzero(streams[rank].op == O.RecvGrad)[0])
    streams[rank] = Stream(np.concatenate([words[[receive]], np.delete(words, receive)]))
    deadlocked = replace(program, streams=tuple(streams))
    assert deadlocked.joined.any()
    with pytest.raises(DeadlockError):
        check(deadlocked)


@pytest.mark.parametrize("schedule", [interleaved, interleaved_zb])
def test_one_queue_is_barely_slower_than_queue_per_edge(schedule: Schedule) -> None:
    """A program lowered for free messages is at most 3 % slower with one queue per device."""
    program = compile(schedule, PipelineShape(ranks=16, microbatches=32, stages_per_rank=2))
    send_costs = Costs(send=0.1)
    edge, device = (
        simulate(program, send_costs, progress_model=model).span
        for model in ("per_edge", "per_device")
    )
    assert device < 1.03 * edge


def assert_graph_equals_machine(
    program: Program, progress_model: ProgressModel, drawn_costs: Costs
) -> None:
    machine = Machine(program, progress_model, drawn_costs)
    is_finished = machine.run()
    if not is_finished:
        with pytest.raises(DeadlockError):
            simulate(program, drawn_costs, progress_model=progress_model, skip_checks=True)
        return
    timeline = simulate(program, drawn_costs, progress_model=progress_model, skip_checks=True)
    graph = Graph(program, progress_model)
    exit_times = np.zeros(graph.node_id_limit)  # a group ends when all its transfers have ended
    np.maximum.at(
        exit_times, graph.entry_exit_nodes[1], compute_earliest_times(graph, drawn_costs).end
    )
    for (rank, index), end in machine.ended.items():
        assert exit_times[graph.entry_exit_nodes[1][int(program.offsets[rank]) + index]] == end
    assert timeline.span == max(machine.ended.values(), default=0.0)


@given(compute_programs(ranks=3, microbatches=4), st.data(), models)
def test_graph_times_equal_machine_times(
    draft: Program, data: st.DataObject, progress_model: ProgressModel
) -> None:
    program, drawn_costs = draw_program_and_costs(data, draft)
    if data.draw(st.booleans()):
        program = group_opposite_transfers(program)
    if data.draw(st.booleans()):
        program = start_gathers_early(program, data.draw(st.integers(1, 3)))
    if data.draw(st.booleans()):
        program = post_receives_early(program, progress_model, data.draw(st.integers(1, 3)))
    assert_graph_equals_machine(
        with_slots(program, data.draw(st.randoms(use_true_random=False))),
        progress_model,
        drawn_costs,
    )


@settings(max_examples=200)
@given(compute_programs(ranks=3, microbatches=3), st.data(), models)
def test_graph_equals_machine_on_shuffled_programs(
    draft: Program, data: st.DataObject, progress_model: ProgressModel
) -> None:
    """Many of these programs hang. The verdicts must agree too."""
    program, drawn_costs = draw_program_and_costs(data, draft)
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    streams = []
    for stream in program.streams:
        words = stream.words.copy()
        for _ in range(rng.randrange(3)):
            k = rng.randrange(max(len(words) - 1, 1))
            words[k : k + 2] = words[k : k + 2][::-1]
        streams.append(Stream(words))
    assert_graph_equals_machine(
        with_slots(replace(program, streams=tuple(streams)), rng), progress_model, drawn_costs
    )


@pytest.mark.parametrize("ranks", [5000, 12000])
def test_queues_of_many_ranks_are_distinct(ranks: int) -> None:
    """The programs have more queues than 16 bits can count."""
    ops = (O.Forward, O.ReduceGrads, O.SendAct, O.RecvGrad, O.RecvAct, O.SendGrad)
    words = np.stack([pack(op, np.arange(ranks), 0) for op in ops], 1)
    ends = Stream(words[0, :4]), Stream(words[-1, [0, 1, 4, 5]])
    program = Program(
        "many", PipelineShape(ranks, 1), (ends[0], *map(Stream, words[1:-1]), ends[1])
    )
    queue = Graph(program, "per_edge").queue
    rank = np.repeat(np.arange(ranks), np.diff(program.offsets))
    # There are queues for compute, for reductions, and for each neighbour and direction.
    assert len(np.unique(queue)) == 2 * ranks + 4 * (ranks - 1)
    assert len(np.unique(np.stack([queue, rank]), axis=1).T) == len(np.unique(queue))
