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
from schedir.runtime.arguments import shape_of

# Bytes: by where a tensor begins, too, products round.  A cache line is 64 of them, and what a
# GPU's library of products looks at is 256 (cuBLAS, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES).
ALIGNED = 256


@dataclass(frozen=True)
class Boundary:
    """Shape and type of a tensor that passes between stages, for one microbatch.

    `grad` says whether its gradient goes back: unless told that of floating and complex types
    does.  One without, as a table or a mask, is passed on detached.  `taken` is its shape as the
    next stage takes it, where that is another: where pieces meet whose ranks share the sequence.

    Raises ModelError for a shape that no tensor has, for a type that is none of torch, and for
    gradients of whole numbers.

    >>> import torch
    >>> from schedir.runtime import Boundary
    >>> print(Boundary((8, 512, 64), torch.bfloat16))
    [8, 512, 64] of torch.bfloat16
    >>> Boundary((8, 512), torch.int64).grad
    False
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    grad: bool | None = None
    taken: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", shape_of(self.shape))
        if self.taken is not None:
            taken = shape_of(self.taken)
            object.__setattr__(self, "taken", taken if taken != self.shape else None)
        if not isinstance(self.dtype, torch.dtype):
            raise ModelError(
                f"the type of a boundary is one of torch, not {self.dtype!r:.60}",
                hint="torch.float32, torch.bfloat16 or torch.float16",
            )
        can = self.dtype.is_floating_point or self.dtype.is_complex
        if self.grad is not None and not isinstance(self.grad, bool):
            raise ModelError(f"grad of a boundary is True or False, not {describe(self.grad)}")
        if self.grad and not can:
            raise ModelError(
                f"a tensor of {self.dtype} has no gradient", hint="Boundary(shape, dtype)"
            )
        object.__setattr__(self, "grad", can if self.grad is None else self.grad)

    @classmethod
    def of(cls, given: Boundary | Sequence[int]) -> Boundary:
        """The boundary that is meant: itself, or of a shape one of float32."""
        return given if isinstance(given, Boundary) else cls(given)  # type: ignore[arg-type]

    def __str__(self) -> str:
        can = self.dtype.is_floating_point or self.dtype.is_complex
        taken = f", taken as {list(self.taken)}" if self.taken else ""
        none = " without gradient" * (can and not self.grad)
        return f"{list(self.shape)} of {self.dtype}{none}{taken}"

    @cached_property
    def as_taken(self) -> Boundary:
        """That of the next stage's side."""
        return replace(self, shape=self.taken, taken=None) if self.taken else self

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Those of a contiguous tensor."""
        return torch.empty(self.shape, device="meta").stride()

    @property
    def nbytes(self) -> int:
        """Of one such tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def within(self, memory: Tensor, begin: int) -> Tensor:
        """Such a tensor in bytes of memory, from one of them on.

        No view: of those of one memory each would look changed when another is.
        """
        at, rest = divmod(int(memory.storage_offset()) + begin, self.dtype.itemsize)
        assert not rest, "memory is aligned"
        tensor = torch.empty(0, dtype=self.dtype, device=memory.device)
        return tensor.set_(memory.untyped_storage(), at, self.shape, self.strides)

    def as_sent(self, value: Tensor) -> Tensor:
        """The value laid out as a message brings it, in memory of its own: what computes with it
        rounds by its layout, and a part would keep the whole alive."""
        alone = value.untyped_storage().nbytes() == value.nbytes
        if value.stride() == self.strides and alone:
            return value
        return torch.empty(self.shape, dtype=value.dtype, device=value.device).copy_(value)


Edge = int | tuple[int, int]  # the stage that puts something out; or from where to where a skip is
Given = Boundary | Sequence[int] | Sequence["Boundary | Sequence[int]"]
Edges = Mapping[int, Given] | Mapping[Edge, Given]


@dataclass(frozen=True)
class BoundaryTensors:
    """The tensors that one stage passes on to the next, in order, or the gradients that go back.

    Their message can be cut into so many equal `parts`.
    """

    tensors: tuple[Boundary, ...]
    parts: int = 1

    @classmethod
    def of(cls, given: Given, parts: int = 1) -> BoundaryTensors:
        """The tensors that are meant: a sequence that has a Boundary is one of several."""
        if isinstance(given, tuple | list) and any(isinstance(one, Boundary) for one in given):
            return cls(tuple(map(Boundary.of, given)), parts)
        return cls((Boundary.of(given),), parts)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return ", ".join(map(str, self.tensors))

    @cached_property
    def graded(self) -> tuple[bool, ...]:
        """Of each tensor whether it has a gradient."""
        return tuple(bool(one.grad) for one in self.tensors)

    @cached_property
    def gradients(self) -> BoundaryTensors:
        """What goes back."""
        return BoundaryTensors(tuple(one for one in self.tensors if one.grad), self.parts)

    @cached_property
    def taken(self) -> BoundaryTensors:
        """What the next stage takes."""
        return BoundaryTensors(tuple(one.as_taken for one in self.tensors), self.parts)

    @property
    def held(self) -> int:
        """Bytes of what one stage puts out and another takes; where these differ, of both."""
        more = sum(one.as_taken.nbytes for one in self.tensors if one.taken)
        return self.nbytes + more

    # ------------------------------------------------------------ as a message

    @cached_property
    def alone(self) -> bool:
        """Whether the message is one tensor as it is; else it is bytes, with room between."""
        each = [torch.Size(one.shape).numel() for one in self.tensors]
        return len(each) == 1 and each[0] % self.parts == 0

    @cached_property
    def begins(self) -> tuple[int, ...]:
        """The byte of the message at which each tensor begins, and the first behind it."""
        if self.alone:
            return 0, self.tensors[0].nbytes
        ends = accumulate((_aligned(one.nbytes) for one in self.tensors), initial=0)
        *begins, end = ends
        return *begins, _aligned(end, ALIGNED * self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the message."""
        return self.begins[-1]

    def lay(self, memory: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """In bytes of memory: what is sent or received there, and the tensors in it."""
        tensors = tuple(
            one.within(memory, begin) for one, begin in zip(self.tensors, self.begins, strict=False)
        )
        if self.alone:
            return tensors[0], tensors
        return memory[: self.nbytes], tensors

    def part(self, memory: Tensor) -> Tensor:
        """In bytes of memory, flat: one of the equal parts of the message."""
        own = memory[: self.nbytes // self.parts]
        return own.view(self.tensors[0].dtype) if self.alone else own

    # ------------------------------------------------------------ what a stage gives

    def expect(self, given: object, stage: int) -> Sequence[Tensor]:
        """The tensors that a stage gives: one, or a tuple or list of them.

        Raises ModelError for what cannot pass: the other side has made room for these.
        """
        one = self.tensors[0]
        if len(self.tensors) > 1 or not isinstance(given, Tensor):
            return self._expect_each(given, stage)
        if given.dtype != one.dtype or given.shape != one.shape:
            return self._expect_each(given, stage)
        return (given,) if one.grad or not given.requires_grad else self._expect_each(given, stage)

    def _expect_each(self, given: object, stage: int) -> Sequence[Tensor]:
        """The same, whatever it is."""
        values: Sequence[Any] = given if isinstance(given, tuple | list) else (given,)
        if len(values) != len(self.tensors):
            several = f"{len(self.tensors)} tensors, " if len(self.tensors) > 1 else ""
            got = f"{len(values)} values" if values is given else _kind(given)
            raise ModelError(
                f"stage {stage} gives {got}, the boundary is {several}{self}",
                hint="" if _are_tensors(values) else _TENSORS,
            )
        for k, (one, value) in enumerate(zip(self.tensors, values, strict=True)):
            if isinstance(value, Tensor) and value.dtype == one.dtype and value.shape == one.shape:
                continue
            which = f", tensor {k} of" if len(values) > 1 else ","
            raise ModelError(
                f"stage {stage} gives {_kind(value)}{which} the boundary is {one}",
                hint="" if _are_tensors([value]) else _TENSORS,
            )
        has = tuple([value.requires_grad for value in values])
        if has != self.graded and any(has):
            k = next(k for k, (one, other) in enumerate(zip(has, self.graded, strict=True))
                     if one != other)  # fmt: skip
            raise ModelError(
                f"tensor {k} that stage {stage} gives has {'a' if has[k] else 'no'} gradient, and "
                f"the boundary says that it has {'none' if has[k] else 'one'}",
                hint="pass it on detached, or without grad=False"
                if has[k]
                else "Boundary(..., grad=False) for what depends on nothing that is trained",
            )
        return values


_TENSORS = "a stage gives a tensor, or a tuple of tensors"


def _are_tensors(values: Iterable[object]) -> bool:
    return all(isinstance(value, Tensor) for value in values)


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} of {value.dtype}"
    return type(value).__name__


def _aligned(size: int, to: int = ALIGNED) -> int:
    return -(-size // to) * to


# The tensors of boundary values that other instructions than stages give. The module with the
# handlers of such an instruction adds them.
CARRIED: dict[Value, BoundaryTensors] = {}


@dataclass(frozen=True)
class ModelBoundaries:
    """What passes from each stage of a model, but the last, to the next; and along each skip."""

    crossings: tuple[BoundaryTensors, ...]
    skips: tuple[tuple[tuple[int, int], BoundaryTensors], ...] = ()

    @classmethod
    def of(
        cls,
        given: Given | Edges | ModelBoundaries,
        stages: int,
        parts: int = 1,
        skips: Skips = (),
    ) -> ModelBoundaries:
        """What is meant: of one Boundary, or a sequence of them, that passes everywhere; of a
        mapping, what each stage puts out that it names, and each skip, by its two stages.

        Raises ModelError for a mapping that leaves one out, or has another.
        """
        each: dict[Edge, Given]
        if isinstance(given, ModelBoundaries):
            each = {s: crossing.tensors for s, crossing in enumerate(given.crossings)}
            each |= {skip: crossing.tensors for skip, crossing in given.skips}
        elif isinstance(given, Mapping):
            each = {**cast(Mapping[Edge, Given], given)}
        else:
            each = dict.fromkeys((*range(stages - 1), *skips), given)
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
            tuple(BoundaryTensors.of(each[s], parts) for s in range(stages - 1)),
            tuple((skip, BoundaryTensors.of(each[skip])) for skip in skips),
        )

    def __str__(self) -> str:
        if len({*self.crossings}) == 1 and not self.skips:
            return str(self.crossings[0])
        each = [f"behind stage {s} {one}" for s, one in enumerate(self.crossings)]
        each += [f"from stage {s} to {t} {one}" for (s, t), one in self.skips]
        return "; ".join(each)

    @cached_property
    def _at(self) -> dict[tuple[PeerRule, int], BoundaryTensors]:
        """What passes between a stage and the one that is a hop away."""
        found = {(PeerRule.NEXT, s): one for s, one in enumerate(self.crossings)}
        found |= {(PeerRule.PREVIOUS, s + 1): one.taken for s, one in enumerate(self.crossings)}
        for (begin, end), one in self.skips:
            found |= {(PeerRule.SKIP_TO, begin): one, (PeerRule.SKIP_FROM, end): one}
        return found

    def carried(self, kind: Value, stage: int) -> BoundaryTensors:
        """What a value of a kind that crosses is, of a stage: tensors, or their gradients."""
        if kind in CARRIED:
            return CARRIED[kind]
        across = VALUES[kind].peer
        assert across is not None
        crossing = self._at[across, stage]
        return crossing.gradients if kind in TRAINING_VALUES else crossing

    def from_where(self, stage: int) -> list[tuple[int, Boundary]]:
        """All tensors that a stage takes in, the skip behind the rest: which stage gives each."""
        came = self.crossings[stage - 1].taken.tensors if stage else ()
        found = [(stage - 1, one) for one in came]
        for (begin, end), skip in self.skips:
            found += [(begin, one) for one in skip.tensors] if end == stage else []
        return found

    def out_of(self, stage: int) -> BoundaryTensors:
        """All that a stage puts out, the skip behind the rest."""
        ways = ((PeerRule.NEXT, stage), (PeerRule.SKIP_TO, stage))
        return BoundaryTensors(
            tuple(one for way in ways if way in self._at for one in self._at[way].tensors)
        )

    def skipped_to(self, stage: int) -> int:
        """How many tensors a stage takes of a skip."""
        skip = self._at.get((PeerRule.SKIP_FROM, stage))
        return len(skip.tensors) if skip else 0

    def expecting(self, stage: int) -> Callable[[object, int], Sequence[Tensor]]:
        """`BoundaryTensors.expect` of all that a stage puts out, which it gives as `with_skip`
        says."""
        expect = self.out_of(stage).expect
        if (PeerRule.SKIP_TO, stage) not in self._at:
            return expect

        def both(y: object, stage: int) -> Sequence[Tensor]:
            rest, skip = with_skip(y, stage)
            return expect((*rest, *skip), stage)

        return both


def with_skip(given: object, stage: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The tensors of what a stage gives that a skip leads from: (y, skip), or (*ys, skip), of which
    the skip is a tensor or several.  Raises ModelError for anything else."""
    if not isinstance(given, tuple | list) or len(given) < 2:
        raise ModelError(
            f"stage {stage} gives {_kind(given)}, and a skip leads from it",
            hint="a stage from which a skip leads returns y, skip: the skip comes last",
        )
    *rest, skip = given
    return passed_on(rest, stage), passed_on(skip, stage)


def passed_on(given: object, stage: int) -> Sequence[Tensor]:
    """What a stage gives, where nobody has said what it is: tensors.  Raises ModelError for
    anything else."""
    values = given if isinstance(given, tuple | list) else (given,)
    for value in values:
        if not isinstance(value, Tensor):
            raise ModelError(
                f"stage {stage} gives {_kind(given if values is not given else value)}",
                hint=_TENSORS,
            )
    return values


def graded(values: Sequence[Tensor]) -> tuple[bool, ...]:
    """Of tensors that a stage has given, which have a gradient: those that depend on what is
    trained, or on what came in with one.  Of nothing but tables, and where all before is frozen,
    any that can have one."""
    has = tuple(value.requires_grad for value in values)
    return has if any(has) else tuple(v.is_floating_point() or v.is_complex() for v in values)
