"""Tests that three solvers of the longest path agree exactly, and that none needs numba."""

from __future__ import annotations

import random
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from schedir import Costs, PipelineShape, compile, schedules, simulate
from schedir.analysis import numba_jit
from schedir.analysis.critical_path import longest_path
from schedir.analysis.critical_path.level_sweep import solve_by_frontiers
from schedir.analysis.critical_path.longest_path import build_problem
from schedir.analysis.critical_path.node_loop import LOOPS, LongestPathProblem, solve_by_loop
from schedir.analysis.dependency_graph import Graph
from schedir.analysis.progress_models import MODELS, ProgressModel
from schedir.errors import UsageError
from schedir.ir.program import Program
from schedir.testing import compute_programs
from tests.mutants import CORPUS, mutate
from tests.strategies import with_slots


def solve_and_compare(problem: LongestPathProblem) -> bool:
    """Compare all available solvers on a problem, and return whether they reach all nodes."""
    problem = problem._replace(edges=[*problem.edges])
    solutions = [solve_by_loop(problem), solve_by_frontiers(problem)]
    if (machine_code := numba_jit._compile(LOOPS)) is not None:
        solutions.append(solve_by_loop(problem, machine_code))
    start, order = solutions[0]
    for other_start, other_order in solutions[1:]:
        np.testing.assert_array_equal(order, other_order)
        reached = order > 0
        np.testing.assert_array_equal(start[reached], other_start[reached])
    return bool((order > 0)[problem.node_mask].all())


def draw_rounded_costs(shape: PipelineShape, rng: random.Random) -> Costs:
    """Return costs whose sums are rounded."""

    def per_stage() -> tuple[float, ...]:
        return tuple(rng.random() for _ in range(shape.stages))

    return Costs(F=per_stage(), B=per_stage(), I=per_stage(), W=per_stage(), send=per_stage())


def draw_end_times(
    program: Program, rng: random.Random
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return given end times for about every third instruction."""
    return np.array([rng.random() * 9 if rng.random() < 0.3 else np.nan for _ in program.words])


@given(compute_programs(), st.integers(0, 2**32))
@settings(deadline=None)
def test_solvers_agree_on_drafts(draft: Program, seed: int) -> None:
    rng = random.Random(seed)
    ends = draw_end_times(draft, rng) if seed % 3 == 0 else None
    assert solve_and_compare(
        build_problem(Graph(draft), draw_rounded_costs(draft.shape, rng), ends)
    )


CHANGES = ("swap_any", "move_anywhere", "join_computes", "join_transfers", "join_both_sides")


@given(st.sampled_from(CHANGES), st.sampled_from(MODELS), st.booleans(), st.integers(0, 2**32))
def test_solvers_agree_on_programs(
    change: str, progress_model: ProgressModel, blocking_hosts: bool, seed: int
) -> None:
    rng = random.Random(seed)
    for program in mutate(change, seed, corpus=CORPUS):
        program = with_slots(program, rng)
        ends = draw_end_times(program, rng) if seed % 3 == 0 else None
        graph = Graph(program, progress_model, blocking_hosts=blocking_hosts)
        event(
            "ends"
            if solve_and_compare(build_problem(graph, draw_rounded_costs(program.shape, rng), ends))
            else "hangs"
        )


@given(
    st.sampled_from((1, 9, 400)), st.integers(0, 30), st.booleans(), st.booleans(), st.integers()
)
@settings(deadline=None)
def test_solvers_agree_on_random_graphs(
    nodes: int, edges: int, fixes: bool, hops: bool, seed: int
) -> None:
    """Graphs have many successors, double edges, cycles, and numbers that are not nodes."""
    rng = np.random.default_rng(abs(seed))
    mask = rng.random(nodes) < 0.95
    edge_lists = []
    for _ in range(int(rng.integers(1, 4))):
        pair = np.sort(rng.integers(0, nodes, (edges, 2)).astype(np.int32), 1)
        pair[:, 0] //= 64
        pair = pair[mask[pair].all(1) & (pair[:, 0] < pair[:, 1])]
        is_reversed = rng.random(len(pair)) < 0.01
        pair[is_reversed] = pair[is_reversed][:, ::-1]
        edge_lists.append((pair[:, 0], pair[:, 1]))
    solve_and_compare(
        LongestPathProblem(
            edge_lists,
            mask,
            rng.random(nodes),
            np.where(rng.random(nodes) < 0.3, rng.random(nodes), np.nan) if fixes else np.empty(0),
            rng.integers(0, 3, nodes).astype(np.int32) if hops else np.empty(0, np.int32),
            rng.random(nodes) if hops else np.empty(0),
        )
    )


@given(st.lists(st.integers(0, 200), min_size=1, max_size=6), st.booleans(), st.integers(0, 2**32))
@settings(deadline=None)
def test_solvers_agree_on_nodes_with_many_successors(
    readers: list[int], hops: bool, seed: int
) -> None:
    """Some nodes have more successors than the table has columns, like a gather of ZeRO 3."""
    rng = np.random.default_rng(seed)
    nodes = 512
    edge_lists = []
    for hub, count in enumerate(readers):
        target = rng.integers(hub + 1, nodes, count).astype(np.int32)
        edge_lists.append((np.full(count, hub, np.int32), target))
    pair = np.sort(rng.integers(0, nodes, (nodes, 2)).astype(np.int32), 1)
    pair = pair[pair[:, 0] < pair[:, 1]]
    edge_lists.append((pair[:, 0], pair[:, 1]))
    problem = LongestPathProblem(edge_lists, np.ones(nodes, bool), rng.random(nodes))
    if hops:
        rank = rng.integers(0, 3, nodes).astype(np.int32)
        problem = problem._replace(rank=rank, hop_time=rng.random(nodes))
    assert solve_and_compare(problem)


@pytest.mark.parametrize("hops", [False, True])
def test_solver_memory_is_linear_in_edges(hops: bool) -> None:
    """A table with a column per successor would have quadratic size, 64 MB for this graph."""
    nodes = 4096
    hubs = [np.full(nodes - 8, hub, np.int32) for hub in range(4)]
    readers = np.arange(8, nodes, dtype=np.int32)
    problem = LongestPathProblem(
        [(hub, readers) for hub in hubs], np.ones(nodes, bool), np.ones(nodes)
    )
    if hops:
        problem = problem._replace(rank=np.zeros(nodes, np.int32), hop_time=np.ones(nodes))
    tracemalloc.start()
    solve_by_frontiers(problem)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200 * sum(map(len, hubs))


def test_solvers_agree_on_star_graph() -> None:
    """One node has a hundred successors, as the norm of many ranks has."""
    successors, nodes = np.arange(1, 101, dtype=np.int32), 100 * 64
    star = (np.zeros_like(successors), successors)
    assert solve_and_compare(LongestPathProblem([star], np.arange(nodes) <= 100, np.ones(nodes)))


def test_solvers_agree_on_large_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large problem is solved by frontiers, with the same spans as by the loop."""
    program = compile(schedules.interleaved, PipelineShape(8, 64, 2), costs=Costs(send=0.1))
    assert solve_and_compare(build_problem(Graph(program), Costs(F=1.1, send=0.3)))
    spans = simulate(program, Costs(F=1.1, send=0.3)).spans
    monkeypatch.setattr(longest_path, "MAX_LOOP_NODES", 0)
    assert (simulate(program, Costs(F=1.1, send=0.3)).spans == spans).all()


def run_code(code: str) -> list[str]:
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout.split()


SIMULATE = """
import sys
from schedir import PipelineShape, compile, schedules, simulate
from schedir.analysis import numba_jit
def times(ranks=4, m=16):
    return simulate(compile(schedules.one_f_one_b, PipelineShape(ranks, m))).span
"""


def test_short_process_does_not_import_numba() -> None:
    assert run_code(SIMULATE + "print(times(16, 256), 'numba' in sys.modules)") == [
        "813.0",
        "False",
    ]


@pytest.fixture
def compiled_loops(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list of the loops to compile. Begin with no uncompiled time, and compile nothing."""
    loops = list[object]()
    monkeypatch.setattr(numba_jit, "_uncompiled_seconds", [0.0])
    monkeypatch.setattr(numba_jit, "_compile", loops.append)
    return loops


def simulate_1f1b() -> float:
    return simulate(compile(schedules.one_f_one_b, PipelineShape(4, 16))).span


def test_enough_uncompiled_time_compiles_loops(compiled_loops: list[object]) -> None:
    numba_jit.add_uncompiled_time(numba_jit.IMPORT_SECONDS)
    assert simulate_1f1b() == 57 and compiled_loops


def test_long_first_solve_compiles_loops(
    compiled_loops: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(longest_path, "SECONDS_PER_NODE", 1.0)
    assert simulate_1f1b() == 57 and compiled_loops


def test_small_programs_add_uncompiled_time(
    compiled_loops: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(longest_path, "SECONDS_PER_NODE", 0.0)
    simulate_1f1b()
    assert numba_jit._uncompiled_seconds[0] > 0
    monkeypatch.setattr(numba_jit, "IMPORT_SECONDS", numba_jit._uncompiled_seconds[0])
    simulate_1f1b()
    assert compiled_loops


def test_simulation_works_without_numba() -> None:
    hide = "import sys\nsys.modules['numba'] = None\n" + SIMULATE
    code = "numba_jit.add_uncompiled_time(9)\nprint(times())"
    code += "\ntry:\n    numba_jit.enable_numba()\nexcept Exception as error:\n"
    code += "    print(type(error).__name__)"
    assert run_code(hide + code) == ["57.0", UsageError.__name__]


def test_enable_numba_imports_at_once() -> None:
    pytest.importorskip("numba")
    assert run_code(
        SIMULATE + "numba_jit.enable_numba()\nprint('numba' in sys.modules, times())"
    ) == [
        "True",
        "57.0",
    ]
