"""Prove that a program is complete, in order and free of deadlocks."""

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
from schedir.call_errors import explain_wrong_calls
from schedir.errors import (
    ChannelMismatchError,
    CommandHint,
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
    TRANSFER_OPS,
    VALUES,
    ProducerRule,
    Scope,
    Value,
)
from schedir.ir.program import HOST_SLOT_VALUES, Program, Proof
from schedir.passes.splitting.frozen_stages import drop_frozen_backwards
from schedir.verify.completeness import require_complete, require_givers

# ---------------------------------------------------------------- sequence chunks

# Forwards run from the first chunk of a sequence to the last, and backwards from the last to the
# first.  A forward reads the keys and values that earlier chunks left in the stage.  A backward
# adds to the gradients of these keys and values (arXiv 2406.03488, section 3). No message contains
# this dependency. Any other order gives wrong results without an error. So `require_segment_order`
# checks the order.


def require_segment_order(index: InstructionIndex) -> None:
    """Check that each stage runs the chunks of a sequence in order.

    Forwards must run in ascending order of the chunks, and backwards in descending order.

    Args:
        index: The index of the program.

    Raises:
        OrderError: A stage runs a chunk too early. The error names the first instruction that runs
            too early.
    """
    shape = index.program.shape
    if shape.sequence_chunks == 1:
        return
    violations = []
    for ops, direction in ((FORWARD_OPS, 1), (BACKWARD_OPS, -1)):
        positions = np.flatnonzero(index.is_op(ops))
        sequence, chunk = np.divmod(index.mb[positions].astype(np.int64), shape.sequence_chunks)
        # A stable sort keeps the Stream order.
        order = np.lexsort((sequence, index.stage[positions]))
        positions, chunk = positions[order], direction * chunk[order]
        is_same_sequence = (sequence[order][1:] == sequence[order][:-1]) & (
            np.diff(index.stage[positions]) == 0
        )
        violation_indices = np.flatnonzero(is_same_sequence & (np.diff(chunk) < 0))
        if len(violation_indices):
            k = violation_indices[positions[violation_indices + 1].argmin()]
            violations.append((int(positions[k + 1]), int(positions[k]), direction))
    if not violations:
        return
    late_at, early_at, direction = min(violations)
    early = index.locate(early_at)
    later = index.locate(late_at)
    if direction > 0:
        fact = f"{early[2]} runs before {later[2]}, whose keys and values it needs"
        note = "needs the keys and values of the other"
    else:
        fact = f"{early[2]} runs before {later[2]}, which gives gradients to its keys and values"
        note = "needs the gradients that the other gives"
    raise OrderError(
        f"{fact}: both are chunks of sequence {later[2].mb // shape.sequence_chunks}",
        program=index.program.name,
        sites=[InstructionSite(*early, note), InstructionSite(*later, "comes too late")],
        hint=f"run the {shape.sequence_chunks} chunks of a sequence forward from first to last, "
        "and backward from last to first",
    )


# Pairs of (blocking_hosts, host_device_sync), the strictest last.  A program that finishes with one
# pair also finishes with the pairs before it.
_HOST_KINDS = ((False, False), (True, False), (True, True))


@explain_wrong_calls("check(program, 'per_device')")
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
    """Verify that a program is complete, in order and free of deadlocks, and return it.

    A correct program is complete: every stage runs every microbatch forward once, every trained
    stage runs it backward once, and every message has a send and a receive. Each update reduces the
    gradients and has one optimizer step per rank. Each rank produces a value before it uses the
    value, and has a free slot for the value. Ranks do not wait for each other in a cycle under the
    progress model. The messages of a channel arrive in the order of their sends.

    The program stores each proof in `Program.proofs`, so a second check with the same arguments
    returns immediately.

    Args:
        program: The program, from `compile` or written by hand.
        progress_model: The progress model of the transport that will run the program.
        blocking_hosts: True if the host waits for the inputs of each compute, as on CPUs.
        host_device_sync: True if a host may wait, at any launch, until all instructions that the
            host issued have ended. GPUs do this when memory is allocated or a kernel is loaded
            during a step. Implies `blocking_hosts`.
        lazy_communicators: True if no communicator exists at the start. The first use of a
            communicator creates it. The creation blocks the hosts of all ranks of the communicator
            until each host has reached its first use of this communicator.
        eager_limit: Largest size in bytes of a message that does not wait for its receive, such as
            small messages of NCCL and MPI. The number of these messages in flight is not limited.
            None means that every message waits.
        sizes: The sizes of messages, which `eager_limit` needs. With `sizes`, a
            DeadlockError reports the smallest limit with which the program would finish.

    Returns:
        `program` itself.

    Raises:
        CompletenessError: An instruction is missing or exists twice (also UnmatchedTransferError
            and ReductionError), or a value is never freed.
        GroupError: A group is not valid, or its messages cross.
        LoweringLevelError: The program is a draft.
        OrderError: A rank uses a value before it exists, or instructions of two updates or sequence
            chunks are in the wrong order.
        SlotError: A rank has too few slots.
        ChannelMismatchError: Messages of a channel are not received in the order of their sends, or
            the two ends of a message use different communicators.
        DeadlockError: Ranks wait for each other.
        UsageError: An argument has a wrong type or value, `lazy_communicators` is set with blocking
            hosts, or `eager_limit` is set without the sizes of messages.

    Example:
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
    require_type(program, "program", Program, "schedir.compile(schedule, shape)")
    host_device_sync = require_bool(host_device_sync, "host_device_sync")
    blocking_hosts = require_bool(blocking_hosts, "blocking_hosts") or host_device_sync
    lazy_communicators = require_bool(lazy_communicators, "lazy_communicators")
    eager_messages = parse_eager_limit(eager_limit, sizes, program)
    if sizes is not None:
        sizes.validate(program.shape)
    if lazy_communicators and blocking_hosts:
        blocking_option = "host_device_sync" if host_device_sync else "blocking_hosts"
        raise UsageError(
            f"lazy_communicators and {blocking_option} cannot both be given: lazy communicators "
            "are checked only for hosts that do not block, such as those of GPUs",
            fields=["lazy_communicators", blocking_option],
        )
    proof = Proof(
        require_model(progress_model),
        blocking_hosts,
        host_device_sync,
        lazy_communicators,
        eager_messages,
    )
    if proof in program.proofs:
        return program
    graph = build_complete_graph(
        program,
        progress_model,
        blocking_hosts=blocking_hosts,
        host_device_sync=host_device_sync,
        eager_messages=eager_messages,
    )
    try:
        prove(graph)
    except DeadlockError as error:
        if sizes is not None and (min_limit := _find_proven_limit(graph, sizes)) is not None:
            error.eager_limit = min_limit
            error.hint += "; " * bool(error.hint) + describe_eager_limit(min_limit)
        raise
    if lazy_communicators:
        if use_error := find_first_use_error(graph):
            raise use_error
        program.proofs.add(proof)
    return program


def _find_proven_limit(graph: Graph, sizes: Sizes) -> float | None:
    """Return the smallest eager limit with which a program that hangs would be correct, or None."""
    if (
        not _has_message_sizes(graph.program, sizes)
        or (min_limit := find_min_eager_limit(graph, sizes)) is None
    ):
        return None
    eager = Graph(
        graph.program, graph.progress_model, eager_messages=EagerMessages(min_limit, sizes)
    )
    return None if find_crossed_messages(eager) else min_limit


def parse_eager_limit(limit: object, sizes: Sizes | None, program: Program) -> EagerMessages | None:
    """Verify an eager limit. Return it with the sizes of messages, or None if there is no limit.

    Args:
        limit: The limit in bytes, at least 0 and finite, or None. See `check`.
        sizes: The sizes of messages, or None.
        program: The program with the messages.

    Raises:
        UsageError: `limit` is not a finite number of at least 0, or `sizes` does not give the sizes
            of all messages.
    """
    if sizes is not None:
        require_type(sizes, "sizes", Sizes, "Sizes(activation=16e6)")
    if limit is None:
        return None
    if isinstance(limit, bool) or not isinstance(limit, Real) or not 0 <= float(limit) < math.inf:
        raise UsageError(
            f"eager_limit must be a number of bytes, such as 512e3, not {describe(limit)}",
            fields=["eager_limit"],
        )
    if sizes is None or not _has_message_sizes(program, sizes):
        size_names = ["activation", *["skip"] * bool(program.skips)]
        raise UsageError(
            "eager_limit needs the sizes of messages",
            hint=CommandHint(
                f"sizes=Sizes({', '.join(f'{name}=16e6' for name in size_names)})",
                "--sizes " + ",".join(f"{name}=16MB" for name in size_names),
            ),
            fields=["sizes"],
        )
    return EagerMessages(float(limit), sizes)


def _has_message_sizes(program: Program, sizes: Sizes) -> bool:
    """Return whether `sizes` gives a positive size for each kind of message of the program."""
    return bool(np.any(sizes.activation) and (not program.skips or np.any(sizes.skip)))


def build_complete_graph(
    program: Program,
    progress_model: ProgressModel,
    *,
    blocking_hosts: bool = False,
    host_device_sync: bool = False,
    eager_messages: EagerMessages | None = None,
) -> Graph:
    """Verify that a program is complete, and return its dependency graph.

    A program that already has a proof is not verified again.

    Args:
        program: The program.
        progress_model: The progress model.
        blocking_hosts: See `check`.
        host_device_sync: See `check`.
        eager_messages: The messages that do not wait for their receive; None if all wait.

    Raises:
        CompletenessError: See `require_complete`, which also lists the other errors.
    """
    if not program.proofs:
        require_complete(program, is_draft=False)
    graph = Graph.from_program(
        program,
        progress_model,
        blocking_hosts=blocking_hosts,
        host_device_sync=host_device_sync,
        eager_messages=eager_messages,
    )
    if not program.proofs:
        require_givers(program, graph.flow)
    return graph


def prove(graph: Graph, earliest_times: EarliestTimes | None = None) -> None:
    """Prove that a complete program is in order and finishes, and store the proof in the program.

    Args:
        graph: The dependency graph of the program.
        earliest_times: The earliest times of the graph, if the caller has them. If None, the
            function computes them when it needs them.

    Raises:
        SchedirError: The program is wrong. See `check` for the types.
    """
    program, index = graph.program, graph.index
    if graph.proof in program.proofs:
        return
    follows_order = earliest_times is None and _follows_message_order(graph)
    _require_update_order(graph)
    _require_update_end_order(graph)
    require_segment_order(graph.index)
    if order_error := find_order_error(graph):
        raise order_error
    _require_releases(graph)
    _require_free_slots(graph)
    if not follows_order:
        earliest_times = earliest_times or compute_earliest_times(graph)
        if not earliest_times.is_done.all():
            raise explain_deadlock(graph, earliest_times)
    if crossing_error := find_crossed_messages(graph):
        raise crossing_error
    # Streams that follow one global order of messages finish under every progress model and with
    # every kind of host.  A program that finishes with blocking hosts also finishes with other
    # hosts.
    is_universal = follows_order and not index.has_joined
    models = MODELS if is_universal else (graph.progress_model,)
    hosts = (
        _HOST_KINDS
        if is_universal
        else _HOST_KINDS[: 1 + graph.blocking_hosts + graph.host_device_sync]
    )
    program.proofs.update(
        Proof(model, *host, eager_messages=graph.eager_messages)
        for model, host in product(models, hosts)
    )


def check_draft(program: Program) -> Program:
    """Verify that the compute of a draft is complete, and return the draft.

    The draft may have backwards of frozen stages, which the lowering drops. This function does not
    search for deadlocks, because the lowering does.

    Args:
        program: The draft.

    Raises:
        CompletenessError: A compute is missing, exists twice, or is on the wrong rank.
        GroupError: The draft joins instructions that cannot be issued together.
        UsageError: `program` is not a program.
    """
    require_type(program, "program", Program, "schedir.compile(schedule, shape)")
    require_complete(drop_frozen_backwards(program), is_draft=True)
    return program


def _require_free_slots(graph: Graph) -> None:
    """Refuse a program if an instruction fills a slot that no earlier group has freed."""
    if not graph.all_slot_reuses:
        return
    group, index, program = number_groups(graph.index), graph.index, graph.program
    names = [kind.name.lower() for kind in graph.slot_reuses]
    violations = [
        (int(fill[is_late.argmax()]), int(free[is_late.argmax()]), name)
        for name, (fill, free) in zip(
            [*names, *graph.host_slot_reuses], graph.all_slot_reuses, strict=True
        )
        if (is_late := group[free] >= group[fill]).any()
    ]
    if not violations:
        return
    fill, free, name = min(violations)
    rank, fill_index, instr = index.locate(fill)
    _, free_index, free_instr = index.locate(free)
    count = getattr(program.slots[rank], name)
    if name in HOST_SLOT_VALUES:
        min_slots = int(find_host_values(program, name).count_peak(group)[rank])
    else:
        min_slots = int(count_min_slots(program, [Value[name.upper()]])[rank, 0])
    raise SlotError(
        f"rank {rank} has {count} {name} slot{'s' * (count != 1)}, but {instr} needs one more",
        program=program.name,
        sites=[
            InstructionSite(rank, fill_index, instr, "needs a slot"),
            InstructionSite(rank, free_index, free_instr, "frees the next slot"),
        ],
        hint=f"the Stream needs {min_slots} {name} slot{'s' * (min_slots != 1)}",
    )


def _require_releases(graph: Graph) -> None:
    """Verify that each value is freed, and is freed before an instruction produces it again.

    Only values that a Stream produces repeatedly (`ProducerRule.LATEST`) are checked.
    """
    flow, locate = graph.flow, graph.index.locate
    for row in VALUES:
        chains = flow.get_chains(row.value) if row.producer_rule is ProducerRule.LATEST else None
        if chains is None:
            continue
        for second, first in chains.find_overwrites()[:1]:
            raise OrderError(
                f"{locate(second)[2]} gives {row.phrase} again, but no instruction has freed the "
                f"value that {locate(first)[2]} gave",
                program=graph.program.name,
                sites=[
                    InstructionSite(*locate(first), "gives it"),
                    InstructionSite(*locate(second), "gives it again"),
                ],
            )
        for last in chains.find_unfreed()[:1] if FREEING_OPS[row.value] else []:
            raise CompletenessError(
                f"{locate(last)[2]} gives {row.phrase}, but no later instruction frees it",
                program=graph.program.name,
                sites=[InstructionSite(*locate(last), "gives it")],
            )


def _follows_message_order(graph: Graph) -> bool:
    """Return whether all Streams agree with the message order that the lowering stored.

    If they agree, the program finishes under every progress model, provided that values exist
    before their use and slots are free. The proof: each edge of the graph leads forward within one
    Stream, or connects instructions with the same message number. Along each Stream, the numbers
    ascend from group to group. So no path forms a cycle. The proof does not cover progress models
    that split groups over queues.
    """
    index = graph.index
    if graph.rules.has_batch_queues and index.has_joined:
        return False
    if any(
        len(numbers) != index.key_count[Scope.MICROBATCH]
        for numbers in graph.program.message_order.values()
    ):
        return False
    message_number = index.find_message_numbers()
    for k, members in enumerate(graph.collective_groups):
        message_number[members] = 2**30 + k
    if ((message_number == NO_POSITION) & index.is_op(TRANSFER_OPS + COLLECTIVE_OPS)).any():
        return False
    positions = np.flatnonzero(message_number != NO_POSITION)
    lowest = highest = message_number[positions]
    rank = index.rank[positions]
    if index.has_joined:  # a group has message numbers from `lowest` to `highest`
        group = number_groups(index)[positions]
        group_starts = np.flatnonzero(np.append(True, group[1:] != group[:-1])[: len(positions)])
        lowest = np.minimum.reduceat(lowest, group_starts)
        highest = np.maximum.reduceat(highest, group_starts)
        rank = rank[group_starts]
    return not ((lowest[1:] <= highest[:-1]) & (rank[1:] == rank[:-1])).any()


def _require_update_order(graph: Graph) -> None:
    """Refuse a program if a rank adds to gradients before the previous update ends.

    A rank has one sum of gradients per weight. Before it adds gradients of the next update, it must
    run the optimizer step, or check the gradients for the CPU optimizer.
    """
    index, shape = graph.index, graph.program.shape
    if shape.optimizer_steps == 1:
        return
    end_op = next(
        (op for op in GRADS_CHECK_OPS if op in index.position_by_key), OPTIMIZER_STEP_OPS[0]
    )
    positions = np.flatnonzero(index.is_op(GRAD_ADDING_OPS))
    update, rank = index.find_updates(positions), index.rank[positions]
    previous_key = np.where(update > 0, (update - 1) * shape.ranks + rank, NO_POSITION).astype(
        np.int32
    )
    previous_end = index.find_positions(end_op, previous_key)
    if not (previous_end > positions).any():
        return
    k = int((previous_end > positions).argmax())
    late_adder = positions[
        (positions > positions[k]) & (positions < previous_end[k]) & (update < update[k])
    ][:1]
    adder, *other_sites = (
        index.locate(int(p)) for p in (positions[k], *late_adder, previous_end[k])
    )
    notes = ["is in the earlier update"] * len(late_adder) + ["ends the earlier update, too late"]
    is_split = adder[2].op in BACKWARD_INPUT_OPS
    raise OrderError(
        f"{adder[2]} is in update {update[k]}, but would add its gradients to update "
        f"{update[k] - 1}",
        program=graph.program.name,
        sites=[
            InstructionSite(
                *adder,
                "adds gradients of biases and norms" if is_split else "adds gradients",
            ),
            *(InstructionSite(*site, note) for site, note in zip(other_sites, notes, strict=True)),
        ],
        hint="on each rank, put all backwards of an update, I and W too, before those of the "
        "next, as in one_f_one_b and pipedream_2bw",
    )


def _require_update_end_order(graph: Graph) -> None:
    """Refuse a program if a rank does not end its updates in ascending order.

    `_require_update_order` covers ranks that add to gradients. A rank whose stages are all frozen
    adds no gradients, so only this check covers it.
    """
    index = graph.index
    if graph.program.shape.optimizer_steps == 1:
        return
    positions = np.flatnonzero(
        index.is_op(row.op for row in INSTRUCTIONS if row.scope is Scope.RANK)
    )
    update, rank = index.find_updates(positions), index.rank[positions]
    is_early = (rank[1:] == rank[:-1]) & (update[1:] < update[:-1])
    if not is_early.any():
        return
    k = int(is_early.argmax())
    first = index.locate(int(positions[k]))
    second = index.locate(int(positions[k + 1]))
    raise OrderError(
        f"{first[2]} of update {update[k]} comes before {second[2]} of update {update[k + 1]}",
        program=graph.program.name,
        sites=[InstructionSite(*first, "comes too early"), InstructionSite(*second)],
        hint="end the updates of each rank in order, also on a rank with frozen stages only",
    )


def find_crossed_messages(graph: Graph) -> GroupError | ChannelMismatchError | None:
    """Return the error for messages of a channel that are not received in the order of their sends.

    Transports match messages of a channel by position. Messages in different groups cannot cross,
    because the graph would then have a cycle. But no queue orders the transfers within a group, and
    a receive may come long after the send of an eager message. So two messages of one group, or two
    eager messages, can cross.

    Args:
        graph: The dependency graph of a program that finishes.

    Returns:
        GroupError, or ChannelMismatchError if the graph has eager messages. None if no messages
        cross.
    """
    index, partner = graph.index, graph.partner
    if not index.has_joined and graph.eager_messages is None:
        return None
    receives, channel = find_channels(index, partner, graph.rules)
    is_crossed = (channel[1:] == channel[:-1]) & (partner[receives[1:]] < partner[receives[:-1]])
    if not is_crossed.any():
        return None
    k = int(is_crossed.argmax())
    sites = [
        index.locate(int(position))
        for position in (*receives[[k, k + 1]], *partner[receives[[k + 1, k]]])
    ]
    return (GroupError if graph.eager_messages is None else ChannelMismatchError)(
        f"{sites[0][2]} and {sites[1][2]} are sent in the opposite order, but messages between "
        "two ranks match by position",
        program=graph.program.name,
        sites=[InstructionSite(*site) for site in sites],
    )
