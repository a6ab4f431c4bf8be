"""Extra programs of an executor, and the check that all ranks run programs in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

from schedir.errors import ExecutionError, ModelError, ProgramSequenceError, describe
from schedir.ir.program import Program
from schedir.runtime.arguments import require_program
from schedir.runtime.boundaries.boundary import BoundaryByEdge, BoundaryLike
from schedir.runtime.boundaries.boundary_table import BoundaryTable, PerMicrobatchBoundary
from schedir.transports.transport import Transport
from schedir.verify.program_sequence import check_program_sequence

# A program, or a pair (program, boundary) if the boundary differs from that of the first program.
ExtraProgram = (
    Program | tuple[Program, BoundaryLike | BoundaryByEdge | PerMicrobatchBoundary | BoundaryTable]
)

# Attributes that must be equal in all programs of an executor with a backward.
_TRAINING_ATTRIBUTES = (
    "tied_weights",
    "clip_grad_norm",
    "frozen_stages",
    "norm_check",
    "reduce_scatter_at",
    "optimizer_placement",
)


class _ScheduledRun(NamedTuple):
    program: Program
    boundaries: BoundaryTable


def resolve_extra_programs(
    extra_programs: Sequence[ExtraProgram], program: Program, boundaries: BoundaryTable
) -> list[_ScheduledRun]:
    """Return the extra programs of an executor, each with its boundaries.

    Args:
        extra_programs: Programs, or pairs of a program and its boundary.
        program: The first program of the executor.
        boundaries: The boundaries of the first program. An entry of `extra_programs` without a
            boundary uses these boundaries.

    Raises:
        UsageError: An entry is not a program.
        ModelError: `extra_programs` is not a sequence, a program cannot run on the same stages, or
            a program occurs twice. Or a boundary is missing or invalid.
    """
    if not isinstance(extra_programs, Sequence):
        raise ModelError(
            f"extra_programs must be a list of programs, not {describe(extra_programs)}",
            program=program.name,
        )
    runs: list[_ScheduledRun] = []
    for index, one in enumerate(extra_programs):
        pair = one if _is_pair(one) else (one, None)
        other = require_program(pair[0], f"extra_programs[{index}]")
        _require_compatible(program, other)
        if any(
            other.digest == known.program.digest
            for known in (_ScheduledRun(program, boundaries), *runs)
        ):
            raise ModelError(
                "this program is twice in extra_programs, or is the executor's first program",
                program=other.name,
                hint="list each program once",
            )
        given: Any = pair[1]
        if given is None:
            if len({*boundaries.rows}) > 1:
                raise ModelError(
                    f"the boundaries of {program.name} differ between microbatches, so this "
                    "program needs its own boundary",
                    program=other.name,
                    hint="extra_programs=[(program, boundary)]",
                )
            given = BoundaryTable(boundaries.rows[:1])
        runs.append(_ScheduledRun(other, BoundaryTable.from_boundary(given, other)))
    return runs


def _is_pair(one: object) -> TypeGuard[tuple[Any, Any]]:
    return isinstance(one, tuple) and len(one) == 2


def _require_compatible(program: Program, other: Program) -> None:
    """Raise ModelError if `other` cannot run on the stages of an executor for `program`."""

    def refuse(fact: str, hint: str = "") -> None:
        raise ModelError(fact, program=other.name, hint=hint)

    if [*map(set, program.shape.stages_on_rank)] != [*map(set, other.shape.stages_on_rank)]:
        refuse(
            f"this program places its stages on other ranks than program {program.name} does",
            "use the same ranks, stages_per_rank and placement",
        )
    for what in ("tp", "dp", "ep", "zero"):
        if getattr(program, what) != getattr(other, what):
            refuse(
                f"{what} is {getattr(other, what)}, but {getattr(program, what)} in {program.name}",
                f"compile(..., {what}={getattr(program, what)})",
            )
    if not other.has_backward:
        if program.zero and other.frozen_stages != program.frozen_stages:
            refuse(
                f"frozen_stages is {other.frozen_stages}, but {program.frozen_stages} in "
                f"{program.name}, and ZeRO does not shard frozen stages",
                f"compile(..., frozen_stages={program.frozen_stages})",
            )
        return
    if not program.has_backward:
        refuse(f"this program trains, but {program.name} does not", "make it the first program")
    for what in _TRAINING_ATTRIBUTES:
        if getattr(program, what) != getattr(other, what):
            refuse(
                f"{what} is {getattr(other, what)!r}, but {getattr(program, what)!r} in "
                f"{program.name}",
                f"compile(..., {what}={getattr(program, what)!r})",
            )
    if program.norm_check == "after_step":
        refuse(
            "norm_check is 'after_step', but the executor has two programs that train, and only "
            "the program of an update can repeat it",
            "compile(..., norm_check='before_step')",
        )


class ProgramOrder:
    """The order in which a rank runs programs, with a check that all ranks use the same order.

    A message does not name its program. So before a rank switches to another program, all processes
    exchange the program that they run next. If a process does not switch, the others wait for it in
    this exchange, and do not receive messages of the wrong program.

    Args:
        programs: The programs of the executor, the first one first.
        rank: The pipeline rank.
        transport: The transport of the rank.
    """

    def __init__(self, programs: Sequence[Program], rank: int, transport: Transport) -> None:
        self.programs = programs
        self.rank = rank
        self.transport = transport
        # The index of the current program, and the number of its runs since the last exchange.
        self.current_number: int = 0
        self.run_count: int = 0

    def start_run(self, program_number: int) -> None:
        """Check that all processes run the same program next, if this rank switches programs.

        All processes must call this before each run.

        Args:
            program_number: The index of the program in `programs`.

        Raises:
            ProgramSequenceError: A process runs another program next, or has run the current
                program another number of times. All processes raise this error.
            ExecutionError: The other processes did not switch within the timeout.
        """
        if program_number == self.current_number:
            self.run_count += 1
            return
        own = self.transport
        try:
            told = own.check_agreement(
                {}, (own.dp_rank, own.tp_rank, self.rank, self.run_count, program_number)
            )
        except RuntimeError as error:  # torch raises it after a timeout or a lost connection
            before, now = self.programs[self.current_number], self.programs[program_number]
            raise ExecutionError(
                f"this process runs {now.name} after {before.name}, but the other processes did "
                "not confirm it",
                program=now.name,
                hint="run the same programs in the same order on all processes",
            ) from error
        if {each[3:] for each in told} != {(self.run_count, program_number)}:
            raise self._order_error(sorted(told))
        self.current_number = program_number
        self.run_count = 1

    def _order_error(self, reports: Sequence[tuple[int, ...]]) -> ProgramSequenceError:
        """Create the error. A report of a rank is (dp_rank, tp_rank, rank, runs, next program)."""
        least = min(times for *_, times, _ in reports)
        rows: dict[tuple[int, int], list[list[Program]]] = {}
        for dp_rank, tp_rank, _, times, which in reports:
            before = [self.programs[self.current_number]] * min(times - least, 2)
            rows.setdefault((dp_rank, tp_rank), []).append([*before, self.programs[which]])
        for runs in rows.values():
            try:
                check_program_sequence(runs, self.transport.progress_model)
            except ProgramSequenceError as error:
                return error
        names = {" and then ".join(p.name for p in row) for runs in rows.values() for row in runs}
        return ProgramSequenceError(
            f"some processes run {', others '.join(sorted(names))}",
            progress_model=self.transport.progress_model,
            sites=[],
            hint="run the same programs in the same order on all processes",
        )
