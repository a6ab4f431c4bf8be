"""Run further programs on the same stages, and the order in which ranks run them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

from schedir.errors import ModelError, ProgramSequenceError, describe
from schedir.ir.program import Program
from schedir.runtime.arguments import program_of
from schedir.runtime.boundaries.boundary import Edges, Given
from schedir.runtime.boundaries.boundary_table import BoundaryTable, PerMicrobatchBoundary
from schedir.transports.transport import Transport
from schedir.verify.program_sequence import check_program_sequence

# A program, or one with what passes between its stages, where that is not as in the first.
Beside = Program | tuple[Program, Given | Edges | PerMicrobatchBoundary | BoundaryTable]

_TRAINED = (
    "tied_weights",
    "clip_grad_norm",
    "frozen_stages",
    "norm_check",
    "reduce_scatter_at",
    "optimizer_placement",
)  # alike in all that train


class _ScheduledRun(NamedTuple):
    program: Program
    passing: BoundaryTable


def beside_of(
    more: Sequence[Beside], program: Program, passing: BoundaryTable
) -> list[_ScheduledRun]:
    """The programs beside one, each with what passes between its stages.

    Raises ModelError for one that cannot run on the same stages, and as `BoundaryTable.of`.
    """
    if not isinstance(more, Sequence):
        raise ModelError(
            f"`more` is a list of programs, not {describe(more)}", program=program.name
        )
    runs: list[_ScheduledRun] = []
    for one in more:
        pair = one if _is_pair(one) else (one, None)
        other = program_of(pair[0])
        _require_beside(program, other)
        if any(
            other.digest == known.program.digest
            for known in (_ScheduledRun(program, passing), *runs)
        ):
            raise ModelError(
                "the program is there twice", program=other.name, hint="an executor has it once"
            )
        given: Any = pair[1]
        if given is None:
            if len({*passing.rows}) > 1:
                raise ModelError(
                    f"microbatches of {program.name} differ in what passes between stages, and "
                    "nobody says what passes in this program",
                    program=other.name,
                    hint="more=[(program, boundary)]",
                )
            given = BoundaryTable(passing.rows[:1])
        runs.append(_ScheduledRun(other, BoundaryTable.of(given, other)))
    return runs


def _is_pair(one: object) -> TypeGuard[tuple[Any, Any]]:
    return isinstance(one, tuple) and len(one) == 2


def _require_beside(program: Program, other: Program) -> None:
    """Refuse a program for which what the first has made of its stages is not right."""

    def refuse(fact: str, hint: str = "") -> None:
        raise ModelError(fact, program=other.name, hint=hint)

    if [*map(set, program.shape.stages_of)] != [*map(set, other.shape.stages_of)]:
        refuse(
            f"its stages are not on the ranks on which {program.name} has them",
            "take the same ranks, stages_per_rank and placement",
        )
    for what in ("tp", "dp", "zero"):
        if getattr(program, what) != getattr(other, what):
            refuse(
                f"{what} is {getattr(other, what)}, and {getattr(program, what)} in {program.name}",
                f"compile(..., {what}={getattr(program, what)})",
            )
    if not other.trains:
        if program.zero and other.frozen_stages != program.frozen_stages:
            refuse(
                f"{other.frozen_stages} stages are frozen, and {program.frozen_stages} in "
                f"{program.name}: of "
                "these weights are whole",
                f"compile(..., frozen_stages={program.frozen_stages})",
            )
        return
    if not program.trains:
        refuse(f"it trains, and stands beside {program.name}, which does not", "give it first")
    for what in _TRAINED:
        if getattr(program, what) != getattr(other, what):
            refuse(
                f"{what} is {getattr(other, what)!r}, and {getattr(program, what)!r} in "
                f"{program.name}",
                f"compile(..., {what}={getattr(program, what)!r})",
            )
    if program.norm_check == "after_step":
        refuse(
            "two programs train, and norm_check is 'after_step': an update is made again by the "
            "program "
            "that has made it",
            "norm_check='before_step'",
        )


class ProgramOrder:
    """In which order a rank runs programs, and whether all ranks do so.

    Nothing in a message says of which program it is.  So where a rank goes over to another program
    all processes tell each other what they run; one that does not go over would wait for those
    that do, and no message of one program arrives in another.
    """

    def __init__(self, programs: Sequence[Program], rank: int, transport: Transport) -> None:
        self.programs, self.rank, self.transport = programs, rank, transport
        self.now = self.times = 0  # which runs, and how often it did since ranks told each other

    def run(self, which: int) -> None:
        """Note that a program is about to run, by its number.

        Raises ProgramSequenceError, in all processes, where others are about to run another.
        """
        if which == self.now:
            self.times += 1
            return
        own = self.transport
        told = own.agree({}, (own.dp_rank, own.tp_rank, self.rank, self.times, which))
        if {each[3:] for each in told} != {(self.times, which)}:
            raise self._unlike(sorted(told))
        self.now, self.times = which, 1

    def _unlike(self, told: Sequence[tuple[int, ...]]) -> ProgramSequenceError:
        """What is wrong with the order in which ranks run programs, as they tell it."""
        least = min(times for *_, times, _ in told)
        rows: dict[tuple[int, int], list[list[Program]]] = {}
        for dp_rank, tp_rank, _, times, which in told:
            before = [self.programs[self.now]] * min(times - least, 2)
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
            hint="let all processes run the same programs in one order",
        )
