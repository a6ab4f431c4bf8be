"""Boundary: the tensors that pass between stages, and the layout of their messages.

All tensors that pass from one stage to the next are one value of a program, with one slot and one
message. If there are several tensors, they are consecutive in one contiguous block of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from schedir.errors import ModelError, describe
from schedir.ir.isa.instructions import TRAINING_VALUES, VALUES, PeerRule, Value
from schedir.ir.pipeline.skip_connections import Skips
from schedir.runtime.arguments import require_shape

# The alignment of each tensor in a message, in bytes. The alignment of a tensor may change how
# matrix products round. cuBLAS considers alignments up to 256
# (CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES), and 256 is a multiple of a cache line of 64 bytes.
ALIGNMENT = 256


@dataclass(frozen=True)
class Boundary:
    """The shape and dtype of a tensor that passes between stages, for one microbatch.

    Args:
        shape: The shape, with sizes of at least 1.
        dtype: The dtype.
        requires_grad: True if the gradient of the tensor goes back to the stage that computed it.
            By default it is True for floating-point and complex dtypes. A tensor without a
            gradient, such as a mask, is detached before it goes to the next stage.
        received_shape: The shape in the next stage, if it differs from `shape`. The shapes differ
            between the segments of a stage if tensor-parallel ranks share the sequence (sequence
            parallelism). They also differ after an all-to-all that sends tokens to experts. In this
            case `received_shape` is the shape for the largest number of tokens that a rank can
            receive.

    Raises:
        ModelError: The shape or the dtype is invalid, or `requires_grad` is True for a dtype
            without gradients.

    Example:
        >>> import torch
        >>> from schedir.runtime import Boundary
        >>> print(Boundary((8, 512, 64), torch.bfloat16))
        [8, 512, 64] of torch.bfloat16
        >>> Boundary((8, 512), torch.int64).requires_grad
        False
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    requires_grad: bool | None = None
    received_shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", require_shape(self.shape))
        if self.received_shape is not None:
            received_shape = require_shape(self.received_shape)
            differs = received_shape != self.shape
            object.__setattr__(self, "received_shape", received_shape if differs else None)
        if not isinstance(self.dtype, torch.dtype):
            hint = "torch.float32, torch.bfloat16 or torch.float16"
            if isinstance(self.dtype, int):  # as in Boundary(4, 128)
                hint = (
                    f"put the shape in brackets: Boundary(({', '.join(map(str, self.shape))}, ...))"
                )
            raise ModelError(
                f"the dtype of a boundary must be a torch.dtype, not {self.dtype!r:.60}", hint=hint
            )
        can_require_grad = self.dtype.is_floating_point or self.dtype.is_complex
        if self.requires_grad is not None and not isinstance(self.requires_grad, bool):
            raise ModelError(
                "requires_grad of a boundary must be True, False or None, not "
                f"{describe(self.requires_grad)}"
            )
        if self.requires_grad and not can_require_grad:
            raise ModelError(
                f"requires_grad of a boundary is True, but {self.dtype} has no gradients",
                hint="Boundary(shape, dtype)",
            )
        object.__setattr__(
            self,
            "requires_grad",
            can_require_grad if self.requires_grad is None else self.requires_grad,
        )

    @classmethod
    def from_shape(cls, boundary: Boundary | Sequence[int]) -> Boundary:
        """Return `boundary` if it is a `Boundary`, or else the float32 boundary of this shape.

        Args:
            boundary: A boundary or a shape.

        Raises:
            ModelError: `boundary` is neither a boundary nor a shape.
        """
        return boundary if isinstance(boundary, Boundary) else cls(boundary)  # type: ignore[arg-type]

    def __str__(self) -> str:
        can_require_grad = self.dtype.is_floating_point or self.dtype.is_complex
        received_text = f", received as {list(self.received_shape)}" if self.received_shape else ""
        gradient_text = " without gradient" * (can_require_grad and not self.requires_grad)
        return f"{list(self.shape)} of {self.dtype}{gradient_text}{received_text}"

    @cached_property
    def received(self) -> Boundary:
        """The boundary with the shape that the next stage receives."""
        return (
            replace(self, shape=self.received_shape, received_shape=None)
            if self.received_shape
            else self
        )

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """The strides of a contiguous tensor of this shape, in elements."""
        return torch.empty(self.shape, device="meta").stride()

    @property
    def nbytes(self) -> int:
        """The bytes of a tensor of this shape and dtype."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def tensor_at(self, memory: Tensor, offset: int) -> Tensor:
        """Return a tensor of this shape and dtype at an offset in `memory`.

        The tensor is not a view. Views of one tensor share a version counter, so autograd would
        treat a write to one view as a write to all views.

        Args:
            memory: A flat uint8 tensor.
            offset: The byte of `memory` at which the tensor begins: a multiple of the dtype's size.
        """
        storage_offset = int(memory.storage_offset())
        element_offset, remainder = divmod(storage_offset + offset, self.dtype.itemsize)
        assert not remainder, "memory is aligned"
        assert offset + self.nbytes <= memory.nbytes, "the tensor is inside of the memory"
        tensor = torch.empty(0, dtype=self.dtype, device=memory.device)
        return tensor.set_(memory.untyped_storage(), element_offset, self.shape, self.strides)

    def to_message_layout(self, value: Tensor) -> Tensor:
        """Return a value in the layout of a received message: contiguous, with its own storage.

        In another layout, computations may round differently. A view is copied, because it would
        keep the memory of its base tensor alive.

        Args:
            value: A tensor of this boundary's shape. If it already has the layout of a received
                message, it is returned without a copy.
        """
        is_only_user = value.untyped_storage().nbytes() == value.nbytes
        if value.stride() == self.strides and is_only_user:
            return value
        return torch.empty(self.shape, dtype=value.dtype, device=value.device).copy_(value)


# The number s means the boundary from stage s to stage s + 1. A pair (s, t) means the skip
# connection from stage s to stage t.
Edge = int | tuple[int, int]
BoundaryLike = Boundary | Sequence[int] | Sequence["Boundary | Sequence[int]"]
BoundaryByEdge = Mapping[int, BoundaryLike] | Mapping[Edge, BoundaryLike]


@dataclass(frozen=True)
class BoundaryTensors:
    """The tensors that one stage passes to another, in order, or their gradients.

    Args:
        tensors: The boundary of each tensor.
        num_parts: The number of equal parts into which the message can be split. With
            scatter-gather this is the tensor-parallel size.
    """

    tensors: tuple[Boundary, ...]
    num_parts: int = 1

    @classmethod
    def from_boundary(cls, boundary: BoundaryLike, num_parts: int = 1) -> BoundaryTensors:
        """Create the `BoundaryTensors` from the boundary that a user passed.

        Args:
            boundary: A boundary, a shape, or a sequence with a boundary or shape for each tensor.
                A sequence without a `Boundary` is a shape.
            num_parts: See the class.

        Raises:
            ModelError: A boundary is invalid.
        """
        if isinstance(boundary, tuple | list) and any(
            isinstance(entry, Boundary) for entry in boundary
        ):
            return cls(tuple(map(Boundary.from_shape, boundary)), num_parts)
        return cls((Boundary.from_shape(boundary),), num_parts)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return ", ".join(map(str, self.tensors))

    @cached_property
    def requires_grad(self) -> tuple[bool, ...]:
        """For each tensor, True if it has a gradient."""
        return tuple(bool(tensor.requires_grad) for tensor in self.tensors)

    @cached_property
    def gradients(self) -> BoundaryTensors:
        """The tensors with `requires_grad`. The next stage sends back the gradient of each."""
        return BoundaryTensors(
            tuple(tensor for tensor in self.tensors if tensor.requires_grad), self.num_parts
        )

    @cached_property
    def received(self) -> BoundaryTensors:
        """The tensors with the shapes that the next stage receives."""
        return BoundaryTensors(tuple(tensor.received for tensor in self.tensors), self.num_parts)

    @property
    def memory_bytes(self) -> int:
        """The bytes of the message, and of the received tensors that have a `received_shape`."""
        received_bytes = sum(
            tensor.received.nbytes for tensor in self.tensors if tensor.received_shape
        )
        return self.nbytes + received_bytes

    # ------------------------------------------------------------ as a message

    @cached_property
    def is_single_tensor(self) -> bool:
        """True if the message is one tensor without padding. Otherwise it is flat uint8."""
        sizes = [torch.Size(tensor.shape).numel() for tensor in self.tensors]
        return len(sizes) == 1 and sizes[0] % self.num_parts == 0

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The byte offset of each tensor in the message, followed by the size of the message."""
        if self.is_single_tensor:
            return 0, self.tensors[0].nbytes
        ends = accumulate((_align(tensor.nbytes) for tensor in self.tensors), initial=0)
        *begins, end = ends
        return *begins, _align(end, ALIGNMENT * self.num_parts)

    @property
    def nbytes(self) -> int:
        """The bytes of the message, with padding."""
        return self.offsets[-1]

    def place_tensors(self, memory: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the message and its tensors, at the start of `memory`.

        Args:
            memory: A flat uint8 tensor of at least `nbytes` bytes.

        Returns:
            The tensor to send or receive, and the boundary tensors in the same memory.
        """
        tensors = tuple(
            tensor.tensor_at(memory, begin)
            for tensor, begin in zip(self.tensors, self.offsets, strict=False)
        )
        if self.is_single_tensor:
            return tensors[0], tensors
        return memory[: self.nbytes], tensors

    def slice_part(self, memory: Tensor) -> Tensor:
        """Return a flat tensor for one of the equal parts of the message, at the start of `memory`.

        Args:
            memory: A flat uint8 tensor of at least `nbytes / num_parts` bytes.
        """
        part = memory[: self.nbytes // self.num_parts]
        return part.view(self.tensors[0].dtype) if self.is_single_tensor else part

    # ------------------------------------------------------------ outputs of a stage

    def require_outputs(self, outputs: object, stage: int) -> Sequence[Tensor]:
        """Return the output tensors of a stage if they match the boundary.

        The receiver has allocated memory for exactly the shapes and dtypes of the boundary.

        Args:
            outputs: The output of the stage: a tensor, or a tuple or list of tensors.
            stage: The stage, for the error message.

        Raises:
            ModelError: The number, shapes, dtypes or `requires_grad` of the outputs do not match.
        """
        tensor = self.tensors[0]
        if len(self.tensors) > 1 or not isinstance(outputs, Tensor):
            return self._require_each(outputs, stage)
        if outputs.dtype != tensor.dtype or outputs.shape != tensor.shape:
            return self._require_each(outputs, stage)
        return (
            (outputs,)
            if tensor.requires_grad or not outputs.requires_grad
            else self._require_each(outputs, stage)
        )

    def _require_each(self, outputs: object, stage: int) -> Sequence[Tensor]:
        """Check outputs of any form for `require_outputs`, and report the first mismatch."""
        values: Sequence[Any] = outputs if isinstance(outputs, tuple | list) else (outputs,)
        if len(values) != len(self.tensors):
            count_text = f"{len(self.tensors)} tensors, " if len(self.tensors) > 1 else ""
            description = f"{len(values)} values" if values is outputs else _describe_value(outputs)
            raise ModelError(
                f"stage {stage} returns {description}, but the boundary is {count_text}{self}",
                hint="" if _are_tensors(values) else _TENSORS_HINT,
            )
        for k, (tensor, value) in enumerate(zip(self.tensors, values, strict=True)):
            if (
                isinstance(value, Tensor)
                and value.dtype == tensor.dtype
                and value.shape == tensor.shape
            ):
                continue
            index_text = f" as tensor {k}" if len(values) > 1 else ""
            raise ModelError(
                f"stage {stage} returns {_describe_value(value)}{index_text}, but the boundary is "
                f"{tensor}",
                hint=_suggest_boundary(value, tensor)
                if isinstance(value, Tensor)
                else _TENSORS_HINT,
            )
        requires_grad = tuple([value.requires_grad for value in values])
        if requires_grad != self.requires_grad and any(requires_grad):
            pairs = zip(requires_grad, self.requires_grad, strict=True)
            k = next(k for k, (actual, expected) in enumerate(pairs) if actual != expected)
            raise ModelError(
                f"tensor {k} that stage {stage} returns has requires_grad={requires_grad[k]}, but "
                f"its boundary has requires_grad={not requires_grad[k]}",
                hint="return the tensor detached, or omit requires_grad=False from its boundary"
                if requires_grad[k]
                else "Boundary(..., requires_grad=False) if it depends on no trained weight",
            )
        return values


_TENSORS_HINT = "a stage must return a tensor, or a tuple of tensors"


def _are_tensors(values: Iterable[object]) -> bool:
    return all(isinstance(value, Tensor) for value in values)


def _suggest_boundary(value: Tensor, boundary: Boundary) -> str:
    """Return a hint for an output with another dtype or number of samples than its boundary."""
    if value.shape[-1:] != boundary.shape[-1:]:
        return ""  # The stage has another width, which may be wrong.
    if value.shape != boundary.shape:
        return f"a boundary is for one microbatch: Boundary({tuple(value.shape)}) fits this output"
    return f"if this dtype is right, the boundary is Boundary({tuple(value.shape)}, {value.dtype})"


def _describe_value(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} of {value.dtype}"
    return type(value).__name__


def _align(size: int, alignment: int = ALIGNMENT) -> int:
    return -(-size // alignment) * alignment


# Value -> its boundary tensors, for values that no compute instruction produces. The module whose
# handlers produce such a value adds the entry.
EXTRA_BOUNDARY_TENSORS: dict[Value, BoundaryTensors] = {}


@dataclass(frozen=True)
class ModelBoundaries:
    """The boundaries of a model for one microbatch.

    Args:
        stage_boundaries: For each stage except the last, the tensors that it passes to the next.
        skips: For each skip connection, its two stages and the tensors that it passes.
    """

    stage_boundaries: tuple[BoundaryTensors, ...]
    skips: tuple[tuple[tuple[int, int], BoundaryTensors], ...] = ()

    @classmethod
    def from_edges(
        cls,
        boundary: BoundaryLike | BoundaryByEdge | ModelBoundaries,
        stages: int,
        num_parts: int = 1,
        skips: Skips = (),
    ) -> ModelBoundaries:
        """Create the boundaries of a model from the boundary that a user passed.

        Args:
            boundary: A boundary for all edges, or a mapping from each edge to its boundary. The key
                of an edge is the number of the stage that sends. The key of a skip connection is
                the pair of its stages.
            stages: The number of stages.
            num_parts: See `BoundaryTensors`.
            skips: The skip connections, as pairs of stages.

        Raises:
            ModelError: The mapping lacks an edge or has an unknown edge, or a boundary is invalid.
        """
        boundary_by_edge: dict[Edge, BoundaryLike]
        if isinstance(boundary, ModelBoundaries):
            boundary_by_edge = {
                s: crossing.tensors for s, crossing in enumerate(boundary.stage_boundaries)
            }
            boundary_by_edge |= {skip: crossing.tensors for skip, crossing in boundary.skips}
        elif isinstance(boundary, Mapping):
            boundary_by_edge = {**cast(Mapping[Edge, BoundaryLike], boundary)}
        else:
            boundary_by_edge = dict.fromkeys((*range(stages - 1), *skips), boundary)
        if {*boundary_by_edge} != {*range(stages - 1), *skips}:
            skip_text, skip_example = "", ""
            if skips:
                skip_text = f" and the skip connections {describe([*skips])}"
                skip_example = f", {skips[0]}: Boundary((8, 64))"
            raise ModelError(
                "the keys of the boundary must be the stages "
                f"{describe([*range(stages - 1)])}{skip_text}, not {describe([*boundary_by_edge])}",
                hint="{0: Boundary((8, 64)), 1: (Boundary((8, 64)), Boundary((8,), torch.int64))"
                f"{skip_example}}}",
            )
        return cls(
            tuple(
                BoundaryTensors.from_boundary(boundary_by_edge[s], num_parts)
                for s in range(stages - 1)
            ),
            tuple((skip, BoundaryTensors.from_boundary(boundary_by_edge[skip])) for skip in skips),
        )

    def __str__(self) -> str:
        if len({*self.stage_boundaries}) == 1 and not self.skips:
            return str(self.stage_boundaries[0])
        descriptions = [
            f"after stage {s} {crossing}" for s, crossing in enumerate(self.stage_boundaries)
        ]
        descriptions += [f"from stage {s} to {t} {crossing}" for (s, t), crossing in self.skips]
        return "; ".join(descriptions)

    @cached_property
    def _by_hop(self) -> dict[tuple[PeerRule, int], BoundaryTensors]:
        """(Direction, stage) -> the tensors between the stage and its peer in that direction."""
        tensors_by_hop: dict[tuple[PeerRule, int], BoundaryTensors] = {}
        for s, crossing in enumerate(self.stage_boundaries):
            tensors_by_hop[PeerRule.NEXT, s] = crossing
            tensors_by_hop[PeerRule.PREVIOUS, s + 1] = crossing.received
        for (begin, end), crossing in self.skips:
            tensors_by_hop[PeerRule.SKIP_TO, begin] = crossing
            tensors_by_hop[PeerRule.SKIP_FROM, end] = crossing
        return tensors_by_hop

    def get_value_tensors(self, kind: Value, stage: int) -> BoundaryTensors:
        """Return the tensors of a boundary value.

        Args:
            kind: A kind of value that passes between stages. For a gradient, the result has only
                the tensors with `requires_grad`.
            stage: The stage that has the value.
        """
        if kind in EXTRA_BOUNDARY_TENSORS:
            return EXTRA_BOUNDARY_TENSORS[kind]
        hop = VALUES[kind].peer
        assert hop is not None
        crossing = self._by_hop[hop, stage]
        return crossing.gradients if kind in TRAINING_VALUES else crossing

    def list_inputs(self, stage: int) -> list[tuple[int, Boundary]]:
        """Return all input tensors of a stage, each with the number of the stage that computes it.

        Args:
            stage: The stage. The first stage has no inputs from other stages. Inputs from skip
                connections come last.
        """
        previous_tensors = self.stage_boundaries[stage - 1].received.tensors if stage else ()
        inputs = [(stage - 1, tensor) for tensor in previous_tensors]
        for (begin, end), crossing in self.skips:
            inputs += [(begin, tensor) for tensor in crossing.tensors] if end == stage else []
        return inputs

    def get_outputs(self, stage: int) -> BoundaryTensors:
        """Return all output tensors of a stage that go to other stages.

        Args:
            stage: The stage. Outputs to a skip connection come last.
        """
        hops = ((PeerRule.NEXT, stage), (PeerRule.SKIP_TO, stage))
        crossings = [self._by_hop[hop] for hop in hops if hop in self._by_hop]
        return BoundaryTensors(
            tuple(tensor for crossing in crossings for tensor in crossing.tensors)
        )

    def count_skip_inputs(self, stage: int) -> int:
        """Return the number of input tensors that a stage receives over a skip connection.

        Args:
            stage: The number of the stage.
        """
        crossing = self._by_hop.get((PeerRule.SKIP_FROM, stage))
        return len(crossing.tensors) if crossing else 0

    def make_output_validator(self, stage: int) -> Callable[[object, int], Sequence[Tensor]]:
        """Return a function that checks all outputs of a stage, as `require_outputs` does.

        Args:
            stage: The stage. If a skip connection begins at this stage, the function takes outputs
                in the form that `split_skip_output` takes.
        """
        require_outputs = self.get_outputs(stage).require_outputs
        if (PeerRule.SKIP_TO, stage) not in self._by_hop:
            return require_outputs

        def require_all(y: object, stage: int) -> Sequence[Tensor]:
            main_outputs, skip_outputs = split_skip_output(y, stage)
            return require_outputs((*main_outputs, *skip_outputs), stage)

        return require_all


def split_skip_output(outputs: object, stage: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Split the output of a stage at which a skip connection begins.

    Args:
        outputs: A tuple or list of at least two entries. The last entry is the skip output, a
            tensor or a tuple of tensors.
        stage: The stage, for the error message.

    Returns:
        The tensors for the next stage, and the tensors for the skip connection.

    Raises:
        ModelError: `outputs` has another form.
    """
    if not isinstance(outputs, tuple | list) or len(outputs) < 2:
        raise ModelError(
            f"a skip connection begins at stage {stage}, so the stage must return a tuple of at "
            f"least two entries, not {_describe_value(outputs)}",
            hint="return y, skip: the last entry passes along the skip connection",
        )
    *main_outputs, skip_outputs = outputs
    return require_output_tensors(main_outputs, stage), require_output_tensors(skip_outputs, stage)


def require_output_tensors(outputs: object, stage: int) -> Sequence[Tensor]:
    """Return the output tensors of a stage whose boundary is unknown.

    Args:
        outputs: A tensor, or a tuple or list of tensors.
        stage: The stage, for the error message.

    Raises:
        ModelError: `outputs` is anything else.
    """
    values = outputs if isinstance(outputs, tuple | list) else (outputs,)
    for value in values:
        if not isinstance(value, Tensor):
            raise ModelError(
                f"stage {stage} returns "
                f"{_describe_value(outputs if values is not outputs else value)}, which is not a "
                "tensor",
                hint=_TENSORS_HINT,
            )
    return values


def infer_requires_grad(values: Sequence[Tensor]) -> tuple[bool, ...]:
    """Return, for each output tensor of a stage, whether it has a gradient.

    A tensor has a gradient if it depends on trained parameters or on an input with a gradient. If
    no tensor depends on these, all tensors of a floating-point or complex dtype count as having a
    gradient. This happens if all layers up to this stage are frozen.

    Args:
        values: The output tensors.
    """
    requires_grad = tuple(value.requires_grad for value in values)
    if any(requires_grad):
        return requires_grad
    return tuple(value.is_floating_point() or value.is_complex() for value in values)
