"""Check data-parallel replicas that run different programs.

If all replicas run one correct program, they finish: see docs/explanation/checker.md. If their
programs differ, two more failures are possible. The members of a group can issue their collectives
in different orders. Or ranks of several replicas can wait for each other in a cycle, although each
program alone has no cycle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise, product, zip_longest
from typing import Final

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.critical_path.longest_path import EarliestTimes, solve_longest_paths
from schedir.analysis.critical_path.node_loop import LongestPathProblem
from schedir.analysis.deadlock import explain_deadlock
from schedir.analysis.dependency_graph import Graph
from schedir.analysis.progress_models import ProgressModel, require_model
from schedir.call_errors import explain_wrong_calls
from schedir.errors import (
    CollectiveOrderError,
    DeadlockError,
    InstructionSite,
    SchedirError,
    UsageError,
    describe,
    require_bool,
    require_type,
)
from schedir.ir.instruction_index import NO_POSITION, InstructionIndex, Positions
from schedir.ir.isa.instructions import INSTRUCTIONS, LANES, Lane, Opcode
from schedir.ir.pipeline.pipeline_shape import MAX_STAGES, PipelineShape
from schedir.ir.program import HEADER_FIELDS, Program, is_op
from schedir.verify.check import check

_REPLICA_ROWS: Final = [
    row for row in INSTRUCTIONS if row.ring is not None and row.ring.members in ("dp", "ep")
]
# Lane -> the opcodes of its collectives over replicas. The members of a group issue the collectives
# of a lane in one order.
_OPS_BY_LANE: Final = {
    row.lane: tuple(other.op for other in _REPLICA_ROWS if other.lane is row.lane)
    for row in _REPLICA_ROWS
}


@explain_wrong_calls("check_replicas([program, program])")
def check_replicas(
    programs: Sequence[Program],
    progress_model: ProgressModel = "per_device",
    *,
    blocking_hosts: bool = False,
) -> None:
    """Check the programs of data-parallel replicas, which may differ.

    `check` assumes that all replicas run the same program. This function verifies each program
    alone. Then it verifies that all members of a group issue the same collectives in the same
    order: all-to-alls of experts, reductions, and gathers of weights. A member waits in a
    collective until all other members have reached it. So the function also verifies that ranks of
    different replicas do not wait for each other in a cycle.

    The function assumes that all-to-alls, reductions and gathers have separate communicators. It
    treats the reduction of a stage with experts as a reduction over all replicas.

    Args:
        programs: The program of each replica. The number of programs is `dp`. The programs differ
            only in their names, Streams and slots.
        progress_model: The progress model of the transport.
        blocking_hosts: True if the host waits for the inputs of each compute, as on CPUs. At each
            dispatch, such a host also waits for the token counts of the group's members. Set it
            also for torch over NCCL, where messages and collectives wait for all earlier compute of
            the rank.

    Raises:
        SchedirError: `check` refuses one of the programs. A note of the error names the replica.
        CollectiveOrderError: Members of a group issue their collectives in different orders.
        DeadlockError: Ranks of several replicas wait for each other.
        UsageError: `programs` is not a list with one program per replica, or the programs differ in
            their settings.

    Example:
        >>> from schedir import check_replicas, compile
        >>> experts = {"ranks": 1, "microbatches": 2, "dp": 2, "ep": 2, "stage_segments": "dc"}
        >>> gpipe, one_f_one_b = compile("gpipe", **experts), compile("one_f_one_b", **experts)
        >>> check_replicas([gpipe, gpipe])
        >>> check_replicas([gpipe, one_f_one_b])
        Traceback (most recent call last):
            ...
        schedir.errors.CollectiveOrderError: gpipe, one_f_one_b: rank 0 of replica 0 issues dispatch 1.1, but rank 0 of replica 1 issues combine_grad 1.0: replicas must issue all-to-alls of the expert-parallel group in one order
          rank 0 of replica 0 #6   dispatch 1.1      waits for replica 1
          rank 0 of replica 1 #6   combine_grad 1.0  waits for replica 0
    """  # noqa: E501
    require_model(progress_model)
    require_bool(blocking_hosts, "blocking_hosts")
    _require_same_settings(programs)
    for number, program in enumerate(programs):
        try:
            check(program, progress_model, blocking_hosts=blocking_hosts)
        except SchedirError as error:
            error.add_note(f"in the program of replica {number}")
            raise
    graph = _ReplicaGraph(programs, progress_model, blocking_hosts=blocking_hosts)
    cost = np.zeros(graph.node_id_limit)
    start, level = solve_longest_paths(LongestPathProblem(graph.edges(), graph.node_mask, cost))
    times = EarliestTimes(start[graph.node], start[graph.node], level[graph.node])
    if not times.is_done.all():
        deadlock = explain_deadlock(graph, times)
        assert isinstance(deadlock, DeadlockError)
        raise _name_replicas(deadlock, programs[0].shape.ranks)


def _require_same_settings(programs: Sequence[Program]) -> None:
    """Raise UsageError unless there is one program per replica, all with the same settings."""
    if not isinstance(programs, Sequence) or not programs:
        raise UsageError(
            f"programs must be a list with the program of each replica, not {describe(programs)}",
            fields=["programs"],
        )
    for number, program in enumerate(programs):
        require_type(program, f"programs[{number}]", Program, "schedir.compile(schedule, shape)")
    first = programs[0]
    for (number, program), field in product(enumerate(programs), HEADER_FIELDS):
        values = [field.get_value(one) for one in (first, program)]
        if values[0] != values[1]:
            raise UsageError(
                f"the programs of replicas 0 and {number} have different settings: {field.name} is "
                f"{values[0]!r} and {values[1]!r}",
                fields=[field.name],
            )
    if len(programs) != first.dp:
        raise UsageError(
            f"the number of programs must be dp, which is {first.dp} in these programs, not "
            f"{len(programs)}",
            hint=f"compile the programs with dp={len(programs)}"
            + (f", or give {first.dp} programs" if first.dp > 1 else ""),
            fields=["programs", "dp"],
        )
    is_same = all(program.streams == first.streams for program in programs)
    if first.ep > 1 and first.clip_grad_norm and first.shape.optimizer_steps > 1 and not is_same:
        raise UsageError(
            "replicas with ep, clip_grad_norm and several optimizer steps need equal Streams",
            hint="the sum of the norm over the experts has no order among the all-to-alls",
            fields=["ep", "clip_grad_norm", "optimizer_steps"],
        )
    if (num_ranks := first.shape.ranks * len(programs)) > MAX_STAGES:
        raise UsageError(
            f"the replicas have {num_ranks} pipeline ranks together ({len(programs)} replicas x "
            f"{first.shape.ranks} ranks), and the limit is {MAX_STAGES}",
            fields=["programs", "ranks"],
        )


class _ReplicaGraph(Graph):
    """The dependency graph of all replicas, in which a collective of replicas is one node.

    Its program has the ranks of all replicas, one replica after the other. The class has only the
    attributes of a graph that the search for a cycle uses.

    Args:
        programs: The program of each replica, all of them correct.
        progress_model: The progress model.
        blocking_hosts: See `check_replicas`.

    Raises:
        CollectiveOrderError: Members of a group issue their collectives in different orders.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        progress_model: ProgressModel,
        *,
        blocking_hosts: bool = False,
    ) -> None:
        shape = programs[0].shape
        self.graphs = [
            Graph.from_program(program, progress_model, blocking_hosts=blocking_hosts)
            for program in programs
        ]
        self.program = Program(
            _join_names(programs),
            PipelineShape(shape.ranks * len(programs), shape.microbatches),
            tuple(stream for program in programs for stream in program.streams),
        )
        self.index = InstructionIndex.from_program(self.program)
        self.progress_model, self.eager_messages = progress_model, None
        self.blocking_hosts, self.host_device_sync = blocking_hosts, False
        # The first position of each replica.
        self.starts = np.cumsum([0, *map(len, self.graphs)])
        # Nodes are numbered in this order: first the positions of all replicas, then the nodes of
        # groups.
        sizes = [graph.node_id_limit - len(graph) for graph in self.graphs]
        group_starts = np.cumsum([len(self.index), *sizes])
        joint = np.arange(group_starts[-1], dtype=np.int32)
        for members in _match_collectives(programs, self.starts):
            joint[members] = members[0]
        # For each replica, an array: node of the replica's graph -> node of this graph.
        self.joint_nodes = [
            np.concatenate([joint[a:b], joint[c:d]])
            for (a, b), (c, d) in zip(pairwise(self.starts), pairwise(group_starts), strict=True)
        ]
        self.node_id_limit = len(joint)

    @cached_property
    def node(self) -> Positions:
        """The node of each instruction, shape (n,)."""
        return np.concatenate(
            [nodes[graph.node] for graph, nodes in zip(self.graphs, self.joint_nodes, strict=True)]
        )

    @cached_property
    def entry_exit_nodes(self) -> Positions:
        """The nodes at which each instruction starts and is complete, shape (2, n)."""
        pairs = zip(self.graphs, self.joint_nodes, strict=True)
        return np.concatenate([nodes[graph.entry_exit_nodes] for graph, nodes in pairs], axis=1)

    @cached_property
    def partner(self) -> Positions:
        """The position of the other end of each transfer, shape (n,); -1 where there is none."""
        return self._join_positions([graph.partner[None] for graph in self.graphs]).reshape(-1)

    @cached_property
    def local_waits(self) -> NDArray[np.int32]:
        """Positions of the instructions that each instruction waits for on its rank."""
        waits = self._join_positions([graph.local_waits for graph in self.graphs])
        if not self.blocking_hosts:
            return waits
        return np.concatenate([waits, self.dispatch_waits[None]])

    @cached_property
    def dispatch_waits(self) -> Positions:
        """The last dispatch before each instruction on its rank, shape (n,); -1 if there is none.

        A blocking host waits at a dispatch until all members of the group have issued it. Within
        one program, this wait has no effect, because the host has already waited for the inputs of
        the dispatch.
        """
        positions = np.arange(len(self.index), dtype=np.int32)
        is_dispatch = self.index.is_op((Opcode.Dispatch,))
        last_dispatch = np.full_like(positions, NO_POSITION)
        last_dispatch[1:] = np.maximum.accumulate(
            np.where(is_dispatch, positions, np.int32(NO_POSITION))
        )[:-1]
        is_on_rank = last_dispatch >= self.program.offsets[self.index.rank]
        return np.where(is_on_rank, last_dispatch, np.int32(NO_POSITION))

    @cached_property
    def queue(self) -> NDArray[np.unsignedinteger]:
        """The number of the in-order queue of each instruction, shape (n,)."""
        sizes = [int(graph.queue.max(initial=0)) + 1 for graph in self.graphs]
        pairs = zip(self.graphs, np.cumsum([0, *sizes]), strict=False)
        return np.concatenate(
            [graph.queue.astype(np.uint64) + np.uint64(start) for graph, start in pairs]
        )

    @cached_property
    def mismatched_sends(self) -> Positions:
        """Always empty, because each program is correct."""
        return np.empty(0, np.int32)

    def edges(self) -> Iterator[tuple[Positions, Positions]]:
        """Yield the edges of all replicas."""
        for graph, nodes in zip(self.graphs, self.joint_nodes, strict=True):
            for source, target in graph.edges():
                yield nodes[source], nodes[target]
        if self.blocking_hosts:
            waiters = np.flatnonzero(self.dispatch_waits != NO_POSITION)
            entry_nodes, exit_nodes = self.entry_exit_nodes
            yield exit_nodes[self.dispatch_waits[waiters]], entry_nodes[waiters]

    def _join_positions(self, tables: list[NDArray[np.int32]]) -> NDArray[np.int32]:
        """Join tables of positions, each of shape (k, instructions of a replica)."""
        joined = np.full((max(map(len, tables)), len(self.index)), NO_POSITION, np.int32)
        for table, (start, end) in zip(tables, pairwise(self.starts), strict=True):
            joined[: len(table), start:end] = np.where(table == NO_POSITION, table, table + start)
        return joined


def _match_collectives(
    programs: Sequence[Program], starts: NDArray[np.int64]
) -> Iterator[NDArray[np.int64]]:
    """Yield the positions of the members of each collective over replicas.

    Args:
        programs: The program of each replica.
        starts: The position of the first instruction of each replica.

    Raises:
        CollectiveOrderError: Members of a group issue their collectives in different orders.
    """
    for (lane, ops), rank in product(_OPS_BY_LANE.items(), range(programs[0].shape.ranks)):
        positions = [
            program.offsets[rank] + np.flatnonzero(is_op(program.streams[rank].op, ops))
            for program in programs
        ]
        group_size = programs[0].ep if lane is Lane.EP else len(programs)
        for first in range(0, len(programs), group_size):
            group = range(first, first + group_size)
            for other in group[1:]:
                _require_same_order(programs, lane, (first, other), positions)
            yield from np.stack([starts[replica] + positions[replica] for replica in group]).T


def _require_same_order(
    programs: Sequence[Program],
    lane: Lane,
    replicas: tuple[int, int],
    positions: Sequence[NDArray[np.int64]],
) -> None:
    """Raise CollectiveOrderError if a rank's collectives on a lane differ between two replicas.

    Args:
        programs: The program of each replica.
        lane: The lane.
        replicas: The two replicas.
        positions: For each replica, the positions of the rank's collectives on the lane.
    """
    words = [programs[k].words[positions[k]].tolist() for k in replicas]
    if words[0] == words[1]:
        return
    number = next(n for n, pair in enumerate(zip_longest(*words)) if pair[0] != pair[1])
    sites = {
        k: InstructionSite(
            *InstructionIndex.from_program(programs[k]).locate(int(positions[k][number])),
            f"waits for replica {sum(replicas) - k}",
            k,
        )
        for k in replicas
        if number < len(positions[k])
    }
    rank = next(iter(sites.values())).rank
    facts = [
        f"rank {rank} of replica {k} "
        + (
            f"issues {sites[k].instr}"
            if k in sites
            else f"has no further collective on the lane {lane.name.lower()}"
        )
        for k in replicas
    ]
    raise CollectiveOrderError(
        f"{', but '.join(facts)}: replicas must issue {LANES[lane].doc} in one order",
        program=_join_names([programs[k] for k in replicas]),
        rank=rank,
        replicas=replicas,
        sites=[*sites.values()],
    )


def _join_names(programs: Sequence[Program]) -> str:
    """Return the names of the programs, each of them once."""
    return ", ".join(dict.fromkeys(program.name for program in programs))


def _name_replicas(error: DeadlockError, ranks: int) -> DeadlockError:
    """Return the deadlock with the replica of each rank, and with ranks numbered per replica.

    Args:
        error: The deadlock. Its rank numbers count the ranks of all replicas, one replica after the
            other.
        ranks: The number of ranks of a replica.
    """
    cycle = [
        replace(
            wait,
            rank=wait.rank % ranks,
            replica=wait.rank // ranks,
            needed_rank=wait.needed_rank % ranks,
            needed_replica=wait.needed_rank // ranks,
        )
        for wait in error.cycle
    ]
    num_ranks = len({wait.rank for wait in error.cycle})
    num_replicas = len({wait.replica for wait in cycle})
    return DeadlockError(
        f"{num_ranks} ranks of {num_replicas} replicas wait for each other; stopped after "
        f"{error.executed_count} of {error.instruction_count} instructions",
        program=error.program,
        progress_model=error.progress_model,
        cycle=cycle,
        executed_count=error.executed_count,
        instruction_count=error.instruction_count,
        hint=error.hint,
    )
