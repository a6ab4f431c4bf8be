"""Tests that found schedules fit and run, and that no built-in schedule is shorter."""

import os
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedir import (
    Costs,
    PipelineShape,
    Sizes,
    check,
    compile,
    lower_bound,
    schedules,
    search_schedule,
    simulate,
    to_text,
)
from schedir.analysis import numba_jit
from schedir.analysis.numba_jit import (
    MIN_COMPILE_SECONDS,
    MIN_LOAD_SECONDS,
    compile_within,
    is_installed,
)
from schedir.compiler.compile import check_memory
from schedir.errors import CostsError, MemoryLimitError, SchedirError, UsageError
from schedir.ir.program import Program
from schedir.schedule_search.bounds.program_bound import compute_program_bound
from schedir.schedule_search.heuristics.annealing import move_on_several_ranks
from schedir.schedule_search.heuristics.heuristic_search import HeuristicSearch
from schedir.schedule_search.heuristics.order_evaluator import LOOPS, DispatchPolicy, OrderEvaluator
from schedir.schedule_search.problem import make_problem
from schedir.schedule_search.rank_order import (
    compute_length,
    compute_peaks,
    draft_from_order,
    order_of_program,
)
from schedir.schedules import get_built_in_schedules
from schedir.schedules.schedule_expansion import expand_schedule
from tests.cases import campaign

EVEN = Costs(F=18.522, I=18.086, W=9.337, send=0.601)


def test_found_schedule_fits_and_is_legal() -> None:
    result = search_schedule(PipelineShape(4, 12), EVEN, max_in_flight=6, max_evaluations=3000)
    assert result.timeline.peak_in_flight.max() <= 6
    for model in ("per_device", "blocking_serial", "per_edge"):
        check(result.program, model)
    assert simulate(result.program, EVEN).span == result.span >= result.bound
    assert result.improvements[-1].span == pytest.approx(result.span)
    assert (
        result.span
        <= simulate(compile(schedules.zb_h1, PipelineShape(4, 12), costs=EVEN), EVEN).span
    )


def test_byte_limit_includes_messages_and_weights() -> None:
    sizes = Sizes(
        activation=2e6, saved=10e6, deferred_wgrad=4e6, saved_and_deferred=12e6, model_states=100e6
    )
    roomy, tight = (
        search_schedule(PipelineShape(3, 4), EVEN, sizes, limit, time_limit=600, max_evaluations=30)
        for limit in (150e6, 135e6)
    )
    assert roomy.timeline.peak_memory.max() <= 150e6 and tight.timeline.peak_memory.max() <= 135e6
    assert roomy.span < tight.span


def test_no_move_is_tried_after_time_limit() -> None:
    problem = make_problem(PipelineShape(4, 8), Costs(F=2, I=2, W=1), max_in_flight=3)
    order = order_of_program(compile(schedules.zb_h1, problem.shape), split_backward=True)
    search = HeuristicSearch(
        problem, 0.0, start_time=perf_counter(), seconds=1e-9, evaluations=None, seed=0,
        report=lambda _: None,
    )  # fmt: skip
    search.add_order(1.0, order, "given")
    assert not search.run()
    tried = search.num_evaluated
    assert list(search.list_finalists()) == [(1.0, order)] and search.num_evaluated == tried


def test_tight_memory_is_enough_without_policy() -> None:
    costs = Costs(F=(3, 1, 1, 1), I=(3, 2, 2, 3), W=(3, 1, 1, 2), send=(2, 1, 1, 2))
    sizes = Sizes(
        saved=(2, 4, 4, 2),
        deferred_wgrad=(3, 2, 1, 1),
        saved_and_deferred=(3, 6, 4, 3),
        model_states=(6, 9, 2, 5),
    )
    result = search_schedule(PipelineShape(2, 4, 2), costs, sizes, 21, max_evaluations=300)
    assert result.timeline.peak_memory.max() <= 21


@pytest.mark.parametrize("saved", [6883729793.34318, 6098687129.154504, 26666666667 / 3])
def test_limit_of_four_saved_activations_holds_four(saved: float) -> None:
    """The limit tolerates rounding of sums, but is exact to one byte."""
    shape, sizes = PipelineShape(4, 7), Sizes(saved=saved)
    four_activations = search_schedule(shape, EVEN, sizes, 4 * saved, max_evaluations=400)
    assert (
        four_activations.span
        == search_schedule(shape, EVEN, max_in_flight=4, max_evaluations=400).span
    )
    check_memory(four_activations.program, sizes, 4 * saved)
    with pytest.raises(MemoryLimitError):
        check_memory(four_activations.program, sizes, 4 * saved - 1)
    smaller_limit = search_schedule(shape, EVEN, sizes, 4 * saved - 1, max_evaluations=400)
    assert (
        smaller_limit.span
        == search_schedule(shape, EVEN, max_in_flight=3, max_evaluations=400).span
    )


@pytest.mark.parametrize("seconds", [float("inf"), 1e308])
def test_search_without_time_limit_ends_with_proof(seconds: float) -> None:
    uneven = Costs(F=3, I=(4, 5, 6, 5), W=2)
    result = search_schedule(PipelineShape(4, 5), uneven, max_in_flight=3, time_limit=seconds)
    assert result.stop_reason == "proved"


def test_search_names_limit_if_it_ends_after_all_evaluations() -> None:
    shape, costs = PipelineShape(4, 8), Costs(F=2, I=2, W=1)
    result = search_schedule(
        shape, costs, max_in_flight=3, max_evaluations=50, time_limit=float("inf")
    )
    assert result.stop_reason == "limit" and result.num_evaluated == 50


def test_interrupt_during_compile_keeps_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def compile_with_interrupt(*args: Any, **more: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored under nohup
            signal.raise_signal(signal.SIGINT)
        return compile(*args, **more)

    monkeypatch.setattr(
        "schedir.schedule_search.heuristics.program_builder.compile", compile_with_interrupt
    )
    uneven = Costs(F=3, I=(4, 5, 6, 5), W=2)
    result = search_schedule(
        PipelineShape(4, 8), uneven, max_in_flight=3, time_limit=600, max_evaluations=300
    )
    assert result.stop_reason == "interrupted" and result.span == result.improvements[-1].span


def test_numpy_numbers_are_accepted() -> None:
    sizes, shape = Sizes(saved=10.0), PipelineShape(2, 3)
    plain = search_schedule(shape, EVEN, sizes, 20, seed=3, time_limit=9, max_evaluations=50)
    result = search_schedule(
        shape, EVEN, sizes, np.int64(20), seed=np.int64(3), time_limit=np.float32(9),  # type: ignore[arg-type]
        max_evaluations=np.int64(50),  # type: ignore[arg-type]
    )  # fmt: skip
    assert to_text(result.program) == to_text(plain.program)
    limit: Any = np.float32(20)
    assert lower_bound(shape, EVEN, sizes, limit) == lower_bound(shape, EVEN, sizes, 20)


@pytest.mark.parametrize("shape, costs, in_flight", [
    (PipelineShape(4, 5, 2, "vee"), Costs(send=2), 8),
    (PipelineShape(4, 8), Costs(F=(0.7, 1.3, 1, 0.9), send=2), 4),
    (PipelineShape(4, 6), Costs(send=1000), None),
])  # fmt: skip
def test_no_initial_schedule_is_shorter(
    shape: PipelineShape, costs: Costs, in_flight: int | None
) -> None:
    """Spans are those of programs, where the messages of a rank wait for each other."""
    result = search_schedule(shape, costs, max_in_flight=in_flight, max_evaluations=50)
    assert result.num_evaluated <= 50 + len(get_built_in_schedules())
    for schedule in get_built_in_schedules().values():
        try:
            run = simulate(
                compile(expand_schedule(schedule, shape.resolve_defaults()), costs=costs), costs
            )
        except SchedirError:  # the schedule is for other shapes
            continue
        split = "I" in to_text(run.program)
        if split and (in_flight is None or run.peak_in_flight.max() <= in_flight):
            assert result.span <= run.span * (1 + 1e-9), run.program.name


@pytest.mark.parametrize("F", [1e300, 1e308])
def test_too_large_costs_are_refused(F: float) -> None:
    for take in (lower_bound, search_schedule):
        with pytest.raises(CostsError, match=r"add up to 1e\+299 or more, the limit of a search"):
            take(PipelineShape(4, 8), Costs(F=F))
    program = compile(schedules.zb_h1, PipelineShape(4, 8))
    assert compute_program_bound(program, Costs(F=F)) is None


def test_pair_cost_that_saves_time_is_refused() -> None:
    """There is no lower bound at such costs, since a schedule with pairs may be shorter."""
    costs, shape = Costs(F=2, I=2, W=1, FB=2.5), PipelineShape(4, 8, placement="vee")
    program = compile(schedules.zb_v, shape, costs=costs)
    for function in (search_schedule, lower_bound):
        with pytest.raises(CostsError):
            function(shape, costs)
    assert compute_program_bound(program, costs) is None
    same = replace(costs, FB=5)
    assert lower_bound(shape, same) == lower_bound(shape, replace(same, FB=None))
    assert compute_program_bound(program, same) == compute_program_bound(
        program, replace(same, FB=None)
    )


@pytest.mark.parametrize(
    "start",
    [
        compile(schedules.gpipe, PipelineShape(4, 8), recompute="all"),
        compile(schedules.zb_h1, PipelineShape(4, 8), frozen_stages=1),
        compile(schedules.forward_only, PipelineShape(4, 8)),
    ],
)
def test_initial_schedule_with_other_work_is_refused(start: Program) -> None:
    with pytest.raises(UsageError) as caught:
        search_schedule(PipelineShape(4, 8), EVEN, initial_schedules=[start], max_evaluations=30)
    assert caught.value.fields == ("initial_schedules",)


def test_split_search_needs_split_backward_costs() -> None:
    with pytest.raises(
        CostsError, match="costs have B, but a search with split backwards needs I and W"
    ):
        search_schedule(PipelineShape(2, 4), Costs(F=10, B=20))
    assert (
        search_schedule(
            PipelineShape(2, 4), Costs(F=10, B=20), split_backward=False, max_evaluations=99
        ).span
        == 150
    )


def test_compiled_loops_equal_python_loops() -> None:
    problem = make_problem(
        PipelineShape(4, 8, 2),
        Costs(F=(1, 2, 1, 3, 1, 2, 2, 2), I=2, W=1.1, send=0.3),
        max_in_flight=5,
    )
    loops, _ = compile_within(LOOPS, 60)
    if loops is None:
        pytest.skip("numba is not here")
    results = []
    for machine in (OrderEvaluator(problem), OrderEvaluator(problem, loops)):
        first = machine.evaluate_policy(
            DispatchPolicy((9, 7, 6, 5, 4, 3, 2, 1), (2, 1, 1, 0), idle_share=0.5)
        )
        order = machine.last_order
        moving = machine.start_annealing(order, 3.0, 0.999, 5)
        results.append(
            (first, order, moving.run(700, 0.0), moving.run(300, 0.0), moving.best_order)
        )
    assert results[0] == results[1]


policy = st.builds(
    lambda lead, lag, **more: DispatchPolicy(tuple(lead), tuple(lag), **more),
    lead=st.lists(st.integers(1, 9), min_size=6, max_size=6),
    lag=st.lists(st.integers(0, 9), min_size=3, max_size=3),
    wait_share=st.sampled_from([0.0, 0.5, 1.0]),
    late_share=st.sampled_from([float("-inf"), 0.0, 0.5]),
    idle_share=st.sampled_from([0.0, 0.5, float("inf")]),
    forward_first=st.booleans(),
    stage_choice=st.integers(0, 2),
)


@given(
    policy,
    st.sampled_from(["loop", "vee", (0, 1, 2, 2, 0, 1)]),
    st.integers(2, 7),
    st.booleans(),
    st.integers(0, 2**31 - 1),
)
def test_random_policy_finishes_and_fits(policy, placement, room, split, seed) -> None:  # type: ignore[no-untyped-def]
    """Orders after random moves finish and fit too. The evaluator agrees with plain functions."""
    costs = Costs(F=(1, 2, 1, 3, 1, 2), I=2, W=1.1, send=0.3)
    problem = make_problem(
        PipelineShape(3, 5, 2, placement), costs, max_in_flight=room, split_backward=split
    )
    machine = OrderEvaluator(problem)
    policy_length = machine.evaluate_policy(policy)
    moving = machine.start_annealing(machine.last_order, 2.0, 0.99, seed)
    shorter = moving.run(60, 0.0)
    assert shorter <= policy_length < float("inf")
    for order, length in ((machine.last_order, policy_length), (moving.best_order, shorter)):
        assert compute_length(problem, order) == length
        assert all(map(problem.fits_on_rank, compute_peaks(problem, order), count()))
        program = compile(draft_from_order(problem, order), costs=costs)
        assert order_of_program(program, split_backward=split) == order


def test_move_on_several_ranks() -> None:
    codes = [c for stage in range(3) for c in (3 * stage, 3 * stage, 3 * stage + 1, 3 * stage + 2)]
    first, local_stages, begin = [0, 4, 8, 12], [0, 1, 2], [0, 1, 2, 3]
    nth = [0, 1, 0, 0] * 3
    rank_at = [x // 4 for x in range(12)]

    def run_move(low: int, high: int, behind: int) -> tuple[int, list[int]]:
        code = list(codes)
        return move_on_several_ranks(
            low, high, local_stages, begin, first, code, nth, rank_at, 6, behind
        ), code

    # Rank 1's I0 moves before its F1, and so on ranks 0 and 2 where these are included.
    changed_ranks, code = run_move(1, 2, 0)
    assert changed_ranks == 2 and code == [0, 0, 1, 2, 3, 4, 3, 5, 6, 7, 6, 8]
    assert run_move(0, 2, 1)[1] == [0, 1, 0, 2, 3, 4, 3, 5, 6, 7, 6, 8]


SEARCH_SCRIPT = """
import sys
if sys.argv[2] == "hide":
    sys.modules["numba"] = None
from schedir import Costs, PipelineShape, search_schedule
uneven = Costs(F=(1.1, 0.7, 1.3, 0.9, 1.2, 0.8), I=(0.9, 1.2, 0.7, 1.1, 0.8, 1.3), W=1.05, send=0.1)
found = search_schedule(PipelineShape(6, 12), uneven, max_in_flight=3, max_evaluations=900,
                        time_limit=float(sys.argv[1]))
print(found.numba, found.span, found.num_evaluated)
"""


def run_search_process(seconds: float, cache: Path, hide: str = "no") -> tuple[str, list[str]]:
    """Run a search that is long enough for numba, with a cache folder for compiled loops."""
    done = subprocess.run(
        [sys.executable, "-c", SEARCH_SCRIPT, str(seconds), hide],
        env=os.environ | {"NUMBA_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=True,
    )
    *numba, span, tried = done.stdout.split()
    return " ".join(numba), [span, tried]


def test_result_reports_status_of_compiled_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result does not depend on the status."""
    uneven, spans = Costs(F=3, I=(4, 5, 6, 5), W=2), set()
    for status in ("no time", "not usable", "used"):
        monkeypatch.setattr(
            "schedir.schedule_search.heuristics.heuristic_search.compile_within",
            lambda loops, seconds, status=status: (loops if status == "used" else None, status),
        )
        result = search_schedule(
            PipelineShape(4, 8), uneven, max_in_flight=3, time_limit=600, max_evaluations=900
        )
        assert result.numba == status
        spans.add((result.span, result.num_evaluated))
    assert len(spans) == 1


def test_compiled_loop_runs_if_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_installed():
        pytest.skip("numba is not here")
    tmp_path.joinpath("loop_of_test.py").write_text("def add_one(x):\n    return x + 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    loops = (import_module("loop_of_test").add_one,)
    compiled, _ = compile_within(loops, 60)
    assert compiled is not None
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # no byte can be written to a file
    try:
        result = compiled[0](2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert result == 3


def test_loops_are_compiled_only_within_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops that were compiled before need less time. These loops are in no file, so not cached."""
    if not is_installed():
        pytest.skip("numba is not here")
    namespace: dict[str, Any] = {}
    exec("def add_one(x):\n    return x + 1", namespace)
    loops = (namespace["add_one"],)
    assert compile_within(loops, MIN_COMPILE_SECONDS - 0.1) == (None, "no time")
    compiled, status = compile_within(loops, MIN_COMPILE_SECONDS)
    assert compiled is not None and status == "used" and compiled[0](2) == 3
    assert compile_within(loops, MIN_LOAD_SECONDS) == (compiled, "used")
    assert compile_within(loops, MIN_LOAD_SECONDS - 0.1) == (None, "no time")
    monkeypatch.setattr(numba_jit, "_compile", lambda loops: None)
    assert compile_within(loops, 60) == (None, "not usable")
    monkeypatch.setattr(numba_jit, "find_spec", lambda name: None)
    assert compile_within(loops, 60) == (None, "not installed")


@campaign
def test_numba_use_depends_on_time_and_cache(tmp_path: Path) -> None:
    missing, without_numba = run_search_process(600, tmp_path, "hide")
    assert missing == "not installed"
    try:
        import numba  # noqa: F401
    except ImportError:
        return
    short, in_short = run_search_process(MIN_COMPILE_SECONDS - 0.1, tmp_path)
    enough, in_enough = run_search_process(600, tmp_path)
    cached, in_again = run_search_process(MIN_COMPILE_SECONDS - 0.1, tmp_path)
    assert (short, enough, cached) == ("no time", "used", "used")
    assert in_short == in_enough == in_again == without_numba
