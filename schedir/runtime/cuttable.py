"""Cuttable: what can be kept in parts (ZeRO), and what would be another thing then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor, nn

from schedir.errors import ModelError
from schedir.ir.program import Program
from schedir.runtime.parts import owner_of
from schedir.runtime.precision import all_within, innermost, is_torchs

# Of torch's own those that step each number by itself, with what is kept of it.
_ELEMENTWISE: Final = (
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SGD",
)  # fmt: skip


def require_cuttable(
    program: Program, stages: Mapping[int, nn.Module], optimizer: object, *, adds: bool
) -> None:
    """Refuse stages and an optimizer of which parts would not be parts of the same, and stages
    that another executor keeps in parts."""

    def refuse(fact: str, hint: str) -> ModelError:
        return ModelError(fact, program=program.name, hint=hint)

    trained = [(s, name, p) for s, name, p in _parameters(stages) if p.requires_grad]
    for s, name, p in trained:
        owner = owner_of(p)
        if owner is not None and (program.zero or not owner.shown):
            raise refuse(
                f"{name} of stage {s} is in parts, which another executor keeps",
                "one executor for them; a program with zero 0 runs within `with first.whole():`",
            )
    fused = _fused(optimizer) if program.dp > 1 or program.summed else set()
    for s, name, p in trained:
        if p in fused and not p.is_contiguous():
            raise refuse(
                f"{name} of stage {s} is not contiguous (its strides are {list(p.stride())}), and "
                "sums over replicas or ties are: a fused optimizer takes both to lie alike",
                "p.data = p.data.contiguous() before the executor is made, or fused=False",
            )
    if not program.zero:
        return
    if adds:
        raise refuse(
            f"zero is {program.zero}, and gradients are added to what is there (adds=True): no "
            "replica would keep its own part only",
            "zero=0, or adds=False",
        )
    for s, name, p in trained:
        if not p.is_contiguous():
            raise refuse(
                f"{name} of stage {s} is not contiguous (its strides are {list(p.stride())}): in "
                "parts its numbers would lie in another order",
                "p.data = p.data.contiguous(), or module.to(memory_format="
                "torch.contiguous_format), before the executor is made",
            )
        if type(p.data) is not Tensor:
            raise refuse(
                f"{name} of stage {s} is a {type(p.data).__name__}, which is no plain tensor",
                "let schedir cut it: parallelize no parameter before the executor is made",
            )
    _refuse_shared_memory(program, stages)
    if program.trains and optimizer is not None:
        _require_elementwise(program, optimizer)


def _fused(optimizer: object) -> set[Any]:
    """The parameters that fused optimizers step."""
    found: set[Any] = set()
    for one in all_within(optimizer):
        of = dict(zip(getattr(one, "main", ()), getattr(one, "parameters", ()), strict=False))
        for group in getattr(innermost(one), "param_groups", ()):
            if group.get("fused"):
                found |= {of.get(p, p) for p in group["params"]}
    return found


def _parameters(stages: Mapping[int, nn.Module]) -> Iterator[tuple[int, str, nn.Parameter]]:
    for s, module in stages.items():
        for name, p in module.named_parameters():
            yield s, name, p


def _attributes(stages: Mapping[int, nn.Module]) -> Iterator[tuple[int, str, Tensor]]:
    """Tensors that modules keep beside parameters and buffers, as views of them; not those that a
    hook makes anew before each forward, as of torch.nn.utils.spectral_norm."""
    for s, module in stages.items():
        for prefix, owner in module.named_modules():
            for name, value in {} if owner._forward_pre_hooks else vars(owner).items():
                if not name.startswith("_") and isinstance(value, Tensor):
                    yield s, f"{prefix}.{name}".lstrip("."), value


def _refuse_shared_memory(program: Program, stages: Mapping[int, nn.Module]) -> None:
    """Two in one memory would be two, as soon as each is cut."""
    buffers = [(s, n, b) for s, module in stages.items() for n, b in module.named_buffers()]
    named: dict[int, tuple[str, Tensor]] = {}
    for s, name, t in [*_parameters(stages), *buffers, *_attributes(stages)]:
        if t.layout is torch.strided and t.numel():
            named.setdefault(id(t), (f"{name} of stage {s}", t))
    places = sorted(
        (str(t.device), t.data_ptr(), t.data_ptr() + t.nbytes, name, t.requires_grad)
        for name, t in named.values()
        if not t.is_meta
    )
    for one, other in pairwise(places):
        if one[0] == other[0] and other[1] < one[2] and (one[4] or other[4]):
            raise ModelError(
                f"{one[3]} and {other[3]} have one memory, and would be two when they are cut",
                program=program.name,
                hint="let them be one Parameter: stage.b = stage.a; and let a forward take what is "
                "a view of it",
            )


def _require_elementwise(program: Program, optimizer: object) -> None:
    """An optimizer of parts gives what it gives of whole weights if each number is by itself."""
    inner: Any = innermost(optimizer)
    name = type(inner).__name__
    known = is_torchs(inner) and name in _ELEMENTWISE
    if not getattr(inner, "elementwise", known):
        raise ModelError(
            f"{name} steps a weight as a whole, and each replica has a piece of it (zero "
            f"{program.zero})"
            if is_torchs(inner) or hasattr(inner, "elementwise")
            else f"zero is {program.zero}, and it is not known whether {name} steps each number by "
            "itself: each replica has a piece of a weight",
            program=program.name,
            hint="AdamW or another that is elementwise, or zero=0"
            if is_torchs(inner) or hasattr(inner, "elementwise")
            else f"zero=0, or, if it does, {name}.elementwise = True",
        )
    state: Mapping[Any, Mapping[str, Any]] = getattr(inner, "state", {})
    for p, kept in state.items():
        for key, value in kept.items() if isinstance(p, torch.Tensor) else ():
            if isinstance(value, Tensor) and value.numel() > 1 and value.shape != p.shape:
                raise ModelError(
                    f"{name} keeps {key} of {list(value.shape)} for a weight of {list(p.shape)}: "
                    "it is not of each number by itself",
                    program=program.name,
                    hint="zero=0",
                )
