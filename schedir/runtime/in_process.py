"""InProcessExecutor: run all ranks of a program in one process, in any legal order.

It is for property tests, and for the study of a schedule on one machine. A seed selects one of the
orders that the dependency graph allows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from schedir.analysis.dependency_graph import Graph
from schedir.analysis.progress_models import ProgressModel
from schedir.call_errors import explain_wrong_calls
from schedir.errors import ModelError
from schedir.ir.instruction_index import NO_POSITION
from schedir.ir.isa.instructions import COLLECTIVE_OPS, INSTRUCTIONS
from schedir.ir.pipeline.tied_weights import TiedWeights
from schedir.ir.program import Program
from schedir.predict.recorded_timeline import build_timeline
from schedir.predict.timeline import Timeline
from schedir.runtime.arguments import require_factory, require_program, require_stages
from schedir.runtime.autograd.evaluation_mode import evaluation_mode
from schedir.runtime.boundaries.boundary import BoundaryByEdge, BoundaryLike
from schedir.runtime.boundaries.boundary_table import BoundaryTable, PerMicrobatchBoundary
from schedir.runtime.checkpoint_state import CheckpointState, build_checkpoint_state
from schedir.runtime.executor import Executor
from schedir.runtime.executor_options import ExecutionOptions, GradientOptions
from schedir.runtime.extra_programs import ExtraProgram
from schedir.runtime.in_process_copies import StageReplica, copy_shared_parameters, copy_stage
from schedir.runtime.model_checks.rank_model import check_virtual_ranks
from schedir.runtime.model_checks.tied_weight_requirements import fingerprint_parameters
from schedir.runtime.parameters.mixed_precision import OptimizerLike
from schedir.runtime.program_runner import ProgramRunner
from schedir.runtime.rank_resources import Loss
from schedir.runtime.recording.recorder import read_step_times
from schedir.runtime.step_inputs import Keywords, Microbatches, StepInputs
from schedir.transports.in_process.cuda_streams import StreamMailbox
from schedir.transports.in_process.mailbox import Mailbox, make_mailboxes
from schedir.verify.check import find_crossed_messages

_COLLECTIVE_RESULTS = {kind for op in COLLECTIVE_OPS for kind in INSTRUCTIONS[op].gives}
_COLLECTIVE_CONSUMERS = tuple(row.op for row in INSTRUCTIONS if _COLLECTIVE_RESULTS & {*row.needs})


@explain_wrong_calls("InProcessExecutor(program, stages, loss=loss, boundary=boundary)")
class InProcessExecutor:
    """An executor that runs all ranks of a program as virtual ranks of one process.

    Each virtual rank has an `Executor`, and on a GPU also separate CUDA streams. All legal orders
    of the instructions give results with the same bits.

    Stage replicas: if several ranks have a stage, the first of them computes with the given module,
    and the others with copies of it. At the start of each step, a copy gets the state of the given
    module. Tensor hooks on the module's weights also run in the copies. Post-accumulate hooks on
    its weights raise an error.

    Shared Parameters: if stages on several ranks share a Parameter, the first of these ranks
    computes with the Parameter itself, and the others with copies. Ranks in separate processes
    would do the same.

    Args:
        program: The program to run, with tp=1 and dp=1. Tensor-parallel ranks and replicas must run
            concurrently, so they need separate processes.
        stages: All stages of the model: a sequence in order, or a mapping from stage number to
            module.
        loss: See `Executor`.
        boundary: See `Executor`.
        progress_model: The progress model for which `schedir.check` must prove the program.
        optimizer: A function that creates the optimizer of a rank from its parameters. By default
            the weights do not change.
        gradients: See `Executor`.
        seed: See `Executor`.
        tied_weights: See `Executor`.
        extra_programs: See `Executor`.
        execution: See `Executor`.

    Raises:
        ModelError: As in `Executor`. Also if tp or dp is not 1, or if messages between two ranks
            overtake each other. Messages may do so under the progress model "torch_lazy".

    Example:
        >>> import schedir, torch
        >>> from torch import nn
        >>> from schedir.runtime import InProcessExecutor
        >>> program = schedir.compile(schedir.schedules.one_f_one_b, schedir.PipelineShape(2, 4))
        >>> stages = [nn.Linear(8, 8), nn.Linear(8, 1)]
        >>> ranks = InProcessExecutor(program, stages, loss=nn.functional.mse_loss, boundary=(2, 8))
        >>> x, y = torch.ones(4, 2, 8), torch.ones(4, 2, 1)
        >>> bool(ranks.step(x, y) ==
        ...     ranks.step(x, y, order_seed=7))  # another legal order gives the same bits
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
        gradients: GradientOptions = GradientOptions(),
        seed: int | None = 0,
        tied_weights: TiedWeights | None = None,
        extra_programs: Sequence[ExtraProgram] = (),
        execution: ExecutionOptions = ExecutionOptions(),
    ) -> None:
        program = require_program(program)
        make_optimizer = require_factory(optimizer, "the optimizer", "optimizer=torch.optim.AdamW")
        if (program.tp, program.dp) != (1, 1):
            raise ModelError(
                f"InProcessExecutor needs a program with tp 1 and dp 1, not tp {program.tp} and "
                f"dp {program.dp}",
                program=program.name,
                hint="compile without tp and dp, or use an Executor in each process",
            )
        stages = [module for _, module in sorted(require_stages(stages, program).items())]
        shape = program.shape
        boundaries = BoundaryTable.from_boundary(boundary, program)
        self.program = program
        cuda = any(p.is_cuda for stage in stages for p in stage.parameters())
        payloads = (
            [(0, fingerprint_parameters(dict(enumerate(stages))))] if program.has_backward else []
        )
        self.mailboxes: Sequence[Mailbox | StreamMailbox] = make_mailboxes(
            program, progress_model, cuda, payloads
        )
        check_virtual_ranks(program, stages)
        copies = copy_shared_parameters(program, stages)
        self.executors: list[Executor] = []
        self.stage_replicas: list[StageReplica] = []
        # Copy all stages first, because with ZeRO an executor shards the originals.
        rank_stages = [
            {
                s: stages[s] if shape.first_rank_per_stage[s] == rank else copy_stage(stages[s])
                for s in own
            }
            for rank, own in enumerate(shape.stages_on_rank)
        ]
        for rank, (own, local_stages) in enumerate(
            zip(shape.stages_on_rank, rank_stages, strict=True)
        ):
            replicas = [
                StageReplica(s, local_stages[s], stages[s])
                for s in own
                if local_stages[s] is not stages[s]
            ]
            for replica in replicas:
                replica.share_hooks(program)
            self.stage_replicas += replicas
            rank_copies = copies[rank]
            parameters = [
                *dict.fromkeys(
                    rank_copies.get(p, p)
                    for stage in local_stages.values()
                    for p in stage.parameters()
                )
            ]
            executor = _VirtualRankExecutor(
                program,
                rank,
                # Include the stages of other ranks, which may share buffers with the local stages.
                [local_stages.get(s, module) for s, module in enumerate(stages)],
                self.mailboxes[rank],
                loss=loss,
                boundary=boundaries,
                optimizer=_create_optimizer(make_optimizer, parameters),
                # A loss scale has state, so each rank needs a copy.
                gradients=deepcopy(gradients),
                seed=seed,
                tied_weights=tied_weights,
                extra_programs=extra_programs,
                execution=execution,
                parameter_copies=rank_copies,
            )
            self.executors.append(executor)
        self.execution_orders: dict[str, ExecutionOrders] = {
            digest: ExecutionOrders(one.program, progress_model)
            for digest, one in self.executors[0].runners.items()
        }
        self.graph: Graph = self.execution_orders[program.digest].graph
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
        """Run one training step of all ranks, in a legal order of the instructions.

        Args:
            inputs: See `Executor.step`.
            targets: See `Executor.step`.
            grad_scale: See `Executor.step`.
            order_seed: The seed that selects a legal order. By default each rank runs its stream in
                order, like a process. The ranks take turns, with one instruction each, and a rank
                that must wait is skipped. If all ranks had to wait at the same time, the step uses
                the order of seed 0 instead.
            keywords: See `Executor.step`.
            program: See `Executor.step`.

        Returns:
            The unscaled sum of the losses, 0-dimensional.

        Raises:
            ExecutionError: As in `Executor.step`.
            ModelError: As in `Executor.step`. Also if a module with stage replicas has changed in a
                way that cannot be copied to the replicas.
        """
        ranks = [
            one.runner if program is None else one.find_runner(program, has_backward=True)
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
        """Run the forwards of a program on all ranks between two steps. See `Executor.evaluate`.

        Args:
            inputs: See `Executor.step`.
            targets: See `Executor.step`.
            keywords: See `Executor.step`.
            order_seed: See `step`.
            program: See `Executor.evaluate`.

        Returns:
            The sum of the losses, 0-dimensional.
        """
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
        numbers = [rank.state.random_streams.step for rank in runners]
        try:
            total = self._run_once(runners, batch, order_seed)
            while self._needs_rerun(runners):
                total = self._run_once(runners, batch, order_seed)
        except BaseException:  # restore modules also after KeyboardInterrupt
            has_begun = any(rank.resources.is_in_step for rank in runners)
            with ExitStack() as stack:
                for rank, number in zip(runners, numbers, strict=True):
                    stack.callback(rank.state.abort_step, number, has_begun=has_begun)
            raise
        return total

    def _needs_rerun(self, runners: Sequence[ProgramRunner]) -> bool:
        """Return whether the ranks must run the step again. See `ProgramRunner.needs_rerun`."""
        results = []
        for rank, mail in zip(runners, self.mailboxes, strict=True):
            mail.wait_for_caller()
            with mail.use_compute_stream():
                results.append(rank.needs_rerun())
            mail.make_caller_wait()
        return any(results)

    def validate_last_update(self) -> None:
        """Validate the last update of all ranks. See `Executor.validate_last_update`."""
        self._lift_guards()
        for rank, mail in zip(self.executors, self.mailboxes, strict=True):
            mail.wait_for_caller()
            with mail.use_compute_stream():
                rank.validate_last_update()
            mail.make_caller_wait()

    def checkpoint_state(self) -> CheckpointState:
        """Return the state that `schedir.checkpoints` saves and loads, of all ranks."""
        return build_checkpoint_state(
            [rank.state for rank in self.executors], self.validate_last_update
        )

    def _lift_guards(self) -> None:
        """Lift the guards of all ranks, before any rank writes to memory that ranks share."""
        for rank in self.executors:
            for service in rank.state.list_services():
                service.lift_guard()

    def _run_once(
        self, runners: Sequence[ProgramRunner], batch: StepInputs, order_seed: int | None
    ) -> Tensor:
        rank_losses, program = [], runners[0].program
        orders = self.execution_orders[program.digest]
        for replica in () if runners[0].state.is_evaluating else self.stage_replicas:
            replica.sync_state(program)
            replica.share_hooks(program)
        for rank, mail in zip(runners, self.mailboxes, strict=True):
            mail.wait_for_caller()
            with mail.use_compute_stream():
                rank.begin_step(batch)
        with (
            runners[0].state.random_streams.preserve_generators(),
            torch.set_grad_enabled(program.has_backward),
        ):
            for r, index in (
                orders.round_robin_order if order_seed is None else orders.random_order(order_seed)
            ):
                with self.mailboxes[r].use_compute_stream():
                    runners[r].run_instruction(index)
        for rank, mail in zip(runners, self.mailboxes, strict=True):
            with mail.use_compute_stream():
                if rank.finish_step() is not None:
                    rank_losses.append(rank.state.losses)
            mail.make_caller_wait()
        for replica in self.stage_replicas:
            replica.record_state()
        zero = torch.zeros((), device=rank_losses[0][0].device)
        each = (sum(losses, zero) for losses in zip(*rank_losses, strict=True))
        # Sum in the order of microbatches. The loss of a microbatch is 0 on all ranks but one.
        total = sum(each, zero)
        for mail in self.mailboxes:
            # A rank's stream may reuse the memory of its losses only after the sum has read them.
            mail.wait_for_caller()
        return total

    def timeline(self) -> Timeline:
        """Return the timeline of the last recorded step, in seconds from its first instruction.

        On a CPU, one virtual rank computes at a time, and all others wait. On a GPU, the ranks run
        concurrently on their streams, and this method waits for all of them.

        Raises:
            ModelError: No step was recorded.
        """
        ranks, _ = read_step_times([rank.timestamps for rank in self.executors])
        start, end = (np.concatenate(times) for times in zip(*ranks, strict=True))
        return build_timeline(self.program, start, end, self.graph.progress_model)


class _VirtualRankExecutor(Executor):
    """The executor of a virtual rank, which computes with copies of shared Parameters."""

    def __init__(
        self, *args: Any, parameter_copies: Mapping[nn.Parameter, nn.Parameter], **options: Any
    ) -> None:
        self.parameter_copies = parameter_copies
        super().__init__(*args, **options)


class ExecutionOrders:
    """The legal sequential orders of all instructions of a program.

    Args:
        program: The program.
        progress_model: The progress model under which an order must be legal.

    Raises:
        ModelError: Two messages between two ranks overtake each other.
    """

    def __init__(self, program: Program, progress_model: ProgressModel) -> None:
        self.graph: Graph = Graph.from_program(program, progress_model)
        # "torch_lazy" allows messages to overtake each other, but a mailbox has one queue.
        if cross := find_crossed_messages(Graph.from_program(program, "per_edge")):
            raise ModelError(
                f"{cross.sites[0].instr} and {cross.sites[1].instr} are received in another "
                f"order than they are sent: {progress_model!r} has two communicators for them, "
                "but InProcessExecutor has one queue between two ranks",
                program=program.name,
                sites=cross.sites,
            )
        # For each node, the (rank, index) of its instructions. The number of a node is the position
        # of its send, so the send comes first.
        self.node_instructions: list[list[tuple[int, int]]] = [
            [] for _ in range(self.graph.node_id_limit)
        ]
        for position, node in enumerate(self.graph.node.tolist()):
            rank, index, _ = self.graph.index.locate(position)
            self.node_instructions[node].insert(
                0 if position == node else len(self.node_instructions[node]), (rank, index)
            )

    def random_order(self, seed: int) -> Iterator[tuple[int, int]]:
        """Return the rank and index of every instruction, in a random legal order.

        Args:
            seed: The seed that selects the order.
        """
        return (
            one
            for node in self.graph.random_topological_order(seed)
            for one in self.node_instructions[node]
        )

    @cached_property
    def round_robin_order(self) -> list[tuple[int, int]]:
        """The rank and index of every instruction, in the order of a step without `order_seed`."""
        order = list(_iterate_round_robin(self.graph))
        return order if len(order) == len(self.graph.program) else list(self.random_order(0))


def _iterate_round_robin(graph: Graph) -> Iterator[tuple[int, int]]:
    """Yield (rank, index) of instructions, one per rank in turn, until all ranks would wait.

    If an instruction waits for a message or a collective, all sides of the message or collective
    come before the instruction. The reason is that a host can make a CUDA stream wait only for work
    that was issued before.
    """
    program = graph.program
    node = graph.node.tolist()
    leave = graph.entry_exit_nodes[1].tolist()
    sides: dict[int, list[int]] = defaultdict(list)  # node -> positions
    for position, one in enumerate(node):
        sides[one].append(position)
    # Exit node -> positions that must be issued before the node is complete: all sides of all
    # transfers of a group.
    members: dict[int, list[int]] = defaultdict(list)
    for position, gate in enumerate(leave):
        members[gate] += sides[node[position]]
    # A consumer of the result of a collective waits for all earlier collectives of its rank.
    is_collective = graph.index.is_op(COLLECTIVE_OPS)
    latest = np.where(is_collective, np.arange(len(is_collective)), NO_POSITION)
    latest = np.maximum.accumulate(latest)
    before = np.full((1, len(is_collective)), NO_POSITION)
    before[0, 1:] = latest[:-1]
    is_consumer = graph.index.is_op(_COLLECTIVE_CONSUMERS)
    before[0, ~is_consumer | (before[0] < program.offsets[graph.index.rank])] = NO_POSITION
    waits = [
        {*one} - {NO_POSITION} for one in np.concatenate([graph.local_waits, before]).T.tolist()
    ]
    issued = [False] * len(node)
    next_of = program.offsets[:-1].tolist()
    moved = True
    while moved:
        moved = False
        for rank, end in enumerate(program.offsets[1:].tolist()):
            at = next_of[rank]
            if at < end and all(issued[q] for p in waits[at] for q in members[leave[p]]):
                yield rank, at - int(program.offsets[rank])
                issued[at] = moved = True
                next_of[rank] += 1


def _create_optimizer(make_optimizer: Callable[..., Any] | None, parameters: Sequence[Any]) -> Any:
    """Create the optimizer of a rank. Return None without a factory or without parameters."""
    if make_optimizer is None or not parameters:
        return None
    if (optimizer := make_optimizer(parameters)) is None:
        raise ModelError(
            "the function that creates the optimizer of a rank returned None",
            hint="optimizer=lambda parameters: torch.optim.AdamW(parameters)",
        )
    return optimizer
