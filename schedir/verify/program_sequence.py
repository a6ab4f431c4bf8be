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

from schedir.analysis.channels import assign_queues, find_channels
from schedir.analysis.critical_path.longest_path import solve_longest_paths
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

    program_index: int  # which one
    occurrence: int


class _SequenceStep(NamedTuple):
    """A step as one rank has it: where in its sequence, from 1, and how it uses a channel."""

    run: _ProgramRun
    step_number: int
    first_position: int  # position of its first instruction there


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
    if len({*together.rank_runs}) > 1:
        together.require_matching_steps()
        together.require_finish()


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
        self.rank_runs = tuple(rows)

    @cached_property
    def graphs(self) -> list[Graph]:
        """The dependency graph of each program."""
        return [Graph.from_program(program, self.progress_model) for program in self.programs]

    def get_step_name(self, rank: int, step_number: int) -> str:
        """A step as an error says it."""
        return self.programs[self.rank_runs[rank][step_number - 1].program_index].name

    def make_site(
        self, rank: int, step_number: int, position: int, note: str = ""
    ) -> InstructionSite:
        """An instruction of a step of a rank."""
        where = self.graphs[self.rank_runs[rank][step_number - 1].program_index].index.locate(
            position
        )
        return InstructionSite(
            *where, f"step {step_number}, {self.get_step_name(rank, step_number)}{note}"
        )

    # ------------------------------------------------------------ who meets whom

    def require_matching_steps(self) -> None:
        """Whatever meets belongs to one step.

        A right program sends and receives equally often in a channel, so that is a matter of
        whole steps: both sides have those that use the channel in one order.  Collectives need no
        look: only programs that train have some, and of two such in unlike order none ends.
        """
        wrong: list[tuple[int, int, int, int, _SequenceStep | None, int, _SequenceStep | None]] = []
        for (one, ours), (other, theirs) in self._match_channels():
            for a, b in zip_longest(ours, theirs):
                if a is None or b is None or a.run != b.run:
                    numbers = [ran.step_number for ran in (a, b) if ran is not None]
                    wrong.append((min(numbers), max(numbers), len(wrong), one, a, other, b))
                    break
        if wrong:
            _, _, _, one, a, other, b = min(wrong, key=lambda found: found[:3])
            raise self._make_crossing_error(one, a, other, b)

    def _match_channels(self) -> Iterator[list[tuple[int, list[_SequenceStep]]]]:
        """For each channel who sends and who receives, with the steps of theirs that use it."""
        uses = [
            {number: both for number, both in self._find_channel_uses(graph)}
            for graph in self.graphs
        ]
        for channel in sorted({channel for own in uses for channel in own}):
            ranks = next(own[channel] for own in uses if channel in own)
            yield [
                (
                    rank,
                    [
                        _SequenceStep(step, number, uses[step.program_index][channel][rank])
                        for number, step in enumerate(self.rank_runs[rank], 1)
                        if channel in uses[step.program_index]
                    ],
                )
                for rank in ranks
            ]

    def _find_channel_uses(self, graph: Graph) -> Iterator[tuple[int, dict[int, int]]]:
        """The channels of a program: who sends and who receives, and at which position first."""
        index = graph.index
        got, channel = find_channels(index, graph.partner, graph.rules)
        sent = graph.partner[got]
        for number in np.unique(channel).tolist():
            here = channel == number
            first = int(sent[here].min()), int(got[here].min())
            yield number, {int(index.rank[position]): position for position in first}

    def _make_crossing_error(
        self,
        one_rank: int,
        one_step: _SequenceStep | None,
        other_rank: int,
        other_step: _SequenceStep | None,
    ) -> ProgramSequenceError:
        """The error for what meets another step's, or nobody's."""
        sites = [
            self.make_site(rank, ran.step_number, ran.first_position)
            for rank, ran in ((one_rank, one_step), (other_rank, other_step))
            if ran is not None
        ]
        names = [
            self.get_step_name(rank, ran.step_number)
            for rank, ran in ((one_rank, one_step), (other_rank, other_step))
            if ran
        ]
        first = sites[0]
        if one_step is None or other_step is None:
            gone = other_rank if other_step is None else one_rank
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

    def require_finish(self) -> None:
        """Every rank comes to the end of its steps.  What meets belongs to one step by now."""
        steps = sorted({step for row in self.rank_runs for step in row})
        begin, total = {}, 0
        for step in steps:
            begin[step] = total
            total += self.graphs[step.program_index].node_id_limit
        mask, edges = np.zeros(total, bool), []
        for step in steps:
            graph, first = self.graphs[step.program_index], begin[step]
            mask[first : first + graph.node_id_limit] = graph.node_mask
            edges += [(first + a, first + b) for a, b in graph.edges()]
        for rank, row in enumerate(self.rank_runs):
            edges += self._make_step_edges(rank, row, begin)
        problem = LongestPathProblem(((a, b) for a, b in edges), mask, np.zeros(total))
        _, turn = solve_longest_paths(problem)
        if (turn[mask] > 0).all():
            return
        sites = [
            site for rank, row in enumerate(self.rank_runs)
            if (site := self._find_unfinished(rank, row, begin, turn > 0))
        ]  # fmt: skip
        raise ProgramSequenceError(
            f"{len(sites)} ranks wait for each other, across steps",
            progress_model=self.progress_model,
            sites=sites,
            hint="let all ranks run the same programs in one order",
        )

    def _make_step_edges(
        self, rank: int, runs: Sequence[_ProgramRun], node_offsets: dict[_ProgramRun, int]
    ) -> Iterator[tuple[Positions, Positions]]:
        """In each queue of a rank, from the last of a step to the first of a next one."""
        last: dict[int, int] = {}
        for step in runs:
            graph = self.graphs[step.program_index]
            queue = assign_queues(graph.index, graph.rules, shared_numbers=True)
            own = np.arange(graph.program.offsets[rank], graph.program.offsets[rank + 1])
            names, where = np.unique(queue[own], return_index=True)
            _, back = np.unique(queue[own][::-1], return_index=True)
            enter, leave = graph.entry_exit_nodes
            known = [k for k, name in enumerate(names.tolist()) if name in last]
            if known:
                yield (
                    np.array([last[int(names[k])] for k in known], np.int32),
                    np.array(node_offsets[step] + enter[own[where[known]]], np.int32),
                )
            ends = node_offsets[step] + leave[own[::-1][back]]
            last |= dict(zip(names.tolist(), ends.tolist(), strict=True))

    def _find_unfinished(
        self,
        rank: int,
        runs: Sequence[_ProgramRun],
        node_offsets: dict[_ProgramRun, int],
        is_done: NDArray[np.bool_],
    ) -> InstructionSite | None:
        """The first instruction of a rank that never ends."""
        for number, step in enumerate(runs, 1):
            graph = self.graphs[step.program_index]
            own = np.arange(graph.program.offsets[rank], graph.program.offsets[rank + 1])
            late = own[~is_done[node_offsets[step] + graph.entry_exit_nodes[1][own]]]
            if len(late):
                return self.make_site(rank, number, int(late[0]), ", waits")
        return None
