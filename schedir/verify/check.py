"""`check`: prove that a program finishes, is complete, and uses every value after it is made."""

from __future__ import annotations

import math
from itertools import product
from numbers import Real

import numpy as np

from schedir.analysis.channels import find_channels
from schedir.analysis.critical_path.longest_path import EarliestTimes, compute_earliest_times
from schedir.analysis.deadlock import explain_deadlock, find_order_error
from schedir.analysis.dependency_graph import Graph
from schedir.analysis.eager_limit import describe_eager_limit, find_min_eager_limit
from schedir.analysis.lazy_communicators import find_first_use_error
from schedir.analysis.memory.buffer_slots import count_min_slots, find_host_values, number_groups
from schedir.analysis.progress_models import MODELS, ProgressModel, require_model
from schedir.errors import (
    ChannelMismatchError,
    CompletenessError,
    DeadlockError,
    GroupError,
    InstructionSite,
    OrderError,
    SlotError,
    UsageError,
    describe,
    require_bool,
    require_type,
)
from schedir.ir.cost.sizes import EagerMessages, Sizes
from schedir.ir.dataflow import FREEING_OPS
from schedir.ir.instruction_index import NO_POSITION, InstructionIndex
from schedir.ir.isa.instructions import (
    BACKWARD_INPUT_OPS,
    BACKWARD_OPS,
    COLLECTIVE_OPS,
    FORWARD_OPS,
    GRAD_ADDING_OPS,
    GRADS_CHECK_OPS,
    INSTRUCTIONS,
    OPTIMIZER_STEP_OPS,
    SLOT_VALUES,
    TRANSFER_OPS,
    VALUES,
    ProducerRule,
    Scope,
    Value,
)
from schedir.ir.program import HOST_SLOT_VALUES, Program, Proof
from schedir.passes.splitting.frozen_stages import drop_frozen_backwards
from schedir.verify.completeness import require_complete

# ---------------------------------------------------------------- segments of a sequence

# Forwards run from the first segment to the last, backwards from the last to the first.  A forward
# reads the keys and values that earlier segments left in the stage, and a backward adds to the
# gradients of these (arXiv 2406.03488, section 3).  No message shows this dependency, and another
# order gives wrong numbers without an error.  So the order is checked.


def require_segment_order(index: InstructionIndex) -> None:
    """Raise OrderError for the first segment of a sequence that its stage runs out of turn."""
    shape = index.program.shape
    if shape.sequence_chunks == 1:
        return
    found = []
    for ops, turn in ((FORWARD_OPS, 1), (BACKWARD_OPS, -1)):
        at = np.flatnonzero(index.is_op(ops))
        sequence, segment = np.divmod(index.mb[at].astype(np.int64), shape.sequence_chunks)
        order = np.lexsort((sequence, index.stage[at]))  # stable: each in Stream order
        at, segment = at[order], turn * segment[order]
        alike = (sequence[order][1:] == sequence[order][:-1]) & (np.diff(index.stage[at]) == 0)
        late = np.flatnonzero(alike & (np.diff(segment) < 0))
        if len(late):
            k = late[at[late + 1].argmin()]
            found.append((int(at[k + 1]), int(at[k]), turn))
    if not found:
        return
    late_at, early_at, turn = min(found)
    early, later = index.locate(early_at), index.locate(late_at)
    if turn > 0:
        fact = f"{early[2]} runs before {later[2]}, whose keys and values it sees"
        needs = "needs what the other leaves"
    else:
        fact = f"{early[2]} runs before {later[2]}, which gives gradients to its keys and values"
        needs = "needs the gradients that the other gives"
    raise OrderError(
        f"{fact}: both are of sequence {later[2].mb // shape.sequence_chunks}",
        program=index.program.name,
        sites=[InstructionSite(*early, needs), InstructionSite(*later, "comes too late")],
        hint=f"the {shape.sequence_chunks} segments of a sequence go forward from the first on, "
        "and backward from the last on",
    )


# Whether hosts block, and wait for their device: who lives through more, lives through less.
_HOST_KINDS = ((False, False), (True, False), (True, True))


def check(
    program: Program,
    progress_model: ProgressModel = "per_device",
    *,
    blocking_hosts: bool = False,
    host_device_sync: bool = False,
    lazy_communicators: bool = False,
    eager_limit: float | None = None,
    sizes: Sizes | None = None,
) -> Program:
    """Return `program` if it is right, whoever wrote it.

    A right program is complete (every stage runs every microbatch forward and backward once,
    every message has both sides, gradients are reduced and stepped once), each rank gives a value
    before it uses it and finds a slot for it, no ranks wait for each other under the progress
    model of the transport that will run it ("edge", "pair", "direction", "device", "torch" or
    "serial"), and messages arrive as they are sent.  With `blocking_hosts`, the hosts themselves
    wait for what a compute needs, as on CPUs.  With `host_device_sync`, a host may besides wait, at
    whatever it launches, until all that it has issued is over: so a program lives through memory
    that is allocated, or a kernel that is loaded, in the middle of a step on GPUs.

    With `lazy_communicators`, no communicator is there yet: the first use of each builds it, and
    the hosts of all its ranks meet for that, each at its own first use.  With `eager_limit`,
    messages of at most so many bytes wait for nobody, as small ones of NCCL and MPI do: they leave
    without their receiver, however many are on their way.  `sizes` says how large messages are, and
    without `eager_limit` lets a DeadlockError tell the least limit with which the program would
    finish.

    A proof stays with the Program: to check it again costs nothing.

    Raises a SchedirError that says what is wrong and where: CompletenessError
    (UnmatchedTransferError, ReductionError), GroupError, LoweringLevelError, OrderError, SlotError,
    ChannelMismatchError or DeadlockError; and UsageError for `lazy_communicators` on hosts that
    block, and for `eager_limit` without the sizes of messages.

    >>> from schedir import PipelineShape, check, compile, from_text, schedules, to_text
    >>> text = to_text(compile(schedules.gpipe, PipelineShape(ranks=2, microbatches=2)),
    ...     folded=False)
    >>> check(from_text(text), progress_model="per_edge")
    <program gpipe: 2 ranks, 20 instructions>
    >>> check(from_text(text.replace("recv_grad 0.1", "")))
    Traceback (most recent call last):
        ...
    schedir.errors.UnmatchedTransferError: gpipe: send_grad 1.1 has no recv_grad 0.1 on rank 0
      rank 1 #8   send_grad 1.1
    """
    require_type(program, Program, "schedir.compile(schedule, shape)")
    host_device_sync = require_bool(host_device_sync, "host_device_sync")
    blocking_hosts, lazy_communicators = (
        require_bool(blocking_hosts, "blocking_hosts") or host_device_sync,
        require_bool(lazy_communicators, "lazy_communicators"),
    )
    small = parse_eager_limit(eager_limit, sizes, program)
    if sizes is not None:
        sizes.validate(program.shape)
    if lazy_communicators and blocking_hosts:
        raise UsageError(
            "communicators that are made lazily are those of GPUs, whose hosts do not block",
            fields=["lazy_communicators"],
        )
    wanted = Proof(
        require_model(progress_model), blocking_hosts, host_device_sync, lazy_communicators, small
    )
    if wanted in program.proofs:
        return program
    graph = build_complete_graph(
        program,
        progress_model,
        blocking_hosts=blocking_hosts,
        host_device_sync=host_device_sync,
        eager_messages=small,
    )
    try:
        prove(graph)
    except DeadlockError as error:
        if sizes is not None and (least := _find_proven_limit(graph, sizes)) is not None:
            error.eager_limit = least
            error.hint += "; " * bool(error.hint) + describe_eager_limit(least)
        raise
    if lazy_communicators:
        if never := find_first_use_error(graph):
            raise never
        program.proofs.add(wanted)
    return program


def _find_proven_limit(graph: Graph, sizes: Sizes) -> float | None:
    """The least limit with which a program is right that hangs, if there is one."""
    if (
        not _has_message_sizes(graph.program, sizes)
        or (least := find_min_eager_limit(graph, sizes)) is None
    ):
        return None
    eager = Graph(graph.program, graph.progress_model, eager_messages=EagerMessages(least, sizes))
    return None if find_crossed_messages(eager) else least


def parse_eager_limit(limit: object, sizes: Sizes | None, program: Program) -> EagerMessages | None:
    """What `check` is told of messages that wait for nobody; raises UsageError if that is nothing
    that can be meant."""
    if sizes is not None:
        require_type(sizes, Sizes, "Sizes(activation=16e6)")
    if limit is None:
        return None
    if isinstance(limit, bool) or not isinstance(limit, Real) or not 0 <= float(limit) < math.inf:
        raise UsageError(
            f"eager_limit is a number of bytes, such as 512e3, not {describe(limit)}",
            fields=["eager_limit"],
        )
    if sizes is None or not _has_message_sizes(program, sizes):
        named = ["activation", *["skip"] * bool(program.skips)]
        raise UsageError(
            "who says from which size on messages wait, says how large they are, too",
            hint=f"sizes=Sizes({', '.join(f'{name}=16e6' for name in named)}), or --sizes "
            + ",".join(f"{name}=16MB" for name in named),
            fields=["sizes"],
        )
    return EagerMessages(float(limit), sizes)


def _has_message_sizes(program: Program, sizes: Sizes) -> bool:
    """Whether sizes say of all messages how large they are: none would be of no bytes."""
    return bool(np.any(sizes.activation) and (not program.skips or np.any(sizes.skip)))


def build_complete_graph(
    program: Program,
    progress_model: ProgressModel,
    *,
    blocking_hosts: bool = False,
    host_device_sync: bool = False,
    eager_messages: EagerMessages | None = None,
) -> Graph:
    """The dependency graph of a program that is complete, as `check` says; raises if it is not."""
    if not program.proofs:
        require_complete(program, is_draft=False)
    return Graph.from_program(
        program,
        progress_model,
        blocking_hosts=blocking_hosts,
        host_device_sync=host_device_sync,
        eager_messages=eager_messages,
    )


def prove(graph: Graph, earliest_times: EarliestTimes | None = None) -> None:
    """Prove a complete program as `check` does, and note that with it.

    `earliest_times` is a walk of the graph, where there is one: then nobody walks again.
    """
    program, index = graph.program, graph.index
    if graph.proof in program.proofs:
        return
    ordered = earliest_times is None and _follows_message_order(graph)
    _require_update_order(graph)
    _require_update_end_order(graph)
    require_segment_order(graph.index)
    if early := find_order_error(graph):
        raise early
    _require_releases(graph)
    _require_free_slots(graph)
    if not ordered:
        earliest_times = earliest_times or compute_earliest_times(graph)
        if not earliest_times.is_done.all():
            raise explain_deadlock(graph, earliest_times)
    if cross := find_crossed_messages(graph):
        raise cross
    # One order is one for all models and hosts; and what runs where hosts block runs elsewhere.
    every = ordered and not index.has_joined
    models = MODELS if every else (graph.progress_model,)
    hosts = (
        _HOST_KINDS if every else _HOST_KINDS[: 1 + graph.blocking_hosts + graph.host_device_sync]
    )
    program.proofs.update(
        Proof(model, *host, eager_messages=graph.eager_messages)
        for model, host in product(models, hosts)
    )


def check_draft(program: Program) -> Program:
    """Return a draft if its compute is all there; whether it finishes, the lowering finds out.

    It may say backwards of frozen stages, which the lowering leaves out.
    """
    require_type(program, Program, "schedir.compile(schedule, shape)")
    require_complete(drop_frozen_backwards(program), is_draft=True)
    return program


def _require_free_slots(graph: Graph) -> None:
    """Each fill finds a slot that was freed earlier in the Stream, and not by what it runs with."""
    if not graph.all_slot_reuses:
        return
    group, index, program = number_groups(graph.index), graph.index, graph.program
    names = [kind.name.lower() for kind in graph.slot_reuses]
    wrong = [
        (int(fill[late.argmax()]), int(free[late.argmax()]), name)
        for name, (fill, free) in zip(
            [*names, *graph.host_slot_reuses], graph.all_slot_reuses, strict=True
        )
        if (late := group[free] >= group[fill]).any()
    ]
    if not wrong:
        return
    fill, free, name = min(wrong)
    rank, at, instr = index.locate(fill)
    _, freed_at, frees = index.locate(free)
    count = getattr(program.slots[rank], name)
    if name in HOST_SLOT_VALUES:
        least = int(find_host_values(program, name).count_peak(group)[rank])
    else:
        least = int(count_min_slots(program)[rank, SLOT_VALUES.index(Value[name.upper()])])
    raise SlotError(
        f"rank {rank} has {count} {name} slot{'s' * (count != 1)}, and {instr} needs one more",
        program=program.name,
        sites=[
            InstructionSite(rank, at, instr, "fills it"),
            InstructionSite(rank, freed_at, frees, "frees the next"),
        ],
        hint=f"its Stream needs {least}",
    )


def _require_releases(graph: Graph) -> None:
    """What is made again and again is let go before it is made again, and in the end."""
    flow, place = graph.flow, graph.index.locate
    for row in VALUES:
        chains = flow.get_chains(row.value) if row.producer_rule is ProducerRule.LATEST else None
        if chains is None:
            continue
        for again, before in chains.find_overwrites()[:1]:
            raise OrderError(
                f"{place(again)[2]} gives {row.phrase}, which {place(before)[2]} has given, and "
                "nobody has let go",
                program=graph.program.name,
                sites=[
                    InstructionSite(*place(before), "gives it"),
                    InstructionSite(*place(again), "gives it again"),
                ],
            )
        for last in chains.find_unfreed()[:1] if FREEING_OPS[row.value] else []:
            raise CompletenessError(
                f"{place(last)[2]} gives {row.phrase}, and nobody lets go of it",
                program=graph.program.name,
                sites=[InstructionSite(*place(last), "gives it")],
            )


def _follows_message_order(graph: Graph) -> bool:
    """Whether all Streams agree with the order of messages that the program brings along.

    Then it finishes under every model, if no value is used before it is given, and no slot before
    it is free.  For all edges of the graph lead forward within one Stream, or join what has one
    number; and along each Stream numbers go up, from group to group.  So no path leads back to
    where it began.  But where a model takes groups apart, that is not known.
    """
    index = graph.index
    if graph.rules.has_batch_queues and index.has_joined:
        return False
    if any(
        len(own) != index.key_count[Scope.MICROBATCH]
        for own in graph.program.message_order.values()
    ):
        return False
    number = index.find_message_numbers()
    for k, members in enumerate(graph.collective_groups):
        number[members] = 2**30 + k
    if ((number == NO_POSITION) & index.is_op(TRANSFER_OPS + COLLECTIVE_OPS)).any():
        return False
    at = np.flatnonzero(number != NO_POSITION)
    least = most = number[at]
    rank = index.rank[at]
    if index.has_joined:  # of each group
        group = number_groups(index)[at]
        first = np.flatnonzero(np.append(True, group[1:] != group[:-1])[: len(at)])
        least, most = np.minimum.reduceat(least, first), np.maximum.reduceat(most, first)
        rank = rank[first]
    return not ((least[1:] <= most[:-1]) & (rank[1:] == rank[:-1])).any()


def _require_update_order(graph: Graph) -> None:
    """A rank steps before it adds to the next update, or lets go of what the host steps by: there
    is one sum of gradients."""
    index, shape = graph.index, graph.program.shape
    if shape.optimizer_steps == 1:
        return
    ends = next(
        (op for op in GRADS_CHECK_OPS if op in index.position_by_key), OPTIMIZER_STEP_OPS[0]
    )
    at = np.flatnonzero(index.is_op(GRAD_ADDING_OPS))
    update, rank = index.find_updates(at), index.rank[at]
    before = np.where(update > 0, (update - 1) * shape.ranks + rank, NO_POSITION).astype(np.int32)
    step = index.find_positions(ends, before)
    if not (step > at).any():
        return
    k = int((step > at).argmax())
    late = at[(at > at[k]) & (at < step[k]) & (update < update[k])][:1]
    adds, *others = (index.locate(int(p)) for p in (at[k], *late, step[k]))
    notes = ["is of that, and comes only now"] * len(late) + ["takes them, and should come before"]
    splits = adds[2].op in BACKWARD_INPUT_OPS
    raise OrderError(
        f"{adds[2]} is of update {update[k]}, but what it adds to the gradients would go into "
        f"update {update[k] - 1}",
        program=graph.program.name,
        sites=[
            InstructionSite(
                *adds,
                "adds those of what is not split (biases, norms)" if splits else "adds to them",
            ),
            *(InstructionSite(*other, note) for other, note in zip(others, notes, strict=True)),
        ],
        hint="all backwards of an update, I and W too, come before those of the next, as in "
        "one_f_one_b and pipedream_2bw",
    )


def _require_update_end_order(graph: Graph) -> None:
    """A rank ends its updates in turn.

    What it adds sees to that; but one whose stages are all frozen adds nothing.
    """
    index = graph.index
    if graph.program.shape.optimizer_steps == 1:
        return
    at = np.flatnonzero(index.is_op(row.op for row in INSTRUCTIONS if row.scope is Scope.RANK))
    update, rank = index.find_updates(at), index.rank[at]
    early = (rank[1:] == rank[:-1]) & (update[1:] < update[:-1])
    if not early.any():
        return
    k = int(early.argmax())
    first, second = index.locate(int(at[k])), index.locate(int(at[k + 1]))
    raise OrderError(
        f"{first[2]}, of update {update[k]}, comes before {second[2]}, of update {update[k + 1]}",
        program=graph.program.name,
        sites=[InstructionSite(*first, "comes too early"), InstructionSite(*second)],
        hint="each rank ends one update after the other, also where all of its stages are frozen",
    )


def find_crossed_messages(graph: Graph) -> GroupError | ChannelMismatchError | None:
    """The error for messages of one channel that are not received as they are sent.

    Transports match them by position.  Queues keep their order, or the graph would have a
    cycle; but within a group there is no queue, and what waits for nobody may be taken in late: so
    two messages of either could cross.
    """
    index, partner = graph.index, graph.partner
    if not index.has_joined and graph.eager_messages is None:
        return None
    got, channel = find_channels(index, partner, graph.rules)
    cross = (channel[1:] == channel[:-1]) & (partner[got[1:]] < partner[got[:-1]])
    if not cross.any():
        return None
    k = int(cross.argmax())
    places = [index.locate(int(at)) for at in (*got[[k, k + 1]], *partner[got[[k + 1, k]]])]
    return (GroupError if graph.eager_messages is None else ChannelMismatchError)(
        f"{places[0][2]} and {places[1][2]} are sent the other way round, and messages between "
        "two ranks match by position",
        program=graph.program.name,
        sites=[InstructionSite(*place) for place in places],
    )
