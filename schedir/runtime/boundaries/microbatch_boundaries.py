"""Boundaries that differ between microbatches, and the check that they fit a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from schedir.errors import ModelError, describe
from schedir.ir.pipeline.stage_segments import ENTRY_COLLECTIVE, EP_LETTERS, EXIT_COLLECTIVE
from schedir.ir.program import Program
from schedir.runtime.boundaries.boundary import (
    Boundary,
    BoundaryByEdge,
    BoundaryLike,
    ModelBoundaries,
)

# ---------------------------------------------------------------- checks of boundaries


def require_fit(boundaries: ModelBoundaries, program: Program) -> None:
    """Check that the boundaries of a model fit a program.

    Args:
        boundaries: The boundaries of one microbatch.
        program: The program.

    Raises:
        ModelError: The program sends a gradient back over a boundary whose tensors have no
            gradient. Or the received shape of a tensor is not the shape that the program's
            collective gives it.
    """
    crossings = [
        (s, f"after stage {s}", crossing) for s, crossing in enumerate(boundaries.stage_boundaries)
    ]
    crossings += [(s, f"from stage {s} to {t}", crossing) for (s, t), crossing in boundaries.skips]
    for s, location, crossing in crossings:
        if program.has_backward and s >= program.frozen_stages and not any(crossing.requires_grad):
            raise ModelError(
                f"the boundary {location} has no gradient ({crossing}), but the program sends a "
                "gradient back",
                program=program.name,
                hint="return a tensor that depends on trained weights; or, if no stage up to "
                f"{s} has trained weights, compile(..., frozen_stages={s + 1})",
            )
    for position, (s, _, crossing) in enumerate(crossings):
        for k, tensor in enumerate(crossing.tensors):
            is_first = k == 0 and position < len(boundaries.stage_boundaries)
            received_shape = (
                _compute_received_shape(tensor, s, program) if is_first else tensor.shape
            )
            if tensor.received.shape != received_shape:
                raise ModelError(
                    f"tensor {k} from stage {s} is {tensor}, but the program gives this tensor the "
                    f"shape {list(received_shape)} before the receiving stage uses it",
                    program=program.name,
                    hint=f"Boundary({tensor.shape}, received_shape={received_shape})"
                    if received_shape != tensor.shape
                    else f"Boundary({tensor.shape})",
                )


def _compute_received_shape(tensor: Boundary, stage: int, program: Program) -> tuple[int, ...]:
    """Return the shape that the first tensor of a boundary has in the next stage.

    With sequence parallelism, tensor-parallel ranks gather all tokens at the entry of a parallel
    region. At the exit of the region, each rank keeps its own tokens. An all-to-all of experts
    changes the number of rows.
    """
    letter, tp = program.segment_boundaries[stage : stage + 1], program.tp
    if letter and letter in EP_LETTERS:
        return tensor.received.shape[:1] + tensor.shape[1:]
    if not program.sequence_parallel or letter not in (ENTRY_COLLECTIVE, EXIT_COLLECTIVE):
        return tensor.shape
    if len(tensor.shape) < 2 or (letter == EXIT_COLLECTIVE and tensor.shape[-2] % tp):
        raise ModelError(
            f"tensor 0 from stage {stage} is {tensor}, but {tp} tensor-parallel ranks must share "
            "its sequence, which is the second last dimension",
            program=program.name,
            hint=f"use the shape (..., tokens, features), where tokens is a multiple of {tp}",
        )
    *batch_dims, tokens, features = tensor.shape
    return *batch_dims, tokens * tp if letter == ENTRY_COLLECTIVE else tokens // tp, features


# ---------------------------------------------------------------- boundaries by microbatch


_PER_MICROBATCH_HINT = "PerMicrobatchBoundary([(length, 64) for length in lengths])"


@dataclass(frozen=True)
class PerMicrobatchBoundary:
    """The boundaries of each microbatch, if microbatches have different shapes.

    Examples are packed data, a smaller last batch, and sequence chunks. A slot is as large as its
    largest value. A message is as large as the value that it transfers.

    Args:
        boundaries: For each microbatch, a boundary in one of the other forms that `Executor` takes.

    Raises:
        ModelError: `boundaries` is not a list or a tuple.

    Example:
        >>> import schedir, torch
        >>> from torch import nn
        >>> from schedir.runtime import InProcessExecutor, PerMicrobatchBoundary
        >>> program = schedir.compile(schedir.schedules.one_f_one_b, schedir.PipelineShape(2, 3))
        >>> stages, loss = [nn.Linear(8, 8), nn.Linear(8, 1)], nn.functional.mse_loss
        >>> lengths = 4, 4, 1
        >>> boundary = PerMicrobatchBoundary([(n, 8) for n in lengths])
        >>> x, y = [torch.ones(n, 8) for n in lengths], [torch.ones(n, 1) for n in lengths]
        >>> InProcessExecutor(program, stages, loss=loss, boundary=boundary).step(x, y).shape
        torch.Size([])
    """

    boundaries: Sequence[BoundaryLike | BoundaryByEdge]

    def __post_init__(self) -> None:
        if not isinstance(self.boundaries, tuple | list):
            raise ModelError(
                f"PerMicrobatchBoundary takes a list, not {describe(self.boundaries)}",
                hint=_PER_MICROBATCH_HINT,
            )
        object.__setattr__(self, "boundaries", tuple(self.boundaries))


@dataclass(frozen=True)
class BoundaryTable:
    """The boundaries of a program, by microbatch.

    Args:
        rows: The boundaries of each microbatch, or a single entry for all microbatches.
    """

    rows: tuple[ModelBoundaries, ...]

    @classmethod
    def from_boundary(
        cls,
        boundary: BoundaryLike
        | BoundaryByEdge
        | ModelBoundaries
        | PerMicrobatchBoundary
        | BoundaryTable,
        program: Program,
    ) -> BoundaryTable:
        """Create the boundaries of a program from the boundary that a user passed.

        Args:
            boundary: A `PerMicrobatchBoundary`, another table, or a boundary for all microbatches
                (see `ModelBoundaries.from_edges`).
            program: The program.

        Raises:
            ModelError: The number of microbatches differs from the program's, or a boundary is
                invalid.
        """
        stages, num_parts, skips = program.shape.stages, program.tp, program.skips
        is_per_microbatch = isinstance(boundary, PerMicrobatchBoundary)
        if isinstance(boundary, BoundaryTable):
            entries: Sequence[BoundaryLike | BoundaryByEdge | ModelBoundaries] = boundary.rows
            is_per_microbatch = len(entries) > 1
        else:
            entries = (
                boundary.boundaries if isinstance(boundary, PerMicrobatchBoundary) else (boundary,)
            )
        if is_per_microbatch and len(entries) != program.shape.microbatches:
            raise ModelError(
                f"the boundary has entries for {len(entries)} microbatches, but the program has "
                f"{program.shape.microbatches} microbatches",
                hint=_PER_MICROBATCH_HINT,
            )
        return cls(
            tuple(ModelBoundaries.from_edges(entry, stages, num_parts, skips) for entry in entries)
        )

    def __getitem__(self, mb: int) -> ModelBoundaries:
        return self.rows[mb if len(self.rows) > 1 else 0]

    def __str__(self) -> str:
        if len(self.rows) == 1:
            return str(self.rows[0])
        return "; ".join(f"microbatch {mb}: {row}" for mb, row in enumerate(self.rows))

    def require_program_fit(self, program: Program) -> None:
        """Check that the boundaries of all microbatches fit a program.

        Args:
            program: The program.

        Raises:
            ModelError: See `require_fit`.
        """
        for row in self.rows:
            require_fit(row, program)
