"""The shape of a pipeline: ranks, stages, their placement, and microbatches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from functools import cached_property
from operator import index
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from schedir.call_errors import explain_wrong_calls
from schedir.errors import ShapeError
from schedir.ir.cost.number_parsing import NON_NUMBER_TYPES, parse_integer
from schedir.ir.input_trust import require_instruction_limit
from schedir.ir.isa.instructions import INSTRUCTIONS, Scope
from schedir.ir.pipeline.field_schema import (
    FieldType,
    collect_fields,
    digest_value,
    make_field_metadata,
    make_integer_type,
    parse_integers,
)
from schedir.ir.pipeline.placement import (
    NAMED_PLACEMENTS,
    PLACEMENT_TYPE,
    Placement,
    find_named_placement,
    require_placement_rows,
    to_placement_rows,
)
from schedir.retired_names import raise_attribute_error

# Limits of a shape.  These limits fit an instruction word, which has 16 bits for the stage and 32
# bits for the microbatch.
MAX_MICROBATCHES = 2**20
MAX_STAGES = 2**15


def _parse_weight_delay(text: str) -> int | tuple[int, ...]:
    try:
        return parse_integers(text) if "," in text else parse_integer(text)
    except ValueError:
        raise ValueError(f"{_DELAY_REQUIREMENT}, not {text!r}") from None


def _format_weight_delay(value: str | int | tuple[int, ...], _: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


# The text form and the command-line help of each field of a shape.
_DELAY_REQUIREMENT = "must be an integer, or one integer per stage like 2,1,0"
_RANKS = make_field_metadata(
    make_integer_type(1, MAX_STAGES),
    "number of pipeline ranks ({ranks})",
    is_always_shown=True,
    digest=digest_value,
)
_MICROBATCHES = make_field_metadata(
    make_integer_type(1, MAX_MICROBATCHES),
    "number of microbatches ({per_rank} per rank)",
    is_always_shown=True,
    digest=digest_value,
)
_STAGES_PER_RANK = make_field_metadata(
    make_integer_type(1, MAX_STAGES),
    "number of stages per rank (default: set by the schedule, such as 1 for gpipe)",
    is_always_shown=True,
    digest=lambda _, __: (),  # The digest has the placement, which determines this number.
)
_PLACEMENT = make_field_metadata(
    PLACEMENT_TYPE,
    f"the rank of each stage: {', '.join(NAMED_PLACEMENTS)}, or a list such as 0,1,1,0. With "
    "stage replicas, give one list per replica, with / between them: 0,1/1,0",
    is_always_shown=True,
    digest=lambda _, shape: (shape.replica_ranks.tolist(),),
)
_OPTIMIZER_STEPS = make_field_metadata(
    make_integer_type(1, MAX_MICROBATCHES),
    "number of optimizer steps in one program; the pipeline does not drain between them (1)",
    digest=digest_value,
)
_WEIGHT_DELAY = make_field_metadata(
    FieldType(
        _DELAY_REQUIREMENT, _parse_weight_delay, int | tuple[int, ...], to_text=_format_weight_delay
    ),
    "age of the weights that a microbatch uses, in optimizer steps: one number, or one per "
    "stage, such as 2,1,0",
    shown_with="optimizer_steps",
    digest=digest_value,
)
_SEQUENCE_CHUNKS = make_field_metadata(
    make_integer_type(1, MAX_MICROBATCHES),
    "number of chunks of each sequence; each chunk is a microbatch (1)",
    in_config=False,  # The GPT model of `schedir train` cannot process sequence chunks.
)


class _DefaultNumber(int):
    """A default number, which a schedule may replace. The type shows that no number was given."""


class _DefaultName(str):
    """A default name, which a schedule may replace. The type shows that no name was given."""


_DEFAULT_TYPES: Final = (_DefaultNumber, _DefaultName)


@explain_wrong_calls("PipelineShape(ranks=4, microbatches=8)")
@dataclass(frozen=True, repr=False)
class PipelineShape:
    """The shape of a pipeline: ranks, stages, their placement, and microbatches.

    If `stages_per_rank`, `placement` or `weight_delay` is not given, `compile` uses the value that
    the schedule needs. For example, `interleaved` has two stages per rank, and `zb_v` has the
    placement "vee".

    Args:
        ranks: Number of pipeline ranks.
        microbatches: Number of microbatches of the program.
        stages_per_rank: Number of stages on each rank. With a placement that lists ranks, this
            number is the largest number of stages on a rank.
        placement: The rank of each stage.

            - "loop": rank r has the stages j * ranks + r.
            - "vee": rank r has the stages r and 2 * ranks - 1 - r. The default is two stages per
              rank. With more stages per rank, the pattern repeats.
            - A tuple with the rank of each stage: `(0, 1, 1, 0)`.
            - "mirror", for DualPipe and Chimera: each stage has two replicas. The first replicas
              are placed as in "loop", with half as many stages per rank. If the first replica of a
              stage is on rank r, the second replica is on rank ranks - 1 - r.
            - "mirror-vee", for BitPipe: two replicas as in "mirror", but the first replicas are
              placed as in "vee". The default is four stages per rank.
            - Several tuples: one row for each replica of the stages. The microbatches are divided
              into one part per row, larger parts first. Each part passes through the replicas of
              its row.
        optimizer_steps: Number of optimizer steps of the program. The pipeline does not drain
            between two steps. Each step has the same number of consecutive microbatches.
        weight_delay: The age of the weights of a microbatch, in optimizer steps. A microbatch of
            step u uses the weights after max(u - weight_delay, 0) steps in its forward and its
            backward. Give one number, or one number per stage.
        sequence_chunks: Number of chunks of each sequence. Each chunk is a microbatch: chunk j of
            sequence n is microbatch n * sequence_chunks + j. A chunk attends to the earlier chunks
            of its sequence, and its backward adds to the gradients of these earlier chunks. So each
            stage runs the chunks of a sequence forward in ascending order, and backward in
            descending order.

    Raises:
        ShapeError: No pipeline can have this shape.

    Example:
        >>> from schedir import PipelineShape
        >>> PipelineShape(ranks=2, microbatches=8, stages_per_rank=2).stages_on_rank
        ((0, 2), (1, 3))
        >>> PipelineShape(ranks=2, microbatches=8, placement="vee").stages_on_rank
        ((0, 3), (1, 2))
        >>> PipelineShape(ranks=2, microbatches=8, placement=(0, 1, 1)).stages_on_rank
        ((0,), (1, 2))
        >>> PipelineShape(ranks=3, microbatches=8, placement=((0, 1), (2, 0))).replica_ranks
        array([[0, 1],
               [2, 0]])
        >>> PipelineShape(ranks=2, microbatches=0)
        Traceback (most recent call last):
            ...
        schedir.errors.ShapeError: microbatches must be from 1 to 1048576, not 0
    """

    ranks: int = field(metadata=_RANKS)
    microbatches: int = field(metadata=_MICROBATCHES)
    stages_per_rank: int = field(default=_DefaultNumber(1), metadata=_STAGES_PER_RANK)
    placement: Placement = field(default=_DefaultName("loop"), metadata=_PLACEMENT)
    _: KW_ONLY
    optimizer_steps: int = field(default=1, metadata=_OPTIMIZER_STEPS)
    weight_delay: int | tuple[int, ...] = field(default=_DefaultNumber(0), metadata=_WEIGHT_DELAY)
    sequence_chunks: int = field(default=1, metadata=_SEQUENCE_CHUNKS)

    if not TYPE_CHECKING:  # A type checker would allow any attribute.
        __getattr__ = raise_attribute_error

    def __post_init__(self) -> None:
        for f in SHAPE_FIELDS:
            value = getattr(self, f.name)
            if not isinstance(value, _DEFAULT_TYPES):
                object.__setattr__(self, f.name, f.field_type.resolve(f.name, value, None))
        if isinstance(self.placement, str):
            self._apply_named_placement(self.placement)
        else:
            self._apply_placement_rows(self.placement)
        if self.microbatches < self.placement_rows:
            raise ShapeError(
                f"a placement with {self.placement_rows} replicas of each stage needs at least "
                f"{self.placement_rows} microbatches, not {self.microbatches}",
                fields=["placement", "microbatches"],
            )
        if self.stages > MAX_STAGES:
            raise ShapeError(
                f"there are {self.stages} stages, and the limit is {MAX_STAGES}",
                fields=["ranks", "stages_per_rank", "placement"],
            )
        self.require_instruction_limit()
        self._check_updates()
        # Each row and each update must begin with the first chunk of a sequence.
        divisible_numbers = {*self.microbatch_row_offsets, self.microbatches_per_update}
        if any(number % self.sequence_chunks for number in divisible_numbers):
            rule = (
                "; the microbatches of each update, and of each row of the placement, must be a "
                "multiple of sequence_chunks"
            ) * (len(divisible_numbers) > 2)
            raise ShapeError(
                f"{self.microbatches} microbatches cannot be divided by sequence_chunks "
                f"{self.sequence_chunks}{rule}",
                fields=["sequence_chunks", "microbatches"],
            )

    @property
    def default_fields(self) -> frozenset[str]:
        """Return the names of the fields that were not given. Equality ignores this property."""
        return frozenset(
            f.name for f in SHAPE_FIELDS if isinstance(getattr(self, f.name), _DEFAULT_TYPES)
        )

    def resolve_defaults(self) -> PipelineShape:
        """Return an equal shape whose values a schedule cannot replace.

        Returns:
            This shape if all fields were given, and otherwise a copy whose `default_fields` are
            empty.
        """
        defaults: dict[str, Any] = {}
        for name in self.default_fields:
            value = getattr(self, name)
            defaults[name] = str(value) if isinstance(value, str) else int(value)
        return replace(self, **defaults) if defaults else self

    def with_stage_ranks(self, placement: Placement, **changes: Any) -> PipelineShape:
        """Return a copy of the shape with the stages on other ranks.

        Args:
            placement: The rank of each stage. The number of stages per rank follows from the
                placement.
            **changes: New values of other fields.
        """
        return replace(self, placement=placement, stages_per_rank=_DefaultNumber(1), **changes)

    def __repr__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        defaults = {f.name: f.default for f in fields(self)}
        arguments = (
            f"{name}={value!r}" for name, value in values.items() if value != defaults[name]
        )
        return f"PipelineShape({', '.join(arguments)})"

    def _apply_named_placement(self, name: str) -> None:
        named_placement = find_named_placement(name)
        if self.stages_per_rank == 1 != named_placement.stages_per_rank:
            if not isinstance(self.stages_per_rank, _DEFAULT_TYPES):
                raise ShapeError(
                    f"placement {name!r} needs more than one stage per rank",
                    hint=f"stages_per_rank={named_placement.stages_per_rank}, the default of this "
                    "placement",
                    fields=["stages_per_rank", "placement"],
                )
            object.__setattr__(
                self, "stages_per_rank", _DefaultNumber(named_placement.stages_per_rank)
            )
        if len(named_placement.rows) == 1:
            return
        for field_name in ("ranks", "stages_per_rank"):
            if getattr(self, field_name) % 2:
                raise ShapeError(
                    f"placement {name!r} pairs ranks and their stages: {field_name} must be even, "
                    f"not {getattr(self, field_name)}",
                    fields=["placement", field_name],
                )

    def _apply_placement_rows(self, placement: object) -> None:
        rows = to_placement_rows(placement)
        max_stages = require_placement_rows(rows, self.ranks)
        is_given = not isinstance(self.stages_per_rank, _DEFAULT_TYPES)
        if is_given and self.stages_per_rank != max_stages:
            raise ShapeError(
                f"placement puts up to {max_stages} stages on a rank, but stages_per_rank is "
                f"{self.stages_per_rank}",
                hint=f"leave out stages_per_rank, or set it to {max_stages}",
                fields=["placement", "stages_per_rank"],
            )
        object.__setattr__(self, "placement", rows if len(rows) > 1 else rows[0])
        object.__setattr__(self, "stages_per_rank", max_stages)

    def _check_updates(self) -> None:
        if self.microbatches % self.optimizer_steps:
            raise ShapeError(
                f"{self.microbatches} microbatches cannot be divided by optimizer_steps "
                f"{self.optimizer_steps}",
                fields=["microbatches", "optimizer_steps"],
            )
        if self.placement_rows > 1 and self.optimizer_steps > 1:
            raise ShapeError(
                f"a placement with {self.placement_rows} replicas of each stage needs "
                f"optimizer_steps=1, not {self.optimizer_steps}",
                fields=["placement", "optimizer_steps"],
            )
        try:
            if isinstance(self.weight_delay, NON_NUMBER_TYPES):
                raise TypeError
            if isinstance(self.weight_delay, Iterable):
                delay: int | tuple[int, ...] = tuple(index(d) for d in self.weight_delay)
            else:
                delay = index(self.weight_delay)
        except TypeError:
            raise ShapeError(
                "weight_delay must be an integer, or a list with one integer per stage, not "
                f"{self.weight_delay!r}",
                fields=["weight_delay"],
            ) from None
        delays = delay if isinstance(delay, tuple) else (delay,)
        if isinstance(delay, tuple) and len(delay) != self.stages:
            raise ShapeError(
                f"weight_delay has {len(delay)} numbers for {self.stages} stages",
                fields=["weight_delay"],
            )
        for d in delays:
            if not 0 <= d < MAX_MICROBATCHES:
                raise ShapeError(
                    f"weight_delay must be from 0 to {MAX_MICROBATCHES - 1}, not {d}",
                    fields=["weight_delay"],
                )
        if len({*delays}) == 1:
            delay = delays[0]
        if delay != 0 and self.optimizer_steps == 1:
            raise ShapeError(
                f"weight_delay is {delay}, but optimizer_steps is 1: there are no older weights",
                fields=["weight_delay", "optimizer_steps"],
            )
        if not isinstance(self.weight_delay, _DEFAULT_TYPES):
            object.__setattr__(self, "weight_delay", delay)

    @property
    def microbatches_per_update(self) -> int:
        """The number of microbatches of each optimizer step."""
        return self.microbatches // self.optimizer_steps

    def weight_version(self, stage: ArrayLike, mb: ArrayLike) -> NDArray[np.int64]:
        """Return the version of the weights that each stage uses for each microbatch.

        Args:
            stage: Numbers of stages.
            mb: Numbers of microbatches.

        Returns:
            The number of updates that made this version. The shape is the broadcast shape of
            `stage` and `mb`, or that of `mb` if all stages have the same weight delay.
        """
        delay = np.asarray(self.weight_delay)
        lag = delay[np.asarray(stage)] if delay.ndim else delay
        return np.asarray(
            np.maximum(np.asarray(mb, np.int64) // self.microbatches_per_update - lag, 0)
        )

    @property
    def stages_per_rank_text(self) -> str:
        """The number of stages per rank as a phrase, such as "up to 2 stages per rank"."""
        counts = {*map(len, self.stages_on_rank)}
        text = f"{max(counts)} stage{'s' * (max(counts) > 1)} per rank"
        return text if len(counts) == 1 else f"up to {text}"

    @cached_property
    def placement_rows(self) -> int:
        """The number of rows of the placement, which is the number of replicas of each stage."""
        if isinstance(self.placement, str):
            return len(NAMED_PLACEMENTS[self.placement].rows)
        return len(self.placement) if isinstance(self.placement[0], tuple) else 1

    @cached_property
    def stages(self) -> int:
        """The number of stages of the model."""
        if isinstance(self.placement, str):
            return self.ranks * self.stages_per_rank // self.placement_rows
        return int(self.replica_ranks.shape[1])

    @cached_property
    def max_instructions(self) -> int:
        """The number of different instructions that a program of this shape can have."""
        count_by_scope = {
            Scope.MICROBATCH: self.stages * self.microbatches,
            Scope.STAGE: self.stages * self.placement_rows * self.optimizer_steps,
            Scope.RANK: self.ranks * self.optimizer_steps,
            Scope.OCCURRENCE: self.stages * self.placement_rows * self.microbatches,
        }
        return sum(count_by_scope[row.scope] for row in INSTRUCTIONS)

    def require_instruction_limit(self, max_instructions: int | None = None) -> None:
        """Raise ShapeError if the forwards alone exceed the limit on instructions.

        Args:
            max_instructions: Limit on the number of instructions. The default is the limit of this
                process for programs that Python code builds (`input_limits`).

        Raises:
            ShapeError: The number of forwards exceeds the limit.
        """
        self._require_limit(self.stages, max_instructions)

    def require_lowered_limit(
        self, *, has_backward: bool, frozen_stages: int = 0, max_instructions: int | None = None
    ) -> None:
        """Raise ShapeError if a lowered program has more instructions than the limit.

        The count includes the forwards, and the sends and receives of activations between ranks.
        With a backward, the count also includes one backward per trained stage and microbatch, and
        the sends and receives of gradients.

        Args:
            has_backward: Include backwards in the count.
            frozen_stages: Number of stages, counted from stage 0, that have no backward.
            max_instructions: See `require_instruction_limit`.

        Raises:
            ShapeError: There are more instructions than the limit.
        """
        # Entry (row, s) is True if the message from stage s to stage s + 1 goes to another rank.
        crosses_ranks = self.replica_ranks[:, 1:] != self.replica_ranks[:, :-1]
        per_microbatch = self.stages + 2 * int(crosses_ranks.sum(1).min())
        if has_backward:
            backward_messages = 2 * int(crosses_ranks[:, frozen_stages:].sum(1).min())
            per_microbatch += self.stages - frozen_stages + backward_messages
        self._require_limit(per_microbatch, max_instructions)

    def _require_limit(self, instrs_per_microbatch: int, max_instructions: int | None) -> None:
        require_instruction_limit(
            instrs_per_microbatch * self.microbatches,
            f"{self.stages} stages x {self.microbatches} microbatches",
            ["microbatches", "ranks", "stages_per_rank", "placement"],
            max_instructions,
        )

    @property
    def first_rank_per_stage(self) -> NDArray[np.int64]:
        """The rank of the first replica of each stage, shape (stages,)."""
        ranks: NDArray[np.int64] = self.replica_ranks[0]
        return ranks

    @cached_property
    def replica_ranks(self) -> NDArray[np.int64]:
        """The rank of each replica of each stage, shape (rows, stages), read-only."""
        if isinstance(self.placement, str):
            stages, rows = np.arange(self.stages), NAMED_PLACEMENTS[self.placement].rows
            replica_ranks = np.stack([row(stages, self.ranks) for row in rows])
        else:
            replica_ranks = np.array(self.placement, np.int64).reshape(self.placement_rows, -1)
        replica_ranks.flags.writeable = False
        return replica_ranks

    def replica_row_of_stage(self, stage: ArrayLike, rank: ArrayLike) -> NDArray[np.intp]:
        """Return, for each (stage, rank) pair, the placement row that puts the stage on the rank.

        Args:
            stage: Numbers of stages.
            rank: Numbers of ranks.

        Returns:
            The row, from 0. The row is also 0 where the rank does not have the stage. The shape is
            the broadcast shape of `stage` and `rank`.
        """
        stage, rank = np.broadcast_arrays(stage, rank)
        if self.placement_rows == 1:
            return np.zeros(stage.shape, np.intp)
        return np.asarray((self.replica_ranks[:, stage] == rank).argmax(0))

    @cached_property
    def microbatch_row_offsets(self) -> tuple[int, ...]:
        """The first microbatch of each row of the placement, followed by `microbatches`."""
        quotient, remainder = divmod(self.microbatches, self.placement_rows)
        return tuple(row * quotient + min(row, remainder) for row in range(self.placement_rows + 1))

    def replica_row_of_microbatch(self, mb: ArrayLike) -> NDArray[np.intp]:
        """Return, for each microbatch, the row of the placement whose stage replicas run it.

        Args:
            mb: Numbers of microbatches.

        Returns:
            The row, from 0, in the shape of `mb`.
        """
        return np.asarray(
            np.searchsorted(self.microbatch_row_offsets[1:-1], np.asarray(mb), side="right")
        )

    def rank_of_stage(self, stage: ArrayLike, mb: ArrayLike) -> NDArray[np.int64]:
        """Return the rank on which each stage runs each microbatch.

        Args:
            stage: Numbers of stages.
            mb: Numbers of microbatches. These numbers are not used if each stage has one replica.

        Returns:
            The ranks, in the broadcast shape of `stage` and `mb`. With one replica per stage, the
            shape is that of `stage`.
        """
        if self.placement_rows == 1:
            return np.asarray(self.first_rank_per_stage[np.asarray(stage)])
        return np.asarray(self.replica_ranks[self.replica_row_of_microbatch(mb), np.asarray(stage)])

    @cached_property
    def stages_on_rank(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, ascending: `F[j]` of rank r is stage `stages_on_rank[r][j]`."""
        stages_on_rank: list[list[int]] = [[] for _ in range(self.ranks)]
        for stage, ranks in enumerate(self.replica_ranks.T.tolist()):
            for rank in ranks:
                stages_on_rank[rank].append(stage)
        return tuple(map(tuple, stages_on_rank))

    @cached_property
    def _local_stages(self) -> NDArray[np.int64]:
        """Return the local number of each stage replica on its rank, shape (rows, stages)."""
        result = np.empty_like(self.replica_ranks)
        for rank, local_stages in enumerate(self.stages_on_rank):
            result[self.replica_row_of_stage(local_stages, rank), local_stages] = np.arange(
                len(local_stages)
            )
        return result

    def local_stage(self, stage: ArrayLike, rank: ArrayLike) -> NDArray[np.int64]:
        """Return the local number of each stage on each rank.

        `F[j]` of a rank is its local stage j. Two replicas of a stage may have different numbers.

        Args:
            stage: Numbers of stages.
            rank: Numbers of ranks. Each rank must have the stage at the same index.

        Returns:
            The local numbers, from 0, in the broadcast shape of `stage` and `rank`.
        """
        return np.asarray(
            self._local_stages[self.replica_row_of_stage(stage, rank), np.asarray(stage)]
        )


SHAPE_FIELDS: Final = collect_fields(PipelineShape, is_shape=True)
