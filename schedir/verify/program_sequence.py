"""Check programs that ranks run one after the other.

If all ranks run the same right programs in one order, nothing can go wrong: each program takes
in as many messages as it sends, in every channel, so each begins where all ranks agree; and what
waits, waits for its own program or an earlier one, so no wait leads back to where it began.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.channels import channels, queues
from schedir.analysis.critical_path.longest_path import solve
from schedir.analysis.critical_path.node_loop import LongestPathProblem
from schedir.analysis.dependency_graph import Graph
from schedir.analysis.progress_models import ProgressModel, require_model
from schedir.errors import InstructionSite, ProgramSequenceError, UsageError, describe, require_type
from schedir.ir.instruction_index import Positions
from schedir.ir.program import Program
from schedir.verify.check import check

_HINT: Final = (
    "messages of a channel match by position, and nothing in them names their step: let all ranks "
    "run the same programs in one order"
)


class _ProgramRun(NamedTuple):
    """A run of a program: the n-th of it, which all ranks have in common."""

    program: int  # which one
    nth: int


class _SequenceStep(NamedTuple):
    """A step as one rank has it: where in its sequence, from 1, and how it uses a channel."""

    step: _ProgramRun
    number: int
    first: int  # position of its first instruction there


def check_program_sequence(
    runs: Sequence[Sequence[Program]], progress_model: ProgressModel = "per_device"
) -> None:
    """Check programs that each rank runs one after the other: `runs` has a list for each rank.

    The n-th run of a program on one rank belongs to the n-th run of it on every other.  Where
    ranks run the same programs in one order, it is enough that each is right.  Where they do not,
    messages of one step may arrive in another, or nowhere, and ranks may wait for each other across
    steps.  Hosts do not wait between steps, but as their messages do.

    Raises what `check` raises for a program that is wrong by itself, UsageError for programs of
    other numbers of ranks, and ProgramSequenceError for the first message that meets one of another step,
    or never meets, and for ranks that wait for each other.

    >>> from schedir import PipelineShape, check_program_sequence, compile, schedules
    >>> train = compile(schedules.gpipe, PipelineShape(ranks=2, microbatches=2))
    >>> evaluate = compile(schedules.forward_only, PipelineShape(ranks=2, microbatches=2))
    >>> check_program_sequence([[train, evaluate, train], [train, evaluate, train]])
    >>> check_program_sequence([[train, evaluate], [train, train]])
    Traceback (most recent call last):
        ...
    schedir.errors.ProgramSequenceError: send_act 0.0 of forward_only arrives as recv_act 1.0 of gpipe
      rank 0 #1   send_act 0.0  step 2, forward_only
      rank 1 #0   recv_act 1.0  step 2, gpipe
      hint: messages of a channel match by position, and nothing in them names their step: let all ranks run the same programs in one order
    """  # noqa: E501
    together = _ProgramSequence(runs, require_model(progress_model))
    for program in together.programs:
        check(program, progress_model)
    if len({*together.rows}) > 1:
        together.meet()
        together.finish()


class _ProgramSequence:
    """The steps of all ranks, under a progress model."""

    def __init__(self, runs: Sequence[Sequence[Program]], progress_model: ProgressModel) -> None:
        self.progress_model = progress_model
        self.programs: list[Program] = []
        known: dict[str, int] = {}
        rows = []
        for some in (runs, *(runs if isinstance(runs, Sequence) else ())):
            if not isinstance(some, Sequence) or not runs:
                raise UsageError(
                    f"this takes a list of programs for each rank, not {describe(some)}",
                    hint="such as [[train, evaluate, train]] * ranks",
                )
        for row in runs:
            steps, counted = [], Counter[int]()
            for program in row:
                require_type(program, Program, "schedir.compile(schedule, shape)")
                if program.shape.ranks != len(runs):
                    raise UsageError(
                        f"{program.name} is of {program.shape.ranks} ranks, and there are the "
                        f"steps of {len(runs)}",
                        hint="a list of programs for each rank",
                    )
                which = known.setdefault(program.digest, len(known))
                self.programs += [program] * (which == len(self.programs))
                steps.append(_ProgramRun(which, counted[which]))
                counted[which] += 1
            rows.append(tuple(steps))
        self.rows = tuple(rows)

    @cached_property
    def graphs(self) -> list[Graph]:
        """The dependency graph of each program."""
        return [Graph.of(program, self.progress_model) for program in self.programs]

    def name(self, rank: int, number: int) -> str:
        """A step as an error says it."""
        return self.programs[self.rows[rank][number - 1].program].name

    def site(self, rank: int, number: int, position: int, note: str = "") -> InstructionSite:
        """An instruction of a step of a rank."""
        where = self.graphs[self.rows[rank][number - 1].program].index.locate(position)
        return InstructionSite(*where, f"step {number}, {self.name(rank, number)}{note}")

    # ------------------------------------------------------------ who meets whom

    def meet(self) -> None:
        """Whatever meets belongs to one step.

        A right program sends and receives equally often in a channel, so that is a matter of
        whole steps: both sides have those that use the channel in one order.  Collectives need no
        look: only programs that train have some, and of two such in unlike order none ends.
        """
        wrong: list[tuple[int, int, int, int, _SequenceStep | None, int, _SequenceStep | None]] = []
        for (one, ours), (other, theirs) in self._channels():
            for a, b in zip_longest(ours, theirs):
                if a is None or b is None or a.step != b.step:
                    numbers = [ran.number for ran in (a, b) if ran is not None]
                    wrong.append((min(numbers), max(numbers), len(wrong), one, a, other, b))
                    break
        if wrong:
            _, _, _, one, a, other, b = min(wrong, key=lambda found: found[:3])
            raise self._crossed(one, a, other, b)

    def _channels(self) -> Iterator[list[tuple[int, list[_SequenceStep]]]]:
        """For each channel who sends and who receives, with the steps of theirs that use it."""
        uses = [{number: both for number, both in self._uses(graph)} for graph in self.graphs]
        for channel in sorted({channel for own in uses for channel in own}):
            ranks = next(own[channel] for own in uses if channel in own)
            yield [
                (
                    rank,
                    [
                        _SequenceStep(step, number, uses[step.program][channel][rank])
                        for number, step in enumerate(self.rows[rank], 1)
                        if channel in uses[step.program]
                    ],
                )
                for rank in ranks
            ]

    def _uses(self, graph: Graph) -> Iterator[tuple[int, dict[int, int]]]:
        """The channels of a program: who sends and who receives, and at which position first."""
        index = graph.index
        got, channel = channels(index, graph.partner, graph.rules)
        sent = graph.partner[got]
        for number in np.unique(channel).tolist():
            here = channel == number
            first = int(sent[here].min()), int(got[here].min())
            yield number, {int(index.rank[position]): position for position in first}

    def _crossed(
        self, one: int, a: _SequenceStep | None, other: int, b: _SequenceStep | None
    ) -> ProgramSequenceError:
        """The error for what meets another step's, or nobody's."""
        sites = [
            self.site(rank, ran.number, ran.first)
            for rank, ran in ((one, a), (other, b))
            if ran is not None
        ]
        names = [self.name(rank, ran.number) for rank, ran in ((one, a), (other, b)) if ran]
        first = sites[0]
        if a is None or b is None:
            gone = other if b is None else one
            fact = (
                f"{first.instr} of {names[0]} never meets anybody: rank {gone} has no step left "
                "with its other side"
            )
        else:
            fact = f"{first.instr} of {names[0]} arrives as {sites[1].instr} of {names[1]}"
        return ProgramSequenceError(
            fact, progress_model=self.progress_model, sites=sites, hint=_HINT
        )

    # ------------------------------------------------------------ whether all finish

    def finish(self) -> None:
        """Every rank comes to the end of its steps.  What meets belongs to one step by now."""
        steps = sorted({step for row in self.rows for step in row})
        begin, total = {}, 0
        for step in steps:
            begin[step] = total
            total += self.graphs[step.program].nodes
        mask, edges = np.zeros(total, bool), []
        for step in steps:
            graph, first = self.graphs[step.program], begin[step]
            mask[first : first + graph.nodes] = graph.node_mask
            edges += [(first + a, first + b) for a, b in graph.edges()]
        for rank, row in enumerate(self.rows):
            edges += self._borders(rank, row, begin)
        problem = LongestPathProblem(((a, b) for a, b in edges), mask, np.zeros(total))
        _, turn = solve(problem)
        if (turn[mask] > 0).all():
            return
        sites = [
            site for rank, row in enumerate(self.rows)
            if (site := self._stands(rank, row, begin, turn > 0))
        ]  # fmt: skip
        raise ProgramSequenceError(
            f"{len(sites)} ranks wait for each other, across steps",
            progress_model=self.progress_model,
            sites=sites,
            hint="let all ranks run the same programs in one order",
        )

    def _borders(
        self, rank: int, row: Sequence[_ProgramRun], begin: dict[_ProgramRun, int]
    ) -> Iterator[tuple[Positions, Positions]]:
        """In each queue of a rank, from the last of a step to the first of a next one."""
        last: dict[int, int] = {}
        for step in row:
            graph = self.graphs[step.program]
            queue = queues(graph.index, graph.rules, shared=True)
            own = np.arange(graph.program.offsets[rank], graph.program.offsets[rank + 1])
            names, where = np.unique(queue[own], return_index=True)
            _, back = np.unique(queue[own][::-1], return_index=True)
            enter, leave = graph.enter_leave
            known = [k for k, name in enumerate(names.tolist()) if name in last]
            if known:
                yield (
                    np.array([last[int(names[k])] for k in known], np.int32),
                    np.array(begin[step] + enter[own[where[known]]], np.int32),
                )
            ends = begin[step] + leave[own[::-1][back]]
            last |= dict(zip(names.tolist(), ends.tolist(), strict=True))

    def _stands(
        self,
        rank: int,
        row: Sequence[_ProgramRun],
        begin: dict[_ProgramRun, int],
        done: NDArray[np.bool_],
    ) -> InstructionSite | None:
        """The first instruction of a rank that never ends."""
        for number, step in enumerate(row, 1):
            graph = self.graphs[step.program]
            own = np.arange(graph.program.offsets[rank], graph.program.offsets[rank + 1])
            late = own[~done[begin[step] + graph.enter_leave[1][own]]]
            if len(late):
                return self.site(rank, number, int(late[0]), ", waits")
        return None
