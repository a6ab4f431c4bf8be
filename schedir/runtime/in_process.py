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
from schedir.ir.instruction_index import NO_POSITION
from schedir.ir.isa.instructions import COLLECTIVE_OPS, INSTRUCTIONS
from schedir.ir.pipeline.tied_weights import TiedWeights
from schedir.ir.program import Program
from schedir.predict.recorded_timeline import build_timeline
from schedir.predict.timeline import Timeline
from schedir.runtime.arguments import require_factory, require_program, require_stages
from schedir.runtime.boundaries.boundary import BoundaryByEdge, BoundaryLike
from schedir.runtime.boundaries.boundary_table import BoundaryTable, PerMicrobatchBoundary
from schedir.runtime.checkpoint_state import CheckpointState, build_checkpoint_state
from schedir.runtime.evaluation_run import evaluation_mode
from schedir.runtime.executor import Executor
from schedir.runtime.extra_programs import ExtraProgram
from schedir.runtime.in_process_copies import StageReplica, copy_shared_parameters, copy_stage
from schedir.runtime.model_checks.memory_overlap import require_copyable, require_rank_local_memory
from schedir.runtime.parameters.mixed_precision import LossScale, OptimizerLike
from schedir.runtime.parameters.tied_parameters import fingerprint_parameters
from schedir.runtime.program_runner import ProgramRunner
from schedir.runtime.rank_resources import Loss
from schedir.runtime.recording.recorder import read_step_times
from schedir.runtime.step_inputs import Keywords, Microbatches, StepInputs
from schedir.transports.in_process.mailbox import make_mailboxes
from schedir.verify.check import find_crossed_messages

_COLLECTIVE_RESULTS = {token for op in COLLECTIVE_OPS for token in INSTRUCTIONS[op].gives}
_COLLECTIVE_CONSUMERS = tuple(row.op for row in INSTRUCTIONS if _COLLECTIVE_RESULTS & {*row.needs})


class InProcessExecutor:
    """All ranks of a program as virtual ranks of this process.

    `stages` are all the stages of the model, in order; where stages have several holders, all but
    the first have copies.  `optimizer` makes each rank's from its parameters, `loss_scale` each
    rank's own.  On a GPU, each rank has streams of its own.  `order_seed`, `tied_weights`,
    `allow_identical_stages`, `record_timestamps`,
    `debug` and `spill_dir` are as an Executor's.  Of a Parameter that stages on several ranks
    share, the first of these ranks has itself, and others a copy, as processes would.  Copies begin
    each step as what they are of.  Tensor hooks on weights of a stage with several holders are
    called in each; post-accumulate hooks there are refused. Raises ModelError as an Executor, for
    programs with tensor- or data-parallel groups, whose ranks run at once and need processes, and
    for those of which messages between two ranks pass each other, as they may under the model
    "torch".

    >>> import schedir, torch
    >>> from torch import nn
    >>> from schedir.runtime import InProcessExecutor
    >>> program = schedir.compile(schedir.schedules.one_f_one_b, schedir.PipelineShape(2, 4))
    >>> stages = [nn.Linear(8, 8), nn.Linear(8, 1)]
    >>> ranks = InProcessExecutor(program, stages, loss=nn.functional.mse_loss, boundary=(2, 8))
    >>> x, y = torch.ones(4, 2, 8), torch.ones(4, 2, 1)
    >>> bool(ranks.step(x, y) == ranks.step(x, y, order_seed=7))  # each legal order: the same bits
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
        boundary: BoundaryLike | BoundaryByEdge | PerMicrobatchBoundary,
        progress_model: ProgressModel = "per_edge",
        optimizer: Callable[[list[nn.Parameter]], OptimizerLike] | None = None,
        max_norm: float | None = None,
        loss_scale: Callable[[], LossScale] | None = None,
        seed: int | None = 0,
        tied_weights: TiedWeights | None = None,
        allow_identical_stages: bool = False,
        extra_programs: Sequence[ExtraProgram] = (),
        record_timestamps: bool = True,
        debug: bool = False,
        spill_dir: str | Path | None = None,
    ) -> None:
        program = require_program(program)
        make = require_factory(optimizer, "the optimizer", "optimizer=torch.optim.AdamW")
        scale = require_factory(loss_scale, "the loss scale", "loss_scale=LossScale")
        if (program.tp, program.dp) != (1, 1):
            raise ModelError("virtual ranks run with tp 1 and dp 1", program=program.name)
        stages = [module for _, module in sorted(require_stages(stages, program).items())]
        shape = program.shape
        passing = BoundaryTable.from_boundary(boundary, program)
        self.program = program
        cuda = any(p.is_cuda for stage in stages for p in stage.parameters())
        told = (
            [(0, fingerprint_parameters(dict(enumerate(stages))))] if program.has_backward else []
        )
        self.mailboxes = make_mailboxes(program, progress_model, cuda, told)
        if program.has_backward:
            require_rank_local_memory(
                dict(enumerate(stages)), shape.first_rank_per_stage.tolist(), program.name
            )
            for s, module in enumerate(stages) if shape.placement_rows > 1 else ():
                require_copyable(module, s, program.name)
        copies = copy_shared_parameters(program, stages)
        self.executors = []
        self.stage_replicas: list[StageReplica] = []
        copied = [  # before an executor cuts what they are of (ZeRO)
            {
                s: stages[s] if shape.first_rank_per_stage[s] == rank else copy_stage(stages[s])
                for s in own
            }
            for rank, own in enumerate(shape.stages_on_rank)
        ]
        for rank, (own, held) in enumerate(zip(shape.stages_on_rank, copied, strict=True)):
            replicas = [
                StageReplica(s, held[s], stages[s]) for s in own if held[s] is not stages[s]
            ]
            for replica in replicas:
                replica.share_hooks(program)
            self.stage_replicas += replicas
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
                self.mailboxes[rank],
                loss=loss,
                boundary=passing,
                optimizer=make(parameters) if make and parameters else None,
                max_norm=max_norm,
                loss_scale=scale and scale(),
                seed=seed,
                tied_weights=tied_weights,
                allow_identical_stages=allow_identical_stages,
                extra_programs=extra_programs,
                parameter_copies=copies[rank],
                other_rank_stages=[module for s, module in enumerate(stages) if s not in own],
                record_timestamps=record_timestamps,
                debug=debug,
                spill_dir=spill_dir,
            )
            self.executors.append(executor)
        self.execution_orders = {
            digest: ExecutionOrders(one.program, progress_model)
            for digest, one in self.executors[0].runners.items()
        }
        self.graph = self.execution_orders[program.digest].graph
        for replica in self.stage_replicas:
            replica.record_state()

    def step(
        self,
        inputs: Microbatches,
        targets: Microbatches,
        grad_scale: float | Tensor = 1.0,
        order_seed: int | None = None,
        keywords: Keywords = (),
        *,
        program: Program | None = None,
    ) -> Tensor:
        """Run every rank's Stream once, in the legal order that `order_seed` picks.

        Without a seed each Stream is run in its own order, as processes would, one instruction
        of each rank in turn as far as they need not wait; where hosts that do so would wait for
        each other, it is the order of seed 0.

        As Executor.step; returns the sum of losses.
        """
        ranks = [
            one if program is None else one.find_runner(program, has_backward=True)
            for one in self.executors
        ]
        return self._run_until_valid(
            ranks, StepInputs(inputs, targets, grad_scale, keywords), order_seed
        )

    def evaluate(
        self,
        inputs: Microbatches,
        targets: Microbatches,
        keywords: Keywords = (),
        order_seed: int | None = None,
        *,
        program: Program | None = None,
    ) -> Tensor:
        """As Executor.evaluate; returns the sum of losses."""
        ranks = [one.find_runner(program, has_backward=False) for one in self.executors]
        self.validate_last_update()
        for replica in self.stage_replicas:
            replica.sync_state(self.program)
        with ExitStack() as stack:
            for rank in ranks:
                stack.enter_context(evaluation_mode(rank.state))
            return self._run_until_valid(
                ranks, StepInputs(inputs, targets, 1.0, keywords), order_seed
            )

    def _run_until_valid(
        self, runners: Sequence[ProgramRunner], batch: StepInputs, order_seed: int | None
    ) -> Tensor:
        self._lift_guards()
        try:
            total = self._run_once(runners, batch, order_seed)
            while self._needs_rerun(runners):
                total = self._run_once(runners, batch, order_seed)
        except BaseException:  # an interrupt, too, must not leave modules what stands in
            for rank in runners:
                rank.state.abort_step(has_begun=rank.is_in_step)
            raise
        return total

    def _needs_rerun(self, runners: Sequence[ProgramRunner]) -> bool:
        """As Executor.is_in_vain, of all ranks."""
        found = []
        for rank, mail in zip(runners, self.mailboxes, strict=True):
            mail.wait_for_caller()
            with mail.use_compute_stream():
                found.append(rank.needs_rerun())
            mail.make_caller_wait()
        return any(found)

    def validate_last_update(self) -> None:
        """As Executor.settle, of all ranks."""
        self._lift_guards()
        for rank, mail in zip(self.executors, self.mailboxes, strict=True):
            mail.wait_for_caller()
            with mail.use_compute_stream():
                rank.validate_last_update()
            mail.make_caller_wait()

    def checkpoint_state(self) -> CheckpointState:
        """As Executor.kept, of all ranks."""
        return build_checkpoint_state(
            [rank.state for rank in self.executors], self.validate_last_update
        )

    def _lift_guards(self) -> None:
        """As Ahead.lift, before ranks write to what others hold, too."""
        for rank in self.executors:
            if rank.state.optimistic_step is not None:
                rank.state.optimistic_step.lift_guard()

    def _run_once(
        self, runners: Sequence[ProgramRunner], batch: StepInputs, order_seed: int | None
    ) -> Tensor:
        last, program = [], runners[0].program
        turns = self.execution_orders[program.digest]
        for replica in () if runners[0].state.is_evaluating else self.stage_replicas:
            replica.sync_state(program)
            replica.share_hooks(program)
        for rank, mail in zip(runners, self.mailboxes, strict=True):
            mail.wait_for_caller()
            with mail.use_compute_stream():
                rank.begin_step(batch)
        with (
            runners[0].random_streams.preserve_generators(),
            torch.set_grad_enabled(program.has_backward),
        ):
            for r, index in (
                turns.round_robin_order if order_seed is None else turns.random_order(order_seed)
            ):
                with self.mailboxes[r].use_compute_stream():
                    runners[r].run_instruction(index)
        for rank, mail in zip(runners, self.mailboxes, strict=True):
            with mail.use_compute_stream():
                if rank.finish_step() is not None:
                    last.append(rank.state.losses)
            mail.make_caller_wait()
        for replica in self.stage_replicas:
            replica.record_state()
        zero = torch.zeros((), device=last[0][0].device)
        each = (sum(losses, zero) for losses in zip(*last, strict=True))
        total = sum(each, zero)  # by microbatch; each loss is 0 but on one rank
        for mail in self.mailboxes:
            # a rank's stream may reuse its losses' memory only after this read them
            mail.wait_for_caller()
        return total

    def timeline(self) -> Timeline:
        """The Timeline of the last step that was recorded, in seconds from its first instruction.

        On a CPU virtual ranks take turns: while one computes, all others wait.  On a GPU they
        run beside each other as its streams do; this waits for all of them.

        Raises ModelError where no step has been recorded.
        """
        ranks, _ = read_step_times([rank.timestamps for rank in self.executors])
        start, end = (np.concatenate(times) for times in zip(*ranks, strict=True))
        return build_timeline(self.program, start, end, self.graph.progress_model)


class ExecutionOrders:
    """The orders in which the instructions of a program may be run, by one after the other.

    Raises ModelError for messages that pass each other.
    """

    def __init__(self, program: Program, progress_model: ProgressModel) -> None:
        self.graph = Graph.from_program(program, progress_model)
        if cross := find_crossed_messages(
            Graph.from_program(program, "per_edge")
        ):  # which "torch" allows
            raise ModelError(
                f"{cross.sites[0].instr} and {cross.sites[1].instr} pass each other, on two "
                f"communicators of {progress_model!r}, but virtual ranks have one mailbox for both",
                program=program.name,
                sites=cross.sites,
            )
        # Who is at a node, by (rank, index); a send names its node, so it comes first.
        self.node_instructions: list[list[tuple[int, int]]] = [
            [] for _ in range(self.graph.node_id_limit)
        ]
        for position, node in enumerate(self.graph.node.tolist()):
            rank, index, _ = self.graph.index.locate(position)
            self.node_instructions[node].insert(
                0 if position == node else len(self.node_instructions[node]), (rank, index)
            )

    def random_order(self, seed: int) -> Iterator[tuple[int, int]]:
        """Rank and index of every instruction, in a legal order."""
        return (
            one
            for node in self.graph.random_topological_order(seed)
            for one in self.node_instructions[node]
        )

    @cached_property
    def round_robin_order(self) -> list[tuple[int, int]]:
        """Rank and index of every instruction in the order of a step without a seed."""
        turns = list(_iterate_round_robin(self.graph))
        return turns if len(turns) == len(self.graph.program) else list(self.random_order(0))


def _iterate_round_robin(graph: Graph) -> Iterator[tuple[int, int]]:
    """Rank and index of instructions, each Stream in its order; stops where all would wait.

    Before an instruction comes what it waits for, with all its sides: a host that does not wait
    can let a stream wait for what has been issued only.
    """
    program, node, leave = graph.program, graph.node.tolist(), graph.entry_exit_nodes[1].tolist()
    sides: dict[int, list[int]] = defaultdict(list)  # of a node
    for position, one in enumerate(node):
        sides[one].append(position)
    whole: dict[int, list[int]] = defaultdict(list)  # of what an instruction ends with: its group
    for position, gate in enumerate(leave):
        whole[gate] += sides[node[position]]
    # What needs what a collective gives waits for all collectives before it on its rank.
    meets = graph.index.is_op(COLLECTIVE_OPS)
    met = np.maximum.accumulate(np.where(meets, np.arange(len(meets)), NO_POSITION))
    before = np.full((1, len(meets)), NO_POSITION)
    before[0, 1:] = met[:-1]
    late = graph.index.is_op(_COLLECTIVE_CONSUMERS)
    before[0, ~late | (before[0] < program.offsets[graph.index.rank])] = NO_POSITION
    waits = [
        {*one} - {NO_POSITION} for one in np.concatenate([graph.local_waits, before]).T.tolist()
    ]
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
