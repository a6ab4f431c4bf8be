"""Check programs that ranks run one after the other.

If all ranks run the same correct programs in one order, the sequence is correct. Each program
receives as many messages as it sends in every channel, so no message is left for the next program.
An instruction waits only for instructions of its own program or of an earlier program, so waits
form no cycle.
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
    "run the same programs in one order on all ranks: messages of a channel match by position, "
    "not by step"
)


class _ProgramRun(NamedTuple):
    """The n-th run of a program. All ranks take part in it."""

    program_index: int  # index in `_ProgramSequence.programs`
    occurrence: int


class _SequenceStep(NamedTuple):
    """A step of one rank, and the first use of a channel in this step."""

    run: _ProgramRun
    step_number: int  # number of the step on the rank, from 1
    first_position: int  # position of the first instruction that uses the channel


def check_program_sequence(
    runs: Sequence[Sequence[Program]], progress_model: ProgressModel = "per_device"
) -> None:
    """Check the programs that each rank runs one after the other.

    The n-th run of a program on one rank belongs to the n-th run of the same program on every other
    rank. If all ranks run the same programs in one order, it is enough that each program is
    correct. Otherwise a message of one step can arrive in another step or never, and ranks can wait
    for each other across steps. The check assumes no barrier between steps: each queue of a rank
    continues with the next step.

    Args:
        runs: For each rank, the programs that it runs, in order.
        progress_model: The progress model of the transport.

    Raises:
        SchedirError: `check` refuses one of the programs.
        UsageError: `runs` is not a list of programs for each rank, or the programs differ in their
            number of ranks.
        ProgramSequenceError: A message arrives in another step or never, or ranks wait for each
            other.

    Example:
        >>> from schedir import PipelineShape, check_program_sequence, compile, schedules
        >>> train = compile(schedules.gpipe, PipelineShape(ranks=2, microbatches=2))
        >>> evaluate = compile(schedules.forward_only, PipelineShape(ranks=2, microbatches=2))
        >>> check_program_sequence([[train, evaluate, train], [train, evaluate, train]])
        >>> check_program_sequence([[train, evaluate], [train, train]])
        Traceback (most recent call last):
            ...
        schedir.errors.ProgramSequenceError: send_act 0.0 of forward_only matches recv_act 1.0 of gpipe
          rank 0 #1   send_act 0.0  step 2, forward_only
          rank 1 #0   recv_act 1.0  step 2, gpipe
          hint: run the same programs in one order on all ranks: messages of a channel match by position, not by step
    """  # noqa: E501
    sequence = _ProgramSequence(runs, require_model(progress_model))
    for program in sequence.programs:
        check(program, progress_model)
    if len({*sequence.rank_runs}) > 1:
        sequence.require_matching_steps()
        sequence.require_finish()


class _ProgramSequence:
    """The steps of all ranks under a progress model."""

    def __init__(self, runs: Sequence[Sequence[Program]], progress_model: ProgressModel) -> None:
        self.progress_model = progress_model
        self.programs: list[Program] = []
        index_by_digest: dict[str, int] = {}
        rows: list[tuple[_ProgramRun, ...]] = []
        for programs in (runs, *(runs if isinstance(runs, Sequence) else ())):
            if not isinstance(programs, Sequence) or not runs:
                raise UsageError(
                    f"runs must be a list of programs for each rank, not {describe(programs)}",
                    hint="for example [[train, evaluate, train]] * ranks",
                )
        for row in runs:
            steps, run_counts = [], Counter[int]()
            for step, program in enumerate(row):
                name = f"runs[{len(rows)}][{step}]"
                require_type(program, name, Program, "schedir.compile(schedule, shape)")
                if program.shape.ranks != len(runs):
                    raise UsageError(
                        f"runs has lists for {len(runs)} ranks, but program {program.name} has "
                        f"{program.shape.ranks} ranks",
                        hint="give a list of programs for each rank",
                    )
                program_index = index_by_digest.setdefault(program.digest, len(index_by_digest))
                self.programs += [program] * (program_index == len(self.programs))
                steps.append(_ProgramRun(program_index, run_counts[program_index]))
                run_counts[program_index] += 1
            rows.append(tuple(steps))
        self.rank_runs = tuple(rows)

    @cached_property
    def graphs(self) -> list[Graph]:
        """The dependency graph of each program."""
        return [Graph.from_program(program, self.progress_model) for program in self.programs]

    def get_step_name(self, rank: int, step_number: int) -> str:
        """Return the name of the program of a step, for an error."""
        return self.programs[self.rank_runs[rank][step_number - 1].program_index].name

    def make_site(
        self, rank: int, step_number: int, position: int, note: str = ""
    ) -> InstructionSite:
        """Return an instruction of a rank's step as a site of an error."""
        location = self.graphs[self.rank_runs[rank][step_number - 1].program_index].index.locate(
            position
        )
        return InstructionSite(
            *location, f"step {step_number}, {self.get_step_name(rank, step_number)}{note}"
        )

    # ------------------------------------------------------------ messages and their steps

    def require_matching_steps(self) -> None:
        """Refuse a sequence if the two ends of a message belong to different steps.

        In a correct program, a channel has as many sends as receives. So this method compares only
        the order of the steps that use a channel, on both ranks of the channel. Collectives need no
        check here. Only programs that train have collectives over pipeline ranks. If ranks run two
        such programs in different orders, the ranks do not finish, and `require_finish` raises the
        error.
        """
        violations: list[
            tuple[int, int, int, int, _SequenceStep | None, int, _SequenceStep | None]
        ] = []
        for (rank, rank_steps), (peer, peer_steps) in self._match_channels():
            for a, b in zip_longest(rank_steps, peer_steps):
                if a is None or b is None or a.run != b.run:
                    numbers = [step.step_number for step in (a, b) if step is not None]
                    violations.append(
                        (min(numbers), max(numbers), len(violations), rank, a, peer, b)
                    )
                    break
        if violations:
            _, _, _, rank, a, peer, b = min(violations, key=lambda violation: violation[:3])
            raise self._make_crossing_error(rank, a, peer, b)

    def _match_channels(self) -> Iterator[list[tuple[int, list[_SequenceStep]]]]:
        """Yield, for each channel, its two ranks with their steps that use the channel."""
        uses = [
            {number: first_by_rank for number, first_by_rank in self._find_channel_uses(graph)}
            for graph in self.graphs
        ]
        for channel in sorted({channel for channels in uses for channel in channels}):
            ranks = next(channels[channel] for channels in uses if channel in channels)
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
        """Yield each channel of a program with a dict: rank -> first position on the channel."""
        index = graph.index
        receives, channel = find_channels(index, graph.partner, graph.rules)
        sends = graph.partner[receives]
        for number in np.unique(channel).tolist():
            is_of_channel = channel == number
            first_positions = int(sends[is_of_channel].min()), int(receives[is_of_channel].min())
            yield number, {int(index.rank[position]): position for position in first_positions}

    def _make_crossing_error(
        self,
        one_rank: int,
        one_step: _SequenceStep | None,
        other_rank: int,
        other_step: _SequenceStep | None,
    ) -> ProgramSequenceError:
        """Return the error for a message that arrives in another step, or never."""
        pairs = ((one_rank, one_step), (other_rank, other_step))
        steps = [(rank, step) for rank, step in pairs if step is not None]
        sites = [
            self.make_site(rank, step.step_number, step.first_position) for rank, step in steps
        ]
        names = [self.get_step_name(rank, step.step_number) for rank, step in steps]
        first_site = sites[0]
        if one_step is None or other_step is None:
            finished_rank = other_rank if other_step is None else one_rank
            fact = (
                f"{first_site.instr} of {names[0]} is never matched: rank {finished_rank} has no "
                "step left with the matching instruction"
            )
        else:
            fact = f"{first_site.instr} of {names[0]} matches {sites[1].instr} of {names[1]}"
        return ProgramSequenceError(
            fact, progress_model=self.progress_model, sites=sites, hint=_HINT
        )

    # ------------------------------------------------------------ deadlocks across steps

    def require_finish(self) -> None:
        """Refuse a sequence in which a rank does not finish its steps.

        Call `require_matching_steps` before.
        """
        steps = sorted({step for row in self.rank_runs for step in row})
        node_offsets, total = {}, 0
        for step in steps:
            node_offsets[step] = total
            total += self.graphs[step.program_index].node_id_limit
        mask, edges = np.zeros(total, bool), []
        for step in steps:
            graph, offset = self.graphs[step.program_index], node_offsets[step]
            mask[offset : offset + graph.node_id_limit] = graph.node_mask
            edges += [(offset + a, offset + b) for a, b in graph.edges()]
        for rank, row in enumerate(self.rank_runs):
            edges += self._make_step_edges(rank, row, node_offsets)
        problem = LongestPathProblem(((a, b) for a, b in edges), mask, np.zeros(total))
        _, order = solve_longest_paths(problem)
        if (order[mask] > 0).all():
            return
        sites = [
            site for rank, row in enumerate(self.rank_runs)
            if (site := self._find_unfinished(rank, row, node_offsets, order > 0))
        ]  # fmt: skip
        raise ProgramSequenceError(
            f"{len(sites)} ranks wait for each other, across steps",
            progress_model=self.progress_model,
            sites=sites,
            hint="run the same programs in one order on all ranks",
        )

    def _make_step_edges(
        self, rank: int, runs: Sequence[_ProgramRun], node_offsets: dict[_ProgramRun, int]
    ) -> Iterator[tuple[Positions, Positions]]:
        """Yield the edges between consecutive steps, for each queue of a rank."""
        last_node: dict[int, int] = {}
        for step in runs:
            graph = self.graphs[step.program_index]
            queue = assign_queues(graph.index, graph.rules, shared_numbers=True)
            rank_positions = np.arange(graph.program.offsets[rank], graph.program.offsets[rank + 1])
            names, first_index = np.unique(queue[rank_positions], return_index=True)
            _, last_from_end = np.unique(queue[rank_positions][::-1], return_index=True)
            enter, leave = graph.entry_exit_nodes
            seen_queues = [k for k, name in enumerate(names.tolist()) if name in last_node]
            if seen_queues:
                yield (
                    np.array([last_node[int(names[k])] for k in seen_queues], np.int32),
                    np.array(
                        node_offsets[step] + enter[rank_positions[first_index[seen_queues]]],
                        np.int32,
                    ),
                )
            ends = node_offsets[step] + leave[rank_positions[::-1][last_from_end]]
            last_node |= dict(zip(names.tolist(), ends.tolist(), strict=True))

    def _find_unfinished(
        self,
        rank: int,
        runs: Sequence[_ProgramRun],
        node_offsets: dict[_ProgramRun, int],
        is_done: NDArray[np.bool_],
    ) -> InstructionSite | None:
        """Return the first instruction of a rank that never ends, or None if all end."""
        for number, step in enumerate(runs, 1):
            graph = self.graphs[step.program_index]
            rank_positions = np.arange(graph.program.offsets[rank], graph.program.offsets[rank + 1])
            unfinished = rank_positions[
                ~is_done[node_offsets[step] + graph.entry_exit_nodes[1][rank_positions]]
            ]
            if len(unfinished):
                return self.make_site(rank, number, int(unfinished[0]), ", waits")
        return None
