"""Extra programs of an executor, and the check that all ranks run programs in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from schedir.errors import ExecutionError, ModelError, ProgramSequenceError, describe
from schedir.ir.program import Program
from schedir.runtime.arguments import require_program
from schedir.runtime.boundaries.boundary import BoundaryByEdge, BoundaryLike
from schedir.runtime.boundaries.microbatch_boundaries import BoundaryTable, PerMicrobatchBoundary
from schedir.transports.transport import Transport
from schedir.verify.program_sequence import check_program_sequence

# A program, or a pair (program, boundary) if the program needs another boundary than the first
# program.
ExtraProgram = (
    Program | tuple[Program, BoundaryLike | BoundaryByEdge | PerMicrobatchBoundary | BoundaryTable]
)

# Attributes that must be equal in all programs with a backward that one executor runs.
_TRAINING_ATTRIBUTES = (
    "tied_weights",
    "clip_grad_norm",
    "frozen_stages",
    "norm_check",
    "reduce_scatter_at",
    "optimizer_placement",
)


def resolve_extra_programs(
    extra_programs: Sequence[ExtraProgram], program: Program, boundaries: BoundaryTable
) -> list[tuple[Program, BoundaryTable]]:
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
    runs = [(program, boundaries)]
    for index, entry in enumerate(extra_programs):
        pair: Any = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, None)
        extra_program, boundary = require_program(pair[0], f"extra_programs[{index}]"), pair[1]
        _require_compatible(program, extra_program)
        if any(extra_program.digest == known_program.digest for known_program, _ in runs):
            raise ModelError(
                "this program is twice in extra_programs, or is the executor's first program",
                program=extra_program.name,
                hint="list each program once",
            )
        if boundary is None:
            if len({*boundaries.rows}) > 1:
                raise ModelError(
                    f"the boundaries of {program.name} differ between microbatches, so this "
                    "program needs its own boundary",
                    program=extra_program.name,
                    hint="extra_programs=[(program, boundary)]",
                )
            boundary = BoundaryTable(boundaries.rows[:1])
        runs.append((extra_program, BoundaryTable.from_boundary(boundary, extra_program)))
    return runs[1:]


def _require_compatible(program: Program, extra_program: Program) -> None:
    """Raise ModelError if `extra_program` cannot run on the stages of an executor for `program`."""

    def refuse(fact: str, hint: str = "") -> None:
        raise ModelError(fact, program=extra_program.name, hint=hint)

    if [*map(set, program.shape.stages_on_rank)] != [*map(set, extra_program.shape.stages_on_rank)]:
        refuse(
            f"this program places its stages on other ranks than program {program.name} does",
            "use the same ranks, stages_per_rank and placement",
        )
    for attribute in ("tp", "dp", "ep", "zero"):
        expected, actual = getattr(program, attribute), getattr(extra_program, attribute)
        if expected != actual:
            refuse(
                f"{attribute} is {actual}, but {expected} in {program.name}",
                f"compile(..., {attribute}={expected})",
            )
    if not extra_program.has_backward:
        if program.zero and extra_program.frozen_stages != program.frozen_stages:
            refuse(
                f"frozen_stages is {extra_program.frozen_stages}, but {program.frozen_stages} in "
                f"{program.name}, and ZeRO does not shard frozen stages",
                f"compile(..., frozen_stages={program.frozen_stages})",
            )
        return
    if not program.has_backward:
        refuse(f"this program trains, but {program.name} does not", "make it the first program")
    for attribute in _TRAINING_ATTRIBUTES:
        expected, actual = getattr(program, attribute), getattr(extra_program, attribute)
        if expected != actual:
            refuse(
                f"{attribute} is {actual!r}, but {expected!r} in {program.name}",
                f"compile(..., {attribute}={expected!r})",
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
    exchange the number of the program that they run next. If a process does not switch, the other
    processes wait for it in this exchange. So they do not receive messages of the wrong program.

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

        All processes must call this method before each run.

        Args:
            program_number: The index of the program in `programs`.

        Raises:
            ProgramSequenceError: A process runs another program next, or has run the current
                program a different number of times. All processes raise this error.
            ExecutionError: The other processes did not switch within the timeout.
        """
        if program_number == self.current_number:
            self.run_count += 1
            return
        transport = self.transport
        try:
            reports = transport.check_agreement(
                {},
                (transport.dp_rank, transport.tp_rank, self.rank, self.run_count, program_number),
            )
        except RuntimeError as error:  # torch raises it after a timeout or a lost connection
            current_program = self.programs[self.current_number]
            next_program = self.programs[program_number]
            raise ExecutionError(
                f"this process runs {next_program.name} after {current_program.name}, but the "
                "other processes did not confirm it",
                program=next_program.name,
                hint="run the same programs in the same order on all processes",
            ) from error
        if {report[3:] for report in reports} != {(self.run_count, program_number)}:
            raise self._order_error(sorted(reports))
        self.current_number = program_number
        self.run_count = 1

    def _order_error(self, reports: Sequence[tuple[int, ...]]) -> ProgramSequenceError:
        """Create the error for reports (dp_rank, tp_rank, rank, run count, program number)."""
        min_run_count = min(run_count for *_, run_count, _ in reports)
        runs_by_replica: dict[tuple[int, int], list[list[Program]]] = {}
        for dp_rank, tp_rank, _, run_count, program_number in reports:
            extra_runs = [self.programs[self.current_number]] * min(run_count - min_run_count, 2)
            runs_by_replica.setdefault((dp_rank, tp_rank), []).append(
                [*extra_runs, self.programs[program_number]]
            )
        for runs in runs_by_replica.values():
            try:
                check_program_sequence(runs, self.transport.progress_model)
            except ProgramSequenceError as error:
                return error
        names = {
            " and then ".join(p.name for p in rank_runs)
            for runs in runs_by_replica.values()
            for rank_runs in runs
        }
        return ProgramSequenceError(
            f"some processes run {', others '.join(sorted(names))}",
            progress_model=self.transport.progress_model,
            sites=[],
            hint="run the same programs in the same order on all processes",
        )
