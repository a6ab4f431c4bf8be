"""List the tensors of a process by their names in the full model, with their local shards.

This module copies and communicates nothing. Exactly one process writes each element of a tensor:

- Each data-parallel replica writes its range of every bucket, even if weights are not sharded.
- The first tensor-parallel rank writes the tensors that are not sharded over these ranks.
- If several ranks have replicas of a stage, the first of these ranks writes the stage.
- The first of the stages that share a tied weight writes the weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from schedir.checkpoints.checkpoint_directory import TensorMeta
from schedir.checkpoints.tensor_slices import split_range_into_slices
from schedir.errors import CheckpointError
from schedir.runtime.checkpoint_state import RankCheckpointState, ShardRange, StageCheckpointState
from schedir.runtime.parameters.gradient_buffers import is_tp_sharded
from schedir.runtime.parameters.mixed_precision import MainOptimizer
from schedir.runtime.parameters.optimizer_inspection import find_optimizers, unwrap_optimizer

NameMap = Callable[[int, str], str]  # (stage, name in the stage) -> name in the full model


class TensorPiece(NamedTuple):
    """A slice of a tensor, with the memory of its elements.

    Attributes:
        offset: The offset of the slice in each dimension of the full tensor.
        size: The size of the slice in each dimension.
        memory: A tensor of this size with the elements.
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]
    memory: Tensor


@dataclass(frozen=True)
class TensorShardSpec:
    """The shard of a tensor that a process has.

    The tensor-parallel slice is the part of the tensor along `dim` that the tensor-parallel rank
    has. The local range is the share of this slice that belongs to this data-parallel replica. The
    local range has the elements `low` to `high` of the flattened slice.

    Args:
        shape: The shape of the tensor-parallel slice.
        full_shape: The shape of the full tensor.
        low: The first element of the local range.
        high: The end of the local range, exclusive.
        dim: The dimension along which the tensor is sliced.
        start: The offset of the slice in `dim`. Elements beyond the full tensor are padding.
        is_flat: True if the memory is one-dimensional and has only the local range. Otherwise the
            memory has the complete slice.
    """

    shape: tuple[int, ...]
    full_shape: tuple[int, ...]
    low: int
    high: int
    dim: int = 0
    start: int = 0
    is_flat: bool = False

    def get_local_slices(self, memory: Tensor) -> list[TensorPiece]:
        """Return the slices of the local range, without padding.

        Args:
            memory: The memory of the shard.
        """
        return [*self._iterate_slices(memory, self.low, self.high)]

    def get_all_slices(self, memory: Tensor) -> list[TensorPiece]:
        """Return the slices of all elements in the memory, without padding.

        Args:
            memory: The memory of the shard.
        """
        numel = torch.Size(self.shape).numel()
        return (
            self.get_local_slices(memory)
            if self.is_flat
            else [*self._iterate_slices(memory, 0, numel)]
        )

    def _iterate_slices(self, memory: Tensor, low: int, high: int) -> Iterator[TensorPiece]:
        memory = memory.detach()
        for part in split_range_into_slices(self.shape, low, high):
            if self.is_flat:
                view = memory[part.flat_offset : part.flat_offset + part.numel].view(part.size)
            else:
                view = memory[tuple(slice(o, o + n) for o, n in zip(*part[:2], strict=True))]
            offset, size = [*part.offset], [*part.size]
            if size:
                offset[self.dim] += self.start
                size[self.dim] = min(size[self.dim], self.full_shape[self.dim] - offset[self.dim])
                if size[self.dim] <= 0:
                    continue
                view = view.narrow(self.dim, 0, size[self.dim])
            yield TensorPiece(tuple(offset), tuple(size), view)


@dataclass(frozen=True)
class TensorShard:
    """A tensor, or the part of a tensor that a process has.

    Args:
        name: The name in the checkpoint. The name begins with a category, as in `weights/NAME`.
        memory: The local memory.
        spec: The part of the tensor that is in the memory.
        should_write: True if this process writes its local range.
    """

    name: str
    memory: Tensor
    spec: TensorShardSpec
    should_write: bool

    @property
    def meta(self) -> TensorMeta:
        """Shape and dtype of the full tensor."""
        return TensorMeta(self.spec.full_shape, str(self.memory.dtype).removeprefix("torch."))


@dataclass(frozen=True)
class SliceableWeight:
    """A weight in a stage of a rank, with its optimizer state.

    Args:
        name: The name in the full model.
        stage: The stage.
        owner_stage: The stage from which the weight has its name. For a tied weight, this stage may
            differ from `stage`.
        parameter: The parameter.
        spec: The part of the weight that this process has.
        should_write: True if this process writes its local range.
        aliases: Other names of the weight in the full model.
        main_parameter: The float32 copy of the parameter, or None.
        optimized_tensor: The tensor that the optimizer steps. This tensor is also the key of the
            optimizer state.
        optimizer: The optimizer that steps the weight, if there is one.
        param_group: The options of the parameter group that has the weight.
    """

    name: str
    stage: int
    owner_stage: int
    parameter: nn.Parameter
    spec: TensorShardSpec
    should_write: bool
    aliases: tuple[str, ...] = ()
    main_parameter: Tensor | None = None
    optimized_tensor: Any = None
    optimizer: Any = None
    param_group: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_optimized(self) -> bool:
        """Return whether an optimizer steps local elements of the weight."""
        return self.optimizer is not None and self._is_trained

    @property
    def lacks_optimizer(self) -> bool:
        """Return whether local elements are trained, but no optimizer steps them."""
        return self.optimizer is None and self._is_trained

    @property
    def _is_trained(self) -> bool:
        has_elements = (
            self.spec.low < self.spec.high if self.spec.is_flat else bool(self.parameter.numel())
        )
        return self.parameter.requires_grad and has_elements

    def iterate_shards(self) -> Iterator[TensorShard]:
        """Yield the weight, its float32 copy, and its optimizer state."""
        yield from self.iterate_weight_shards()
        state = self.optimizer.state if self.is_optimized else {}
        for key, value in state.get(self.optimized_tensor, {}).items():
            if value is not None:
                yield self.make_state_shard(key, value)

    def iterate_weight_shards(self) -> Iterator[TensorShard]:
        """Yield the weight and its float32 copy."""
        yield TensorShard(f"weights/{self.name}", self.parameter, self.spec, self.should_write)
        if self.main_parameter is not None:
            yield TensorShard(
                f"main/{self.name}", self.main_parameter, self.spec, self.should_write
            )

    def make_state_shard(self, key: str, value: Tensor) -> TensorShard:
        """Return the shard of an optimizer state of this weight.

        A scalar state, such as a step count, is written by the process that has the first element
        of the weight.

        Args:
            key: The key of the state.
            value: The state: a tensor like the weight, or a scalar.
        """
        spec, should_write = self.spec, self.should_write
        if not value.dim() and (spec.shape or spec.is_flat):
            has_first_element = not spec.start and spec.low == 0 < spec.high
            spec, should_write = TensorShardSpec((), (), 0, 1), should_write and has_first_element
        return TensorShard(f"optimizer/{self.name}/{key}", value, spec, should_write)


@dataclass
class LocalState:
    """The tensors of a rank. Iteration yields the shards of these tensors.

    Args:
        weights: The weights.
        buffers: The buffers, each with its stage.
    """

    weights: list[SliceableWeight] = field(default_factory=list)
    buffers: list[tuple[int, TensorShard]] = field(default_factory=list)

    def __iter__(self) -> Iterator[TensorShard]:
        for weight in self.weights:
            yield from weight.iterate_shards()
        yield from (shard for _, shard in self.buffers)


def list_generator_shards(rank: RankCheckpointState, process: int) -> list[TensorShard]:
    """Return the states of torch's random number generators in a process.

    A checkpoint has these states if the run has no seed. The states are in the order of
    `rank.random_streams.generators`.

    Args:
        rank: The state of a rank in this process.
        process: The index of the process, which is part of the names.
    """
    shards = []
    for k, generator in enumerate(rank.random_streams.generators):
        state: Tensor = generator.get_state()
        shape = tuple(state.shape)
        spec = TensorShardSpec(shape, shape, 0, state.numel())
        shards.append(TensorShard(f"generators/{process}.{k}", state, spec, should_write=True))
    return shards


def collect_tied_names(rank: RankCheckpointState, name_map: NameMap) -> dict[tuple[Any, ...], str]:
    """Return the names of the tied weights whose first stage is on this rank.

    The other processes use these names.

    Args:
        rank: The state of the rank.
        name_map: Returns the name in the full model.

    Returns:
        (the stages that share a weight, the index of the weight among all weights that these stages
        share) -> name.
    """
    return {key: name_map(s, n) for key, s, n in _iterate_tied_weights(rank) if s == key[0][0]}


def _iterate_tied_weights(rank: RankCheckpointState) -> Iterator[tuple[tuple[Any, ...], int, str]]:
    """Yield key, stage and local name of each copy of a tied weight on a rank.

    The key has the stages that share the weight, and the index of the weight among all weights that
    these stages share.
    """
    last_index: dict[tuple[int, ...], int] = {}
    for weight in rank.tied_weights:
        k = last_index[weight.stages] = last_index.get(weight.stages, -1) + 1
        for s, p in weight.local_copies.items():
            yield (weight.stages, k), s, rank.stages[s].parameter_names[p]


def collect_local_state(
    rank: RankCheckpointState, name_map: NameMap, tied: Mapping[tuple[Any, ...], str]
) -> LocalState:
    """Return the weights and buffers of a rank.

    If the loss is a module, its tensors are included as tensors of the last stage. The names in
    this module begin with `loss.`.

    Args:
        rank: The state of the rank.
        name_map: Returns the name in the full model.
        tied: The names of tied weights from all processes. See `collect_tied_names`.

    Raises:
        CheckpointError: Two weights or buffers of a stage have the same name, or two optimizers
            step the same parameter.
    """
    local_state = LocalState()
    owners = OptimizerOwners(rank.optimizer)
    tied_names = {(s, n): (key[0][0], tied[key]) for key, s, n in _iterate_tied_weights(rank)}
    modules = [(s, stage, name_map, tied_names) for s, stage in rank.stages.items()]
    last_stage = rank.program.shape.stages - 1
    loss = getattr(rank.loss, "func", rank.loss)
    if isinstance(loss, nn.Module) and last_stage in rank.stages:
        modules.append(
            (last_stage, StageCheckpointState(loss, {}), lambda _, name: f"loss.{name}", {})
        )
    for s, stage, map_name, first_copies in modules:
        trained = {n: p for p, n in stage.parameter_names.items()}
        for name, p, other_names in _iterate_parameters(stage.module):
            p = trained.get(name, p)  # The stage may compute with a parameter of another stage.
            if p in rank.aliases:  # Another stage has the same memory, and saves it.
                continue
            owner_stage, full_name = first_copies.get((s, name)) or (s, map_name(s, name))
            shard_range = stage.shard_ranges.get(p) or _make_equal_range(p, rank)
            spec = _make_shard_spec(p, shard_range, rank, is_flat=p in stage.shards)
            all_names = [map_name(s, n) for n in ([name] if owner_stage != s else []) + other_names]
            aliases = tuple(dict.fromkeys(n for n in all_names if n != full_name))
            should_write = _is_writer(rank, s, p) and owner_stage == s
            optimizer_fields = owners.find_owner(p)
            local_state.weights.append(
                SliceableWeight(
                    full_name, s, owner_stage, p, spec, should_write, aliases, *optimizer_fields
                )
            )
        for name, buffer in _iterate_buffers(stage.module):
            local_state.buffers.append((s, _make_buffer_shard(map_name(s, name), s, buffer, rank)))
    _require_unique_names(local_state)
    return local_state


def _require_unique_names(local_state: LocalState) -> None:
    """Raise CheckpointError if two weights or two buffers of a stage have the same name."""
    counts = Counter(
        (weight.stage, f"weights named {weight.name}") for weight in local_state.weights
    )
    counts.update(
        (s, f"buffers named {buffer.name.removeprefix('buffers/')}")
        for s, buffer in local_state.buffers
    )
    for (stage, name), number in counts.items():
        if number > 1:
            raise CheckpointError(
                f"stage {stage} has two {name}",
                hint="pass name_map=..., a function that gives each tensor of the complete model "
                "a different name",
            )


class OptimizerOwners:
    """The optimizer and the float32 copy of each parameter.

    Args:
        optimizer: The optimizer of a rank, which may contain other optimizers, or None.

    Raises:
        CheckpointError: Two optimizers step the same parameter.
    """

    def __init__(self, optimizer: object) -> None:
        self.main_parameters: dict[Any, Tensor] = {}
        self.groups: dict[Any, tuple[Any, dict[str, Any]]] = {}
        for part in find_optimizers(optimizer):
            if isinstance(part, MainOptimizer):
                self.main_parameters |= zip(part.parameters, part.main_parameters, strict=True)
            for group in getattr(part, "param_groups", ()):
                for p in group["params"]:
                    owner = unwrap_optimizer(part)
                    first_owner, _ = self.groups.setdefault(p, (owner, group))
                    if first_owner is not owner:
                        raise CheckpointError(
                            f"two optimizers, {type(first_owner).__name__} and "
                            f"{type(owner).__name__}, step the same parameter of shape "
                            f"{list(p.shape)}, but a checkpoint has the state of one optimizer "
                            "per parameter",
                        )

    def find_owner(self, p: nn.Parameter) -> tuple[Tensor | None, Any, Any, dict[str, Any]]:
        """Return the optimizer of a parameter, and the tensor that the optimizer steps.

        Args:
            p: The parameter.

        Returns:
            The float32 copy of the parameter or None, the tensor that the optimizer steps, the
            optimizer or None, and the parameter group.
        """
        main_parameter = self.main_parameters.get(p)
        optimized_tensor = p if main_parameter is None else main_parameter
        return main_parameter, optimized_tensor, *self.groups.get(optimized_tensor, (None, {}))


def _iterate_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, list[str]]]:
    """Yield each parameter once, with its first name and its other names."""
    names_by_parameter: dict[nn.Parameter, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        names_by_parameter.setdefault(p, []).append(name)
    for p, (name, *other_names) in names_by_parameter.items():
        yield name, p, other_names


def _is_writer(rank: RankCheckpointState, stage: int, tensor: Tensor) -> bool:
    """Return whether a rank writes its local range of a tensor.

    The first rank of the stage writes the tensor. If the tensor is not sharded over tensor-parallel
    ranks, only the first of these ranks writes it.
    """
    is_first = bool(rank.program.shape.first_rank_per_stage[stage] == rank.rank)
    return is_first and (is_tp_sharded(tensor) or not rank.tp_rank)


def _make_buffer_shard(
    name: str, stage: int, buffer: Tensor, rank: RankCheckpointState
) -> TensorShard:
    """Return the shard of a buffer.

    Only the first replica that has the buffer writes it, because the values of the buffer may
    differ between replicas.
    """
    full_range = ShardRange(tuple(buffer.shape), 0, buffer.numel())
    spec = _make_shard_spec(buffer, full_range, rank, is_flat=False)
    is_writer = _is_writer(rank, stage, buffer)
    should_write = is_writer and not rank.shard_spec.for_tensor(buffer).replica
    return TensorShard(f"buffers/{name}", buffer, spec, should_write)


def _make_equal_range(p: Tensor, rank: RankCheckpointState) -> ShardRange:
    """Return this replica's range of a parameter that belongs to no bucket."""
    n, k, _ = rank.shard_spec.for_tensor(p)
    return ShardRange(tuple(p.shape), p.numel() * k // n, p.numel() * (k + 1) // n)


def _make_shard_spec(
    p: Tensor, shard_range: ShardRange, rank: RankCheckpointState, *, is_flat: bool
) -> TensorShardSpec:
    (shape, low, high), dim = shard_range, getattr(p, "shard_dim", None)
    if dim is None:
        return TensorShardSpec(shape, shape, low, high, is_flat=is_flat)
    dim, full_shape = dim % len(shape), [*shape]
    full_shape[dim] = getattr(p, "shard_size", rank.tp * shape[dim])
    return TensorShardSpec(
        shape, tuple(full_shape), low, high, dim, rank.tp_rank * shape[dim], is_flat
    )


def _iterate_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of a module's state_dict, each once."""
    seen: set[int] = set()
    for prefix, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is None or name in owner._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            yield f"{prefix}.{name}".lstrip("."), buffer
