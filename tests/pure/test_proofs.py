"""Tests of proofs, which stay with a program, end with a change, and replace a second check."""

from __future__ import annotations

import gc
import pickle
import random
import weakref
from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from schedir.analysis.dependency_graph import Graph
from schedir.analysis.progress_models import MODELS, ProgressModel
from schedir.compiler.compile import compile
from schedir.errors import (
    DeadlockError,
    LoweringLevelError,
    OrderError,
    SchedirError,
    SlotError,
    UsageError,
)
from schedir.io import torch_csv
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.sizes import Sizes
from schedir.ir.dataflow import Dataflow
from schedir.ir.instruction_index import InstructionIndex
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program, Proof, SlotCounts
from schedir.ir.text_format import from_text, to_text
from schedir.predict.simulate import simulate
from schedir.schedules import forward_only, interleaved, one_f_one_b, zb_h1
from schedir.schedules.greedy import greedy_schedule
from schedir.schedules.schedule_expansion import expand_schedule
from schedir.testing import compute_programs
from schedir.verify.check import check
from tests.mutants import CORPUS, MUTATIONS, draw_lowered_program, draw_program_of_updates, mutate
from tests.pure.test_check import naive
from tests.strategies import costs, with_slots


@pytest.fixture
def checked_programs(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """Return the list of programs whose completeness is checked."""
    checked: list[Program] = []
    module = import_module("schedir.verify.check")
    real = module.require_complete

    def record_check(program: Program, *, is_draft: bool) -> object:
        checked.append(program)
        return real(program, is_draft=is_draft)

    monkeypatch.setattr(module, "require_complete", record_check)
    return checked


def test_proof_is_kept_until_program_changes(checked_programs: list[Program]) -> None:
    program = from_text(to_text(compile(one_f_one_b, PipelineShape(3, 6))))
    checked_programs.clear()
    for _ in range(2):
        simulate(check(program))
    assert checked_programs == [program] and program.proofs == {Proof("per_device")}
    renamed = replace(program, name="another")
    assert not renamed.proofs
    simulate(renamed)
    simulate(renamed, Costs(F=3))
    check(renamed)
    assert len(checked_programs) == 2 and checked_programs[1] is renamed


@pytest.mark.parametrize("copied", [copy, deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_copy_has_no_proof_and_is_read_only(copied: Callable[[Program], Program]) -> None:
    program = compile(zb_h1, PipelineShape(2, 4), buffer_sharing="minimal")
    copied_program = copied(program)
    assert copied_program == program
    assert copied_program.digest == program.digest
    assert not copied_program.proofs
    assert copied_program.message_order.keys() == program.message_order.keys()
    assert all(
        np.shares_memory(stream.words, copied_program.words) for stream in copied_program.streams
    )
    for words in (
        copied_program.words,
        copied_program.streams[0].words,
        copied(copied_program).streams[1].words,
    ):
        with pytest.raises(ValueError, match="read-only"):
            words[0] = words[1]


def test_proof_for_blocking_hosts_implies_nonblocking(checked_programs: list[Program]) -> None:
    program = from_text(to_text(compile(one_f_one_b, PipelineShape(3, 6))))
    checked_programs.clear()
    check(program, "per_edge", blocking_hosts=True)
    simulate(program, progress_model="per_edge")
    assert program.proofs == {Proof("per_edge"), Proof("per_edge", blocking_hosts=True)}
    check(program, "blocking_serial")
    assert Proof("blocking_serial", blocking_hosts=True) not in program.proofs
    assert len(checked_programs) == 1  # it is complete under every model
    hosts = ((False, False), (True, False), (True, True))
    ordered = compile(one_f_one_b, PipelineShape(3, 6)).proofs
    assert ordered == {Proof(model, *host) for model in MODELS for host in hosts}


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_each_proof_holds_separately(seed: int) -> None:
    """The checker proves all models with one order. This test checks each model separately."""
    rng = random.Random(seed)
    program = check(
        with_slots(rng.choice([draw_lowered_program, draw_program_of_updates])(rng), rng),
        "per_edge",
    )
    event(f"{len(program.proofs)} proofs")
    for model, blocks, device_waits, *other_fields in program.proofs:
        copied = replace(program, message_order={})
        check(copied, model, blocking_hosts=blocks, host_device_sync=device_waits)  # type: ignore[arg-type]
        assert other_fields == [False, None]


def test_refused_check_leaves_no_proof() -> None:
    program = naive(expand_schedule(one_f_one_b, PipelineShape(2, 4)))
    check(program, "per_edge")
    for model in ("per_device", "blocking_serial"):
        for _ in range(2):
            with pytest.raises(DeadlockError):
                check(program, model)
            with pytest.raises(DeadlockError):
                simulate(program, progress_model=model)
    assert program.proofs == {Proof("per_edge")}
    with pytest.raises(UsageError):
        check(program, "tcp")  # type: ignore[arg-type]


def get_error(call: object, *args: object, **options: object) -> str:
    """Return the error of a call, or "" if there is none."""
    assert callable(call)
    try:
        call(*args, **options)
    except SchedirError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@settings(max_examples=200)
@given(st.integers(0, 2**32), st.sampled_from([*MUTATIONS]), st.sampled_from(MODELS))
def test_simulate_and_check_refuse_the_same_programs(
    seed: int, name: str, progress_model: ProgressModel
) -> None:
    try:
        program, mutant = mutate(name, seed, corpus=CORPUS)
    except SchedirError:
        return  # its text is refused
    if mutant.is_draft:
        return  # a draft is lowered first
    if mutant.shape.ranks == program.shape.ranks:
        mutant = replace(mutant, slots=with_slots(program, random.Random(seed)).slots)
    error = get_error(check, replace(mutant), progress_model)
    event(error.partition(":")[0] or "right")
    assert get_error(simulate, replace(mutant), progress_model=progress_model) == error
    assert get_error(simulate, mutant, Costs(F=2, send=1), progress_model=progress_model) == error
    assert bool(mutant.proofs) == (not error)
    if not error:
        checked_run, unchecked_run = (
            simulate(mutant, progress_model=progress_model, skip_checks=b) for b in (False, True)
        )
        assert (checked_run.spans == unchecked_run.spans).all()


def test_skip_checks_simulates_wrong_program() -> None:
    """A reduction with its own queue finishes at any position, even where it is not legal."""
    program = compile(zb_h1, PipelineShape(2, 4))
    text = to_text(program, folded=False)
    wrong_program = from_text(
        text.replace("  reduce_grads 1\n", "").replace("rank 1\n", "rank 1\n  reduce_grads 1\n")
    )
    with pytest.raises(OrderError):
        simulate(wrong_program)
    assert simulate(wrong_program, skip_checks=True).span == simulate(program).span
    assert not wrong_program.proofs


def test_slot_error_of_single_rank_evaluation() -> None:
    program = replace(
        compile(forward_only, PipelineShape(1, 2, 2)), slots=(SlotCounts(0, 0, 0, 0),)
    )
    for proven in (check, simulate):
        with pytest.raises(SlotError):
            proven(program)


def test_slot_freed_by_its_own_instruction_deadlocks() -> None:
    program = compile(interleaved, PipelineShape(1, 1, 3))
    program = replace(program, slots=(SlotCounts(0, 1, 0, 2),))
    with pytest.raises(SlotError):
        simulate(program)
    with pytest.raises(DeadlockError) as caught:
        simulate(program, skip_checks=True)
    (wait,) = caught.value.cycle
    assert str(wait.instr) == str(wait.needed_instr) == "F 1.0"


# ---------------------------------------------------------------- drafts


@given(compute_programs(), st.data(), st.sampled_from(MODELS))
def test_draft_simulates_as_compiled_program(
    given: Program, data: st.DataObject, progress_model: ProgressModel
) -> None:
    priced = data.draw(costs(given.shape))
    program = compile(given, costs=priced, progress_model=progress_model)
    of_draft, of_program = (
        simulate(given, priced, progress_model=progress_model),
        simulate(program, priced, progress_model=progress_model),
    )
    assert of_draft.program == program and np.array_equal(of_draft.spans, of_program.spans)


def test_drafts_from_all_sources_compile() -> None:
    shape = PipelineShape(4, 8)
    program = compile(one_f_one_b, shape)
    listed = greedy_schedule(shape, "BF", lambda rank: shape.ranks - rank)
    imported = torch_csv.from_csv(torch_csv.to_csv(program, "torch"))
    for source in (
        expand_schedule(one_f_one_b, shape),
        listed,
        imported,
        from_text(to_text(listed)),
    ):
        assert compile(source).streams == compile(source, shape).streams == program.streams
    assert compile(listed, costs=Costs(send=5)).message_order.keys() == program.message_order.keys()


def test_draft_attributes_are_compile_defaults() -> None:
    draft = replace(expand_schedule(one_f_one_b, PipelineShape(2, 4)), tp=2, clip_grad_norm=True)
    assert compile(draft) == replace(
        compile(one_f_one_b, PipelineShape(2, 4), tp=2, clip_grad_norm=True)
    )
    assert compile(draft, tp=1, clip_grad_norm=False) == compile(one_f_one_b, PipelineShape(2, 4))


def test_wrong_compile_input_is_refused() -> None:
    draft = expand_schedule(one_f_one_b, PipelineShape(2, 4))
    with pytest.raises(UsageError, match="the draft has the shape"):
        compile(draft, PipelineShape(2, 8))
    with pytest.raises(LoweringLevelError, match="lowered already"):
        compile(compile(draft))
    with pytest.raises(UsageError, match="needs ranks and microbatches"):
        compile(one_f_one_b)
    with pytest.raises(LoweringLevelError) as caught:
        check(draft)
    assert "lower the draft with schedir.compile" in caught.value.hint


def test_derived_objects_are_freed_with_program() -> None:
    """Derived objects are freed with the program, without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        program = compile(one_f_one_b, PipelineShape(2, 4))
        index, flow, graph = (
            InstructionIndex.from_program(program),
            Dataflow.from_program(program),
            Graph.from_program(program),
        )
        timeline = simulate(program)
        assert timeline.graph is graph and graph.flow is flow and flow.index is index
        references = [weakref.ref(value) for value in (program, index, flow, graph)]
        del program, index, flow, graph, timeline
        assert [ref() for ref in references] == [None] * 4
    finally:
        gc.enable()


@pytest.fixture
def created_objects(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return the list of all indexes, flows and graphs that the test creates."""
    all_made: list[object] = []
    for kind in (InstructionIndex, Dataflow, Graph):
        before = kind.__init__

        def record_creation(
            self: object, *given: Any, _before: Any = before, **options: Any
        ) -> None:
            all_made.append(self)
            _before(self, *given, **options)

        monkeypatch.setattr(kind, "__init__", record_creation)
    return all_made


def test_index_and_flow_are_created_once(created_objects: list[object]) -> None:
    program = compile(one_f_one_b, PipelineShape(2, 4), buffer_sharing="minimal")
    created_objects.clear()
    timeline = simulate(program, sizes=Sizes(activation=1, saved=10))
    assert timeline.peak_memory.any() and timeline.critical_path.size and timeline.idle.any()
    assert not created_objects
    check(program, "per_edge")
    assert not created_objects
    slots = compile(one_f_one_b, PipelineShape(2, 4)).with_slots(program.slots)
    created_objects.clear()
    check(slots)
    assert [type(value) for value in created_objects] == [Graph]
    check(from_text(to_text(program)))
    assert sorted(type(value).__name__ for value in created_objects[1:]) == [
        "Dataflow",
        "Graph",
        "InstructionIndex",
    ]


def test_large_program_caches_nothing(
    created_objects: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = from_text(
        to_text(compile(one_f_one_b, PipelineShape(2, 4), buffer_sharing="minimal"))
    )
    monkeypatch.setattr("schedir.ir.program._MAX_CACHED_INSTRUCTIONS", 10)
    created_objects.clear()
    check(program)  # one index for completeness, and one for the graph
    assert sorted(type(value).__name__ for value in created_objects) == [
        "Dataflow",
        "Graph",
        "InstructionIndex",
        "InstructionIndex",
    ]
    alive = [weakref.ref(value) for value in created_objects]
    created_objects.clear()
    gc.collect()
    assert [ref() for ref in alive] == [None] * 4
