"""Explain why a program cannot finish: a cycle of waits, or a value that is used too early."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.critical_path.longest_path import EarliestTimes
from schedir.analysis.dependency_graph import Graph
from schedir.errors import (
    ChannelMismatchError,
    CycleWait,
    DeadlockError,
    InstructionSite,
    OrderError,
    SchedirError,
)
from schedir.ir.dataflow import StaleRead
from schedir.ir.instruction_index import NO_POSITION
from schedir.ir.isa.instructions import (
    COMPUTE_OPS,
    INSTRUCTIONS,
    OPTIMIZER_STEP_OPS,
    TIERS,
    VALUES,
    ProducerRule,
    Value,
    find_change,
    find_modifiers,
    find_producers,
)

_BLOCKING_HINT = (
    "issue the instructions that other ranks need earlier: a host that waits for the inputs of a "
    "compute issues nothing meanwhile, and over NCCL a message also waits for what was issued "
    "before it"
)
_DEVICE_SYNC_HINT = (
    "post messages later (overlap=False), or allocate no memory in a step: a host that waits for "
    "its device also waits for messages that were posted early"
)


def find_order_error(graph: Graph) -> OrderError | None:
    """Return the error for the first instruction that uses a value before its rank produces it.

    The producer must come earlier in the Stream, and must be in another group. Lanes run
    independently, but the host issues a Stream in order. A lane cannot wait for an instruction that
    the host has not issued yet.

    Args:
        graph: The dependency graph of a program or a draft. In a draft, values from other ranks are
            not checked.

    Returns:
        The error, or None if the order is correct.
    """
    first = len(graph)
    needs_of = graph.needs
    for stale in graph.flow.stale_reads:
        first = min(first, stale.needer)
    giver, own = NO_POSITION, np.arange(len(graph), dtype=np.int32)
    for needs in needs_of:
        wrong: NDArray[np.bool_] = needs > own
        if graph.index.has_joined:
            wrong |= (needs != NO_POSITION) & (
                graph.entry_exit_nodes[0][needs] == graph.entry_exit_nodes[0]
            )
        if graph.program.is_draft:  # a draft has no messages, so values come from other ranks, too
            wrong &= graph.index.rank[needs] == graph.index.rank
        if wrong.any() and wrong.argmax() < first:
            first = int(wrong.argmax())
            giver = int(needs[first])
    if first == len(graph):
        return None
    if giver == NO_POSITION:
        return _make_stale_error(
            graph, next(stale for stale in graph.flow.stale_reads if stale.needer == first)
        )
    needer = graph.index.locate(first)
    gives = graph.index.locate(giver)
    instr, given = needer[2], gives[2]
    kind = graph.flow.find_value(first, giver)
    value = VALUES[kind].phrase if kind is not None else "the value"
    if giver > first:
        fact = f"{instr} needs {value}, which {given} gives only later"
    else:
        fact = f"{instr} needs {value}, which {given} gives, but both are in one group"
    return OrderError(
        fact,
        program=graph.program.name,
        sites=[InstructionSite(*needer, "needs it here"), InstructionSite(*gives, "gives it")],
        hint=_suggest_weight_delay(graph) if kind is Value.PARAMS else "",
    )


def _make_stale_error(graph: Graph, stale: StaleRead) -> OrderError:
    """Return the error for a value that another instruction has freed, moved or changed."""
    needer = graph.index.locate(stale.needer)
    culprit = graph.index.locate(stale.culprit)
    instr, last = needer[2], culprit[2]
    words, gone = VALUES[stale.value].phrase, stale.value in INSTRUCTIONS[last.op].frees
    change = find_change(last.op, stale.value)
    how = "has freed" if gone else "has changed"
    if change is not None and not gone:
        way = "moved to the" if change.after in TIERS else "changed to"
        how = f"has {way} {change.after}"
    makers = [
        INSTRUCTIONS[op].text for op in find_producers(stale.value) or find_modifiers(stale.value)
    ]
    names = " or ".join(filter(None, [", ".join(makers[:-1]), makers[-1]]))
    again = VALUES[stale.value].producer_rule in (ProducerRule.LATEST, ProducerRule.ALL)
    return OrderError(
        f"{instr} needs {words}, which {last} {how}",
        program=graph.program.name,
        sites=[
            InstructionSite(*culprit, "is the last to use it" if gone else "changes it"),
            InstructionSite(*needer, "needs it here"),
        ],
        hint=f"insert {names} of this stage between these two instructions" * (gone and again),
    )


def _suggest_weight_delay(graph: Graph) -> str:
    """Return a hint with the smallest weight delay that the order of the Streams allows."""
    index = graph.index
    stepped = np.cumsum(index.is_op(OPTIMIZER_STEP_OPS), dtype=np.int64)
    first = graph.program.offsets[index.rank]  # each rank counts from the start of its Stream
    stepped -= np.append(0, stepped)[first]
    at = np.flatnonzero(index.is_op(COMPUTE_OPS))
    least = int((index.find_updates(at) - stepped[at]).max(initial=0))
    return (
        f"use weights that are {least} updates older: -O weight_delay={least}, "
        f"pipeline.weight_delay = {least} or PipelineShape(weight_delay={least})"
    )


def explain_deadlock(graph: Graph, earliest_times: EarliestTimes) -> SchedirError:
    """Return the error that shows the shortest cycle of waits.

    The order of a draft has not been checked before, so the error for a draft can be an OrderError.

    Args:
        graph: The dependency graph of a program that does not finish.
        earliest_times: The earliest times of the graph.

    Returns:
        A DeadlockError, an OrderError for a draft, or a ChannelMismatchError if the ends of a
        message use different communicators.
    """
    import networkx as nx

    if graph.program.is_draft and (early := find_order_error(graph)):
        return early
    if len(graph.mismatched_sends):
        return _make_mismatch_error(graph)
    finished = _is_finished(graph, earliest_times)
    waits = nx.DiGraph()
    for head, needs in _find_unmet_waits(graph, finished).items():
        for one, needed in needs:
            waits.add_edge(head, one, needed=needed)
    cycle = find_shortest_cycle(waits)
    steps = list_cycle_waits(graph, waits, cycle)
    ran = int(finished.sum())
    ranks = len({w.rank for w in steps})
    cause = f"{ranks} ranks wait for each other" if ranks > 1 else "a rank waits for itself"
    return make_deadlock_error(
        graph,
        f"{cause}; stopped after {ran} of {len(graph.program)} instructions",
        steps,
        ran,
        _DEVICE_SYNC_HINT if graph.host_device_sync else _BLOCKING_HINT * graph.blocking_hosts,
    )


def make_deadlock_error(
    graph: Graph, fact: str, steps: list[CycleWait], num_executed: int, hint: str
) -> DeadlockError:
    """Return the error for a cycle of waits.

    Args:
        graph: The dependency graph of the program.
        fact: The message of the error.
        steps: The waits along the cycle.
        num_executed: Number of instructions that ended, or that the hosts issued.
        hint: The remedy that the error suggests; may be empty.
    """
    return DeadlockError(
        fact,
        program=graph.program.name,
        progress_model=graph.progress_model,
        cycle=steps,
        executed_count=num_executed,
        instruction_count=len(graph.program),
        window=_make_window(graph, steps),
        hint=hint,
    )


def list_cycle_waits(graph: Graph, waits: nx.DiGraph, cycle: list[int]) -> list[CycleWait]:  # type: ignore[name-defined] # noqa: F821
    """Return the waits along a cycle.

    Args:
        graph: The dependency graph of the program.
        waits: A graph of positions. The attribute `needed` of an edge is the position of the
            instruction that its source waits for.
        cycle: The positions along the cycle.
    """
    steps, locate = [], graph.index.locate
    for a, b in zip(cycle, cycle[1:] + cycle[:1], strict=True):
        needs_rank, needs_at, needs = locate(waits.edges[a, b]["needed"])
        steps.append(CycleWait(*locate(a), needs, needs_rank, needs_at, current_index=locate(b)[1]))
    return steps


def _make_mismatch_error(graph: Graph) -> ChannelMismatchError:
    """Return the error for the first message whose ends use different communicators."""
    one = int(graph.mismatched_sends[0])
    other = int(graph.partner[graph.mismatched_sends[0]])
    sends = graph.index.locate(one)
    takes = graph.index.locate(other)
    of_group = "is in a group with sends and receives: communicator of all ranks"
    of_pair = "is in no such group: communicator of the two ranks"
    if grouped := graph.entry_exit_nodes[0][one] != graph.node[one]:
        notes = [of_group, of_pair]
    else:
        notes = [of_pair, of_group]
    return ChannelMismatchError(
        f"{sends[2]} and {takes[2]} use different communicators: the "
        f"{'send' if grouped else 'receive'} is in a group with sends and receives, but the "
        f"{'receive' if grouped else 'send'} is not",
        program=graph.program.name,
        sites=[InstructionSite(*sends, notes[0]), InstructionSite(*takes, notes[1])],
        hint="put both ends of the message in groups, or neither; or initialise NCCL eagerly "
        "with init_process_group(device_id=...), and use the progress model per_device",
    )


def _is_finished(graph: Graph, earliest_times: EarliestTimes) -> NDArray[np.bool_]:
    """Return a mask of the instructions of groups whose members all end."""
    done = earliest_times.is_done
    if not graph.index.has_joined:
        return done
    finished = np.ones(graph.node_id_limit, bool)
    np.logical_and.at(finished, graph.entry_exit_nodes[1], done)
    return np.asarray(finished[graph.entry_exit_nodes[1]])


def _find_queue_heads(graph: Graph, finished: NDArray[np.bool_]) -> dict[int, int]:
    """Return the first unfinished instruction of each queue, as {queue: position}."""
    stuck = np.flatnonzero(~finished)
    queues, first = np.unique(graph.queue[stuck], return_index=True)
    return dict(zip(queues.tolist(), stuck[first].tolist(), strict=True))


def _find_group_members(graph: Graph, head: int) -> NDArray[np.intp]:
    """Return the positions that a rank issues together with an instruction, itself included."""
    enter, rank = graph.entry_exit_nodes[0], graph.index.rank
    return np.flatnonzero((enter == enter[head]) & (rank == rank[head]))


def _find_unmet_values(
    graph: Graph, finished: NDArray[np.bool_], members: NDArray[np.intp]
) -> list[int]:
    """Return the unfinished instructions on the same rank that members of a group need.

    Predecessors in a queue are not included.
    """
    needed = graph.local_waits[:, members].reshape(-1).tolist()
    return [n for n in needed if n != NO_POSITION and not finished[n]]


def _find_unmet_waits(
    graph: Graph, finished: NDArray[np.bool_]
) -> dict[int, list[tuple[int, int]]]:
    """Return a dict from the head of each queue to its waits.

    A wait is a pair of the head of another queue and the needed instruction in this queue.
    The head of a queue is its first unfinished instruction. The needed instruction produces a
    missing value, or is the other end of a message or collective. All members of a group start
    together, when each member is the head of its queue and has its values. If both ends of a
    message are heads, an end that lacks something on its own rank does not wait for the other end.
    """
    heads = _find_queue_heads(graph, finished)
    together = {head: _find_group_members(graph, head) for head in heads.values()}
    lacks: dict[int, set[int]] = {}
    # `there`: instructions at the head of their queue. `ready`: instructions in groups that lack
    # nothing on their rank.
    there, ready = set[int](), set[int]()
    for head, members in together.items():
        own, first = {*members.tolist()}, [heads[queue] for queue in graph.queue[members].tolist()]
        lacks[head] = ({*first} - own).union(_find_unmet_values(graph, finished, members))
        there.update(one for one, at in zip(members.tolist(), first, strict=True) if at in own)
        ready.update([] if lacks[head] else members.tolist())
    unmet = {}
    for head, members in together.items():
        waits, own = set[int](), {*members.tolist()}
        for one in members.tolist():
            waits.update(np.flatnonzero((graph.node == graph.node[one]) & ~finished).tolist())
            sent = int(graph.partner[one])
            if sent in graph.eager_sends and not finished[sent]:
                waits.add(sent)  # the receive of an eager message still waits for its send
        waits -= own | (there if lacks[head] else ready)
        waits |= lacks[head]  # can include members of the group, if they free a slot for the head
        unmet[head] = [(heads[int(graph.queue[n])], n) for n in sorted(waits)]
    return unmet


def find_shortest_cycle(waits: nx.DiGraph) -> list[int]:  # type: ignore[name-defined] # noqa: F821
    """Return the shortest cycle of a graph. If several cycles are shortest, return the first one.

    Args:
        waits: A directed graph of positions that has a cycle.

    Returns:
        The positions along the cycle.
    """
    import networkx as nx

    best: list[int] = []
    for part in nx.strongly_connected_components(waits):
        if len(part) == 1 and not any(waits.has_edge(n, n) for n in part):
            continue
        inner = waits.subgraph(part)
        for node in sorted(part):
            for after in sorted(inner.successors(node)):
                path = nx.shortest_path(inner, after, node)
                if not best or len(path) < len(best):
                    best = [node, *path[:-1]]
    return best


def _make_window(graph: Graph, steps: list[CycleWait]) -> list[InstructionSite]:
    """Return instructions of the second rank in the cycle, as sites of the error.

    They lead to the instruction that the first rank waits for. Only the first and the last
    instructions of a long range are included.
    """
    first, second = steps[0], steps[1 % len(steps)]
    stream = graph.program.streams[first.needed_rank]
    lo, hi = first.current_index, first.needed_index
    shown = [i for i in range(max(0, lo - 2), min(len(stream), hi + 1)) if i <= lo + 2 or i >= hi]
    notes = {lo: "waits", hi: f"rank {first.rank} waits for this"}
    if lo == hi:
        notes = {lo: f"waits, and rank {first.rank} waits for it"}
    return [InstructionSite(second.rank, i, stream[i], notes.get(i, "")) for i in shown]
