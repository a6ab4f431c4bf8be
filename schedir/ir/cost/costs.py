"""Costs: the time of each instruction, in any time unit."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from schedir.call_errors import explain_wrong_calls
from schedir.errors import CostsError
from schedir.ir.cost.cost_fields import COST_BY_OPCODE, CostFields
from schedir.ir.cost.per_stage_values import (
    PerStage,
    expand_by_stage,
    from_grid,
    to_grid,
    to_per_stage,
)
from schedir.ir.isa.instructions import (
    BACKWARD_INPUT_OPS,
    BACKWARD_OPS,
    BACKWARD_WEIGHT_OPS,
    COMPUTE_OPS,
    FORWARD,
    FULL_BACKWARD_OPS,
    INSTRUCTIONS,
    RECOMPUTE,
    Opcode,
    Scope,
)

if TYPE_CHECKING:
    from schedir.ir.instruction_index import InstructionIndex
    from schedir.ir.pipeline.pipeline_shape import PipelineShape

Cost = PerStage

_NOT_PER_MICROBATCH: Final = {row.cost for row in INSTRUCTIONS if row.scope is not Scope.MICROBATCH}
# Costs that are proportional to the size of a stage: its compute, and the collectives and copies
# of its weights.  If a stage is split in two, each part has half of these costs.
STAGE_COSTS: Final = ("FB", *dict.fromkeys(
    row.cost for row in INSTRUCTIONS
    if row.op in COMPUTE_OPS
    or (row.scope in (Scope.STAGE, Scope.OCCURRENCE) and row.cost and row.group != "tied_weights")
))  # fmt: skip
_PER_RANK_OPS: Final = tuple(row.op for row in INSTRUCTIONS if row.scope is Scope.RANK)
# Costs of instructions per rank, such as `step`.  Number k of such a cost is for rank k.
PER_RANK_COSTS: Final = {row.cost for row in INSTRUCTIONS if row.scope is Scope.RANK and row.cost}


def select_ranks(subject: str, value: PerStage, shape: PipelineShape) -> Any:
    """Return a cost of `PER_RANK_COSTS` as one number per rank, or one number for all ranks.

    Args:
        subject: The subject of an error message.
        value: One number, one per rank, or one per stage. In both lists, number k is for rank k.
        shape: Shape of the pipeline.

    Raises:
        CostsError: `value` has another length.
    """
    if not isinstance(value, tuple):
        return value
    if len(value) not in (shape.ranks, shape.stages):
        per_stage = f" and {shape.stages} stages" if shape.stages != shape.ranks else ""
        raise CostsError(
            f"{subject} has {len(value)} numbers for {shape.ranks} ranks{per_stage}",
            hint=f"give {shape.ranks} numbers, one per rank, or one number for all ranks",
        )
    return value[: shape.ranks]


@explain_wrong_calls("Costs(F=1, B=2)")
@dataclass(frozen=True, kw_only=True)
class Costs(CostFields):
    """Time of each instruction, in one time unit of your choice.

    Each cost is a number, one number per stage, or an array of shape (stages, microbatches). An
    array with one row, shape (1, microbatches), applies to all stages. Nested lists work, too.
    Costs of instructions that are not per microbatch, such as `step`, cannot be arrays. Costs of
    instructions per rank, such as `step` and `reduce_norm`, have one number per rank. Such a cost
    can also have as many numbers as there are stages; number k is then for rank k.

    None means that a cost is not given. Missing costs of compute have the defaults below, and all
    other missing costs are 0. A `Cluster` can fill missing costs.

    Args:
        F: Forward. The default is 1.
        I: Gradient of the inputs (BackwardInput). The default is half of B if B is given, else F.
        W: Deferred weight gradients (BackwardWeight). The default is half of B, or F, as for I.
        B: Full backward. The default is I + W.
        R: Forward that runs again (Recompute). The default is F.
        FB: A forward that runs together with a B or an I. The default is the sum of the two costs.
        send: Time from the start of a transfer to its end. The transfer occupies the queues of both
            ranks, but not their compute.
        step: Optimizer step of a rank.
        reduce_grads: All-reduce of a stage's gradient over the replicas. Executors start the
            all-reduce during the last backward. Give only the time that remains after this
            backward. If you give the full time, predictions are too long by the time that overlaps
            with the backward.
        reduce_replicated_stages: All-reduce of a gradient over the replicas of a stage.
        reduce_tied: Sum of the gradients of tied weights.
        reduce_norm: Reduction of the gradient norm over all ranks.
        tp_scatter: Copy of a tensor-parallel rank's part of a boundary, before the rank sends it.
        tp_gather: All-gather of a received boundary in the tensor-parallel group.
        reduce_norm_after_step: Reduction of the gradient norm after the optimizer step
            (post-validation).
        unshard: All-gather of the weights of a stage.
        reduce_scatter: Reduce-scatter of the gradient of a stage.
        snapshot: Copy of a stage's weights and optimizer state to the host, for a checkpoint.
        offload: Copy of saved activations to the host.
        reload: Copy of saved activations back to the device.
        offload_to_disk: Copy of offloaded activations from the host to the disk.
        reload_from_disk: Copy of offloaded activations from the disk to the host.
        reload_state: Copy of a stage's optimizer state to the device.
        stage_step: Optimizer step of one stage on the device.
        offload_state: Copy of a stage's optimizer state to the host.
        tp_reduce: Tensor-parallel all-reduce or reduce-scatter between two segments of a stage.
        reduce_sequence_parallel_grads: Tensor-parallel sum of the gradients of weights that each
            rank has in full, with sequence parallelism.
        read_state_from_disk: Copy of a stage's optimizer state from the disk to the host.
        write_state_to_disk: Copy of a stage's optimizer state from the host to the disk.
        offload_grads: Copy of a stage's gradient to the host.
        host_step: Optimizer step of one stage on the host.
        reload_weights: Copy of a stage's updated weights to the device.
        check_grads_finite: Test whether a rank's gradients are finite, before the step on the host.
        dispatch: All-to-all that sends tokens, or gradients of outputs, to the ranks of experts.
        combine: All-to-all that sends outputs of experts, or gradients of tokens, back.

    Raises:
        CostsError: A cost is negative or not finite, has rows of different lengths, or is an array
            although its instruction is not per microbatch.

    Example:
        >>> from schedir import Costs, PipelineShape, compile, schedules, simulate
        >>> program = compile(schedules.gpipe, PipelineShape(ranks=2, microbatches=4))
        >>> simulate(program, Costs(F=1, B=2)).span
        15.0
        >>> simulate(program, Costs(F=1, B=2, send=0.5)).span
        16.0
        >>> simulate(program, Costs(F=(1, 1.5), B=(2, 3))).span  # one for each stage
        21.0
        >>> simulate(program, Costs(F=[[1, 1, 1, 3]], B=[[2, 2, 2, 6]])).span  # for each microbatch
        27.0
    """

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value is None:
                continue
            allows_arrays = f.name not in _NOT_PER_MICROBATCH
            value = to_per_stage(f"cost {f.name}", value, CostsError, allow_arrays=allows_arrays)
            object.__setattr__(self, f.name, value)

    def __repr__(self) -> str:
        return f"Costs({', '.join(f'{name}={cost!r}' for name, cost in self.specified.items())})"

    @property
    def specified(self) -> dict[str, Cost]:
        """The costs that are given, by name."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def with_defaults(self) -> Costs:
        """Return a copy in which F, I and W have their defaults if they are not given.

        Returns:
            The costs. Other missing costs stay missing.
        """
        forward = 1.0 if self.F is None else self.F
        half = forward if self.B is None else from_grid(to_grid(self.B) / 2)
        return replace(self, **({"F": forward, "I": half, "W": half} | self.specified))

    @cached_property
    def _resolved(self) -> Costs:
        return self.with_defaults()

    @cached_property
    def _tables_by_shape(self) -> dict[PipelineShape, list[NDArray[np.float64]]]:
        return {}

    def for_opcode(self, op: Opcode, shape: PipelineShape) -> NDArray[np.float64]:
        """Return the cost of an instruction for each stage and microbatch.

        Args:
            op: Opcode of the instruction.
            shape: Shape of the pipeline.

        Returns:
            The costs, shape (stages, microbatches). The shape is (stages, 1) if all microbatches
            have the same cost. Missing costs have their defaults.

        Raises:
            CostsError: A cost is given for another number of stages or microbatches.
        """
        if op in FULL_BACKWARD_OPS and self.B is None:
            half_ops = BACKWARD_INPUT_OPS + BACKWARD_WEIGHT_OPS
            with np.errstate(over="ignore"):  # an infinite span raises an error later
                return sum((self.for_opcode(op, shape) for op in half_ops), np.zeros((1, 1)))
        if op is RECOMPUTE and self.R is None:
            return self.for_opcode(FORWARD, shape)
        return self._expand(COST_BY_OPCODE.get(op), shape)

    def paired(self, shape: PipelineShape) -> NDArray[np.float64] | None:
        """Return the cost of a forward that runs together with a backward, if it is given.

        Args:
            shape: Shape of the pipeline.

        Returns:
            The cost `FB`, in the same shape as from `for_opcode`, or None.

        Raises:
            CostsError: See `for_opcode`.
        """
        return None if self.FB is None else self._expand("FB", shape)

    def has_pairing_gain(self, shape: PipelineShape) -> bool:
        """Return whether any forward and backward are faster together than one after the other.

        Args:
            shape: Shape of the pipeline.

        Returns:
            True if `FB` is given, and is less than F plus the longer of B and I for at least one
            stage and microbatch.

        Raises:
            CostsError: See `for_opcode`.
        """
        paired_cost = self.paired(shape)
        if paired_cost is None:
            return False
        separate_cost = self.for_opcode(FORWARD, shape) + np.maximum(
            *(self.for_opcode(op, shape) for op in BACKWARD_OPS)
        )
        return bool((paired_cost < separate_cost).any())

    def per_instruction(
        self, index: InstructionIndex
    ) -> tuple[NDArray[np.float64], NDArray[np.integer[Any]]]:
        """Return the cost of each instruction of a program.

        Args:
            index: The instruction index of the program.

        Returns:
            A table of costs, shape (entries,), and the index of each instruction's cost in this
            table, shape (instructions,).

        Raises:
            CostsError: See `for_opcode`.
        """
        shape = index.program.shape
        tables = self._tables_by_shape.get(shape)
        if tables is None:  # a search or an advice simulates many programs of one shape
            tables = [self.for_opcode(op, shape) for op in Opcode]
            self._tables_by_shape[shape] = tables
        # For an instruction per rank, number k of the cost is for rank k, not for stage k.
        rank_positions = index.find_all_positions(_PER_RANK_OPS)
        column = np.minimum(index.rank[rank_positions], shape.stages - 1)
        if all(table.shape[1] == 1 for table in tables):
            row = index.op.astype(np.int32) * np.int32(shape.stages) + index.stage
            row[rank_positions] = index.op[rank_positions] * np.int32(shape.stages) + column
            return np.concatenate(tables)[:, 0], row
        begin = np.cumsum([0, *(table.size for table in tables)])[index.op]
        width = np.array([table.shape[1] for table in tables])[index.op]
        cell = begin + index.stage * width + np.where(width > 1, index.mb, 0)
        cell[rank_positions] = begin[rank_positions] + column
        return np.concatenate([table.reshape(-1) for table in tables]), cell

    def _expand(self, name: str | None, shape: PipelineShape) -> NDArray[np.float64]:
        value = getattr(self._resolved, name) if name else None
        if value is None:  # the cost of most opcodes
            return np.zeros((shape.stages, 1))
        if name in PER_RANK_COSTS and isinstance(value, tuple):
            value = select_ranks(f"cost {name}", value, shape)
            value = (value + value[-1:] * shape.stages)[: shape.stages]
        return expand_by_stage(f"cost {name}", value, shape.stages, CostsError, shape.microbatches)
