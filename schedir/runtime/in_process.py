"""InProcessExecutor: run all ranks of a program in one process, in any legal order.

This executor is for property tests, and for the study of a schedule on one machine. A seed selects
one of the orders that the dependency graph allows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

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
from schedir.retired_names import raise_attribute_error
from schedir.runtime.arguments import require_optimizer_factory, require_program, require_stages
from schedir.runtime.autograd.evaluation_mode import evaluation_mode
from schedir.runtime.boundaries.boundary import BoundaryByEdge, BoundaryLike
from schedir.runtime.boundaries.microbatch_boundaries import BoundaryTable, PerMicrobatchBoundary
from schedir.runtime.checkpoint_state import CheckpointState, build_checkpoint_state
from schedir.runtime.executor import Executor
from schedir.runtime.executor_options import ExecutionOptions, GradientOptions
from schedir.runtime.extra_programs import ExtraProgram
from schedir.runtime.in_process_copies import StageReplica, copy_shared_parameters, copy_stage
from schedir.runtime.model_checks.model_to_check import check_virtual_ranks
from schedir.runtime.model_checks.tied_weight_requirements import fingerprint_parameters
from schedir.runtime.parameters.optimizer_inspection import OptimizerLike
from schedir.runtime.program_runner import ProgramRunner
from schedir.runtime.program_state import run_all
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
    module. Tensor hooks on the module's weights also run in the copies. The executor raises an
    error if a weight has a post-accumulate hook.

    Shared Parameters: if stages on several ranks share a Parameter, the first of these ranks
    computes with the Parameter itself, and the others with copies. Ranks in separate processes
    would also compute with copies.

    Args:
        program: The program to run, with tp=1 and dp=1. Tensor-parallel ranks and replicas must run
            concurrently, so they need separate processes.
        stages: All stages of the model: a sequence in order, or a mapping from stage number to
            module.
        loss: See `Executor`.
        boundary: See `Executor`.
        progress_model: The progress model under which `schedir.check` must accept the program.
        optimizer: A function that creates the optimizer of a rank from its parameters. By default
            the weights do not change.
        gradients: See `Executor`.
        seed: See `Executor`.
        tied_weights: See `Executor`.
        extra_programs: See `Executor`.
        execution: See `Executor`.

    Raises:
        ModelError: As in `Executor`. Also if tp or dp is not 1, or if messages between two ranks
            overtake each other. Under the progress model "torch_lazy", messages may overtake each
            other.

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

    if not TYPE_CHECKING:  # With `__getattr__`, a type checker would allow any attribute.
        __getattr__ = raise_attribute_error

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
        make_optimizer = require_optimizer_factory(optimizer, _suggest_optimizer(optimizer))
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
        is_cuda = any(p.is_cuda for stage in stages for p in stage.parameters())
        payloads = (
            [(0, fingerprint_parameters(dict(enumerate(stages))))] if program.has_backward else []
        )
        self.mailboxes: Sequence[Mailbox | StreamMailbox] = make_mailboxes(
            program, progress_model, is_cuda, payloads
        )
        check_virtual_ranks(program, stages)
        copies_by_rank = copy_shared_parameters(program, stages)
        self.executors: list[Executor] = []
        made_optimizers: list[Any] = []
        self.stage_replicas: list[StageReplica] = []
        # Copy all stages first, because with ZeRO an executor shards the originals.
        stages_by_rank = [
            {
                s: stages[s] if shape.first_rank_per_stage[s] == rank else copy_stage(stages[s])
                for s in stage_numbers
            }
            for rank, stage_numbers in enumerate(shape.stages_on_rank)
        ]
        for rank, (stage_numbers, local_stages) in enumerate(
            zip(shape.stages_on_rank, stages_by_rank, strict=True)
        ):
            replicas = [
                StageReplica(s, local_stages[s], stages[s])
                for s in stage_numbers
                if local_stages[s] is not stages[s]
            ]
            for replica in replicas:
                replica.share_hooks(program)
            self.stage_replicas += replicas
            rank_copies = copies_by_rank[rank]
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
                optimizer=_create_optimizer(make_optimizer, parameters, made_optimizers),
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
            digest: ExecutionOrders(runner.program, progress_model)
            for digest, runner in self.executors[0].runners.items()
        }
        self.graph: Graph = self.execution_orders[program.digest].graph
        for replica in self.stage_replicas:
            replica.record_state()

    @explain_wrong_calls("executor.step(inputs, targets)")
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
                order, as a separate process does. The ranks take turns, with one instruction each,
                and a rank that must wait is skipped. If at any time all ranks must wait, the step
                uses the order of seed 0 instead.
            keywords: See `Executor.step`.
            program: See `Executor.step`.

        Returns:
            The unscaled sum of the losses, 0-dimensional.

        Raises:
            ExecutionError: As in `Executor.step`.
            ModelError: As in `Executor.step`. Also if a module with stage replicas has changed in a
                way that cannot be copied to the replicas.
        """
        runners = [executor.find_step_runner(program) for executor in self.executors]
        return self._run_until_valid(
            runners, StepInputs(inputs, targets, grad_scale, keywords), order_seed
        )

    @explain_wrong_calls("executor.evaluate(inputs, targets)")
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
        runners = [executor.find_runner(program, has_backward=False) for executor in self.executors]
        self.validate_last_update()
        for replica in self.stage_replicas:
            replica.sync_state(self.program)
        with ExitStack() as stack:
            for runner in runners:
                stack.enter_context(evaluation_mode(runner.state))
            return self._run_until_valid(
                runners, StepInputs(inputs, targets, 1.0, keywords), order_seed
            )

    def _run_until_valid(
        self, runners: Sequence[ProgramRunner], batch: StepInputs, order_seed: int | None
    ) -> Tensor:
        self._lift_guards()
        step_numbers = [runner.state.random_streams.step for runner in runners]
        try:
            total_loss = self._run_once(runners, batch, order_seed)
            while self._needs_rerun(runners):
                total_loss = self._run_once(runners, batch, order_seed)
        except BaseException:  # restore modules also after KeyboardInterrupt
            has_begun = any(runner.resources.is_in_step for runner in runners)
            run_all(
                [
                    partial(runner.state.abort_step, step_number, has_begun=has_begun)
                    for runner, step_number in zip(runners, step_numbers, strict=True)
                ][::-1]
            )
            raise
        return total_loss

    def _needs_rerun(self, runners: Sequence[ProgramRunner]) -> bool:
        """Return whether the ranks must run the step again. See `ProgramRunner.needs_rerun`."""
        results = []
        for runner, mailbox in zip(runners, self.mailboxes, strict=True):
            mailbox.wait_for_caller()
            with mailbox.use_compute_stream():
                results.append(runner.needs_rerun())
            mailbox.make_caller_wait()
        return any(results)

    def validate_last_update(self) -> None:
        """Validate the last update of all ranks. See `Executor.validate_last_update`."""
        self._lift_guards()
        for executor, mailbox in zip(self.executors, self.mailboxes, strict=True):
            mailbox.wait_for_caller()
            with mailbox.use_compute_stream():
                executor.validate_last_update()
            mailbox.make_caller_wait()

    def checkpoint_state(self) -> CheckpointState:
        """Return the state of all ranks, which `schedir.checkpoints` saves and loads."""
        return build_checkpoint_state(
            [executor.state for executor in self.executors], self.validate_last_update
        )

    def _lift_guards(self) -> None:
        """Lift the guards of unvalidated updates, before any rank writes to shared memory."""
        for executor in self.executors:
            for service in executor.state.list_services():
                service.allow_weight_access()

    def _run_once(
        self, runners: Sequence[ProgramRunner], batch: StepInputs, order_seed: int | None
    ) -> Tensor:
        rank_losses, program = [], runners[0].program
        orders = self.execution_orders[program.digest]
        for replica in () if runners[0].state.is_evaluating else self.stage_replicas:
            replica.sync_state(program)
            replica.share_hooks(program)
        for runner, mailbox in zip(runners, self.mailboxes, strict=True):
            mailbox.wait_for_caller()
            with mailbox.use_compute_stream():
                runner.begin_step(batch)
        with (
            runners[0].state.random_streams.preserve_generators(),
            torch.set_grad_enabled(program.has_backward),
        ):
            for rank, index in (
                orders.round_robin_order if order_seed is None else orders.random_order(order_seed)
            ):
                with self.mailboxes[rank].use_compute_stream():
                    runners[rank].run_instruction(index)
        for runner, mailbox in zip(runners, self.mailboxes, strict=True):
            with mailbox.use_compute_stream():
                if runner.finish_step() is not None:
                    rank_losses.append(runner.state.losses)
            mailbox.make_caller_wait()
        for replica in self.stage_replicas:
            replica.record_state()
        zero = torch.zeros((), device=rank_losses[0][0].device)
        microbatch_losses = (sum(losses, zero) for losses in zip(*rank_losses, strict=True))
        # Sum in the order of microbatches. Only one rank has a nonzero loss for a microbatch.
        total_loss = sum(microbatch_losses, zero)
        for mailbox in self.mailboxes:
            # A rank's stream may reuse the memory of its losses only after the sum has read them.
            mailbox.wait_for_caller()
        return total_loss

    def timeline(self) -> Timeline:
        """Return the timeline of the last recorded step, in seconds from its first instruction.

        On a CPU, one virtual rank computes at a time, and all others wait. On a GPU, the ranks run
        concurrently on their streams, and this method waits for all of them.

        Raises:
            ModelError: No step was recorded.
        """
        rank_times, _ = read_step_times([executor.timestamps for executor in self.executors])
        start, end = (np.concatenate(times) for times in zip(*rank_times, strict=True))
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
        # "torch_lazy" allows messages to overtake each other, but a mailbox has one queue between
        # two ranks.
        if crossing_error := find_crossed_messages(Graph.from_program(program, "per_edge")):
            raise ModelError(
                f"{crossing_error.sites[0].instr} and {crossing_error.sites[1].instr} are received "
                f"in another order than they are sent: {progress_model!r} has two communicators "
                "for them, but InProcessExecutor has one queue between two ranks",
                program=program.name,
                sites=crossing_error.sites,
            )
        # For each node of the graph, the (rank, index) of its instructions. A send comes before its
        # receive. The number of a transfer's node is the position of the send.
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
            location
            for node in self.graph.random_topological_order(seed)
            for location in self.node_instructions[node]
        )

    @cached_property
    def round_robin_order(self) -> list[tuple[int, int]]:
        """The rank and index of every instruction, in the order of a step without `order_seed`."""
        order = list(_iterate_round_robin(self.graph))
        return order if len(order) == len(self.graph.program) else list(self.random_order(0))


def _iterate_round_robin(graph: Graph) -> Iterator[tuple[int, int]]:
    """Yield (rank, index) of instructions, one per rank in turn, until all ranks would wait.

    An instruction that waits for a message or a collective comes after the sends, receives or
    collectives of all ranks that take part. The reason is that a host can make a CUDA stream wait
    only for work that the host has already issued.
    """
    program = graph.program
    node_of_position = graph.node.tolist()
    exit_nodes = graph.entry_exit_nodes[1].tolist()
    positions_of_node: dict[int, list[int]] = defaultdict(list)
    for position, node in enumerate(node_of_position):
        positions_of_node[node].append(position)
    # Exit node of a group of transfers -> the positions of all sends and receives of the group. The
    # node is complete only after the ranks have issued all of them.
    required_positions: dict[int, list[int]] = defaultdict(list)
    for position, exit_node in enumerate(exit_nodes):
        required_positions[exit_node] += positions_of_node[node_of_position[position]]
    # A consumer of the result of a collective waits for all earlier collectives of its rank.
    is_collective = graph.index.is_op(COLLECTIVE_OPS)
    last_collective = np.where(is_collective, np.arange(len(is_collective)), NO_POSITION)
    last_collective = np.maximum.accumulate(last_collective)
    previous_collective = np.full((1, len(is_collective)), NO_POSITION)
    previous_collective[0, 1:] = last_collective[:-1]
    is_consumer = graph.index.is_op(_COLLECTIVE_CONSUMERS)
    is_on_other_rank = previous_collective[0] < program.offsets[graph.index.rank]
    previous_collective[0, ~is_consumer | is_on_other_rank] = NO_POSITION
    waits = [
        {*predecessors} - {NO_POSITION}
        for predecessors in np.concatenate([graph.local_waits, previous_collective]).T.tolist()
    ]
    is_issued = [False] * len(node_of_position)
    next_positions = program.offsets[:-1].tolist()
    has_progressed = True
    while has_progressed:
        has_progressed = False
        for rank, end in enumerate(program.offsets[1:].tolist()):
            next_position = next_positions[rank]
            if next_position < end and all(
                is_issued[q]
                for p in waits[next_position]
                for q in required_positions[exit_nodes[p]]
            ):
                yield rank, next_position - int(program.offsets[rank])
                is_issued[next_position] = has_progressed = True
                next_positions[rank] += 1


def _suggest_optimizer(optimizer: object) -> str:
    """Return an example of the argument `optimizer`, with the class and lr of a given optimizer."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return "optimizer=torch.optim.AdamW"
    name = type(optimizer).__name__
    if hasattr(torch.optim, name):
        name = f"torch.optim.{name}"
    learning_rate = optimizer.defaults.get("lr")
    option = f", lr={learning_rate:g}" if isinstance(learning_rate, float) else ""
    return f"optimizer=lambda parameters: {name}(parameters{option})"


def _create_optimizer(
    make_optimizer: Callable[..., Any] | None,
    parameters: Sequence[Any],
    made_optimizers: list[Any],
) -> Any:
    """Create the optimizer of a rank. Return None without a factory or a trained parameter.

    Args:
        make_optimizer: A function that creates an optimizer from parameters, or None.
        parameters: The parameters of the rank.
        made_optimizers: The optimizers of the previous ranks. The new optimizer is appended.

    Raises:
        ModelError: The factory returned None, or the optimizer of a previous rank.
    """
    if make_optimizer is None or not any(p.requires_grad for p in parameters):
        return None
    if (optimizer := make_optimizer(parameters)) is None:
        raise ModelError(
            "the function that creates the optimizer of a rank returned None",
            hint="optimizer=lambda parameters: torch.optim.AdamW(parameters)",
        )
    if any(optimizer is other for other in made_optimizers):
        raise ModelError(
            "the function that creates the optimizer of a rank returned one optimizer for several "
            "ranks, and each of them would step it",
            hint="create an optimizer in the function: lambda parameters: "
            "torch.optim.AdamW(parameters)",
        )
    made_optimizers.append(optimizer)
    return optimizer
