"""Find tensors that share memory, and refuse tensors that must have separate memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_leaves_with_path

from schedir.errors import ModelError
from schedir.runtime.model_checks.tensor_fingerprint import get_local_shard


class ModuleTensor(NamedTuple):
    """A tensor of a module.

    Attributes:
        stages: The stages that have the tensor.
        name: Its name in the first of these stages.
        tensor: The tensor.
        is_trained: True if it is a Parameter that requires a gradient.
    """

    stages: tuple[int, ...]
    name: str
    tensor: Tensor
    is_trained: bool

    def __str__(self) -> str:
        return f"{self.name} of stage {self.stages[0]}"


def list_module_tensors(stages: Mapping[int, nn.Module]) -> list[ModuleTensor]:
    """Return the parameters, buffers and tensor attributes of stages, each tensor once.

    Attributes include the tensors in lists, tuples and dicts. The result leaves out the attributes
    of a module with forward pre-hooks, because a hook may create these attributes before each
    forward, as in torch.nn.utils.spectral_norm.

    Args:
        stages: The stages, by number.
    """
    tensors: dict[int, ModuleTensor] = {}
    for s, module in stages.items():
        attributes = (
            (f"{prefix}.{name}".lstrip("."), value)
            for prefix, submodule in module.named_modules()
            for name, value in _list_tensor_attributes(submodule)
        )
        for name, t in (*module.named_parameters(), *module.named_buffers(), *attributes):
            new_tensor = ModuleTensor((), name, t, isinstance(t, nn.Parameter))
            module_tensor = tensors.get(id(t), new_tensor)
            is_trained = module_tensor.is_trained and t.requires_grad
            tensors[id(t)] = module_tensor._replace(
                stages=tuple(dict.fromkeys((*module_tensor.stages, s))), is_trained=is_trained
            )
    return [*tensors.values()]


def _list_tensor_attributes(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a name such as `views[0]`, and the tensor, for each tensor in a module's attributes."""
    for name, value in vars(module).items():
        if name in MODULE_ATTRIBUTES or module._forward_pre_hooks:
            continue
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, list | tuple | dict):
            for path, leaf in tree_leaves_with_path(value):
                if isinstance(leaf, Tensor):
                    yield name + keystr(path), leaf


# The attributes of every module, such as _parameters.
MODULE_ATTRIBUTES: Final = frozenset(vars(nn.Module()))


def find_overlaps(tensors: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of tensors that have an element in the same memory.

    A tensor that has no memory, or is not strided, overlaps with no tensor. A tensor object that
    occurs twice in `tensors` is not a pair with itself.

    Args:
        tensors: The tensors. For a DTensor, the function uses its local shard.

    Yields:
        Two indices in `tensors`, the smaller index first.
    """
    spans = []
    for k, t in enumerate(tensors):
        shard = get_local_shard(t)
        if shard.layout is not torch.strided or not shard.numel() or shard.is_meta:
            continue
        start = shard.data_ptr()
        if start:  # freed memory has the address 0
            end = start + _measure_span(shard)
            spans.append((str(shard.device), start, end, k, shard))
    spans.sort(key=lambda span: span[:4])
    # Spans that begin before the next span, and may end after its begin.
    earlier_spans: list[tuple[str, int, int, int, Tensor]] = []
    for span in spans:
        device, start, _, k, t = span
        earlier_spans = [
            earlier for earlier in earlier_spans if earlier[0] == device and earlier[2] > start
        ]
        for *_, other_index, other_tensor in earlier_spans:
            if tensors[other_index] is not tensors[k] and _has_overlap(other_tensor, t):
                yield min(k, other_index), max(k, other_index)
        earlier_spans.append(span)


def has_same_storage(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same storage.

    Args:
        one: A tensor.
        other: Another tensor.
    """
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def require_no_overlap(stages: Mapping[int, nn.Module], program: str) -> None:
    """Check that no trained parameter overlaps with another tensor of the stages (ZeRO).

    Replicas split parameters into shards, and each shard has separate memory.

    Args:
        stages: The stages, by number.
        program: The name of the program.

    Raises:
        ModelError: A trained parameter and another tensor have an element in the same memory.
    """
    for first, second in _find_overlapping_pairs(list_module_tensors(stages)):
        if first.is_trained or second.is_trained:
            raise ModelError(
                f"{first} and {second} share memory, but ZeRO gives each parameter its own shards",
                program=program,
                hint="use one Parameter (stage.b = stage.a), and compute its views in the forward",
            )


def require_no_views(stages: Mapping[int, nn.Module], program: str) -> None:
    """Check that no untrained tensor uses the memory of a trained parameter.

    A program with a weight delay computes with older versions of weights, which are copies of
    trained parameters. A buffer, an attribute or a frozen parameter in the same memory would have
    the newest weights.

    Args:
        stages: The stages, by number.
        program: The name of the program.

    Raises:
        ModelError: A trained parameter overlaps with a tensor that is not trained.
    """
    for first, second in _find_overlapping_pairs(list_module_tensors(stages)):
        if first.is_trained != second.is_trained:
            view = second if first.is_trained else first
            raise ModelError(
                f"{first} and {second} share memory, but the program computes with older versions "
                f"of weights: {view} would have the newest version",
                program=program,
                hint="compute the view of the weight in the forward, or set weight_delay=0",
            )


def require_rank_local_memory(
    stages: Mapping[int, nn.Module], ranks: Sequence[int], program: str
) -> None:
    """Check that no trained parameter overlaps with a tensor of another rank in this process.

    The same Parameter object in stages of several ranks is allowed. It is a tied weight: the first
    rank computes with the object, and the other ranks with copies. But another tensor in the memory
    of the Parameter is not copied. This tensor would change whenever another rank updates the
    Parameter.

    Args:
        stages: The stages of all ranks, by number.
        ranks: The rank of each stage.
        program: The name of the program.

    Raises:
        ModelError: A trained parameter and a tensor of another rank have an element in the same
            memory.
    """
    for first, second in _find_overlapping_pairs(list_module_tensors(stages)):
        user_ranks = {
            ranks[s]
            for tensor in (first, second)
            for s in tensor.stages[: 1 if tensor.is_trained else None]
        }
        if len(user_ranks) > 1 and (first.is_trained or second.is_trained):
            raise ModelError(
                f"{first} and {second} share memory, but their stages are on ranks "
                f"{' and '.join(map(str, sorted(user_ranks)))}, which do not share memory",
                program=program,
                hint="to share the weight, use one Parameter in both stages (stage.b = stage.a) "
                "and compile(..., tied_weights=schedir.find_tied_weights(stages)); otherwise use "
                "a .clone() in one stage",
            )


def require_copyable(module: nn.Module, stage: int, program: str) -> None:
    """Check that no tensors of a stage overlap, because in a copy they would not overlap.

    Stage replicas are copies of a stage, in which each tensor has separate memory. Buffers may
    overlap, because they are copied from the first replica before each step.

    Args:
        module: A stage with several stage replicas.
        stage: The number of the stage.
        program: The name of the program.

    Raises:
        ModelError: A trained parameter overlaps with another parameter or with an attribute.
    """
    buffers = {id(buffer) for buffer in module.buffers()}
    for first, second in _find_overlapping_pairs(list_module_tensors({stage: module})):
        if {id(first.tensor), id(second.tensor)}.isdisjoint(buffers) and (
            first.is_trained or second.is_trained
        ):
            raise ModelError(
                f"{first} and {second} share memory, but their copies in stage replicas would not",
                program=program,
                hint="compute the view of the weight in the forward",
            )


def find_shared_buffers(module: nn.Module, others: Iterable[nn.Module]) -> list[Tensor]:
    """Return the buffers of a module that other modules have, or that overlap with their buffers.

    Args:
        module: The module.
        others: The other modules.
    """
    local_buffers = dict.fromkeys(module.buffers())
    other_buffers = dict.fromkeys(b for other_module in others for b in other_module.buffers())
    buffers = [*local_buffers, *(b for b in other_buffers if b not in local_buffers)]
    views = [buffers[k] for k, n in find_overlaps(buffers) if k < len(local_buffers) <= n]
    return [*(b for b in local_buffers if b in other_buffers), *views]


def _find_overlapping_pairs(module_tensors: Sequence[ModuleTensor]) -> Iterator[list[ModuleTensor]]:
    """Yield the pairs of tensors that overlap. Each pair is sorted by name."""
    for pair in sorted(find_overlaps([module_tensor.tensor for module_tensor in module_tensors])):
        yield sorted((module_tensors[k] for k in pair), key=str)


def _measure_span(t: Tensor) -> int:
    """Return the bytes from the first element of a tensor to the end of its last element."""
    last_offset = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return (last_offset + 1) * t.itemsize


def _has_overlap(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors with overlapping spans have an element in the same memory."""
    if first.is_contiguous() and second.is_contiguous():
        return True
    if first.itemsize != second.itemsize:
        return True  # elements of two sizes cannot be compared one by one
    storages = [t.untyped_storage() for t in (first, second)]
    if storages[0].data_ptr() != storages[1].data_ptr():
        return True
    marks = torch.zeros(storages[0].nbytes() // first.itemsize, dtype=torch.bool)
    marks.as_strided(first.shape, first.stride(), first.storage_offset()).fill_(True)
    return bool(marks.as_strided(second.shape, second.stride(), second.storage_offset()).any())
