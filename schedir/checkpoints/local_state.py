"""List the tensors of a process by their names in the whole model, with the slices that it holds.

Nothing is copied or gathered here.  Replicas (dp) have the same, in parts (ZeRO) or whole; each
writes its own part of every bucket.  What each tensor-parallel rank has whole the first one writes,
of several holders of a stage the first, and of a weight that is tied the first stage.
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
from schedir.runtime.parameters.mixed_precision import (
    MainOptimizer,
    find_optimizers,
    unwrap_optimizer,
)

NameMap = Callable[[int, str], str]  # of a stage and a name there, the name in the whole model


class TensorPiece(NamedTuple):
    """A box of a tensor, and the memory in which its numbers are, of its size."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    memory: Tensor


@dataclass(frozen=True)
class TensorShardSpec:
    """What part of a tensor a process has: a slice of it, and of the numbers of the slice those
    from `low` to `high` are its own.

    The slice is of `shape`, and begins at `start` along the dimension `dim` of the tensor, which is
    of the shape `full_shape`; where it reaches beyond that, its numbers are padding.  Memory has
    the own numbers only, 1-dim, where they are `is_flat`, and else the slice.
    """

    shape: tuple[int, ...]
    full_shape: tuple[int, ...]
    low: int
    high: int
    dim: int = 0
    start: int = 0
    is_flat: bool = False

    def get_local_slices(self, memory: Tensor) -> list[TensorPiece]:
        """The boxes of own numbers."""
        return [*self._iterate_slices(memory, self.low, self.high)]

    def get_all_slices(self, memory: Tensor) -> list[TensorPiece]:
        """The boxes of all numbers that memory has."""
        numel = torch.Size(self.shape).numel()
        return (
            self.get_local_slices(memory)
            if self.is_flat
            else [*self._iterate_slices(memory, 0, numel)]
        )

    def _iterate_slices(self, memory: Tensor, low: int, high: int) -> Iterator[TensorPiece]:
        memory = memory.detach()
        for box in split_range_into_slices(self.shape, low, high):
            if self.is_flat:
                view = memory[box.flat_offset : box.flat_offset + box.numel].view(box.size)
            else:
                view = memory[tuple(slice(o, o + n) for o, n in zip(*box[:2], strict=True))]
            offset, size = [*box.offset], [*box.size]
            if size:
                offset[self.dim] += self.start
                size[self.dim] = min(size[self.dim], self.full_shape[self.dim] - offset[self.dim])
                if size[self.dim] <= 0:
                    continue
                view = view.narrow(self.dim, 0, size[self.dim])
            yield TensorPiece(tuple(offset), tuple(size), view)


@dataclass(frozen=True)
class TensorShard:
    """A tensor of which a process has something: its name with what it is of, as `weights/NAME`;
    which memory has it, cut how; and whether the process writes its own numbers of it."""

    name: str
    memory: Tensor
    spec: TensorShardSpec
    should_write: bool

    @property
    def meta(self) -> TensorMeta:
        """What the whole tensor is."""
        return TensorMeta(self.spec.full_shape, str(self.memory.dtype).removeprefix("torch."))


@dataclass(frozen=True)
class SliceableWeight:
    """A weight as a stage of a rank has it.

    `name` is the one in the whole model, that of the stage `owner_stage`, and `aliases` are others
    that it has there.  `main_parameter` is its float32 copy, and `optimized_tensor` what an
    `optimizer` keeps its state by, with the options of a `param_group`.
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
        """Whether an optimizer steps numbers of it."""
        return self.optimizer is not None and self._is_trained

    @property
    def lacks_optimizer(self) -> bool:
        """Whether numbers of it are trained, and no optimizer steps them."""
        return self.optimizer is None and self._is_trained

    @property
    def _is_trained(self) -> bool:
        has_some = (
            self.spec.low < self.spec.high if self.spec.is_flat else bool(self.parameter.numel())
        )
        return self.parameter.requires_grad and has_some

    def iterate_shards(self) -> Iterator[TensorShard]:
        """The weight, its float32 copy, and what an optimizer keeps of it."""
        yield from self.iterate_weight_shards()
        state = self.optimizer.state if self.is_optimized else {}
        for key, value in state.get(self.optimized_tensor, {}).items():
            if value is not None:
                yield self.make_state_shard(key, value)

    def iterate_weight_shards(self) -> Iterator[TensorShard]:
        """The weight, and its float32 copy."""
        yield TensorShard(f"weights/{self.name}", self.parameter, self.spec, self.should_write)
        if self.main_parameter is not None:
            yield TensorShard(
                f"main/{self.name}", self.main_parameter, self.spec, self.should_write
            )

    def make_state_shard(self, key: str, value: Tensor) -> TensorShard:
        """What an optimizer keeps under a key: a number for each of the weight's, or one of all."""
        cut, writes = self.spec, self.should_write
        if not value.dim() and (cut.shape or cut.is_flat):  # whoever has the first number writes it
            first = not cut.start and cut.low == 0 < cut.high
            cut, writes = TensorShardSpec((), (), 0, 1), writes and first
        return TensorShard(f"optimizer/{self.name}/{key}", value, cut, writes)


@dataclass
class LocalState:
    """All that a rank has: weights, and buffers with the stage of each."""

    weights: list[SliceableWeight] = field(default_factory=list)
    buffers: list[tuple[int, TensorShard]] = field(default_factory=list)

    def __iter__(self) -> Iterator[TensorShard]:
        for weight in self.weights:
            yield from weight.iterate_shards()
        yield from (part for _, part in self.buffers)


def list_generator_shards(rank: RankCheckpointState, process: int) -> list[TensorShard]:
    """The states of torch's generators in a process, of modules that draw as they come (seed=None),
    in the order of `rank.draws.generators`."""
    parts = []
    for k, generator in enumerate(rank.random_streams.generators):
        state: Tensor = generator.get_state()
        shape = tuple(state.shape)
        cut = TensorShardSpec(shape, shape, 0, state.numel())
        parts.append(TensorShard(f"generators/{process}.{k}", state, cut, should_write=True))
    return parts


def collect_tied_names(rank: RankCheckpointState, name_map: NameMap) -> dict[tuple[Any, ...], str]:
    """The names of tied weights whose first stage is this rank's, by the stages that share them and
    a number: these are told to the others."""
    return {key: name_map(s, n) for key, s, n in _iterate_tied_weights(rank) if s == key[0][0]}


def _iterate_tied_weights(rank: RankCheckpointState) -> Iterator[tuple[tuple[Any, ...], int, str]]:
    """The copies of tied weights that a rank has: by which stages share one, and its number among
    the weights of these; the stage, and the name there."""
    count: dict[tuple[int, ...], int] = {}
    for weight in rank.tied_weights:
        k = count[weight.stages] = count.get(weight.stages, -1) + 1
        for s, p in weight.local_copies.items():
            yield (weight.stages, k), s, rank.stages[s].parameter_names[p]


def collect_local_state(
    rank: RankCheckpointState, name_map: NameMap, tied: Mapping[tuple[Any, ...], str]
) -> LocalState:
    """What a rank has; `tied_weights` are the names of tied weights, as all processes have told
    them."""
    own, steppers = LocalState(), OptimizerOwners(rank.optimizer)
    first_name = {(s, n): (key[0][0], tied[key]) for key, s, n in _iterate_tied_weights(rank)}
    modules = [(s, stage, name_map, first_name) for s, stage in rank.stages.items()]
    last, loss = rank.program.shape.stages - 1, getattr(rank.loss, "func", rank.loss)
    if isinstance(loss, nn.Module) and last in rank.stages:  # by names of its own
        modules.append((last, StageCheckpointState(loss, {}), lambda _, name: f"loss.{name}", {}))
    for s, stage, names_of, firsts in modules:
        trained = {n: p for p, n in stage.parameter_names.items()}
        for name, p, also in _iterate_parameters(stage.module):
            p = trained.get(name, p)  # what the stage computes with, where it shares it
            if p in rank.aliases:  # the memory of another stage's
                continue
            of, whole_name = firsts.get((s, name)) or (s, names_of(s, name))
            own_range = stage.shard_ranges.get(p) or _make_equal_range(p, rank)
            cut = _make_shard_spec(p, own_range, rank, is_flat=p in stage.shards)
            others = [names_of(s, n) for n in ([name] if of != s else []) + also]
            also_whole = tuple(dict.fromkeys(n for n in others if n != whole_name))
            writes = _is_writer(rank, s, p) and of == s
            kept = steppers.find_owner(p)
            own.weights.append(
                SliceableWeight(whole_name, s, of, p, cut, writes, also_whole, *kept)
            )
        for name, buffer in _iterate_buffers(stage.module):
            own.buffers.append((s, _make_buffer_shard(names_of(s, name), s, buffer, rank)))
    _require_unique_names(own)
    return own


def _require_unique_names(local_state: LocalState) -> None:
    """Refuse one name for two weights or buffers of a stage: the checkpoint would have one."""
    count = Counter((weight.stage, f"weights {weight.name}") for weight in local_state.weights)
    count.update(
        (s, f"buffers {part.name.removeprefix('buffers/')}") for s, part in local_state.buffers
    )
    for (stage, name), number in count.items():
        if number > 1:
            raise CheckpointError(
                f"stage {stage} has two {name}",
                hint="name_map=..., which gives each its name in the whole model",
            )


class OptimizerOwners:
    """What optimizers keep: which of them steps a parameter, and from which float32 copy."""

    def __init__(self, optimizer: object) -> None:
        self.main_parameters: dict[Any, Tensor] = {}
        self.groups: dict[Any, tuple[Any, dict[str, Any]]] = {}
        for one in find_optimizers(optimizer):
            if isinstance(one, MainOptimizer):
                self.main_parameters |= zip(one.parameters, one.main_parameters, strict=True)
            for group in getattr(one, "param_groups", ()):
                for p in group["params"]:
                    by = unwrap_optimizer(one)
                    other, _ = self.groups.setdefault(p, (by, group))
                    if other is not by:
                        raise CheckpointError(
                            f"two optimizers step a parameter of {list(p.shape)}, "
                            f"{type(other).__name__} and {type(by).__name__}: what one "
                            "of them keeps would be lost",
                        )

    def find_owner(self, p: nn.Parameter) -> tuple[Tensor | None, Any, Any, dict[str, Any]]:
        """Of a parameter its float32 copy, what is stepped, by which optimizer, and with which
        options."""
        main = self.main_parameters.get(p)
        stepped = p if main is None else main
        return main, stepped, *self.groups.get(stepped, (None, {}))


def _iterate_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, list[str]]]:
    """Each parameter with its first name, and the others that it has."""
    every: dict[nn.Parameter, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        every.setdefault(p, []).append(name)
    for p, (name, *also) in every.items():
        yield name, p, also


def _is_writer(rank: RankCheckpointState, stage: int, tensor: Tensor) -> bool:
    """Whether a rank writes its part of what it and others have: the first holder of the stage, and
    the first of tensor-parallel ranks unless each has a slice."""
    is_first = bool(rank.program.shape.first_rank_per_stage[stage] == rank.rank)
    return is_first and (is_tp_sharded(tensor) or not rank.tp_rank)


def _make_buffer_shard(
    name: str, stage: int, buffer: Tensor, rank: RankCheckpointState
) -> TensorShard:
    """A buffer, which the first replica writes: each has seen other microbatches."""
    whole = ShardRange(tuple(buffer.shape), 0, buffer.numel())
    cut = _make_shard_spec(buffer, whole, rank, is_flat=False)
    writes = _is_writer(rank, stage, buffer) and not rank.shard_spec.replica
    return TensorShard(f"buffers/{name}", buffer, cut, writes)


def _make_equal_range(p: Tensor, rank: RankCheckpointState) -> ShardRange:
    """The range of a parameter that has none of its own, as one that is frozen: an equal share."""
    n, k = rank.shard_spec.replicas, rank.shard_spec.replica
    return ShardRange(tuple(p.shape), p.numel() * k // n, p.numel() * (k + 1) // n)


def _make_shard_spec(
    p: Tensor, shard_range: ShardRange, rank: RankCheckpointState, *, is_flat: bool
) -> TensorShardSpec:
    (shape, low, high), dim = shard_range, getattr(p, "shard_dim", None)
    if dim is None:
        return TensorShardSpec(shape, shape, low, high, is_flat=is_flat)
    dim, whole = dim % len(shape), [*shape]
    whole[dim] = getattr(p, "shard_size", rank.tp * shape[dim])
    return TensorShardSpec(shape, tuple(whole), low, high, dim, rank.tp_rank * shape[dim], is_flat)


def _iterate_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that a state_dict has, once each."""
    seen: set[int] = set()
    for prefix, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is None or name in owner._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            yield f"{prefix}.{name}".lstrip("."), buffer
