"""Boundary: the tensors that pass between stages, and the messages that carry them.

What crosses from one stage to the next is one value of a program, whatever it is made of: it has
one slot, one message, one place in a queue.  Several tensors lie in one piece of memory, one
behind the other, and are one message.
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

# Bytes: by where a tensor begins, too, products round.  A cache line is 64 of them, and what a
# GPU's library of products looks at is 256 (cuBLAS, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES).
ALIGNMENT = 256


@dataclass(frozen=True)
class Boundary:
    """Shape and type of a tensor that passes between stages, for one microbatch.

    `requires_grad` says whether its gradient goes back: unless told that of floating and complex
    types does.  One without, as a table or a mask, is passed on detached.  `received_shape` is its
    shape as the next stage takes it, where that is another: where pieces meet whose ranks share the
    sequence.

    Raises ModelError for a shape that no tensor has, for a type that is none of torch, and for
    gradients of whole numbers.

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
            taken = require_shape(self.received_shape)
            object.__setattr__(self, "received_shape", taken if taken != self.shape else None)
        if not isinstance(self.dtype, torch.dtype):
            raise ModelError(
                f"the type of a boundary is one of torch, not {self.dtype!r:.60}",
                hint="torch.float32, torch.bfloat16 or torch.float16",
            )
        can = self.dtype.is_floating_point or self.dtype.is_complex
        if self.requires_grad is not None and not isinstance(self.requires_grad, bool):
            raise ModelError(
                f"grad of a boundary is True or False, not {describe(self.requires_grad)}"
            )
        if self.requires_grad and not can:
            raise ModelError(
                f"a tensor of {self.dtype} has no gradient", hint="Boundary(shape, dtype)"
            )
        object.__setattr__(
            self, "requires_grad", can if self.requires_grad is None else self.requires_grad
        )

    @classmethod
    def from_shape(cls, boundary: Boundary | Sequence[int]) -> Boundary:
        """The boundary that is meant: itself, or of a shape one of float32."""
        return boundary if isinstance(boundary, Boundary) else cls(boundary)  # type: ignore[arg-type]

    def __str__(self) -> str:
        can = self.dtype.is_floating_point or self.dtype.is_complex
        taken = f", taken as {list(self.received_shape)}" if self.received_shape else ""
        none = " without gradient" * (can and not self.requires_grad)
        return f"{list(self.shape)} of {self.dtype}{none}{taken}"

    @cached_property
    def received(self) -> Boundary:
        """That of the next stage's side."""
        return (
            replace(self, shape=self.received_shape, received_shape=None)
            if self.received_shape
            else self
        )

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Those of a contiguous tensor."""
        return torch.empty(self.shape, device="meta").stride()

    @property
    def nbytes(self) -> int:
        """Of one such tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def tensor_at(self, memory: Tensor, offset: int) -> Tensor:
        """Such a tensor in bytes of memory, from one of them on.

        No view: of those of one memory each would look changed when another is.
        """
        at, rest = divmod(int(memory.storage_offset()) + offset, self.dtype.itemsize)
        assert not rest, "memory is aligned"
        tensor = torch.empty(0, dtype=self.dtype, device=memory.device)
        return tensor.set_(memory.untyped_storage(), at, self.shape, self.strides)

    def to_message_layout(self, value: Tensor) -> Tensor:
        """The value laid out as a message brings it, in memory of its own: what computes with it
        rounds by its layout, and a part would keep the whole alive."""
        alone = value.untyped_storage().nbytes() == value.nbytes
        if value.stride() == self.strides and alone:
            return value
        return torch.empty(self.shape, dtype=value.dtype, device=value.device).copy_(value)


Edge = int | tuple[int, int]  # the stage that puts something out; or from where to where a skip is
BoundaryLike = Boundary | Sequence[int] | Sequence["Boundary | Sequence[int]"]
BoundaryByEdge = Mapping[int, BoundaryLike] | Mapping[Edge, BoundaryLike]


@dataclass(frozen=True)
class BoundaryTensors:
    """The tensors that one stage passes on to the next, in order, or the gradients that go back.

    Their message can be cut into so many equal `num_parts`.
    """

    tensors: tuple[Boundary, ...]
    num_parts: int = 1

    @classmethod
    def from_boundary(cls, boundary: BoundaryLike, num_parts: int = 1) -> BoundaryTensors:
        """The tensors that are meant: a sequence that has a Boundary is one of several."""
        if isinstance(boundary, tuple | list) and any(
            isinstance(one, Boundary) for one in boundary
        ):
            return cls(tuple(map(Boundary.from_shape, boundary)), num_parts)
        return cls((Boundary.from_shape(boundary),), num_parts)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return ", ".join(map(str, self.tensors))

    @cached_property
    def requires_grad(self) -> tuple[bool, ...]:
        """Of each tensor whether it has a gradient."""
        return tuple(bool(one.requires_grad) for one in self.tensors)

    @cached_property
    def gradients(self) -> BoundaryTensors:
        """What goes back."""
        return BoundaryTensors(
            tuple(one for one in self.tensors if one.requires_grad), self.num_parts
        )

    @cached_property
    def received(self) -> BoundaryTensors:
        """What the next stage takes."""
        return BoundaryTensors(tuple(one.received for one in self.tensors), self.num_parts)

    @property
    def memory_bytes(self) -> int:
        """Bytes of what one stage puts out and another takes; where these differ, of both."""
        more = sum(one.received.nbytes for one in self.tensors if one.received_shape)
        return self.nbytes + more

    # ------------------------------------------------------------ as a message

    @cached_property
    def is_single_tensor(self) -> bool:
        """Whether the message is one tensor as it is; else it is bytes, with room between."""
        each = [torch.Size(one.shape).numel() for one in self.tensors]
        return len(each) == 1 and each[0] % self.num_parts == 0

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The byte of the message at which each tensor begins, and the first behind it."""
        if self.is_single_tensor:
            return 0, self.tensors[0].nbytes
        ends = accumulate((_align(one.nbytes) for one in self.tensors), initial=0)
        *begins, end = ends
        return *begins, _align(end, ALIGNMENT * self.num_parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the message."""
        return self.offsets[-1]

    def place_tensors(self, memory: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """In bytes of memory: what is sent or received there, and the tensors in it."""
        tensors = tuple(
            one.tensor_at(memory, begin)
            for one, begin in zip(self.tensors, self.offsets, strict=False)
        )
        if self.is_single_tensor:
            return tensors[0], tensors
        return memory[: self.nbytes], tensors

    def slice_part(self, memory: Tensor) -> Tensor:
        """In bytes of memory, flat: one of the equal parts of the message."""
        own = memory[: self.nbytes // self.num_parts]
        return own.view(self.tensors[0].dtype) if self.is_single_tensor else own

    # ------------------------------------------------------------ what a stage gives

    def require_outputs(self, outputs: object, stage: int) -> Sequence[Tensor]:
        """The tensors that a stage gives: one, or a tuple or list of them.

        Raises ModelError for what cannot pass: the other side has made room for these.
        """
        one = self.tensors[0]
        if len(self.tensors) > 1 or not isinstance(outputs, Tensor):
            return self._require_each(outputs, stage)
        if outputs.dtype != one.dtype or outputs.shape != one.shape:
            return self._require_each(outputs, stage)
        return (
            (outputs,)
            if one.requires_grad or not outputs.requires_grad
            else self._require_each(outputs, stage)
        )

    def _require_each(self, outputs: object, stage: int) -> Sequence[Tensor]:
        """The same, whatever it is."""
        values: Sequence[Any] = outputs if isinstance(outputs, tuple | list) else (outputs,)
        if len(values) != len(self.tensors):
            several = f"{len(self.tensors)} tensors, " if len(self.tensors) > 1 else ""
            got = f"{len(values)} values" if values is outputs else _describe_value(outputs)
            raise ModelError(
                f"stage {stage} gives {got}, the boundary is {several}{self}",
                hint="" if _are_tensors(values) else _TENSORS_HINT,
            )
        for k, (one, value) in enumerate(zip(self.tensors, values, strict=True)):
            if isinstance(value, Tensor) and value.dtype == one.dtype and value.shape == one.shape:
                continue
            which = f", tensor {k} of" if len(values) > 1 else ","
            raise ModelError(
                f"stage {stage} gives {_describe_value(value)}{which} the boundary is {one}",
                hint="" if _are_tensors([value]) else _TENSORS_HINT,
            )
        has = tuple([value.requires_grad for value in values])
        if has != self.requires_grad and any(has):
            k = next(k for k, (one, other) in enumerate(zip(has, self.requires_grad, strict=True))
                     if one != other)  # fmt: skip
            raise ModelError(
                f"tensor {k} that stage {stage} gives has {'a' if has[k] else 'no'} gradient, and "
                f"the boundary says that it has {'none' if has[k] else 'one'}",
                hint="pass it on detached, or without requires_grad=False"
                if has[k]
                else "Boundary(..., requires_grad=False), if it depends on nothing that is trained",
            )
        return values


_TENSORS_HINT = "a stage gives a tensor, or a tuple of tensors"


def _are_tensors(values: Iterable[object]) -> bool:
    return all(isinstance(value, Tensor) for value in values)


def _describe_value(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} of {value.dtype}"
    return type(value).__name__


def _align(size: int, alignment: int = ALIGNMENT) -> int:
    return -(-size // alignment) * alignment


# The tensors of boundary values that other instructions than stages give. The module with the
# handlers of such an instruction adds them.
EXTRA_BOUNDARY_TENSORS: dict[Value, BoundaryTensors] = {}


@dataclass(frozen=True)
class ModelBoundaries:
    """What passes from each stage of a model, but the last, to the next; and along each skip."""

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
        """What is meant: of one Boundary, or a sequence of them, that passes everywhere; of a
        mapping, what each stage puts out that it names, and each skip, by its two stages.

        Raises ModelError for a mapping that leaves one out, or has another.
        """
        each: dict[Edge, BoundaryLike]
        if isinstance(boundary, ModelBoundaries):
            each = {s: crossing.tensors for s, crossing in enumerate(boundary.stage_boundaries)}
            each |= {skip: crossing.tensors for skip, crossing in boundary.skips}
        elif isinstance(boundary, Mapping):
            each = {**cast(Mapping[Edge, BoundaryLike], boundary)}
        else:
            each = dict.fromkeys((*range(stages - 1), *skips), boundary)
        if {*each} != {*range(stages - 1), *skips}:
            along, more = "", ""
            if skips:
                along = f", and skips lead along {describe([*skips])}"
                more = f", {skips[0]}: Boundary((8, 64))"
            raise ModelError(
                f"stages {describe([*range(stages - 1)])} pass something on{along}, and "
                "boundaries are "
                f"given for {describe([*each])}",
                hint="{0: Boundary((8, 64)), 1: (Boundary((8, 64)), Boundary((8,), torch.int64))"
                f"{more}}}",
            )
        return cls(
            tuple(BoundaryTensors.from_boundary(each[s], num_parts) for s in range(stages - 1)),
            tuple((skip, BoundaryTensors.from_boundary(each[skip])) for skip in skips),
        )

    def __str__(self) -> str:
        if len({*self.stage_boundaries}) == 1 and not self.skips:
            return str(self.stage_boundaries[0])
        each = [f"behind stage {s} {one}" for s, one in enumerate(self.stage_boundaries)]
        each += [f"from stage {s} to {t} {one}" for (s, t), one in self.skips]
        return "; ".join(each)

    @cached_property
    def _by_hop(self) -> dict[tuple[PeerRule, int], BoundaryTensors]:
        """What passes between a stage and the one that is a hop away."""
        found = {(PeerRule.NEXT, s): one for s, one in enumerate(self.stage_boundaries)}
        found |= {
            (PeerRule.PREVIOUS, s + 1): one.received for s, one in enumerate(self.stage_boundaries)
        }
        for (begin, end), one in self.skips:
            found |= {(PeerRule.SKIP_TO, begin): one, (PeerRule.SKIP_FROM, end): one}
        return found

    def get_value_tensors(self, kind: Value, stage: int) -> BoundaryTensors:
        """What a value of a kind that crosses is, of a stage: tensors, or their gradients."""
        if kind in EXTRA_BOUNDARY_TENSORS:
            return EXTRA_BOUNDARY_TENSORS[kind]
        across = VALUES[kind].peer
        assert across is not None
        crossing = self._by_hop[across, stage]
        return crossing.gradients if kind in TRAINING_VALUES else crossing

    def list_inputs(self, stage: int) -> list[tuple[int, Boundary]]:
        """All tensors that a stage takes in, the skip behind the rest: which stage gives each."""
        came = self.stage_boundaries[stage - 1].received.tensors if stage else ()
        found = [(stage - 1, one) for one in came]
        for (begin, end), skip in self.skips:
            found += [(begin, one) for one in skip.tensors] if end == stage else []
        return found

    def get_outputs(self, stage: int) -> BoundaryTensors:
        """All that a stage puts out, the skip behind the rest."""
        ways = ((PeerRule.NEXT, stage), (PeerRule.SKIP_TO, stage))
        return BoundaryTensors(
            tuple(one for way in ways if way in self._by_hop for one in self._by_hop[way].tensors)
        )

    def count_skip_inputs(self, stage: int) -> int:
        """How many tensors a stage takes of a skip."""
        skip = self._by_hop.get((PeerRule.SKIP_FROM, stage))
        return len(skip.tensors) if skip else 0

    def make_output_validator(self, stage: int) -> Callable[[object, int], Sequence[Tensor]]:
        """`BoundaryTensors.expect` of all that a stage puts out, which it gives as
        `split_skip_output` says."""
        expect = self.get_outputs(stage).require_outputs
        if (PeerRule.SKIP_TO, stage) not in self._by_hop:
            return expect

        def both(y: object, stage: int) -> Sequence[Tensor]:
            rest, skip = split_skip_output(y, stage)
            return expect((*rest, *skip), stage)

        return both


def split_skip_output(outputs: object, stage: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The tensors of what a stage gives that a skip leads from: (y, skip), or (*ys, skip), of which
    the skip is a tensor or several.  Raises ModelError for anything else."""
    if not isinstance(outputs, tuple | list) or len(outputs) < 2:
        raise ModelError(
            f"stage {stage} gives {_describe_value(outputs)}, and a skip leads from it",
            hint="a stage from which a skip leads returns y, skip: the skip comes last",
        )
    *rest, skip = outputs
    return require_output_tensors(rest, stage), require_output_tensors(skip, stage)


def require_output_tensors(outputs: object, stage: int) -> Sequence[Tensor]:
    """What a stage gives, where nobody has said what it is: tensors.  Raises ModelError for
    anything else."""
    values = outputs if isinstance(outputs, tuple | list) else (outputs,)
    for value in values:
        if not isinstance(value, Tensor):
            raise ModelError(
                f"stage {stage} gives "
                f"{_describe_value(outputs if values is not outputs else value)}",
                hint=_TENSORS_HINT,
            )
    return values


def infer_requires_grad(values: Sequence[Tensor]) -> tuple[bool, ...]:
    """Of tensors that a stage has given, which have a gradient: those that depend on what is
    trained, or on what came in with one.  Of nothing but tables, and where all before is frozen,
    any that can have one."""
    has = tuple(value.requires_grad for value in values)
    return has if any(has) else tuple(v.is_floating_point() or v.is_complex() for v in values)
