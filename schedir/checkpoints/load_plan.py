"""Plan which stored slices of a checkpoint a process reads, and refuse what does not fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from schedir.checkpoints.checkpoint_directory import Manifest, TensorMeta
from schedir.checkpoints.local_state import LocalState, SliceableWeight, TensorShard
from schedir.runtime.parameters.mixed_precision import has_hooks, is_torchs


class LoadPlan:
    """What is to be read: `parts`, each with the name of the tensor in the checkpoint, and `state`,
    which an optimizer then keeps of each weight.

    `steps` says whether there is an optimizer.  `wrong` is what does not fit, `said` what is read
    otherwise than it was written, in words, and `trained` under which name the checkpoint has each
    weight that is trained.
    """

    def __init__(self, manifest: Manifest, owns: Iterable[LocalState], *, steps: bool) -> None:
        self.manifest, self.steps = manifest, steps
        self.parts: list[tuple[str, TensorShard]] = []
        self.taken: list[str] = []  # of weights and buffers, by the names that it has
        self.state: list[tuple[SliceableWeight, dict[str, Tensor]]] = []
        self.wrong: list[str] = []
        self.said: list[str] = []
        self.trained: dict[str, str] = {}
        self.also: Mapping[str, str] = manifest.state.get("also", {})
        self.steppers: Mapping[str, str] = {
            name: kind for kind, names in manifest.state["optimizers"].items() for name in names
        }
        self.keys: dict[str, list[str]] = {}  # of what optimizers kept, by weight
        self.made: dict[Any, dict[str, Tensor]] = {}
        for tensor in manifest.tensors:
            what, _, rest = tensor.partition("/")
            if what == "optimizer":
                name, _, key = rest.rpartition("/")
                self.keys.setdefault(name, []).append(key)
        for own in owns:
            for weight in own.weights:
                self._take(weight)
            for _, part in own.buffers:
                self.taken.append(part.name)
                self._want(part.name, part)

    def name_of(self, weight: SliceableWeight) -> str:
        """The name under which a checkpoint has a weight: one of those that it has there."""
        if f"weights/{weight.name}" in self.manifest.tensors:
            return weight.name
        return self.also.get(weight.name, weight.name)

    def _take(self, weight: SliceableWeight) -> None:
        name, kinds = self.name_of(weight), self.manifest.tensors
        whole, main = f"weights/{name}", f"main/{name}"
        self.taken.append(whole)
        if weight.parameter.requires_grad:
            self.trained[weight.name] = name
        exact = main if main in kinds else whole  # has the numbers before they were rounded
        exact_type = kinds[exact].dtype if exact in kinds else ""
        for part in weight.numbers():
            stored = whole
            if part.name.startswith("main/"):
                stored = exact
            elif kinds.get(whole, part.kind).dtype != (here := part.kind.dtype) and (
                weight.main is not None or here == exact_type
            ):
                stored, there = exact, kinds[whole].dtype
                what = "float32 copies" if exact == main else "weights"
                self.said.append(f"weights of {here} are read from {what} of a run of {there}")
            rounds = part.memory is weight.parameter and weight.main is not None
            self._want(stored, part, rounds=rounds)
        if name in self.keys and not weight.parameter.requires_grad:
            self.said.append("some weights are frozen here: what was kept to step them is not read")
        if whole in kinds and name in self.keys and self.steps and weight.is_left:
            self.wrong.append(
                f"{name} was stepped by {self.steppers.get(name)}, and is by nothing here"
            )
        if not weight.is_stepped or whole not in kinds:
            return
        kind, before = type(weight.optimizer).__name__, self.steppers.get(name)
        if before != kind:
            stepped = f"was stepped by {before}" if before else "was not stepped"
            self.wrong.append(f"{name} {stepped}, and is by {kind} here")
            return
        state = self._state(weight, name)
        for key, value in state.items():
            self._want(f"optimizer/{name}/{key}", weight.moment(key, value))
        self.state.append((weight, state))

    def _want(self, stored: str, part: TensorShard, *, rounds: bool = False) -> None:
        there, here = self.manifest.tensors.get(stored), part.kind
        if there is None:
            self.wrong.append(f"it has no {stored}")
        elif there.shape != here.shape or (there.dtype != here.dtype and not rounds):
            self.wrong.append(f"{stored} is {_said(there)} in it, and {_said(here)} here")
        elif any(n > 1 and not by for n, by in zip(here.shape, part.memory.stride(), strict=False)):
            self.wrong.append(f"{stored} is expanded here: several of its numbers are one")
        else:
            self.parts.append((stored, part))

    def _state(self, weight: SliceableWeight, name: str) -> dict[str, Tensor]:
        """What an optimizer is to keep of a weight, in what memory there is, or in new memory."""
        keys = self.keys.get(name, [])  # none before the first step
        keeps = self._made_by(weight)
        there, state = weight.optimizer.state.get(weight.stepped, {}), {}
        for key in dict.fromkeys([*keys, *keeps]) if keys else ():
            stored = self.manifest.tensors.get(f"optimizer/{name}/{key}")
            if stored is None:
                self.wrong.append(f"it has no optimizer/{name}/{key}")
                continue
            if keeps and key not in keeps:
                kind = type(weight.optimizer).__name__
                self.wrong.append(f"it has optimizer/{name}/{key}, which {kind} does not keep here")
                continue
            own: Tensor = weight.stepped
            like = keeps.get(key)
            is_one = not like.dim() if like is not None else stored.shape != weight.cut.whole
            dtype = like.dtype if like is not None else getattr(torch, stored.dtype)
            device = like.device if like is not None else own.device
            shape = torch.Size(()) if is_one else own.shape
            value = there.get(key)
            if not isinstance(value, Tensor) or (value.shape, value.dtype) != (shape, dtype):
                # As optimizers make it: a fused one steps numbers in their order in memory.
                value = torch.empty_like(
                    own if shape else own.new_empty(()), dtype=dtype, device=device
                )
            state[key] = value
        return state

    def _made_by(self, weight: SliceableWeight) -> dict[str, Tensor]:
        """What an optimizer of torch's keeps of a weight, as it makes it of one of one number;
        nothing where that cannot be found out."""
        optimizer, own = weight.optimizer, weight.stepped
        place = id(weight.group), own.dtype, own.device
        if place not in self.made:
            self.made[place] = {}
            if is_torchs(optimizer) and not has_hooks(optimizer):
                self.made[place] = _kept_by(optimizer, weight.group, own)
        return self.made[place]

    def unread(self, taken: Iterable[str]) -> Iterator[str]:
        """What of a checkpoint nobody takes, of weights and buffers, given what is taken of it."""
        every = {*taken}
        for tensor in self.manifest.tensors:
            if tensor.partition("/")[0] in ("weights", "buffers") and tensor not in every:
                yield f"it has {tensor}, which is nothing here"


def _kept_by(optimizer: Any, group: Mapping[str, Any], own: Tensor) -> dict[str, Tensor]:
    p = nn.Parameter(own.detach().new_zeros(1, 1))
    p.grad = torch.zeros_like(p)
    takes = signature(type(optimizer)).parameters
    options = {key: value for key, value in group.items() if key in takes and key != "params"}
    try:
        one = type(optimizer)([p], **options)
        one.step()
    except (RuntimeError, ValueError, TypeError):
        return {}
    return {key: value for key, value in one.state[p].items() if isinstance(value, Tensor)}


def _said(kind: TensorMeta) -> str:
    return f"{list(kind.shape)} of {kind.dtype}"
