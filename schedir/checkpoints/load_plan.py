"""Plan which tensors and stored slices a process loads, and detect tensors that do not fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from inspect import signature
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from schedir.checkpoints.checkpoint_directory import Manifest, StoredSlice, TensorMeta
from schedir.checkpoints.local_state import LocalState, SliceableWeight, TensorPiece, TensorShard
from schedir.runtime.parameters.optimizer_inspection import has_step_hooks, is_torch_optimizer

# Name of a file -> the stored slices to read. Each stored slice comes with the slices in memory
# that it fills.
FileReads = Mapping[str, Sequence[tuple[StoredSlice, Sequence[TensorPiece]]]]


class LoadPlan:
    """The shards of a checkpoint that a process loads.

    Args:
        manifest: The manifest of the checkpoint.
        local_states: The local states of the ranks in this process.
        has_optimizer: True if the run has an optimizer.

    Attributes:
        shards: The shards to read, each with the name of its tensor in the checkpoint.
        used_names: The names of weights and buffers in the checkpoint that this process uses.
        optimizer_states: Each weight with the memory for its optimizer state, by key of the state.
            The load fills this memory.
        mismatches: Descriptions of tensors that do not fit.
        warnings: Descriptions of tensors that are read in another form than they were written.
        trained_names: Name of a trained weight in this run -> its name in the checkpoint.
        aliases: Other name of a weight -> its name in the checkpoint.
        optimizer_kinds: Name of a weight in the checkpoint -> the class name of its optimizer.
        optimizer_keys: Name of a weight in the checkpoint -> the keys of its optimizer state.
        initial_states: The cache of `_get_initial_state`, by parameter group, dtype and device.
    """

    def __init__(
        self, manifest: Manifest, local_states: Iterable[LocalState], *, has_optimizer: bool
    ) -> None:
        self.manifest = manifest
        self.has_optimizer = has_optimizer
        self.shards: list[tuple[str, TensorShard]] = []
        self.used_names: list[str] = []
        self.optimizer_states: list[tuple[SliceableWeight, dict[str, Tensor]]] = []
        self.mismatches: list[str] = []
        self.warnings: list[str] = []
        self.trained_names: dict[str, str] = {}
        self.aliases: Mapping[str, str] = manifest.state.get("also", {})
        self.optimizer_kinds: Mapping[str, str] = {
            name: kind for kind, names in manifest.state["optimizers"].items() for name in names
        }
        self.optimizer_keys: dict[str, list[str]] = {}
        self.initial_states: dict[Any, dict[str, Tensor]] = {}
        for tensor in manifest.tensors:
            group, _, state_name = tensor.partition("/")
            if group == "optimizer":
                name, _, key = state_name.rpartition("/")
                self.optimizer_keys.setdefault(name, []).append(key)
        for local_state in local_states:
            for weight in local_state.weights:
                self._add_weight(weight)
            for _, shard in local_state.buffers:
                self.used_names.append(shard.name)
                self._add_shard(shard.name, shard)

    def find_stored_name(self, weight: SliceableWeight) -> str:
        """Return the name under which the checkpoint has a weight.

        For a tied weight, the result may be another name of this weight.

        Args:
            weight: The weight.
        """
        if f"weights/{weight.name}" in self.manifest.tensors:
            return weight.name
        return self.aliases.get(weight.name, weight.name)

    def _add_weight(self, weight: SliceableWeight) -> None:
        name, metas = self.find_stored_name(weight), self.manifest.tensors
        stored_weight, stored_copy = f"weights/{name}", f"main/{name}"
        self.used_names.append(stored_weight)
        if weight.parameter.requires_grad:
            self.trained_names[weight.name] = name
        # The float32 copy has the values before they were rounded to the dtype of the weight.
        precise_name = stored_copy if stored_copy in metas else stored_weight
        precise_dtype = metas[precise_name].dtype if precise_name in metas else ""
        for shard in weight.iterate_weight_shards():
            stored, run_dtype = stored_weight, shard.meta.dtype
            if shard.name.startswith("main/"):
                stored = precise_name
            elif metas.get(stored_weight, shard.meta).dtype != run_dtype and (
                weight.main_parameter is not None or run_dtype == precise_dtype
            ):
                stored, stored_dtype = precise_name, metas[stored_weight].dtype
                source = "float32 copies" if precise_name == stored_copy else "weights"
                self.warnings.append(
                    f"{run_dtype} weights are read from {source} of a {stored_dtype} run"
                )
            allows_rounding = shard.memory is weight.parameter and weight.main_parameter is not None
            self._add_shard(stored, shard, allows_rounding=allows_rounding)
        if name in self.optimizer_keys and not weight.parameter.requires_grad:
            self.warnings.append("some weights are frozen here: their optimizer state is not read")
        if (
            stored_weight in metas
            and name in self.optimizer_keys
            and self.has_optimizer
            and weight.lacks_optimizer
        ):
            self.mismatches.append(
                f"{name} has state of {self.optimizer_kinds.get(name)}, but no optimizer here"
            )
        if not weight.is_optimized or stored_weight not in metas:
            return
        kind, stored_kind = type(weight.optimizer).__name__, self.optimizer_kinds.get(name)
        if stored_kind != kind:
            stored_fact = f"has state of {stored_kind}" if stored_kind else "has no optimizer state"
            self.mismatches.append(f"{name} {stored_fact}, but its optimizer is {kind} here")
            return
        state = self._prepare_state(weight, name)
        for key, value in state.items():
            self._add_shard(f"optimizer/{name}/{key}", weight.make_state_shard(key, value))
        self.optimizer_states.append((weight, state))

    def _add_shard(self, stored: str, shard: TensorShard, *, allows_rounding: bool = False) -> None:
        stored_meta, meta = self.manifest.tensors.get(stored), shard.meta
        if stored_meta is None:
            self.mismatches.append(f"it has no {stored}")
        elif stored_meta.shape != meta.shape or (
            stored_meta.dtype != meta.dtype and not allows_rounding
        ):
            self.mismatches.append(
                f"{stored} is {_describe_tensor(stored_meta)} in it, but "
                f"{_describe_tensor(meta)} here"
            )
        elif any(
            n > 1 and not stride
            for n, stride in zip(meta.shape, shard.memory.stride(), strict=False)
        ):
            self.mismatches.append(f"{stored} is expanded here: its elements share memory")
        else:
            self.shards.append((stored, shard))

    def _prepare_state(self, weight: SliceableWeight, name: str) -> dict[str, Tensor]:
        """Return the memory for the optimizer state of a weight, by key of the state.

        Existing memory is reused.
        """
        keys = self.optimizer_keys.get(name, [])  # Empty if no step was made before the save.
        initial_state = self._get_initial_state(weight)
        current_state, state = weight.optimizer.state.get(weight.optimized_tensor, {}), {}
        for key in dict.fromkeys([*keys, *initial_state]) if keys else ():
            stored = self.manifest.tensors.get(f"optimizer/{name}/{key}")
            if stored is None:
                self.mismatches.append(f"it has no optimizer/{name}/{key}")
                continue
            if initial_state and key not in initial_state:
                kind = type(weight.optimizer).__name__
                self.mismatches.append(
                    f"it has optimizer/{name}/{key}, but {kind} has no such state here"
                )
                continue
            tensor: Tensor = weight.optimized_tensor
            initial = initial_state.get(key)
            is_scalar = (
                not initial.dim() if initial is not None else stored.shape != weight.spec.full_shape
            )
            dtype = initial.dtype if initial is not None else getattr(torch, stored.dtype)
            device = initial.device if initial is not None else tensor.device
            shape = torch.Size(()) if is_scalar else tensor.shape
            value = current_state.get(key)
            if not isinstance(value, Tensor) or (value.shape, value.dtype) != (shape, dtype):
                # Use the memory format of the parameter, as optimizers do. A fused optimizer steps
                # the elements in memory order.
                value = torch.empty_like(
                    tensor if shape else tensor.new_empty(()), dtype=dtype, device=device
                )
            state[key] = value
        return state

    def _get_initial_state(self, weight: SliceableWeight) -> dict[str, Tensor]:
        """Return the state that an optimizer of torch creates for a parameter with one element.

        The result is empty if the optimizer is not one of torch's, has step hooks, or cannot step
        this parameter.
        """
        optimizer, tensor = weight.optimizer, weight.optimized_tensor
        key = id(weight.param_group), tensor.dtype, tensor.device
        if key not in self.initial_states:
            self.initial_states[key] = {}
            if is_torch_optimizer(optimizer) and not has_step_hooks(optimizer):
                self.initial_states[key] = _make_initial_state(
                    optimizer, weight.param_group, tensor
                )
        return self.initial_states[key]

    def find_unread(self, used_names: Iterable[str]) -> Iterator[str]:
        """Describe the weights and buffers of the checkpoint that no process uses.

        Args:
            used_names: The `used_names` of all processes.
        """
        all_used = {*used_names}
        for tensor in self.manifest.tensors:
            if tensor.partition("/")[0] in ("weights", "buffers") and tensor not in all_used:
                yield f"it has {tensor}, but no stage here has it"


def plan_reads(
    manifest: Manifest, destinations: Iterable[tuple[str, Sequence[TensorPiece]]]
) -> FileReads:
    """Choose the stored slices that overlap the slices to load.

    Args:
        manifest: The manifest of the checkpoint.
        destinations: (name of a tensor, slices with the memory to fill) pairs.
    """
    pieces: dict[str, list[TensorPiece]] = {}
    for name, tensor_pieces in destinations:
        pieces.setdefault(name, []).extend(tensor_pieces)
    reads: dict[str, list[tuple[StoredSlice, list[TensorPiece]]]] = {}
    for stored in manifest.slices:
        overlapping = [
            piece for piece in pieces.get(stored.tensor, ()) if prod(intersect(piece, stored)[1])
        ]
        if overlapping:
            reads.setdefault(stored.file, []).append((stored, overlapping))
    return reads


def intersect(piece: TensorPiece, stored: StoredSlice) -> tuple[list[int], list[int]]:
    """Return offset and size of the intersection of two slices of a tensor. Sizes may be 0.

    Args:
        piece: A slice in memory.
        stored: A slice of the same tensor in a file.
    """
    ranges = [*zip(piece.offset, piece.size, stored.offset, stored.size, strict=True)]
    begin = [max(low, stored_low) for low, _, stored_low, _ in ranges]
    end = [min(low + n, stored_low + m) for low, n, stored_low, m in ranges]
    return begin, [max(0, high - low) for low, high in zip(begin, end, strict=True)]


def _make_initial_state(
    optimizer: Any, group: Mapping[str, Any], tensor: Tensor
) -> dict[str, Tensor]:
    """Step a new optimizer of the same class once, and return its state for one element."""
    p = nn.Parameter(tensor.detach().new_zeros(1, 1))
    p.grad = torch.zeros_like(p)
    parameters = signature(type(optimizer)).parameters
    options = {key: value for key, value in group.items() if key in parameters and key != "params"}
    try:
        new_optimizer = type(optimizer)([p], **options)
        new_optimizer.step()
    except (RuntimeError, ValueError, TypeError):
        return {}
    return {
        key: value for key, value in new_optimizer.state[p].items() if isinstance(value, Tensor)
    }


def _describe_tensor(meta: TensorMeta) -> str:
    return f"{list(meta.shape)} of {meta.dtype}"
