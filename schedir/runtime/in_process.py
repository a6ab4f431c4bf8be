"""InProcessExecutor: run all ranks of a program in one process, in any legal order.

For property tests and for looking at a schedule on one machine: what the dependency graph
allows is what happens, in an order that a seed decides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from schedir.analysis.dependency_graph import Graph
from schedir.analysis.progress_models import ProgressModel
from schedir.errors import ModelError
from schedir.ir.instruction_index import NONE
from schedir.ir.isa.instructions import COLLECTIVES, ROWS
from schedir.ir.pipeline.tied_weights import TiedWeights
from schedir.ir.program import Program
from schedir.predict.recorded_timeline import timeline_of
from schedir.predict.timeline import Timeline
from schedir.runtime.arguments import maker_of, program_of, stages_of
from schedir.runtime.boundaries.boundary import Edges, Given
from schedir.runtime.boundaries.boundary_table import BoundaryTable, PerMicrobatchBoundary
from schedir.runtime.checkpoint_state import CheckpointState, kept_of
from schedir.runtime.evaluation_run import looking
from schedir.runtime.executor import Executor
from schedir.runtime.extra_programs import Beside
from schedir.runtime.in_process_copies import StageReplica, copies_of, copy_of
from schedir.runtime.model_checks.memory_overlap import expect_copyable, expect_ranks_apart
from schedir.runtime.parameters.mixed_precision import LossScale, OptimizerLike
from schedir.runtime.parameters.tied_parameters import prints
from schedir.runtime.program_runner import ProgramRunner
from schedir.runtime.rank_resources import Loss
from schedir.runtime.recording.recorder import read
from schedir.runtime.step_inputs import Keywords, Microbatches, StepInputs
from schedir.transports.in_process.mailbox import mailboxes
from schedir.verify.check import crossing

_COLLECTED = {token for op in COLLECTIVES for token in ROWS[op].gives}
_AFTER_COLLECTIVES = tuple(row.op for row in ROWS if _COLLECTED & {*row.needs})


class InProcessExecutor:
    """All ranks of a program as virtual ranks of this process.

    `stages` are all the stages of the model, in order; where stages have several holders, all but
    the first have copies.  `optimizer` makes each rank's from its parameters, `loss_scale` each
    rank's own.  On a GPU, each rank has streams of its own.  `seed`, `tied`, `alike`, `record`,
    `debug` and `folder` are as an Executor's.  Of a Parameter that stages on several ranks share,
    the first of these ranks has itself, and others a copy, as processes would.  Copies begin each
    step as what they are of.  Tensor hooks on weights of a stage with several holders are called in
    each; post-accumulate hooks there are refused.
    Raises ModelError as an Executor, for programs with tensor- or data-parallel groups, whose
    ranks run at once and need processes, and for those of which messages between two ranks pass
    each other, as they may under the model "torch".

    >>> import schedir, torch
    >>> from torch import nn
    >>> from schedir.runtime import InProcessExecutor
    >>> program = schedir.compile(schedir.schedules.one_f_one_b, schedir.PipelineShape(2, 4))
    >>> stages = [nn.Linear(8, 8), nn.Linear(8, 1)]
    >>> ranks = InProcessExecutor(program, stages, loss=nn.functional.mse_loss, boundary=(2, 8))
    >>> x, y = torch.ones(4, 2, 8), torch.ones(4, 2, 1)
    >>> bool(ranks.step(x, y) == ranks.step(x, y, seed=7))  # any legal order has the same bits
    True
    >>> ranks.timeline().unit
    's'
    """

    def __init__(
        self,
        program: Program,
        stages: Sequence[nn.Module] | Mapping[int, nn.Module],
        *,
        loss: Loss,
        boundary: Given | Edges | PerMicrobatchBoundary,
        progress_model: ProgressModel = "per_edge",
        optimizer: Callable[[list[nn.Parameter]], OptimizerLike] | None = None,
        max_norm: float | None = None,
        loss_scale: Callable[[], LossScale] | None = None,
        seed: int | None = 0,
        tied: TiedWeights | None = None,
        alike: bool = False,
        more: Sequence[Beside] = (),
        record: bool = True,
        debug: bool = False,
        folder: str | Path | None = None,
    ) -> None:
        program = program_of(program)
        make = maker_of(optimizer, "the optimizer", "optimizer=torch.optim.AdamW")
        scale = maker_of(loss_scale, "the loss scale", "loss_scale=LossScale")
        if (program.tp, program.dp) != (1, 1):
            raise ModelError("virtual ranks run with tp 1 and dp 1", program=program.name)
        stages = [module for _, module in sorted(stages_of(stages, program).items())]
        shape = program.shape
        passing = BoundaryTable.of(boundary, program)
        self.program = program
        cuda = any(p.is_cuda for stage in stages for p in stage.parameters())
        told = [(0, prints(dict(enumerate(stages))))] if program.trains else []
        self.mail = mailboxes(program, progress_model, cuda, told)
        if program.trains:
            expect_ranks_apart(dict(enumerate(stages)), shape.rank_of.tolist(), program.name)
            for s, module in enumerate(stages) if shape.rows > 1 else ():
                expect_copyable(module, s, program.name)
        copies = copies_of(program, stages)
        self.ranks = []
        self.other_holders: list[StageReplica] = []
        copied = [  # before an executor cuts what they are of (ZeRO)
            {s: stages[s] if shape.rank_of[s] == rank else copy_of(stages[s]) for s in own}
            for rank, own in enumerate(shape.stages_of)
        ]
        for rank, (own, held) in enumerate(zip(shape.stages_of, copied, strict=True)):
            replicas = [
                StageReplica(s, held[s], stages[s]) for s in own if held[s] is not stages[s]
            ]
            for replica in replicas:
                replica.share_hooks(program)
            self.other_holders += replicas
            own_of = copies[rank]
            parameters = [
                *dict.fromkeys(
                    own_of.get(p, p) for stage in held.values() for p in stage.parameters()
                )
            ]
            executor = Executor(
                program,
                rank,
                held,
                self.mail[rank],
                loss=loss,
                boundary=passing,
                optimizer=make(parameters) if make and parameters else None,
                max_norm=max_norm,
                loss_scale=scale and scale(),
                seed=seed,
                tied=tied,
                alike=alike,
                more=more,
                copies=copies[rank],
                others=[module for s, module in enumerate(stages) if s not in own],
                record=record,
                debug=debug,
                folder=folder,
            )
            self.ranks.append(executor)
        self.turns_of = {
            digest: ExecutionOrders(one.program, progress_model)
            for digest, one in self.ranks[0].running.items()
        }
        self.graph = self.turns_of[program.digest].graph
        for replica in self.other_holders:
            replica.note_state()

    def step(
        self,
        inputs: Microbatches,
        targets: Microbatches,
        scale: float | Tensor = 1.0,
        seed: int | None = None,
        keywords: Keywords = (),
        *,
        program: Program | None = None,
    ) -> Tensor:
        """Run every rank's Stream once, in the legal order that `seed` picks.

        Without a seed each Stream is run in its own order, as processes would, one instruction
        of each rank in turn as far as they need not wait; where hosts that do so would wait for
        each other, it is the order of seed 0.

        As Executor.step; returns the sum of losses.
        """
        ranks = [one if program is None else one.on(program, trains=True) for one in self.ranks]
        return self._run(ranks, StepInputs(inputs, targets, scale, keywords), seed)

    def evaluate(
        self,
        inputs: Microbatches,
        targets: Microbatches,
        keywords: Keywords = (),
        seed: int | None = None,
        *,
        program: Program | None = None,
    ) -> Tensor:
        """As Executor.evaluate; returns the sum of losses."""
        ranks = [one.on(program, trains=False) for one in self.ranks]
        self.settle()
        for replica in self.other_holders:
            replica.follow(self.program)
        with ExitStack() as stack:
            for rank in ranks:
                stack.enter_context(looking(rank.state))
            return self._run(ranks, StepInputs(inputs, targets, 1.0, keywords), seed)

    def _run(self, ranks: Sequence[ProgramRunner], batch: StepInputs, seed: int | None) -> Tensor:
        self._lift()
        try:
            total = self._once(ranks, batch, seed)
            while self._is_in_vain(ranks):
                total = self._once(ranks, batch, seed)
        except BaseException:  # an interrupt, too, must not leave modules what stands in
            for rank in ranks:
                rank.state.fail(begun=rank.under_way)
            raise
        return total

    def _is_in_vain(self, ranks: Sequence[ProgramRunner]) -> bool:
        """As Executor.is_in_vain, of all ranks."""
        found = []
        for rank, mail in zip(ranks, self.mail, strict=True):
            mail.begin()
            with mail.running():
                found.append(rank.is_in_vain())
            mail.end()
        return any(found)

    def settle(self) -> None:
        """As Executor.settle, of all ranks."""
        self._lift()
        for rank, mail in zip(self.ranks, self.mail, strict=True):
            mail.begin()
            with mail.running():
                rank.settle()
            mail.end()

    def kept(self) -> CheckpointState:
        """As Executor.kept, of all ranks."""
        return kept_of([rank.state for rank in self.ranks], self.settle)

    def _lift(self) -> None:
        """As Ahead.lift, before ranks write to what others hold, too."""
        for rank in self.ranks:
            if rank.state.ahead is not None:
                rank.state.ahead.lift()

    def _once(self, ranks: Sequence[ProgramRunner], batch: StepInputs, seed: int | None) -> Tensor:
        last, program = [], ranks[0].program
        turns = self.turns_of[program.digest]
        for replica in () if ranks[0].state.looks else self.other_holders:
            replica.follow(program)
            replica.share_hooks(program)
        for rank, mail in zip(ranks, self.mail, strict=True):
            mail.begin()
            with mail.running():
                rank.begin(batch)
        with ranks[0].draws.kept(), torch.set_grad_enabled(program.trains):
            for r, index in turns.in_turn if seed is None else turns.any_order(seed):
                with self.mail[r].running():
                    ranks[r].call(index)
        for rank, mail in zip(ranks, self.mail, strict=True):
            with mail.running():
                if rank.finish() is not None:
                    last.append(rank.state.losses)
            mail.end()
        for replica in self.other_holders:
            replica.note_state()
        zero = torch.zeros((), device=last[0][0].device)
        each = (sum(losses, zero) for losses in zip(*last, strict=True))
        total = sum(each, zero)  # by microbatch; each loss is 0 but on one rank
        for mail in self.mail:
            mail.begin()  # a rank's stream may reuse its losses' memory only after this read them
        return total

    def timeline(self) -> Timeline:
        """The Timeline of the last step that was recorded, in seconds from its first instruction.

        On a CPU virtual ranks take turns: while one computes, all others wait.  On a GPU they
        run beside each other as its streams do; this waits for all of them.

        Raises ModelError where no step has been recorded.
        """
        ranks, _ = read([rank.stamps for rank in self.ranks])
        start, end = (np.concatenate(times) for times in zip(*ranks, strict=True))
        return timeline_of(self.program, start, end, self.graph.progress_model)


class ExecutionOrders:
    """The orders in which the instructions of a program may be run, by one after the other.

    Raises ModelError for messages that pass each other.
    """

    def __init__(self, program: Program, progress_model: ProgressModel) -> None:
        self.graph = Graph.of(program, progress_model)
        if cross := crossing(Graph.of(program, "per_edge")):  # which "torch" allows
            raise ModelError(
                f"{cross.sites[0].instr} and {cross.sites[1].instr} pass each other, on two "
                f"communicators of {progress_model!r}, but virtual ranks have one mailbox for both",
                program=program.name,
                sites=cross.sites,
            )
        # Who is at a node, by (rank, index); a send names its node, so it comes first.
        self.at: list[list[tuple[int, int]]] = [[] for _ in range(self.graph.nodes)]
        for position, node in enumerate(self.graph.node.tolist()):
            rank, index, _ = self.graph.index.locate(position)
            self.at[node].insert(0 if position == node else len(self.at[node]), (rank, index))

    def any_order(self, seed: int) -> Iterator[tuple[int, int]]:
        """Rank and index of every instruction, in a legal order."""
        return (one for node in self.graph.random_topological_order(seed) for one in self.at[node])

    @cached_property
    def in_turn(self) -> list[tuple[int, int]]:
        """Rank and index of every instruction in the order of a step without a seed."""
        turns = list(_in_turns(self.graph))
        return turns if len(turns) == len(self.graph.program) else list(self.any_order(0))


def _in_turns(graph: Graph) -> Iterator[tuple[int, int]]:
    """Rank and index of instructions, each Stream in its order; stops where all would wait.

    Before an instruction comes what it waits for, with all its sides: a host that does not wait
    can let a stream wait for what has been issued only.
    """
    program, node, leave = graph.program, graph.node.tolist(), graph.enter_leave[1].tolist()
    sides: dict[int, list[int]] = defaultdict(list)  # of a node
    for position, one in enumerate(node):
        sides[one].append(position)
    whole: dict[int, list[int]] = defaultdict(list)  # of what an instruction ends with: its group
    for position, gate in enumerate(leave):
        whole[gate] += sides[node[position]]
    # What needs what a collective gives waits for all collectives before it on its rank.
    meets = graph.index.is_op(COLLECTIVES)
    met = np.maximum.accumulate(np.where(meets, np.arange(len(meets)), NONE))
    before = np.full((1, len(meets)), NONE)
    before[0, 1:] = met[:-1]
    late = graph.index.is_op(_AFTER_COLLECTIVES)
    before[0, ~late | (before[0] < program.offsets[graph.index.rank])] = NONE
    waits = [{*one} - {NONE} for one in np.concatenate([graph.waits, before]).T.tolist()]
    issued, next_of = [False] * len(node), program.offsets[:-1].tolist()
    moved = True
    while moved:
        moved = False
        for rank, end in enumerate(program.offsets[1:].tolist()):
            at = next_of[rank]
            if at < end and all(issued[q] for p in waits[at] for q in whole[leave[p]]):
                yield rank, at - int(program.offsets[rank])
                issued[at] = moved = True
                next_of[rank] += 1
