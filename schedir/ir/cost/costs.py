"""Costs: the time of each instruction, in any one unit."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from schedir.errors import CostsError
from schedir.ir.cost.cost_fields import COST_BY_OPCODE, CostFields
from schedir.ir.cost.per_stage_values import PerStage, expand_by_stage, to_per_stage
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

# What a cost is that nobody tells; all else is free.
_DEFAULT_COSTS: Final = {"F": 1.0, "I": 1.0, "W": 1.0}
_NOT_PER_MICROBATCH: Final = {row.cost for row in INSTRUCTIONS if row.scope is not Scope.MICROBATCH}
# Costs of which half a stage has half: what computes it, and what moves or sums its weights.
STAGE_COSTS: Final = ("FB", *dict.fromkeys(
    row.cost for row in INSTRUCTIONS
    if row.op in COMPUTE_OPS
    or (row.scope in (Scope.STAGE, Scope.OCCURRENCE) and row.cost and row.group != "tied_weights")
))  # fmt: skip
_PER_RANK_OPS: Final = tuple(row.op for row in INSTRUCTIONS if row.scope is Scope.RANK)


@dataclass(frozen=True)
class Costs(CostFields):
    """Time of each instruction: a number, one number per stage, or an array.

    An array has a row for each stage, and in each row a number for each microbatch; one with a
    single row, shape (1, microbatches), is of all stages alike.  Lists of lists do, too.  What is
    not of a microbatch (reduce_*, step) takes none.

    `B` defaults to I + W, `R` to F, and `FB`, the time of a forward run together with a B or an I,
    to the sum of both.  `send` is the time from a transfer's start to its end; it occupies the
    queues of both ranks, never their compute.  `reduce_grads` is what is left of it at its turn:
    executors begin it under the last backward, and with the time of a whole one a prediction is too
    long by what that hides.  None is a cost that nobody tells: F, I and W then take 1, and all else
    is free, unless a `Cluster` fills it.  For instructions that are not of a stage (step,
    reduce_norm) the k-th number is rank k's.

    Raises CostsError for a cost that is negative or not finite, and for rows of different lengths.

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
            arrays = f.name not in _NOT_PER_MICROBATCH
            value = to_per_stage(f"cost {f.name}", value, CostsError, allow_arrays=arrays)
            object.__setattr__(self, f.name, value)

    @property
    def specified(self) -> dict[str, Cost]:
        """The costs that somebody tells, by name."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def with_defaults(self) -> Costs:
        """The same, with F, I and W told: 1 where nobody tells them."""
        return replace(self, **(_DEFAULT_COSTS | self.specified))

    def for_opcode(self, op: Opcode, shape: PipelineShape) -> NDArray[np.float64]:
        """What an instruction costs: shape (stages, microbatches), or (stages, 1) where it is the
        same for all microbatches.

        Raises CostsError for numbers of other stages or microbatches than the shape's.
        """
        if op in FULL_BACKWARD_OPS and self.B is None:
            return sum(
                (self.for_opcode(part, shape) for part in BACKWARD_INPUT_OPS + BACKWARD_WEIGHT_OPS),
                np.zeros((shape.stages, 1)),
            )
        if op is RECOMPUTE and self.R is None:
            return self.for_opcode(FORWARD, shape)
        return self._expand(COST_BY_OPCODE.get(op), shape)

    def paired(self, shape: PipelineShape) -> NDArray[np.float64] | None:
        """What a forward run together with a backward costs, as `for_opcode` says it, if that is
        given."""
        return None if self.FB is None else self._expand("FB", shape)

    def has_pairing_gain(self, shape: PipelineShape) -> bool:
        """Whether any forward and backward take less together than one after the other."""
        together = self.paired(shape)
        if together is None:
            return False
        alone = self.for_opcode(FORWARD, shape) + np.maximum(
            *(self.for_opcode(op, shape) for op in BACKWARD_OPS)
        )
        return bool((together < alone).any())

    def per_instruction(
        self, index: InstructionIndex
    ) -> tuple[NDArray[np.float64], NDArray[np.integer[Any]]]:
        """What each instruction of a program costs: all numbers, and which of them is whose."""
        shape = index.program.shape
        tables = [self.for_opcode(op, shape) for op in Opcode]
        late = index.find_all_positions(_PER_RANK_OPS)  # the k-th number is rank k's
        column = np.minimum(index.rank[late], shape.stages - 1)
        if all(table.shape[1] == 1 for table in tables):
            row = index.op.astype(np.int32) * np.int32(shape.stages) + index.stage
            row[late] = index.op[late] * np.int32(shape.stages) + column
            return np.concatenate(tables)[:, 0], row
        begin = np.cumsum([0, *(table.size for table in tables)])[index.op]
        width = np.array([table.shape[1] for table in tables])[index.op]
        cell = begin + index.stage * width + np.where(width > 1, index.mb, 0)
        cell[late] = begin[late] + column
        return np.concatenate([table.reshape(-1) for table in tables]), cell

    def _expand(self, name: str | None, shape: PipelineShape) -> NDArray[np.float64]:
        value = getattr(self, name) if name else None
        value = _DEFAULT_COSTS.get(name or "", 0.0) if value is None else value
        return expand_by_stage(f"cost {name}", value, shape.stages, CostsError, shape.microbatches)
