"""Plan which stored slices of a checkpoint a process reads, and refuse what does not fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from schedir.checkpoints.checkpoint_directory import Manifest, TensorMeta
from schedir.checkpoints.local_state import LocalState, SliceableWeight, TensorShard
from schedir.runtime.parameters.mixed_precision import has_step_hooks, is_torch_optimizer


class LoadPlan:
    """What is to be read: `shards`, each with the name of the tensor in the checkpoint, and
    `optimizer_states`, which an optimizer then keeps of each weight.

    `has_optimizer` says whether there is an optimizer.  `mismatches` is what does not fit,
    `warnings` what is read otherwise than it was written, in words, and `trained_names` under which
    name the checkpoint has each weight that is trained.
    """

    def __init__(
        self, manifest: Manifest, local_states: Iterable[LocalState], *, has_optimizer: bool
    ) -> None:
        self.manifest, self.has_optimizer = manifest, has_optimizer
        self.shards: list[tuple[str, TensorShard]] = []
        self.used_names: list[str] = []  # of weights and buffers, by the names that it has
        self.optimizer_states: list[tuple[SliceableWeight, dict[str, Tensor]]] = []
        self.mismatches: list[str] = []
        self.warnings: list[str] = []
        self.trained_names: dict[str, str] = {}
        self.aliases: Mapping[str, str] = manifest.state.get("also", {})
        self.optimizer_kinds: Mapping[str, str] = {
            name: kind for kind, names in manifest.state["optimizers"].items() for name in names
        }
        self.optimizer_keys: dict[str, list[str]] = {}  # of what optimizers kept, by weight
        self.initial_states: dict[Any, dict[str, Tensor]] = {}
        for tensor in manifest.tensors:
            what, _, rest = tensor.partition("/")
            if what == "optimizer":
                name, _, key = rest.rpartition("/")
                self.optimizer_keys.setdefault(name, []).append(key)
        for own in local_states:
            for weight in own.weights:
                self._add_weight(weight)
            for _, part in own.buffers:
                self.used_names.append(part.name)
                self._add_shard(part.name, part)

    def find_stored_name(self, weight: SliceableWeight) -> str:
        """The name under which a checkpoint has a weight: one of those that it has there."""
        if f"weights/{weight.name}" in self.manifest.tensors:
            return weight.name
        return self.aliases.get(weight.name, weight.name)

    def _add_weight(self, weight: SliceableWeight) -> None:
        name, kinds = self.find_stored_name(weight), self.manifest.tensors
        whole, main = f"weights/{name}", f"main/{name}"
        self.used_names.append(whole)
        if weight.parameter.requires_grad:
            self.trained_names[weight.name] = name
        exact = main if main in kinds else whole  # has the numbers before they were rounded
        exact_type = kinds[exact].dtype if exact in kinds else ""
        for part in weight.iterate_weight_shards():
            stored = whole
            if part.name.startswith("main/"):
                stored = exact
            elif kinds.get(whole, part.meta).dtype != (here := part.meta.dtype) and (
                weight.main_parameter is not None or here == exact_type
            ):
                stored, there = exact, kinds[whole].dtype
                what = "float32 copies" if exact == main else "weights"
                self.warnings.append(f"weights of {here} are read from {what} of a run of {there}")
            rounds = part.memory is weight.parameter and weight.main_parameter is not None
            self._add_shard(stored, part, allows_rounding=rounds)
        if name in self.optimizer_keys and not weight.parameter.requires_grad:
            self.warnings.append(
                "some weights are frozen here: what was kept to step them is not read"
            )
        if (
            whole in kinds
            and name in self.optimizer_keys
            and self.has_optimizer
            and weight.lacks_optimizer
        ):
            self.mismatches.append(
                f"{name} was stepped by {self.optimizer_kinds.get(name)}, and is by nothing here"
            )
        if not weight.is_optimized or whole not in kinds:
            return
        kind, before = type(weight.optimizer).__name__, self.optimizer_kinds.get(name)
        if before != kind:
            stepped = f"was stepped by {before}" if before else "was not stepped"
            self.mismatches.append(f"{name} {stepped}, and is by {kind} here")
            return
        state = self._prepare_state(weight, name)
        for key, value in state.items():
            self._add_shard(f"optimizer/{name}/{key}", weight.make_state_shard(key, value))
        self.optimizer_states.append((weight, state))

    def _add_shard(self, stored: str, shard: TensorShard, *, allows_rounding: bool = False) -> None:
        there, here = self.manifest.tensors.get(stored), shard.meta
        if there is None:
            self.mismatches.append(f"it has no {stored}")
        elif there.shape != here.shape or (there.dtype != here.dtype and not allows_rounding):
            self.mismatches.append(
                f"{stored} is {_describe_tensor(there)} in it, and {_describe_tensor(here)} here"
            )
        elif any(
            n > 1 and not by for n, by in zip(here.shape, shard.memory.stride(), strict=False)
        ):
            self.mismatches.append(f"{stored} is expanded here: several of its numbers are one")
        else:
            self.shards.append((stored, shard))

    def _prepare_state(self, weight: SliceableWeight, name: str) -> dict[str, Tensor]:
        """What an optimizer is to keep of a weight, in what memory there is, or in new memory."""
        keys = self.optimizer_keys.get(name, [])  # none before the first step
        keeps = self._get_initial_state(weight)
        there, state = weight.optimizer.state.get(weight.optimized_tensor, {}), {}
        for key in dict.fromkeys([*keys, *keeps]) if keys else ():
            stored = self.manifest.tensors.get(f"optimizer/{name}/{key}")
            if stored is None:
                self.mismatches.append(f"it has no optimizer/{name}/{key}")
                continue
            if keeps and key not in keeps:
                kind = type(weight.optimizer).__name__
                self.mismatches.append(
                    f"it has optimizer/{name}/{key}, which {kind} does not keep here"
                )
                continue
            own: Tensor = weight.optimized_tensor
            like = keeps.get(key)
            is_one = not like.dim() if like is not None else stored.shape != weight.spec.full_shape
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

    def _get_initial_state(self, weight: SliceableWeight) -> dict[str, Tensor]:
        """What an optimizer of torch's keeps of a weight, as it makes it of one of one number;
        nothing where that cannot be found out."""
        optimizer, own = weight.optimizer, weight.optimized_tensor
        place = id(weight.param_group), own.dtype, own.device
        if place not in self.initial_states:
            self.initial_states[place] = {}
            if is_torch_optimizer(optimizer) and not has_step_hooks(optimizer):
                self.initial_states[place] = _make_initial_state(optimizer, weight.param_group, own)
        return self.initial_states[place]

    def find_unread(self, used_names: Iterable[str]) -> Iterator[str]:
        """What of a checkpoint nobody takes, of weights and buffers, given what is taken of it."""
        every = {*used_names}
        for tensor in self.manifest.tensors:
            if tensor.partition("/")[0] in ("weights", "buffers") and tensor not in every:
                yield f"it has {tensor}, which is nothing here"


def _make_initial_state(
    optimizer: Any, group: Mapping[str, Any], tensor: Tensor
) -> dict[str, Tensor]:
    p = nn.Parameter(tensor.detach().new_zeros(1, 1))
    p.grad = torch.zeros_like(p)
    takes = signature(type(optimizer)).parameters
    options = {key: value for key, value in group.items() if key in takes and key != "params"}
    try:
        one = type(optimizer)([p], **options)
        one.step()
    except (RuntimeError, ValueError, TypeError):
        return {}
    return {key: value for key, value in one.state[p].items() if isinstance(value, Tensor)}


def _describe_tensor(kind: TensorMeta) -> str:
    return f"{list(kind.shape)} of {kind.dtype}"
