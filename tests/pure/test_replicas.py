"""Tests of data-parallel replicas that run different programs."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from schedir import PipelineShape, Program, Stream, check, check_replicas, compile, to_text
from schedir.analysis.channels import assign_queues
from schedir.analysis.dependency_graph import Graph
from schedir.analysis.progress_models import MODELS, ProgressModel
from schedir.errors import CollectiveOrderError, DeadlockError, SchedirError, UsageError
from schedir.ir.isa.instructions import EP_COLLECTIVE_OPS, GRAD_ADDING_OPS, INSTRUCTIONS, Lane
from schedir.ir.program import is_op
from tests.commands import run_command, run_refused_command
from tests.museum.cases import cases
from tests.mutants import reordered
from tests.oracle_replicas import verdict

EXPERTS: dict[str, Any] = {"dp": 2, "ep": 2, "stage_segments": "dc"}
SHAPES = [
    ("gpipe", 2, 2),
    ("one_f_one_b", 2, 3),
    ("zb_h1", 2, 3),
    ("interleaved", 2, 4),
    ("dualpipe_v", 2, 4),
]
PROGRAMS = [compile(name, ranks=ranks, microbatches=m, **EXPERTS) for name, ranks, m in SHAPES] + [
    compile("one_f_one_b", ranks=2, microbatches=3, dp=2, zero=zero) for zero in (0, 3)
]
CASES = {case.name: case.of_replicas() for case in cases() if case.replicas}
REPLICA_LANES = (Lane.EP, Lane.DP, Lane.PARAMS)


def find_error(
    programs: list[Program], model: ProgressModel, *, blocking_hosts: bool = False
) -> SchedirError | None:
    try:
        check_replicas(programs, model, blocking_hosts=blocking_hosts)
    except SchedirError as error:
        return error
    return None


def replace_words(program: Program, rank: int, words: list[int]) -> Program:
    """Return a program in which a rank has other instructions."""
    streams = [*program.streams]
    streams[rank] = Stream(np.array(words))
    return replace(program, name="changed", streams=tuple(streams), message_order={})


def move_instructions(program: Program, rng: random.Random) -> Program:
    """Return a program in which one instruction moves, but no collective of replicas."""
    rank = rng.randrange(program.shape.ranks)
    words = program.streams[rank].words.tolist()
    free = [
        k
        for k, instr in enumerate(program.streams[rank])
        if INSTRUCTIONS[instr.op].lane not in REPLICA_LANES
    ]
    word = words.pop(rng.choice(free))
    words.insert(rng.randrange(len(words) + 1), word)
    return replace_words(program, rank, words)


def move_after(program: Program, rank: int, instr: str, other: str) -> Program:
    """Return a program in which an instruction of a rank comes directly after another one."""
    stream = program.streams[rank]
    names, words = [*map(str, stream)], stream.words.tolist()
    word = words.pop(names.index(instr))
    names.remove(instr)
    words.insert(names.index(other) + 1, word)
    return replace_words(program, rank, words)


def move_some_instructions(program: Program, model: ProgressModel, seed: int) -> Program:
    """Return a program in another order, which finishes on blocking hosts."""
    rng = random.Random(seed)
    for _ in range(rng.randrange(1, 12)):
        changed = move_instructions(program, rng)
        try:
            program = check(changed, model, blocking_hosts=True)
        except SchedirError:
            continue
    return program


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(PROGRAMS), st.sampled_from(MODELS), st.booleans(), st.integers(0, 2**30))
def test_equal_programs_agree_with_check(
    program: Program, model: ProgressModel, blocking_hosts: bool, seed: int
) -> None:
    program = move_instructions(reordered(program, random.Random(seed)), random.Random(seed))
    try:
        check(program, model, blocking_hosts=blocking_hosts)
    except SchedirError as error:
        event(type(error).__name__)
        found = find_error([program, program], model, blocking_hosts=blocking_hosts)
        assert str(found) == str(error)
    else:
        event("accepted")
        check_replicas([program, program], model, blocking_hosts=blocking_hosts)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(PROGRAMS), st.sampled_from(MODELS), st.data())
def test_swapped_collectives_of_one_replica_are_refused(
    program: Program, model: ProgressModel, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, program.shape.ranks - 1))
    lane = data.draw(st.sampled_from(REPLICA_LANES))
    ops = [row.op for row in INSTRUCTIONS if row.lane is lane and row.ring is not None]
    words = program.streams[rank].words.tolist()
    places = np.flatnonzero(is_op(program.streams[rank].op, tuple(ops))).tolist()
    assume(len(places) > 1)
    k = data.draw(st.integers(0, len(places) - 2))
    first, second = places[k], places[k + 1]
    # The second collective moves before the first one, or the first one after the second one.
    if data.draw(st.booleans()):
        words.insert(first, words.pop(second))
    else:
        words.insert(second, words.pop(first))
    changed = replace_words(program, rank, words)
    replicas = [changed, program] if data.draw(st.booleans()) else [program, changed]
    error = find_error(replicas, model)
    assert error is not None
    event(type(error).__name__)
    try:
        check(changed, model)
    except SchedirError as alone:
        assert str(error) == str(alone)
        return
    assert isinstance(error, CollectiveOrderError)
    assert (error.rank, error.replicas) == (rank, (0, 1))
    assert [(site.rank, site.replica) for site in error.sites] == [(rank, 0), (rank, 1)]
    assert {str(site.instr) for site in error.sites} == {
        str(program.streams[rank][place]) for place in (first, second)
    }


class LooseGraph(Graph):
    """A graph in which only collectives of replicas keep the order of the Streams."""

    @cached_property
    def queue(self) -> NDArray[np.unsignedinteger]:
        queue = assign_queues(self.index, self.rules).astype(np.uint64)
        is_free = np.array([INSTRUCTIONS[op].lane not in REPLICA_LANES for op in self.index.op])
        # The reductions wait for the last backward of a stage, so backwards keep their order.
        adds_grads = self.index.is_op(GRAD_ADDING_OPS)
        number = np.where(adds_grads, self.index.stage, 2**20 + np.arange(len(self)))
        queue[is_free] = int(queue.max()) + 1 + number[is_free]
        return queue


def reorder_collectives(program: Program, seed: int) -> Program:
    """Return a correct program in another order, with the same order of collectives."""
    graph = LooseGraph(program, "per_edge")
    members: dict[int, list[int]] = defaultdict(list)
    for position, node in enumerate(graph.node.tolist()):
        members[node].append(position)
    streams: list[list[int]] = [[] for _ in program.streams]
    for node in graph.random_topological_order(seed):
        for position in members[node]:
            streams[graph.index.rank[position]].append(int(program.words[position]))
    return replace(
        program, streams=tuple(Stream(np.array(words)) for words in streams), message_order={}
    )


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([*PROGRAMS[:-1], *(replace(program, dp=4) for program in PROGRAMS[:2])]),
    st.sampled_from(MODELS),
    st.lists(st.integers(0, 2**30), min_size=4, max_size=4),
)
def test_check_agrees_with_execution(
    program: Program, model: ProgressModel, seeds: list[int]
) -> None:
    """Replicas finish in an execution without the checker if and only if they are accepted."""
    replicas = [reorder_collectives(program, seed) for seed in seeds[: program.dp]]
    for replica in replicas:
        check(replica, model)
    error = find_error(replicas, model)
    event(type(error).__name__)
    assert error is None or isinstance(error, DeadlockError)
    assert verdict(replicas, model, seeds[0]).kind == ("ok" if error is None else "hang")


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([*PROGRAMS, *(replace(program, dp=4) for program in PROGRAMS[:2])]),
    st.sampled_from(MODELS),
    st.lists(st.integers(0, 2**30), min_size=4, max_size=4),
)
def test_check_agrees_with_execution_on_blocking_hosts(
    program: Program, model: ProgressModel, seeds: list[int]
) -> None:
    replicas = [move_some_instructions(program, model, seed) for seed in seeds[: program.dp]]
    error = find_error(replicas, model, blocking_hosts=True)
    event(type(error).__name__)
    assert error is None or isinstance(error, DeadlockError)
    kind = verdict(replicas, model, seeds[0], blocking_hosts=True).kind
    # In the oracle, all collectives of `blocking_serial` have one communicator.
    hangs = ("hang", "wrong") if model == "blocking_serial" else ("hang",)
    assert kind in (("ok",) if error is None else hangs)


@pytest.mark.parametrize("other", ["dispatch 4.1", "F 4.1"])
def test_blocking_hosts_can_wait_in_a_cycle(other: str) -> None:
    """Hosts wait in computes, and at a dispatch for the numbers of tokens."""
    program = compile("one_f_one_b", ranks=2, microbatches=2, **EXPERTS)
    late_act = move_after(program, 0, "send_act 2.1", "B 1.0")
    late_grad = move_after(program, 1, "send_grad 3.0", other)
    replicas = [late_act, late_grad]
    for replica in replicas:
        check_replicas([replica, replica], "per_edge", blocking_hosts=True)
    check_replicas(replicas, "per_edge")
    assert verdict(replicas, "per_edge", 0).kind == "ok"
    error = find_error(replicas, "per_edge", blocking_hosts=True)
    assert isinstance(error, DeadlockError)
    assert error.fact.startswith("4 ranks of 2 replicas wait for each other")
    assert error.hint.startswith("issue earlier the instructions for which other ranks wait")
    assert verdict(replicas, "per_edge", 0, blocking_hosts=True).kind == "hang"


@pytest.mark.parametrize("model", MODELS)
def test_deadlock_names_both_replicas(model: ProgressModel) -> None:
    programs = CASES["messages_and_all_to_alls_in_two_orders"]
    for program in programs:
        check_replicas([program, program], model)
    error = find_error(programs, model)
    assert isinstance(error, DeadlockError)
    assert error.fact.startswith("4 ranks of 2 replicas wait for each other")
    processes = [(wait.replica, wait.rank) for wait in error.cycle]
    assert {*processes} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    needed = [(wait.needed_replica, wait.needed_rank) for wait in error.cycle]
    assert needed == [*processes[1:], processes[0]]
    for wait in error.cycle:
        assert wait.replica is not None and wait.needed_replica is not None
        stream = programs[wait.replica].streams[wait.rank]
        assert stream[wait.index] == wait.instr
        stream = programs[wait.needed_replica].streams[wait.needed_rank]
        assert stream[wait.needed_index] == wait.needed_instr


def test_groups_may_have_different_orders() -> None:
    """With four replicas and groups of two, each group can have another order."""
    one, other = (replace(program, dp=4) for program in CASES["all_to_alls_in_two_orders"])
    check_replicas([one, one, other, other])
    error = find_error([one, one, other, one], "per_device")
    assert isinstance(error, CollectiveOrderError)
    assert error.replicas == (2, 3)
    assert error.program == f"{other.name}, {one.name}"
    assert [site.replica for site in error.sites] == [2, 3]
    assert all(site.instr.op in EP_COLLECTIVE_OPS for site in error.sites)  # type: ignore[attr-defined]


def test_missing_collective_error_names_one_instruction() -> None:
    """With ZeRO 3, replicas can have different numbers of gathers."""
    options: dict[str, Any] = {"ranks": 1, "microbatches": 2, "dp": 2, "zero": 3}
    one, two = (
        compile("interleaved", **options, stages_per_rank=2, unsharded_stages=stages)
        for stages in (1, 2)
    )
    error = find_error([one, two], "per_device")
    assert isinstance(error, CollectiveOrderError)
    assert [(str(site.instr), site.replica) for site in error.sites] == [("unshard 0.1", 0)]
    assert "rank 0 of replica 1 has no further collective on the lane params" in error.fact


def test_error_of_one_program_names_the_replica() -> None:
    program = PROGRAMS[0]
    broken = replace_words(program, 1, program.streams[1].words.tolist()[:-1])
    error = find_error([program, broken], "per_device")
    assert error is not None
    assert error.__notes__ == ["in the program of replica 1"]


def test_programs_with_different_settings_are_refused() -> None:
    program = PROGRAMS[0]
    wrong: Any
    for wrong, text in (
        ([program], "must be dp, which is 2 in these programs, not 1"),
        ([program] * 3, "compile the programs with dp=3, or give 2 programs"),
        ([replace(program, dp=2**15)] * 2**15, "have 65536 pipeline ranks"),
        ([program, PROGRAMS[1]], "microbatches is 2 and 3"),
        ([program, replace(program, clip_grad_norm=True)], "clip_grad_norm is False and True"),
        ([program, "gpipe"], "programs[1] must be a Program"),
        (program, "programs must be a list"),
        ([], "programs must be a list"),
    ):
        with pytest.raises(UsageError) as caught:
            check_replicas(wrong)
        assert text in str(caught.value)


def test_command_checks_replicas(
    capsys: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, programs in CASES.items():
        for number, program in enumerate(programs):
            (tmp_path / f"{name}{number}.sched").write_text(to_text(program))
    orders, cycle = "all_to_alls_in_two_orders", "messages_and_all_to_alls_in_two_orders"
    text = run_command(capsys, "check", "--replicas", f"{cycle}0.sched", f"{cycle}0.sched")
    assert "2 replicas finish under per_edge, per_pair" in text
    options = ("check", "--replicas", "--json", "one_f_one_b", "one_f_one_b", "--ranks", "2")
    text = run_command(capsys, *options, "--microbatches", "2", "-O", "dp=2")
    facts = json.loads(text)
    assert facts["replica_programs"] == ["one_f_one_b", "one_f_one_b"]
    assert facts["progress_models_with_blocking_hosts"] == [*MODELS]
    text = run_refused_command(
        capsys, "check", "--replicas", f"{orders}0.sched", f"{orders}1.sched"
    )
    assert text.startswith(
        "CollectiveOrderError: dispatch_first, combine_grad_first: rank 0 of replica 0 issues "
        "dispatch 1.1, but rank 0 of replica 1 issues combine_grad 1.0"
    )
    text = run_refused_command(capsys, "check", "--replicas", f"{cycle}0.sched", f"{cycle}1.sched")
    assert "4 ranks of 2 replicas wait for each other" in text
    assert "needs dispatch 1.1, #9 on rank 0 of replica 1" in text
    text = run_refused_command(
        capsys, "check", "--replicas", "a.sched", "--rank-programs", "0:a.sched"
    )
    assert "--replicas cannot be combined with --rank-programs" in text


def test_command_checks_replicas_on_blocking_hosts(
    capsys: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program = compile("one_f_one_b", ranks=2, microbatches=2, **EXPERTS)
    for name, replica in (
        ("act", move_after(program, 0, "send_act 2.1", "B 1.0")),
        ("grad", move_after(program, 1, "send_grad 3.0", "F 4.1")),
    ):
        (tmp_path / f"{name}.sched").write_text(to_text(replica))
    options = ("check", "--replicas", "act.sched", "grad.sched", "--progress-model", "per_edge")
    text = run_command(capsys, *options)
    assert "2 replicas finish under per_edge; if hosts block, as CPU hosts do, under none" in text
    facts = json.loads(run_command(capsys, *options, "--json"))
    assert facts["progress_models"] == ["per_edge"]
    assert facts["progress_models_with_blocking_hosts"] == []
    text = run_refused_command(capsys, *options, "--blocking-hosts")
    assert "4 ranks of 2 replicas wait for each other" in text
    files = ("act.sched", "act.sched", "--progress-model", "per_edge")
    text = run_command(capsys, "check", "--replicas", *files, "--blocking-hosts")
    assert "2 replicas finish under per_edge, if hosts block, as CPU hosts do" in text
    text = run_refused_command(capsys, "check", "--replicas", "act.sched", "-o", "a.svg")
    assert "-o cannot be combined with --replicas" in text


def test_different_streams_with_experts_norm_and_several_updates_are_refused() -> None:
    """The runtime sums the norm over the experts, and the table has no place for this sum."""
    options: dict[str, Any] = {
        "dp": 2, "ep": 2, "stage_segments": "dc", "clip_grad_norm": True,
    }  # fmt: skip
    shape = PipelineShape(1, 4, optimizer_steps=2, weight_delay=1)
    program = compile("one_f_one_b", shape, **options)
    check_replicas([program, program])
    changed = replace_words(program, 0, program.streams[0].words[::-1].tolist())
    with pytest.raises(UsageError, match="need equal Streams"):
        check_replicas([program, changed])
