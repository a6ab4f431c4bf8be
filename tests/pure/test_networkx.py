"""Tests that networkx gives the same verdict and span for an explicit dependency graph.

The graph follows the rules of `tests/oracle.py`. The tests also show that "acyclic" and
"longest path" have their usual meaning.
"""

from __future__ import annotations

import random

import networkx as nx
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from schedir.analysis.progress_models import MODELS, ProgressModel
from schedir.errors import (
    ChannelMismatchError,
    CompletenessError,
    DeadlockError,
    GroupError,
    OrderError,
)
from schedir.ir.cost.costs import Costs
from schedir.ir.isa.instructions import INSTRUCTIONS
from schedir.ir.program import Program
from schedir.predict.simulate import simulate
from tests.mutants import FEW, mutate
from tests.oracle import Machine
from tests.strategies import with_slots

# These change only the order or the grouping of instructions.
NAMES = (
    "rename", "run_order", "swap_neighbors", "swap_any", "move_anywhere", "swap_receives",
    "early_receive", "late_send", "swap_pairs", "move_sharding", "reduce_early", "step_early",
    "join_computes", "join_transfers", "join_both_sides", "join_next_transfer", "reorder_group",
)  # fmt: skip


def build_graph(program: Program, progress_model: ProgressModel, costs: Costs) -> nx.DiGraph:
    """Return the graph in which each group has a node for its start and one for its end.

    Between the two is the cost of the group. A message connects its two groups.
    """
    machine = Machine(program, progress_model, costs)
    machine.run()
    graph = nx.DiGraph()
    for rank, groups in enumerate(machine.groups):
        instructions = machine.lists[rank]
        for group in groups:
            posted, complete = ("posted", rank, group), ("complete", rank, group)
            graph.add_edge(posted, complete, weight=0.0)
            for earlier_group in machine.before[rank, group[0]]:
                graph.add_edge(("complete", rank, earlier_group), posted, weight=0.0)
            for k in group:
                for free in machine.left[rank].get(k, ()):
                    holder_group = machine._group_of(rank, free)
                    graph.add_edge(("complete", rank, holder_group), posted, weight=0.0)
                needs = [(rank, need) for need in machine._of_parts(rank, k)]
                for giver, need in machine._needs(rank, instructions[k]) + needs:
                    giver_complete = ("complete", giver, machine._group_of(giver, need))
                    graph.add_edge(giver_complete, posted, weight=0.0)
                if INSTRUCTIONS[instructions[k].op].partner is None:
                    graph[posted][complete]["weight"] += machine._cost(rank, instructions[k])
                    continue
                partners = machine._partners(rank, instructions[k])
                if progress_model == "torch_lazy" and machine._apart(partners):
                    graph.add_edge(complete, posted, weight=0.0)  # a cycle: the transfer never ends
                cost = max(machine._cost(r, machine.lists[r][n]) for r, n in partners)
                graph.add_edge(posted, frozenset(partners), weight=0.0)
                graph.add_edge(frozenset(partners), complete, weight=cost)
    return graph


def draw_integer_costs(rng: random.Random, stages: int) -> Costs:
    """Draw an integer cost per stage, so that sums are exact."""

    def per_stage() -> tuple[float, ...]:
        return tuple(float(rng.randint(0, 5)) for _ in range(stages))

    names = (
        "F",
        "I",
        "W",
        "B",
        "send",
        "step",
        "reduce_grads",
        "reduce_tied",
        "tp_scatter",
        "tp_gather",
    )
    return Costs(**{name: per_stage() for name in names})


@settings(max_examples=60)
@example(4790, "move_anywhere", "per_edge")
@example(1420, "reduce_early", "per_edge")
@example(1497, "swap_neighbors", "per_direction")
@example(1621, "swap_any", "per_device")
@example(1626, "reduce_early", "per_edge")
@example(20068, "swap_neighbors", "torch_lazy")
@example(2296, "swap_neighbors", "blocking_serial")
@example(568612525, "reduce_early", "per_device")
@given(st.integers(0, 2**32), st.sampled_from(NAMES), st.sampled_from(MODELS))
def test_networkx_gives_same_verdict_and_span(
    seed: int, name: str, progress_model: ProgressModel
) -> None:
    _, program = mutate(name, seed, corpus=FEW)
    program = with_slots(program, random.Random(seed))
    drawn_costs = draw_integer_costs(random.Random(seed), program.shape.stages)
    try:
        span = simulate(program, drawn_costs, progress_model=progress_model, skip_checks=True).span
    except (DeadlockError, ChannelMismatchError, OrderError):  # a single rank gives an OrderError
        event("deadlock")
        assert not nx.is_directed_acyclic_graph(build_graph(program, progress_model, drawn_costs))
    except (GroupError, CompletenessError):  # `simulate` reports these before all other errors
        event("no such group, or turns out of turn")
    else:
        graph = build_graph(program, progress_model, drawn_costs)
        assert nx.is_directed_acyclic_graph(graph)
        assert nx.dag_longest_path_length(graph) == span
