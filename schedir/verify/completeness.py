"""Check that all instructions exist once and on the right rank.

These checks ignore the order of instructions. `schedir/verify/check.py` checks the order.
"""

from __future__ import annotations

import numpy as np

from schedir.errors import (
    CompletenessError,
    GroupError,
    LoweringLevelError,
    ReductionError,
    require_type,
)
from schedir.ir.dataflow import Dataflow
from schedir.ir.instruction_index import InstructionIndex
from schedir.ir.isa.instructions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_OPS,
    BACKWARD_WEIGHT,
    COMPUTE_OPS,
    FORWARD,
    INSTRUCTIONS,
    REDUCTION_OPS,
    TRAINED_STAGE_OPS,
    TRANSFER_OPS,
    VALUES,
    Instr,
    Row,
    Scope,
)
from schedir.ir.program import WORD_DTYPE, Program, is_op
from schedir.passes.pass_registry import LOWERING_PASSES
from schedir.passes.pass_types import ExpectedInstructions
from schedir.verify.communication import (
    require_form_pairs,
    require_group_members,
    require_transfers,
)
from schedir.verify.inspector import Inspector

MAX_GROUP_SIZE = 256  # largest number of transfers in a group; NCCL hangs with more
_RANK_OPS = tuple(row.op for row in INSTRUCTIONS if row.scope is Scope.RANK)
_COMPUTE_NAMES = " and ".join(
    [
        ", ".join(INSTRUCTIONS[op].text for op in COMPUTE_OPS[:-1]),
        INSTRUCTIONS[COMPUTE_OPS[-1]].text,
    ]
)
_SMALL_PROGRAM_SIZE = 2**16  # number of instructions; tables of this size need little memory


def require_complete(program: Program, *, is_draft: bool) -> InstructionIndex:
    """Check that all instructions exist once, in range and on the right rank.

    Args:
        program: The program or draft.
        is_draft: True to check the compute instructions of a draft only.

    Returns:
        The index of the program, for further checks.

    Raises:
        CompletenessError: An instruction is missing, exists twice, or is not needed. Subclasses are
            UnmatchedTransferError and ReductionError.
        GroupError: A group has instructions that cannot be issued together.
        LoweringLevelError: The program is a draft, and `is_draft` is False.
        UsageError: `program` is not a program.
    """
    require_type(program, "program", Program, "schedir.compile(schedule, shape)")
    _require_plausible_size(program)
    _require_valid_words(program)
    index = InstructionIndex.from_program(program)
    inspector = Inspector(program, index)
    if is_draft:
        _require_only_compute(inspector)
    elif program.is_draft and program.has_backward:
        raise LoweringLevelError(
            "the program is a draft: it has no messages, reductions or optimizer steps",
            program=program.name,
            hint="lower the draft with schedir.compile",
        )
    _require_valid_ranges(inspector)
    _require_owner_ranks(inspector)
    _require_unique(inspector)
    _require_valid_groups(inspector)
    _require_compute(inspector)
    _require_occurrences(inspector)
    if not is_draft:
        require_transfers(inspector)
        require_form_pairs(inspector)
        _require_pass_results(inspector)
        require_group_members(inspector)
    return index


def require_givers(program: Program, flow: Dataflow) -> None:
    """Check that an instruction makes each value that another instruction needs.

    Args:
        program: A program that `require_complete` accepts.
        flow: The flow of its values.

    Raises:
        CompletenessError: No instruction makes a value that another instruction needs.
    """
    missing = flow.find_missing_giver()
    if missing is not None:
        (position, kind), inspector = missing, Inspector(program, flow.index)
        inspector.refuse(
            f"it needs {VALUES[kind].phrase}, which no instruction gives",
            inspector.make_site(position),
        )


def _require_plausible_size(program: Program) -> None:
    """Refuse a program that is far too small or too large for its shape.

    This check runs before tables with the size of the shape are allocated. It ignores small
    differences, because later checks describe them better.
    """
    shape, n = program.shape, len(program)
    if len(program.streams) != shape.ranks:
        raise CompletenessError(
            f"{len(program.streams)} Streams for {shape.ranks} ranks", program=program.name
        )
    min_forwards = shape.stages * shape.microbatches
    if min_forwards > max(4 * n, _SMALL_PROGRAM_SIZE) or n > max(
        4 * shape.max_instructions, _SMALL_PROGRAM_SIZE
    ):
        raise CompletenessError(
            f"{n} instructions are far too {'few' if n < min_forwards else 'many'} for "
            f"{shape.stages} stages x {shape.microbatches} microbatches, which need "
            f"{min_forwards} to {shape.max_instructions}",
            program=program.name,
        )


def _require_valid_words(program: Program) -> None:
    """Refuse int64 words that do not encode an instruction. Only words from a user can be wrong."""
    words, fields = program.words, program.words.view(WORD_DTYPE)
    is_valid = (fields["joined"] <= 1) & (fields["op"] < len(INSTRUCTIONS))
    is_valid &= (fields["stage"] == 0) | ~is_op(fields["op"], _RANK_OPS)
    if not is_valid.all():
        position = int(np.flatnonzero(~is_valid)[0])
        rank = int(np.searchsorted(program.offsets, position, side="right")) - 1
        raise CompletenessError(
            f"rank {rank} #{position - int(program.offsets[rank])} is not an instruction: "
            f"{int(words[position]):#x}",
            program=program.name,
        )


def _require_only_compute(inspector: Inspector) -> None:
    inspector.refuse_first(
        ~inspector.index.is_op(COMPUTE_OPS),
        lambda position: f"a draft may only have {_COMPUTE_NAMES}",
    )


def _require_valid_ranges(inspector: Inspector) -> None:
    """Refuse a stage, microbatch, update or occurrence number that is out of range."""
    ix, shape = inspector.index, inspector.shape
    if ix.is_all_valid:
        return
    inspector.refuse_first(
        ix.stage >= shape.stages,
        lambda position: (
            f"there is no stage {ix.stage[position]}: the stages are 0 to {shape.stages - 1}"
        ),
    )
    is_per_microbatch = ix.is_op(row.op for row in INSTRUCTIONS if row.scope is Scope.MICROBATCH)
    inspector.refuse_first(
        (ix.mb >= shape.microbatches) & is_per_microbatch,
        lambda position: (
            f"there is no microbatch {ix.mb[position]}: the microbatches are 0 to "
            f"{shape.microbatches - 1}" + _describe_excess(inspector, position)
        ),
    )
    is_per_occurrence = ix.is_op(row.op for row in INSTRUCTIONS if row.scope is Scope.OCCURRENCE)
    inspector.refuse_first(
        (ix.mb >= shape.optimizer_steps) & ~is_per_microbatch & ~is_per_occurrence,
        lambda position: (
            f"there is no update {ix.mb[position]}: the last one is {shape.optimizer_steps - 1}"
        ),
    )
    inspector.refuse_first(
        (ix.mb >= ix.occurrences) & is_per_occurrence,
        lambda position: (
            f"there is no occurrence {ix.mb[position]}: occurrences of a stage begin at 0"
        ),
    )


def _describe_excess(inspector: Inspector, position: int) -> str:
    """Return a remark if a stage has more instructions of an opcode than microbatches, else "".

    The function takes the stage and the opcode from the instruction at `position`. B and I of a
    stage are counted together.
    """
    ix = inspector.index
    candidates = BACKWARD_OPS if ix.op[position] in BACKWARD_OPS else (ix.op[position],)
    is_on_stage = ix.stage == ix.stage[position]
    ops = [op for op in candidates if ((ix.op == op) & is_on_stage).any()]
    number = int((np.isin(ix.op, ops) & is_on_stage).sum())
    if number <= inspector.shape.microbatches:
        return ""
    names = " and ".join(INSTRUCTIONS[op].text for op in ops)
    return f", but stage {ix.stage[position]} has {number} {names}"


def _require_owner_ranks(inspector: Inspector) -> None:
    """Refuse an instruction on a rank that does not run the instruction's stage."""
    ix, shape = inspector.index, inspector.shape
    is_wrong = shape.rank_of_stage(ix.stage, ix.mb) != ix.rank
    for row, positions in ix.iterate_rows():
        if row.scope is Scope.RANK:
            is_wrong[positions] = False
        elif row.scope is not Scope.MICROBATCH:  # each stage replica has the instruction
            is_wrong[positions] = (
                shape.replica_ranks[:, ix.stage[positions]] != ix.rank[positions]
            ).all(0)

    def describe_owner(position: int) -> str:
        stage, mb = ix.stage[position], ix.mb[position]
        verb = f"runs microbatch {mb}" if shape.placement_rows > 1 else "is"
        owner = shape.rank_of_stage(stage, mb)
        return f"stage {stage} {verb} on rank {owner}, not on rank {ix.rank[position]}"

    inspector.refuse_first(is_wrong, describe_owner)


def _require_unique(inspector: Inspector) -> None:
    ix = inspector.index
    if ix.has_no_duplicates:
        return
    for row, positions in ix.iterate_rows():
        is_duplicate = ix.position_by_key[row.op][ix.key[positions]] != positions
        if is_duplicate.any():
            second = int(positions[is_duplicate.argmax()])
            first = int(ix.position_by_key[row.op][ix.key[second]])
            sites = [inspector.make_site(position) for position in (second, first)]
            error_type = _choose_error_type(row)
            inspector.refuse(f"{sites[0].instr} exists twice", *sites, error_type=error_type)


def _choose_error_type(row: Row) -> type[CompletenessError]:
    """Return the error type for a missing or surplus instruction of this row."""
    is_at_update_end = row.scope in (Scope.STAGE, Scope.RANK) or row.op in REDUCTION_OPS
    return ReductionError if is_at_update_end else CompletenessError


def _require_valid_groups(inspector: Inspector) -> None:
    """Check that each group has only transfers, or exactly two computes."""
    ix = inspector.index
    if not ix.has_joined:
        return
    starts = inspector.program.offsets[:-1]
    starts = starts[starts < len(ix.op)]
    joined_starts = starts[ix.joined[starts]]
    if len(joined_starts):
        site = inspector.make_site(int(joined_starts[0]))
        inspector.refuse(
            "it belongs to the group of the previous instruction, but no instruction precedes it",
            site,
            error_type=GroupError,
        )
    begins = np.flatnonzero(~ix.joined)
    sizes = np.diff([*begins.tolist(), len(ix.op)])
    is_transfer = ix.is_op(TRANSFER_OPS)
    for begin, size in zip(begins[sizes > 1].tolist(), sizes[sizes > 1].tolist(), strict=True):
        ops = ix.op[begin : begin + size]
        if is_transfer[begin : begin + size].all():
            if size > MAX_GROUP_SIZE:
                inspector.refuse(
                    f"a group has {size} transfers, and the limit is {MAX_GROUP_SIZE}",
                    inspector.make_site(begin),
                    error_type=GroupError,
                )
        elif size > 2 or not np.isin(ops, COMPUTE_OPS).all():
            inspector.refuse(
                "a group must have transfers only, or two computes",
                *(inspector.make_site(begin + k) for k in range(min(size, 4))),
                error_type=GroupError,
            )


def _require_compute(inspector: Inspector) -> None:
    """Check that each stage runs each microbatch forward once, and backward once if it trains."""
    has_forward, has_backward, has_input, has_weight = (
        inspector.is_present(op) for op in (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
    )
    if not has_forward.all():
        key = int((~has_forward).argmax())
        stage, microbatches = inspector.stage[key], inspector.shape.microbatches
        forwards_by_stage = has_forward.reshape(-1, microbatches).sum(axis=1)
        forwards = int(forwards_by_stage[stage])
        hint = ""
        if forwards and (forwards_by_stage == forwards).all():
            # If all stages lack the same number of forwards, `microbatches` is probably wrong.
            hint = (
                f"add the missing F, set microbatches to {forwards}, or compile a program file "
                f"again for {microbatches}"
            )
            if forwards == 1 and has_backward.all():  # as in F + microbatches * B
                hint = (
                    f"`*` applies before `+`: {microbatches} * (F + B), not F + {microbatches} * B"
                )
        plural = "es" * (microbatches > 1)
        reason = f": stage {stage} has {forwards} F for {microbatches} microbatch{plural}"
        inspector.refuse_missing(FORWARD, key, reason, hint=hint)
    if not inspector.program.has_backward:
        return
    ix, is_frozen = inspector.index, inspector.stage < inspector.program.frozen_stages
    if inspector.program.frozen_stages:
        inspector.refuse_first(
            ix.is_op(TRAINED_STAGE_OPS) & (ix.stage < inspector.program.frozen_stages),
            lambda position: (
                f"stage {ix.stage[position]} is frozen, and has no "
                f"{INSTRUCTIONS[ix.op[position]].text}"
            ),
        )
    for has_half, split_op in ((has_input, BACKWARD_INPUT), (has_weight, BACKWARD_WEIGHT)):
        if (has_backward & has_half).any():
            key = int((has_backward & has_half).argmax())
            inspector.refuse(
                f"stage {inspector.stage[key]} has both a full and a split backward of "
                f"microbatch {inspector.mb[key]}",
                inspector.make_key_site(BACKWARD, key),
                inspector.make_key_site(split_op, key),
                hint="B computes both I and W: keep B, or I and W",
            )
    for is_missing, op, reason in (
        (has_weight & ~has_input, BACKWARD_INPUT, ", but its W exists"),
        (has_input & ~has_weight, BACKWARD_WEIGHT, ", but its I exists: B computes both"),
    ):
        if is_missing.any():
            inspector.refuse_missing(op, int(is_missing.argmax()), reason)
    if not (has_backward | has_input | is_frozen).all():
        key = int((~(has_backward | has_input | is_frozen)).argmax())
        rank = int(inspector.shape.rank_of_stage(inspector.stage[key], inspector.mb[key]))
        inspector.refuse(
            f"microbatch {inspector.mb[key]} has no backward in stage {inspector.stage[key]} "
            f"(rank {rank})",
            inspector.make_key_site(FORWARD, key),
        )


def _require_occurrences(inspector: Inspector) -> None:
    """Check that the occurrences of an instruction of a stage are numbered in order from 0."""
    ix = inspector.index
    for row, positions in ix.iterate_rows():
        if row.scope is not Scope.OCCURRENCE:
            continue
        if inspector.shape.optimizer_steps > 1:
            inspector.refuse(
                f"{row.text} needs optimizer_steps 1", inspector.make_site(int(positions[0]))
            )
        keys = ix.compute_keys(row.scope, positions, np.zeros(len(positions), np.int64))
        order = np.argsort(keys, kind="stable")
        group_start = np.searchsorted(keys[order], keys[order])
        expected = np.arange(len(positions)) - group_start
        is_wrong = ix.mb[positions[order]] != expected
        if is_wrong.any():
            position = int(positions[order[is_wrong.argmax()]])
            occurrence = int(expected[is_wrong.argmax()])
            site = inspector.make_site(position)
            inspector.refuse(
                f"{site.instr} is out of order: "
                f"{Instr(row.op, int(ix.stage[position]), occurrence)} is expected here",
                site,
                hint=f"number the {row.text} of a stage from 0, in order",
            )


def _require_pass_results(inspector: Inspector) -> None:
    """Check that the program has exactly the instructions that passes must add to it."""
    for lowering_pass in LOWERING_PASSES:
        for expected in lowering_pass.list_expected(inspector.program, inspector.is_present):
            _require_expected(inspector, expected)


def _require_expected(inspector: Inspector, expected: ExpectedInstructions) -> None:
    """Refuse a program that lacks a required instruction, or has one that is not required."""
    op, shape = expected.op, inspector.shape
    required = np.asarray(expected.required, bool)
    if op not in inspector.index.position_by_key and not required.any():
        return
    scope, present = INSTRUCTIONS[op].scope, inspector.is_present(op)
    if len(required) != len(present):  # each update or occurrence requires the same instructions
        required = np.resize(required, len(present))
    if not (required != present).any():
        return
    error_type = _choose_error_type(INSTRUCTIONS[op])
    if (required & ~present).any():
        missing = int((required & ~present).argmax())
        counterpart = expected.counterpart
        sites = (
            [inspector.make_key_site(counterpart, missing)]
            if counterpart is not None and inspector.is_present(counterpart)[missing]
            else []
        )
        if scope is Scope.MICROBATCH:
            inspector.refuse_missing(op, missing, "", *sites, hint=expected.hint)
        number, key = divmod(
            missing, shape.ranks if scope is Scope.RANK else shape.replica_ranks.size
        )
        rank = key if scope is Scope.RANK else int(shape.replica_ranks.reshape(-1)[key])
        instr = Instr(op, 0 if scope is Scope.RANK else key % shape.stages, number)
        inspector.refuse(
            f"{instr} is missing on rank {rank}", *sites, error_type=error_type, hint=expected.hint
        )
    if (present & ~required).any():
        site = inspector.make_key_site(op, int((present & ~required).argmax()))
        reason = (
            expected.reason if inspector.program.has_backward else "the program has no backward"
        )
        inspector.refuse(f"{site.instr} is not needed: {reason}", site, error_type=error_type)
