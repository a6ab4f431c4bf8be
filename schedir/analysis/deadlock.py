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
    "issue earlier the instructions for which other ranks wait: while a host waits for the inputs "
    "of a compute, it issues no instructions, and over NCCL a message also waits for the "
    "instructions before it"
)
_DEVICE_SYNC_HINT = (
    "post messages later (overlap=False), or allocate no memory in a step: a host that waits for "
    "its device also waits for messages that were posted early"
)


def find_order_error(graph: Graph) -> OrderError | None:
    """Return the error for the first instruction that uses a value before its rank produces it.

    The producer must come earlier in the Stream. The two instructions must not be in one group,
    because the host issues all instructions of a group together. The text form joins the
    instructions of a group with `&`. Lanes run independently, but the host issues a Stream in
    order. A lane cannot wait for an instruction that the host has not issued yet.

    Args:
        graph: The dependency graph of a program or a draft. In a draft, values from other ranks are
            not checked.

    Returns:
        The error, or None if the order is correct.
    """
    first = len(graph)
    all_givers = graph.needs
    for stale in graph.flow.stale_reads:
        first = min(first, stale.needer)
    giver, positions = NO_POSITION, np.arange(len(graph), dtype=np.int32)
    for givers in all_givers:
        is_violation: NDArray[np.bool_] = givers > positions
        if graph.index.has_joined:
            is_violation |= (givers != NO_POSITION) & (
                graph.entry_exit_nodes[0][givers] == graph.entry_exit_nodes[0]
            )
        if graph.program.is_draft:  # a draft has no messages, so values come from other ranks, too
            is_violation &= graph.index.rank[givers] == graph.index.rank
        if is_violation.any() and is_violation.argmax() < first:
            first = int(is_violation.argmax())
            giver = int(givers[first])
    if first == len(graph):
        return None
    if giver == NO_POSITION:
        return _make_stale_error(
            graph, next(stale for stale in graph.flow.stale_reads if stale.needer == first)
        )
    needer_site = graph.index.locate(first)
    giver_site = graph.index.locate(giver)
    instr, giver_instr = needer_site[2], giver_site[2]
    kind = graph.flow.find_value(first, giver)
    value = VALUES[kind].phrase if kind is not None else "the value"
    if giver > first:
        fact = f"{instr} needs {value}, which {giver_instr} gives only later"
    else:
        fact = f"{instr} needs {value}, which {giver_instr} gives, but both are in one group"
    return OrderError(
        fact,
        program=graph.program.name,
        sites=[
            InstructionSite(*needer_site, "needs it here"),
            InstructionSite(*giver_site, "gives it"),
        ],
        hint=_suggest_weight_delay(graph) if kind is Value.PARAMS else "",
    )


def _make_stale_error(graph: Graph, stale: StaleRead) -> OrderError:
    """Return the error for a value that another instruction has freed, moved or changed."""
    needer = graph.index.locate(stale.needer)
    culprit = graph.index.locate(stale.culprit)
    instr, culprit_instr = needer[2], culprit[2]
    phrase = VALUES[stale.value].phrase
    is_freed = stale.value in INSTRUCTIONS[culprit_instr.op].frees
    change = find_change(culprit_instr.op, stale.value)
    change_text = "has freed" if is_freed else "has changed"
    if change is not None and not is_freed:
        verb = "moved to the" if change.after in TIERS else "changed to"
        change_text = f"has {verb} {change.after}"
    producers = [
        INSTRUCTIONS[op].text for op in find_producers(stale.value) or find_modifiers(stale.value)
    ]
    names = " or ".join(filter(None, [", ".join(producers[:-1]), producers[-1]]))
    is_repeatable = VALUES[stale.value].producer_rule in (ProducerRule.LATEST, ProducerRule.ALL)
    return OrderError(
        f"{instr} needs {phrase}, which {culprit_instr} {change_text}",
        program=graph.program.name,
        sites=[
            InstructionSite(*culprit, "is the last to use it" if is_freed else "changes it"),
            InstructionSite(*needer, "needs it here"),
        ],
        hint=f"insert {names} of this stage between these two instructions"
        * (is_freed and is_repeatable),
    )


def _suggest_weight_delay(graph: Graph) -> str:
    """Return a hint with the smallest weight delay that the order of the Streams allows."""
    index = graph.index
    step_counts = np.cumsum(index.is_op(OPTIMIZER_STEP_OPS), dtype=np.int64)
    # Each rank counts from the start of its Stream.
    stream_start = graph.program.offsets[index.rank]
    step_counts -= np.append(0, step_counts)[stream_start]
    positions = np.flatnonzero(index.is_op(COMPUTE_OPS))
    min_delay = int((index.find_updates(positions) - step_counts[positions]).max(initial=0))
    return (
        f"use weights that are {min_delay} updates older: -O weight_delay={min_delay}, "
        f"pipeline.weight_delay = {min_delay} or PipelineShape(weight_delay={min_delay})"
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

    if graph.program.is_draft and (order_error := find_order_error(graph)):
        return order_error
    if len(graph.mismatched_sends):
        return _make_mismatch_error(graph)
    is_finished = _is_finished(graph, earliest_times)
    waits = nx.DiGraph()
    for head, head_waits in _find_unmet_waits(graph, is_finished).items():
        for needed_head, needed in head_waits:
            waits.add_edge(head, needed_head, needed=needed)
    cycle = find_shortest_cycle(waits)
    steps = list_cycle_waits(graph, waits, cycle)
    finished_count = int(is_finished.sum())
    ranks = len({w.rank for w in steps})
    cause = f"{ranks} ranks wait for each other" if ranks > 1 else "a rank waits for itself"
    return make_deadlock_error(
        graph,
        f"{cause}; stopped after {finished_count} of {len(graph.program)} instructions",
        steps,
        finished_count,
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
        num_executed: Number of instructions that ended before the deadlock. For lazy communicators,
            the number that the hosts issued.
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
            instruction that the source of the edge waits for.
        cycle: The positions along the cycle.
    """
    steps, locate = [], graph.index.locate
    for a, b in zip(cycle, cycle[1:] + cycle[:1], strict=True):
        rank, index, instr = locate(waits.edges[a, b]["needed"])
        steps.append(CycleWait(*locate(a), instr, rank, index, current_index=locate(b)[1]))
    return steps


def _make_mismatch_error(graph: Graph) -> ChannelMismatchError:
    """Return the error for the first message whose ends use different communicators."""
    send = int(graph.mismatched_sends[0])
    receive = int(graph.partner[graph.mismatched_sends[0]])
    send_site = graph.index.locate(send)
    receive_site = graph.index.locate(receive)
    group_note = "is in a group with sends and receives: communicator of all ranks"
    pair_note = "is in no such group: communicator of the two ranks"
    if graph.entry_exit_nodes[0][send] != graph.node[send]:
        notes = [group_note, pair_note]
        grouped_end, other_end = "send", "receive"
    else:
        notes = [pair_note, group_note]
        grouped_end, other_end = "receive", "send"
    return ChannelMismatchError(
        f"{send_site[2]} and {receive_site[2]} use different communicators: the "
        f"{grouped_end} is in a group with sends and receives, but the {other_end} is not",
        program=graph.program.name,
        sites=[InstructionSite(*send_site, notes[0]), InstructionSite(*receive_site, notes[1])],
        hint="put both ends of the message in groups, or neither; or initialise NCCL eagerly "
        "with init_process_group(device_id=...), and use the progress model per_device",
    )


def _is_finished(graph: Graph, earliest_times: EarliestTimes) -> NDArray[np.bool_]:
    """Return a mask: True for an instruction if all members of its group end."""
    is_done = earliest_times.is_done
    if not graph.index.has_joined:
        return is_done
    is_finished = np.ones(graph.node_id_limit, bool)
    np.logical_and.at(is_finished, graph.entry_exit_nodes[1], is_done)
    return np.asarray(is_finished[graph.entry_exit_nodes[1]])


def _find_queue_heads(graph: Graph, is_finished: NDArray[np.bool_]) -> dict[int, int]:
    """Return the first unfinished instruction of each queue, as {queue: position}."""
    stuck_positions = np.flatnonzero(~is_finished)
    queues, first_indices = np.unique(graph.queue[stuck_positions], return_index=True)
    return dict(zip(queues.tolist(), stuck_positions[first_indices].tolist(), strict=True))


def _find_group_members(graph: Graph, head: int) -> NDArray[np.intp]:
    """Return the positions of `head` and of the instructions that its rank issues with it."""
    entry_node, rank = graph.entry_exit_nodes[0], graph.index.rank
    return np.flatnonzero((entry_node == entry_node[head]) & (rank == rank[head]))


def _find_unmet_values(
    graph: Graph, is_finished: NDArray[np.bool_], members: NDArray[np.intp]
) -> list[int]:
    """Return the unfinished instructions on the same rank that members of a group need.

    Predecessors in a queue are not included.
    """
    needed = graph.local_waits[:, members].reshape(-1).tolist()
    return [n for n in needed if n != NO_POSITION and not is_finished[n]]


def _find_unmet_waits(
    graph: Graph, is_finished: NDArray[np.bool_]
) -> dict[int, list[tuple[int, int]]]:
    """Return a dict from the head of each queue to its waits.

    A wait is a pair of the head of another queue and the needed instruction in this queue. The head
    of a queue is its first unfinished instruction. The needed instruction produces a missing value,
    or is the other end of a message or collective. All members of a group start together, when each
    member is the head of its queue and has its values. If both ends of a message are heads, an end
    that still waits for its own rank does not wait for the other end.
    """
    heads = _find_queue_heads(graph, is_finished)
    members_by_head = {head: _find_group_members(graph, head) for head in heads.values()}
    rank_waits: dict[int, set[int]] = {}
    # Instructions at the head of their queue, and instructions in groups that wait for nothing on
    # their own rank.
    queue_heads, ready_members = set[int](), set[int]()
    for head, members in members_by_head.items():
        group = {*members.tolist()}
        own_heads = [heads[queue] for queue in graph.queue[members].tolist()]
        rank_waits[head] = ({*own_heads} - group).union(
            _find_unmet_values(graph, is_finished, members)
        )
        queue_heads.update(
            member
            for member, own_head in zip(members.tolist(), own_heads, strict=True)
            if own_head in group
        )
        ready_members.update([] if rank_waits[head] else members.tolist())
    unmet_waits = {}
    for head, members in members_by_head.items():
        waits, group = set[int](), {*members.tolist()}
        for member in members.tolist():
            waits.update(np.flatnonzero((graph.node == graph.node[member]) & ~is_finished).tolist())
            send = int(graph.partner[member])
            if send in graph.eager_sends and not is_finished[send]:
                waits.add(send)  # the receive of an eager message still waits for its send
        waits -= group | (queue_heads if rank_waits[head] else ready_members)
        # These waits can include members of the group, if they free a slot for the head.
        waits |= rank_waits[head]
        unmet_waits[head] = [(heads[int(graph.queue[n])], n) for n in sorted(waits)]
    return unmet_waits


def find_shortest_cycle(waits: nx.DiGraph) -> list[int]:  # type: ignore[name-defined] # noqa: F821
    """Return the shortest cycle of a graph. If several cycles are shortest, return the first one.

    Args:
        waits: A directed graph of positions that has a cycle.

    Returns:
        The positions along the cycle.
    """
    import networkx as nx

    shortest: list[int] = []
    for component in nx.strongly_connected_components(waits):
        if len(component) == 1 and not any(waits.has_edge(n, n) for n in component):
            continue
        subgraph = waits.subgraph(component)
        for node in sorted(component):
            for successor in sorted(subgraph.successors(node)):
                path = nx.shortest_path(subgraph, successor, node)
                if not shortest or len(path) < len(shortest):
                    shortest = [node, *path[:-1]]
    return shortest


def _make_window(graph: Graph, steps: list[CycleWait]) -> list[InstructionSite]:
    """Return instructions of the second rank in the cycle, as sites of the error.

    These instructions lead to the instruction that the first rank waits for. Only the first and the
    last instructions of a long range are included.
    """
    first, second = steps[0], steps[1 % len(steps)]
    stream = graph.program.streams[first.needed_rank]
    waiting_index, needed_index = first.current_index, first.needed_index
    indices = [
        i
        for i in range(max(0, waiting_index - 2), min(len(stream), needed_index + 1))
        if i <= waiting_index + 2 or i >= needed_index
    ]
    notes = {waiting_index: "waits", needed_index: f"rank {first.rank} waits for this"}
    if waiting_index == needed_index:
        notes = {waiting_index: f"waits, and rank {first.rank} waits for it"}
    return [InstructionSite(second.rank, i, stream[i], notes.get(i, "")) for i in indices]
